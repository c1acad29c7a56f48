"""Two-phase depth attention: several reads attend to their shared sources in one pass, then add their own.

Reads of one block see the same finished blocks; only the partial sum differs. Phase 1 (`attend_to_shared`)
takes all of these reads at once over the shared sources, and gives per read the softmax-weighted mean o of
the sources and the log-sum-exp of their scores. Phase 2 (`merge_own_sources`) is a softmax over that
log-sum-exp and the scores of the read's own sources: exactly the read over all of them (arXiv 2603.15031).

The equations and derivatives stand in `two_phase_formulas`. Saved for backward: the sources, o, lse, the
vectors and a few numbers per token. o is float32 beside 16-bit sources (float64 beside float64): in the
sources' dtype, its rounding would reach the query's gradient, far above plain PyTorch's error (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_residuals.depth_attention.dispatch import check_sources, check_vector
from attention_residuals.depth_attention.formulas import Settings
from attention_residuals.depth_attention.lean import chunks, joined, no_autocast, recorded
from attention_residuals.depth_attention.two_phase_formulas import (
    MergeGradients,
    MergeScalars,
    SharedScalars,
    attend,
    attend_gradients,
    merge,
    merge_gradients,
)


class SharedRead(NamedTuple):
    """What phase 1 found for one read, in float32 (float64 for float64 sources).

    Attributes:
        output: softmax-weighted mean of the N shared sources [..., D].
        lse: log-sum-exp of their scores [...].
        weights: their softmax [N, ...].
    """

    output: Tensor
    lse: Tensor
    weights: Tensor


def attend_to_shared(
    sources: Sequence[Tensor] | Tensor,
    queries: Sequence[Tensor],
    key_weights: Sequence[Tensor | None],
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
) -> tuple[SharedRead, ...]:
    """Phase 1: S reads attend to the N sources they share, in one pass over the sources.

        o_s = sum_i softmax_i(scale * <w_s, RMSNorm(v_i) * g_s>) v_i
    Differentiable, twice too. With N = 1 every o is the source itself.

    Args:
        sources: N >= 1 tensors [..., D] of one shape, dtype and device; or one packed tensor [N, ..., D].
        queries: S >= 1 vectors w_s [D]; may be wider than the sources.
        key_weights: S weights g_s [D] of the key norm; None means ones.
        eps: added to the mean square inside the key norm's root.
        scale: multiplies the scores.

    Raises:
        ValueError: no sources or queries; shapes, devices or numbers of vectors that don't fit.
        TypeError: something that is not a floating-point tensor; sources of different dtypes.
    """
    listed = check_sources(sources)
    if not queries or len(queries) != len(key_weights):
        raise ValueError(
            f"give one key weight (or None) per query and at least one query, got {len(queries)} queries and "
            f"{len(key_weights)} key weights"
        )
    first = listed[0]
    u = torch.stack([_product(w, g, first) for w, g in zip(queries, key_weights, strict=True)])
    settings = Settings(eps, scale, 0.0, 1.0)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (u, *listed)):
        lse, alpha, _, _, *outputs = _Attend.apply(settings, u, *listed)
    else:
        with torch.no_grad():
            outputs, lse, (alpha, *_) = _attend(settings, u, listed)
    # Out here, since a view that leaves an autograd.Function can't be modified in place by the caller.
    shape = first.shape
    lses, alphas = (x.reshape(*x.shape[:-1], *shape[:-1]).unbind(0) for x in (lse, alpha))
    return tuple(
        SharedRead(output.reshape(shape), *rest) for output, *rest in zip(outputs, lses, alphas, strict=True)
    )


def merge_own_sources(
    shared: SharedRead,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    dtype: torch.dtype,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    read_scale: str = "mean",
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Phase 2: one read over its shared and its own sources, from what phase 1 found.

    Args:
        shared: what `attend_to_shared` gave for this query and key weight.
        sources: K >= 0 more sources of this read [..., D], e.g. the open block's partial sum.
        dtype: of the sources; the result has it (phase 1's output is wider).
        query, key_weight, eps, scale: those of phase 1.
        norm_weight, norm_eps, read_scale, return_weights: as in `depth_attention`; "sum" multiplies by N + K.

    Returns:
        h (or y) [..., D] in `dtype`; the depth weights [N + K, ...], shared sources first, or None.

    Raises:
        ValueError: shapes or devices that don't fit, or an unknown `read_scale`.
        TypeError: sources whose dtype isn't `dtype`.
    """
    own = _check_own(shared, sources, dtype)
    if read_scale not in ("mean", "sum"):
        raise ValueError(f"read_scale must be 'mean' or 'sum', got {read_scale!r}")
    output, lse, alpha = shared
    gain = float(len(alpha) + len(own)) if read_scale == "sum" else 1.0
    settings = Settings(eps, scale, norm_eps, gain)
    u = _product(query, key_weight, output) if own else None
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, output)
    tensors = (output, lse, u, norm_weight, *own)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        h, weights, *_ = _Merge.apply(settings, dtype, *tensors)
    else:
        with torch.no_grad():
            h, (weights, *_) = _merge(settings, dtype, output, lse, u, norm_weight, own)
    h = h.reshape(output.shape)
    if not return_weights:
        return h, None
    weights = weights.reshape(1 + len(own), *lse.shape)
    return h, torch.cat([alpha * weights[0], weights[1:]])


