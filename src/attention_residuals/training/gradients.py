"""Gradients over ranks: averaged where each has rows of its own; their norm over all shards and stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET = 1 << 24  # elements that are averaged by one exchange


def complete_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated DTensors that tensor-parallel ranks hold in part, in place."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over `group`, in place; every rank has the same parameters.

    Those that the group's ranks share are FSDP2's, which has averaged them.
    """
    ranks = group.size()
    if ranks == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    for bucket in _buckets([local(g) for g in gradients if not _shared_by(group, g)]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= ranks
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype together, up to a bucket's size."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def gradient_norm(parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup) -> float:
    """The L2 norm of all gradients of the whole model, each counted once.

    Args:
        parameters: this rank's, without copies of what another stage counts (a tied head).
        stages: the pipeline ranks; each has other parameters.
    """
    squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            squares.setdefault(_sharded_over(parameter.grad), []).append(square)
    device = next((kept[0].device for kept in squares.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, kept in squares.items():
        subtotal = torch.stack(kept).sum()
        for group in groups:
            dist.all_reduce(subtotal, group=group)
        total += subtotal
    dist.all_reduce(total, group=stages)
    return math.sqrt(total.item())


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, in place, as torch's `clip_grad_norm_` does."""
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def _sharded_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold other elements of the gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis) for axis, kind in enumerate(gradient.placements) if not kind.is_replicate()
    )


def _shared_by(group: dist.ProcessGroup, gradient: Tensor) -> bool:
    """Whether each rank of `group` holds other elements of the gradient."""
    ranks = dist.get_process_group_ranks(group)
    return any(dist.get_process_group_ranks(sharing) == ranks for sharing in _sharded_over(gradient))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself where it isn't sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
