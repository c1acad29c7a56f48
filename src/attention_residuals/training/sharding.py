"""From a whole model to this rank's share of it: tensor-parallel projections, then layers sharded by FSDP2.

Both replace parameters by DTensors and keep every name. Reads, pre-norms and the final norm are replicated
among tensor-parallel ranks: what reaches them is equal on all of these, so their gradients are too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from attention_residuals.errors import UserError
from attention_residuals.models.mixins import family_of
from attention_residuals.training.layout import Layout

HEADS = 2  # dimension of [B, T, heads, head width] that a norm over the head's width receives

# transformers' names of what happens to a projection; None: nothing
STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    "replicate": None,
}


def projection_styles(config: Any) -> dict[str, Callable[[], ParallelStyle]]:
    """Names of modules in the backbone, `*` for a layer's number, to how each is cut.

    Raises:
        UserError: transformers has no plan for this family, or one with a style that isn't in `STYLES`.
    """
    plan: dict[str, str] = config.base_model_tp_plan or {}
    if not plan:
        raise UserError(
            f"--tensor-parallel: transformers has no plan for {config.family}; use --fsdp or --pipeline"
        )
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise UserError(
            f"--tensor-parallel: the plan for {config.family} has {', '.join(unknown)}, which isn't "
            "supported; use --fsdp or --pipeline"
        )
    return {pattern: style for pattern, name in plan.items() if (style := STYLES[name]) is not None}


def make_mesh(layout: Layout) -> DeviceMesh:
    """The ranks as a cube with the axes pipeline, data and tensor."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (layout.pipeline, layout.data_ranks, layout.tensor_parallel)
    return init_device_mesh(device, shape, mesh_dim_names=("pipeline", "data", "tensor"))


def shard_projections(model: Any, mesh: DeviceMesh) -> None:
    """Cut the projections that transformers' plan for this family names; embedding and head stay whole.

    Args:
        model: with or without a head, or a pipeline stage of one.
        mesh: the tensor-parallel ranks, one axis.

    Raises:
        UserError: the plan uses a style that torch doesn't have.
    """
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in projection_styles(model.config).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        plan |= {name: style() for name, _ in model.base_model.named_modules() if expression.fullmatch(name)}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model.base_model, mesh, plan)
    for name, parameter in model.named_parameters():  # torch makes replicated parameters anew, all trainable
        parameter.requires_grad_(name not in frozen)


def shard_layers(model: Any, mesh: DeviceMesh) -> None:
    """`fully_shard` each decoder layer, then the rest (embedding, final read and norm, head), in place.

    Args:
        mesh: the data-parallel ranks, one axis.
    """
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_stages(parts: Sequence[Any], mesh: DeviceMesh) -> None:
    """`shard_layers` of a rank's pipeline stages, whose weights stay whole from microbatch to microbatch.

    A tied weight of which both the embedding and the head are on this rank, in different stages, stays whole.

    Args:
        parts: what runs of each stage (`Pipeline.parts`).
        mesh: the data-parallel ranks, one axis.
    """
    uses = Counter(parameter for part in parts for parameter in part.parameters())
    whole = {parameter for parameter, count in uses.items() if count > 1}
    for part in parts:
        for module in (*_layers(part), part):
            if any(True for _ in module.parameters()):  # a layer of another stage has none
                fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=whole)


def free_whole_weights(model: nn.Module) -> None:
    """Drop whatever weights a forward without a backward has left whole in place of its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _layers(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = family_of(model.config).layers_of(model.base_model)
    return layers
