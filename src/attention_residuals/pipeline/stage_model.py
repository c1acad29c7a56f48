"""From a model and a StagePlan to the model of each stage: the same model with holes.

A stage's model has the parameters of its own layers, the first one the embedding too, the last one the final
norm and the head. Everything else is a hole without parameters, so that names are those of the whole model
and a stage's `state_dict` is a part of the whole one. It runs the backbone's own forward, which makes masks
and rotary positions from the token ids as ever; holes pass on what they receive, and the residual stream
enters and leaves beside it (`models.model_pass.handover`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attention_residuals.models.auto import causal_lm_class
from attention_residuals.models.mixins import AttnResBackbone, family_of
from attention_residuals.models.model_pass import LOCAL, handover
from attention_residuals.pipeline.stage_plan import StagePlan, even_split
from attention_residuals.stream import ResidualStream


class AbsentEmbedding(nn.Module):
    """Where an embedding is on another stage: zeros [..., D] for ids [...]; only their shape matters."""

    embedding_dim: int
    dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.embedding_dim)


class AbsentLayer(nn.Module):
    """Where a layer is on another stage: passes its input on.

    In standard mode the stream is the input itself, so one before the stage's layers hands in what was
    received.
    """

    hands_in: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.hands_in:
            return hidden_states
        received: Tensor = LOCAL.handover.stream.partial
        return received


class AbsentModule(nn.Module):
    """Where a final norm or a head is on another stage: passes its input on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def plan_stages(
    model: nn.Module,
    num_ranks: int,
    *,
    virtual_stages: int = 1,
    layers: Iterable[int] | None = None,
    cache: bool = True,
    placement: str = "loop",
) -> StagePlan:
    """The stages of one of our models.

    Args:
        model: one of our language models, on any device, the meta device among them.
        num_ranks: P.
        virtual_stages: V, stages per rank.
        layers: decoder layers of each of the P V stages; None for an even split.
        cache: whether a rank keeps block sums from one of its stages to the next.
        placement: "loop" or "v", as in `StagePlan`.

    Raises:
        TypeError, ValueError: the model can't be split, or not so.
    """
    backbone = backbone_with_reads(model)
    per_layer = family_of(backbone.config).sublayers_per_layer
    total = backbone.depth_plan.num_sublayers // per_layer
    split = even_split(total, num_ranks * virtual_stages) if layers is None else tuple(layers)
    return StagePlan(
        depth=backbone.depth_plan,
        layers=split,
        num_ranks=num_ranks,
        cache=cache,
        sublayers_per_layer=per_layer,
        placement=placement,
    )


def split_model(model: nn.Module, plan: StagePlan, rank: int) -> list[nn.Module]:
    """The models of a rank's stages, in order; `model` is left as it is.

    They share the parameters of `model`, which may be on the meta device. Drop it afterwards, and what other
    ranks own is freed.

    Args:
        model: one of our causal language models.
        plan: `plan_stages(model, ...)`.
        rank: position in the pipeline.

    Raises:
        TypeError, ValueError: the model can't be split, or the plan is of another model.
    """
    backbone = backbone_with_reads(model)
    if plan.depth != backbone.depth_plan:
        raise ValueError(f"the plan must be the model's, got {plan.depth} for {backbone.depth_plan}")
    _check_parts(model)
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    stages = []
    for stage in plan.stages_of(rank):
        made = copy.deepcopy(model, dict(shared))
        _cut_holes(made, plan, stage)
        stages.append(made)
    return stages


