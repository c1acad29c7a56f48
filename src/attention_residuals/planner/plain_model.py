"""From a preset, a configuration file or a model folder to the plain model that is planned for.

The model is never built whole. `thin_model` builds it with one layer of each kind; the others hand on what
they receive. So a dry run or a timing costs a few layers, however deep the model is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from attention_residuals.config import AttnResConfig
from attention_residuals.conversion.architecture import our_class_and_config
from attention_residuals.errors import UserError
from attention_residuals.models.auto import plain_config, plain_model_type
from attention_residuals.models.families import Family
from attention_residuals.models.mixins import family_of
from attention_residuals.training.presets import BPE_VOCABULARY, PRESETS


@dataclasses.dataclass(frozen=True)
class PlainModel:
    """A plain language model by its configuration, with what it consists of.

    Attributes:
        name: what the user called it.
        config: transformers' own configuration.
        architecture: transformers' own class.
        family: where its layers and norms are.
        attn_res: the settings of its reads, if it was saved with some.
        kinds: which kind of layer each layer is; kinds are numbered by first appearance.
        layer_parameters: numbers in the weights of each layer.
        embedding_parameters: of what comes before the layers.
        head_parameters: of what comes after them, the final norm and the output matrix, tied or not.
        parameters: of the whole model; a tied matrix counts once.
    """

    name: str
    config: Any
    architecture: Any
    family: Family
    attn_res: AttnResConfig | None
    kinds: tuple[int, ...]
    layer_parameters: tuple[int, ...]
    embedding_parameters: int
    head_parameters: int
    parameters: int

    @property
    def width(self) -> int:
        """D."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def num_sublayers(self) -> int:
        """L."""
        return self.family.sublayers_per_layer * self.num_layers


def plain_model(source: str) -> PlainModel:
    """The model that a preset's name, a JSON file of configuration fields or a model folder stands for.

    Raises:
        UserError: it is none of these, or no causal language model with pre-norm layers.
    """
    config, settings = _configuration(source)
    try:
        _, ours, architecture = our_class_and_config(config, settings or AttnResConfig())
        family = family_of(ours)
        with torch.device("meta"):
            model = architecture(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{source} can't be planned for: {error}") from error
    return describe(source, model, family, settings)


def describe(name: str, model: Any, family: Family, settings: AttnResConfig | None = None) -> PlainModel:
    """Take a plain model with a head apart; it may be on the meta device."""
    layers = family.layers_of(model.base_model)
    signatures = [_signature(layer) for layer in layers]
    numbers = {signature: i for i, signature in enumerate(dict.fromkeys(signatures))}
    per_layer = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    total = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    final_norm = sum(p.numel() for p in family.final_norm_of(model.base_model).parameters())
    return PlainModel(
        name=name,
        config=model.config,
        architecture=type(model),
        family=family,
        attn_res=settings,
        kinds=tuple(numbers[signature] for signature in signatures),
        layer_parameters=per_layer,
        embedding_parameters=total - sum(per_layer) - final_norm - (0 if tied else head.numel()),
        head_parameters=final_norm + head.numel(),
        parameters=total,
    )


def thin_model(model: PlainModel, dtype: torch.dtype, device: torch.device | str, **changed: Any) -> Any:
    """The plain model with memory for one layer of each kind; other layers return what they receive.

    Weights are uninitialised: fill them before running on real numbers. In `FakeTensorMode` they are fake.

    Args:
        changed: fields of the configuration to replace, such as `vocab_size`.
    """
    config = type(model.config).from_dict({**model.config.to_dict(), **changed})
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        thin = model.architecture(config)
    seen: set[int] = set()
    for layer, kind in zip(model.family.layers_of(thin.base_model), model.kinds, strict=True):
        if kind in seen:
            layer._modules.clear()
            layer._parameters.clear()
            layer.forward = _hand_on
        seen.add(kind)
    _materialise(thin, dtype, device)
    return thin


def representatives(model: PlainModel, thin: Any) -> list[nn.Module]:
    """The layers of a thin model that do something, one a kind in order."""
    layers = model.family.layers_of(thin.base_model)
    return [layers[model.kinds.index(kind)] for kind in range(max(model.kinds) + 1)]


def _hand_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give memory to every parameter and buffer of a model on the meta device; tied ones stay tied."""

    @functools.cache
    def real(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() and isinstance(tensor, nn.Parameter) else tensor.dtype
        made = torch.empty(tensor.shape, dtype=kind, device=device)
        return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made

    holders: list[dict[str, Any]] = [
        tensors for part in module.modules() for tensors in (part._parameters, part._buffers)
    ]
    for tensors in holders:
        tensors.update({name: real(tensor) for name, tensor in tensors.items() if tensor is not None})


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers of one kind: classes, shapes of weights, and named types such as sliding."""
    types = tuple(
        str(getattr(part, name, None))
        for part in (layer, *layer.children())
        for name in ("layer_type", "attention_type", "block_type", "is_sliding", "sliding_window")
    )
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return type(layer), tuple(type(part) for part in layer.modules()), shapes, types


def _configuration(source: str) -> tuple[Any, AttnResConfig | None]:
    """transformers' own configuration of the language model, and the settings of its reads if it has some."""
    if source in PRESETS:
        fields = {"vocab_size": BPE_VOCABULARY, **PRESETS[source].fields}
        return AutoConfig.for_model("qwen3_5_text", **fields), None
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"MODEL must be one of {', '.join(PRESETS)}, a JSON file of configuration fields or a model "
            f"folder, got {source!r}, which does not exist"
        )
    try:
        if path.is_dir():
            config = AutoConfig.from_pretrained(source)
        else:
            fields = json.loads(path.read_text(encoding="utf-8"))
            config = AutoConfig.for_model(fields.pop("model_type", "qwen3_5_text"), **fields)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise UserError(f"{source} holds no configuration: {str(error).splitlines()[0]}") from error
    config = config.get_text_config()
    settings = None
    if plain_model_type(config.model_type) is not None:
        settings = AttnResConfig.from_dict(config.attn_res)
        config = plain_config(config)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{source} is of type {config.model_type!r}, which has no causal language model")
    config.architectures = None  # the language model, whatever head the folder was saved with
    return config, settings
