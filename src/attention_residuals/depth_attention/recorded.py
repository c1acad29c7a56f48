"""From a recorded read to its depth weights and norms: in one pass where the compiled CPU kernel runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_residuals.depth_attention.cpu.binding import (
    depth_attention_cpu,
    depth_attention_cpu_recorded,
    read_plain_tensors,
    write_difference_norms,
)
from attention_residuals.depth_attention.cpu.compiled import (
    depth_attention_cpu_compiled,
    depth_attention_cpu_compiled_recorded,
)
from attention_residuals.depth_attention.dispatch import (
    checked,
    choose,
    depth_attention,
    is_plain_inference,
    norm_scale,
    untraced,
)

# Backends that hand out the mixture's norm too, since they compute it for the output norm.
_RECORDED: dict[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    depth_attention_cpu: depth_attention_cpu_recorded,
    depth_attention_cpu_compiled: depth_attention_cpu_compiled_recorded,
}


class ReadMemory(NamedTuple):
    """Memory for what a recorded read hands out, contiguous, float32.

    Attributes:
        weights: depth weights [N, ...].
        norms: L2 norm of the mixture per token [...].
    """

    weights: Tensor
    norms: Tensor


@dataclasses.dataclass
class ReadRecord:
    """What a recorded read hands out beside its output and depth weights.

    Attributes:
        memory: where weights and norms may lie; None where nothing is prepared.
        norms: set by the read: the L2 norm of the mixture per token [...], before any output norm; float32,
            without gradient.
    """

    memory: ReadMemory | None = None
    norms: Tensor = dataclasses.field(init=False)


def depth_attention_recorded(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    *,
    eps: float,
    norm_eps: float,
    norm_offset: float,
    read_scale: str,
    backend: str,
    memory: ReadMemory | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`depth_attention` with depth weights, and the L2 norm of the mixture before its output norm.

    The compiled CPU kernel makes all three in one pass. Elsewhere the mixture is made first, and so rounded
    to the sources' dtype, then its norm.

    Args:
        memory: where the results may lie; used where it fits and the kernel runs without gradients.

    Returns:
        h or y [..., D], alpha [N, ...], and the norms [...], float32, without gradient.
    """
    if memory is not None and backend in ("auto", "cpu") and _fits(memory, sources) and is_plain_inference():
        y = read_plain_tensors(
            sources, query, key_weight, norm_weight, eps, 1.0, norm_eps, norm_offset, read_scale, *memory
        )
        if y is not None:
            return y, *memory
    listed = checked(sources, query, key_weight, norm_weight)
    run = choose(backend, listed, return_weights=True)
    gain = float(len(listed)) if read_scale == "sum" else 1.0
    if recorded := _RECORDED.get(run):
        weight = norm_scale(norm_weight, norm_offset)
        return recorded(listed, query, key_weight, weight, eps=eps, scale=1.0, norm_eps=norm_eps, gain=gain)
    h, weights = run(listed, query, key_weight, None, eps=eps, scale=1.0, norm_eps=norm_eps, gain=gain)
    norms = row_norms(h)
    if norm_weight is not None:
        h = norm_mixture(h, norm_weight, norm_eps, norm_offset, backend)
    return h, weights, norms


def _fits(memory: ReadMemory, sources: Sequence[Tensor]) -> bool:
    shape = sources[0].shape[:-1]
    return (
        memory.norms.is_cpu and memory.norms.shape == shape and memory.weights.shape == (len(sources), *shape)
    )


def norm_mixture(
    mixture: Tensor, norm_weight: Tensor, norm_eps: float, norm_offset: float, backend: str
) -> Tensor:
    """The output norm alone: a read of one source is that source under any query."""
    return depth_attention(
        (mixture,),
        norm_weight,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        backend=backend,
    )


def row_norms(x: Tensor) -> Tensor:
    """L2 norm over the width, [..., D] to [...], float32, without gradients."""
    return torch.linalg.vector_norm(x.detach().float(), dim=-1)


def difference_norms(after: Tensor, before: Tensor, memory: Tensor | None = None) -> Tensor:
    """L2 norm of after - before over the width, [..., D] to [...], float32, without gradients.

    They lie in `memory`, contiguous float32, where that fits.
    """
    after, before = after.detach(), before.detach()
    if after.is_cpu and not torch.compiler.is_compiling() and untraced() is None:
        shape = after.shape[:-1]
        fits = memory is not None and memory.is_cpu and memory.shape == shape
        norms = memory if memory is not None and fits else after.new_empty(shape, dtype=torch.float32)
        if write_difference_norms(after, before, norms):
            return norms
    return row_norms(after - before)
