"""The CPU kernel as torch custom ops, so that torch.compile keeps it as one node of the graph.

Eager calls don't come here: they skip the dispatcher, which would cost more than a small read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.depth_attention.cpu.binding import run_backward, run_forward


@torch.library.custom_op("attention_residuals::read_cpu", mutates_args=())
def read_op(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    settings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h or y [..., D], alpha [N, ...], L2 norms of h [...], and r, t, q [2N + 1, tokens].

    settings: eps, scale, norm_eps, gain.
    """
    return run_forward(tuple(settings), query, key_weight, norm_weight, sources, save=True, want_norms=True)


@read_op.register_fake
def _(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    settings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, count = sources[0], len(sources)
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    alpha = first.new_empty((count, *first.shape[:-1]), dtype=torch.float32)
    norms = first.new_empty(first.shape[:-1], dtype=torch.float32)
    saved = first.new_empty((2 * count + 1, first.numel() // first.shape[-1]), dtype=torch.float32)
    return out, alpha, norms, saved


@torch.library.custom_op("attention_residuals::read_cpu_backward", mutates_args=())
def backward_op(
    d_out: Tensor | None,
    d_alpha: Tensor | None,
    alpha: Tensor,
    saved: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    sources: Sequence[Tensor],
    settings: Sequence[float],
) -> list[Tensor]:
    """Gradients of query, key weight and norm weight (where given), then of every source."""
    vectors = (query, key_weight, norm_weight)
    needs = (True,) * (3 + len(sources))
    grads = run_backward(tuple(settings), needs, (d_out, d_alpha), alpha, saved, vectors, sources)
    return [grad for grad in grads if grad is not None]


@backward_op.register_fake
def _(
    d_out: Tensor | None,
    d_alpha: Tensor | None,
    alpha: Tensor,
    saved: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    sources: Sequence[Tensor],
    settings: Sequence[float],
) -> list[Tensor]:
    vectors = [torch.empty_like(v) for v in (query, key_weight, norm_weight) if v is not None]
    return vectors + [torch.empty_like(s, memory_format=torch.contiguous_format) for s in sources]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query, key_weight, norm_weight, ctx.settings = inputs
    _, alpha, norms, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(norms, saved)
    ctx.save_for_backward(alpha, saved, query, key_weight, norm_weight, *sources)


def _backward(ctx: Any, d_out: Tensor | None, d_alpha: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    alpha, saved, query, key_weight, norm_weight, *sources = ctx.saved_tensors
    vectors = (query, key_weight, norm_weight)
    grads = iter(backward_op(d_out, d_alpha, alpha, saved, *vectors, sources, ctx.settings))
    d_vectors = [None if v is None else next(grads) for v in vectors]
    return list(grads), *d_vectors, None


read_op.register_autograd(_backward, setup_context=_keep)


def depth_attention_cpu_compiled(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    **settings: float,
) -> tuple[Tensor, Tensor]:
    """`depth_attention_cpu` inside torch.compile."""
    return depth_attention_cpu_compiled_recorded(sources, query, key_weight, norm_weight, **settings)[:2]


def depth_attention_cpu_compiled_recorded(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    *,
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`depth_attention_cpu_recorded` inside torch.compile."""
    settings = [eps, scale, norm_eps, gain]
    h, alpha, norms, _ = read_op(list(sources), query, key_weight, norm_weight, settings)
    return h, alpha, norms