def run_stage(
    model: nn.Module, plan: StagePlan, stage: int, stream: ResidualStream | None, inputs: dict[str, Any]
) -> ResidualStream | Tensor:
    """Run a stage's layers on one microbatch.

    Args:
        model: the stage's model, from `split_model`.
        plan: the plan it was split by.
        stage: which stage it is.
        stream: what the stage before left, None for the first; block sums and partial sum [B, T, D].
        inputs: `input_ids` [B, T] and other arguments of the model's forward; `labels` for the last stage.

    Returns:
        The stream after the stage; of the last stage the loss, or without labels the logits
        [B, T, vocabulary].
    """
    run: Any = running_part(model, plan, stage)
    with handover(stream, plan.layer_range(stage).start) as current:
        outputs = run(**inputs, use_cache=False, return_dict=True)
    if stage == plan.num_stages - 1:
        result: Tensor = outputs.logits if inputs.get("labels") is None else outputs.loss
        return result
    if plan.depth.config.mode == "standard":
        return ResidualStream((), outputs.last_hidden_state)
    assert current.stream is not None  # at least one layer has run
    return current.stream


def running_part(model: nn.Module, plan: StagePlan, stage: int) -> nn.Module:
    """What of a stage's model runs: the backbone, and on the last stage the head around it."""
    backbone: nn.Module = backbone_with_reads(model)
    return model if stage == plan.num_stages - 1 else backbone


def backbone_with_reads(model: nn.Module) -> Any:
    """The backbone of one of our language models.

    Raises:
        TypeError: it is a plain model, or one with other towers beside the language model.
    """
    backbone = getattr(model, "base_model", None)
    if not isinstance(backbone, AttnResBackbone):
        raise TypeError(
            f"only a language model with attention residuals can be split into stages, got "
            f"{type(model).__name__}; convert() a plain one, and take the language model of a multimodal one"
        )
    return backbone


def _check_parts(model: nn.Module) -> None:
    """Refuse what would be computed wrongly, or on every stage.

    Raises:
        TypeError: no causal language model.
        ValueError: a setting or a part that doesn't work across stages.
    """
    backbone: Any = backbone_with_reads(model)
    try:
        language_model = causal_lm_class(backbone.config)
    except KeyError:  # e.g. a vision model
        language_model = ()
    if not isinstance(model, language_model):
        raise TypeError(f"only causal language models can be split, got {type(model).__name__}")
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits must be False, got True: the routers of all layers make one more loss, "
            "but no stage has them all"
        )
    if backbone.depth_plan.config.read_schedule == "two_phase":
        raise ValueError(
            "read_schedule must be 'auto' or 'per_read', got 'two_phase': its groups of reads cross stages"
        )
    family = family_of(backbone.config)
    known = [family.layers, family.final_norm]
    known += [name for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)]
    for name, _ in backbone.named_parameters():
        if not any(name.startswith(f"{path}.") for path in known):
            raise ValueError(
                f"parameter {name!r} is in neither layers, final norm nor embeddings, so it is unknown which "
                "stage should have it; this architecture can't be split"
            )


def _cut_holes(model: nn.Module, plan: StagePlan, stage: int) -> None:
    backbone = backbone_with_reads(model)
    family = family_of(backbone.config)
    backbone.read_groups = ()  # a group's first phase needs the reads of several layers, here perhaps absent
    own = plan.layer_range(stage)
    layers = family.layers_of(backbone)
    embeddings = [m for m in backbone.modules() if isinstance(m, nn.Embedding)]
    heads = [child for child in model.children() if child is not backbone]
    standard = plan.depth.config.mode == "standard"
    for i, layer in enumerate(layers):
        if i not in own:
            _empty(layer, AbsentLayer).hands_in = standard and i < own.start
    if stage > 0:
        for embedding in embeddings:
            dtype = embedding.weight.dtype
            _empty(embedding, AbsentEmbedding).dtype = dtype
    if stage < plan.num_stages - 1:
        for module in (family.final_norm_of(backbone), *heads):
            _empty(module, AbsentModule)


def _empty(module: Any, hole: type[nn.Module]) -> Any:
    """Make a module a hole. Its plain attributes stay, since a backbone may ask a layer for its kind."""
    for contents in (module._parameters, module._buffers, module._modules):
        contents.clear()
    module.__class__ = hole
    return module