def _product(query: Tensor, key_weight: Tensor | None, first: Tensor) -> Tensor:
    """u = w * g [D] in the compute dtype; the multiplication comes after the upcast."""
    check_vector("query", query, first)
    dtype = torch.promote_types(first.dtype, torch.float32)
    if key_weight is None:
        return query.to(dtype)
    check_vector("key_weight", key_weight, first)
    return query.to(dtype) * key_weight.to(dtype)


def _check_own(shared: SharedRead, sources: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The read's own sources, which may be none."""
    if not sources:
        return ()
    own = check_sources(sources)
    for what, found, needed in (
        ("shape", tuple(own[0].shape), tuple(shared.output.shape)),
        ("device", own[0].device, shared.output.device),
    ):
        if found != needed:
            raise ValueError(f"own sources must have the shared ones' {what} {needed}, got {found}")
    if own[0].dtype != dtype:
        raise TypeError(f"own sources must have the dtype of the shared ones, {dtype}, got {own[0].dtype}")
    return own


class _Attend(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(settings: Settings, u: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        outputs, lse, scalars = _attend(settings, u, sources)
        return lse, *scalars, *outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings, *tensors = inputs
        _, alpha, r, t, *_ = output
        ctx.mark_non_differentiable(r, t)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(alpha, r, t, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        alpha, r, t, u, *sources = ctx.saved_tensors
        d_lse, d_alpha, _, _, *d_outputs = grads
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(sources))
        scalars = SharedScalars(alpha, r, t)
        if recorded():  # to autograd the saved scalars are constants; these know where they come from
            _, _, scalars = _attend(ctx.settings, u, sources)
        d_sources, du = _attend_backward(ctx.settings, u, sources, scalars, d_outputs, d_lse, d_alpha)
        return (None, du, *d_sources)


def _attend(
    settings: Settings, u: Tensor, sources: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, SharedScalars]:
    """S outputs [tokens, D], lse [S, tokens], and the scalars of all tokens."""
    lses: list[Tensor] = []
    parts: list[SharedScalars] = []

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks(sources, u.dtype):
            outputs, lse, scalars = attend(settings, rows, u)
            lses.append(lse)
            parts.append(scalars)
            yield chunk, outputs

    with no_autocast(u.device):
        outputs = joined(pieces(), sources[0])
    if len(parts) == 1:
        return outputs, lses[0], parts[0]
    scalars = SharedScalars(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))
    return outputs, torch.cat(lses, -1), scalars


def _attend_backward(
    settings: Settings,
    u: Tensor,
    sources: Sequence[Tensor],
    scalars: SharedScalars,
    d_outputs: Sequence[Tensor | None],
    d_lse: Tensor | None,
    d_alpha: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the sources, each in its own dtype, and of u."""
    first, tokens = sources[0], scalars.r.shape[1]
    nothing = u.new_zeros(()).expand(tokens, u.shape[1])
    arriving = [nothing if d is None else d for d in d_outputs]
    parts: list[Tensor] = []

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks(sources, u.dtype):
            here = SharedScalars(*(x[..., chunk] for x in scalars))
            dl, da = (None if d is None else d[..., chunk] for d in (d_lse, d_alpha))
            d_rows, du = attend_gradients(settings, rows, u, here, [d[chunk] for d in arriving], dl, da)
            parts.append(du)
            yield chunk, (d.to(first.dtype) for d in d_rows)

    with no_autocast(u.device):
        d_sources = joined(pieces(), first)
    return [d.reshape(first.shape) for d in d_sources], torch.stack(parts).sum(0)


class _Merge(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        settings: Settings,
        dtype: torch.dtype,
        output: Tensor,
        lse: Tensor,
        u: Tensor | None,
        norm_weight: Tensor | None,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        h, scalars = _merge(settings, dtype, output, lse, u, norm_weight, own)
        return h, *scalars

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings, ctx.dtype, *tensors = inputs
        _, weights, r, t, q = output
        ctx.mark_non_differentiable(r, t, q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, r, t, q, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        weights, r, t, q, output, lse, u, norm_weight, *own = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * (6 + len(own))
        scalars = MergeScalars(weights, r, t, q)
        if recorded():
            _, scalars = _merge(ctx.settings, ctx.dtype, output, lse, u, norm_weight, own)
        found, d_rows = _merge_backward(
            ctx.settings, output, u, norm_weight, own, scalars, grads[0], grads[1]
        )
        d_norm = None if found.n is None or norm_weight is None else found.n.to(norm_weight.dtype)
        d_own = (d.reshape(x.shape).to(x.dtype) for d, x in zip(d_rows[1:], own, strict=True))
        d_output, d_lse = d_rows[0].reshape(output.shape), found.lse.reshape(lse.shape)
        return (None, None, d_output, d_lse, found.u, d_norm, *d_own)


def _merge(
    settings: Settings,
    dtype: torch.dtype,
    output: Tensor,
    lse: Tensor,
    u: Tensor | None,
    norm_weight: Tensor | None,
    own: Sequence[Tensor],
) -> tuple[Tensor, MergeScalars]:
    """h or y [tokens, D] in `dtype`, and the scalars of all tokens."""
    parts: list[MergeScalars] = []
    n = None if norm_weight is None else norm_weight.to(output.dtype)
    scores = lse.reshape(-1)

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks((output, *own), output.dtype):
            h, scalars = merge(settings, rows, scores[chunk], u, n)
            parts.append(scalars)
            yield chunk, [h.to(dtype)]

    with no_autocast(output.device):
        (h,) = joined(pieces(), output)
    if len(parts) == 1:
        return h, parts[0]
    return h, MergeScalars(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def _merge_backward(
    settings: Settings,
    output: Tensor,
    u: Tensor | None,
    norm_weight: Tensor | None,
    own: Sequence[Tensor],
    scalars: MergeScalars,
    d_output: Tensor | None,
    d_weights: Tensor | None,
) -> tuple[MergeGradients, list[Tensor]]:
    """Gradients of lse, u and the norm weight over all tokens, and of o and the own sources [tokens, D]."""
    n = None if norm_weight is None else norm_weight.to(output.dtype)
    tokens = scalars.weights.shape[1]
    dy = output.new_zeros(()).expand(tokens, output.shape[-1]) if d_output is None else d_output
    parts: list[MergeGradients] = []

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks((output, *own), output.dtype):
            here = MergeScalars(*(x[..., chunk] for x in scalars))
            dw = None if d_weights is None else d_weights[:, chunk]
            found = merge_gradients(settings, rows, u, n, here, dy[chunk].to(output.dtype), dw)
            parts.append(found)
            yield chunk, (d.to(x.dtype) for d, x in zip(found.rows, (output, *own), strict=True))

    with no_autocast(output.device):
        d_rows = joined(pieces(), output)
    du, dn = (
        torch.stack(found).sum(0) if (found := [x for x in kind if x is not None]) else None
        for kind in zip(*((part.u, part.n) for part in parts), strict=True)
    )
    return MergeGradients([], torch.cat([part.lse for part in parts], -1), du, dn), d_rows
