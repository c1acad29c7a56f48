"""Depth attention with a hand-written backward that keeps the sources and per-token scalars only.

Forward, per token (symbols as in `reference`; u = w * g):

    r_i = 1 / sqrt(mean(v_i^2) + eps)      t_i = <u, v_i>      score_i = scale * r_i * t_i
    alpha = softmax(score)                 h = gain * sum_i alpha_i v_i
    q = 1 / sqrt(mean(h^2) + norm_eps)     y = q * h * n

Backward, from dy (or dh) and the gradient dalpha of the returned weights:

    dn  = sum over tokens of dy * q * h                dh  = q * (dy*n - h * q^2 * <dy*n, h> / D)
    p_i = gain * <dh, v_i> + dalpha_i                  ds_i = alpha_i * (p_i - sum_j alpha_j p_j)
    dv_i = gain * alpha_i * dh + scale * ds_i * (r_i * u - r_i^3 * t_i / D * v_i)
    du  = sum over tokens and i of scale * ds_i * r_i * v_i       dw = du * g       dg = du * w

Saved for backward: the sources themselves, the three vectors, and alpha, r, t, q (N or 1 numbers a token);
h is recomputed where the output norm needs it. Tokens are worked through in chunks that fit in the cache,
so that the sources are read from memory once in each direction. docs/math.md derives the formulas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.depth_attention.reference import depth_attention_reference

# Elements of one source in a chunk: 64 Ki float32 are 256 KiB, so a few sources share a 2 MiB cache.
CHUNK_ELEMENTS = 1 << 16


def depth_attention_lean(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    *,
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `depth_attention_reference`; any device and dtype.

    A second derivative goes through the reference, so it is right, at the reference's memory.
    """
    inputs = [t for t in (query, key_weight, norm_weight, *sources) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        h, alpha, *_ = _DepthAttention.apply(  # type: ignore[no-untyped-call]
            eps, scale, norm_eps, gain, query, key_weight, norm_weight, *sources
        )
    else:
        h, alpha, *_ = _forward(eps, scale, norm_eps, gain, query, key_weight, norm_weight, sources)
    return h, alpha


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        eps: float,
        scale: float,
        norm_eps: float,
        gain: float,
        query: Tensor,
        key_weight: Tensor | None,
        norm_weight: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        return _forward(eps, scale, norm_eps, gain, query, key_weight, norm_weight, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[:4]
        _, alpha, *scalars = output
        ctx.mark_non_differentiable(*scalars)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(alpha, *scalars, *inputs[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        alpha, r, t, q, query, key_weight, norm_weight, *sources = ctx.saved_tensors
        d_output, d_alpha = grads[0], grads[1]
        vectors = (query, key_weight, norm_weight)
        if d_output is None and d_alpha is None:
            return (None,) * (7 + len(sources))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found = _second_order(ctx.settings, ctx.needs_input_grad, d_output, d_alpha, vectors, sources)
        else:
            found = _backward(
                ctx.settings, ctx.needs_input_grad, d_output, d_alpha, (alpha, r, t, q), vectors, sources
            )
        return (None, None, None, None, *found)


def _second_order(
    settings: tuple[float, ...],
    needs: tuple[bool, ...],
    d_output: Tensor | None,
    d_alpha: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    sources: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The same gradients as a graph of their own: differentiates the reference (create_graph=True)."""
    eps, scale, norm_eps, gain = settings
    query, key_weight, norm_weight = vectors
    assert query is not None
    outputs = depth_attention_reference(
        sources, query, key_weight, norm_weight, eps=eps, scale=scale, norm_eps=norm_eps, gain=gain
    )
    pairs = [(o, g) for o, g in zip(outputs, (d_output, d_alpha), strict=True) if g is not None]
    wanted = [x for x, need in zip((*vectors, *sources), needs[4:], strict=True) if need and x is not None]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
    )
    return tuple(next(found) if need else None for need in needs[4:])


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keeps the products in float32 where the caller is inside torch.autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _key_vector(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)


def _chunks(tokens: int, width: int) -> list[slice]:
    """Token ranges that fit in the cache; one range inside torch.compile, which does its own tiling."""
    if torch.compiler.is_compiling() or tokens * width <= 2 * CHUNK_ELEMENTS:
        return [slice(0, tokens)]
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _row_dot(rows: Tensor, vector: Tensor) -> Tensor:
    """<row, vector> for every row [c, D]: a BLAS call, or an expression that a compiler can fuse."""
    if torch.compiler.is_compiling():
        return (rows * vector).sum(-1)
    return torch.mv(rows, vector)


def _mean_square(rows: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return rows.square().mean(-1)
    return torch.linalg.vector_norm(rows, dim=-1).square_().div_(rows.shape[-1])


def _mix(rows: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_i weights_i * rows_i [c, D] in a new tensor."""
    h = weights[0].unsqueeze(-1) * rows[0]
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        h.addcmul_(weight.unsqueeze(-1), row)
    return h


def _forward(
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    sources: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Returns h or y [..., D], alpha [N, ...], and the scalars r, t [N, tokens], q [tokens]."""
    first = sources[0]
    width = first.shape[-1]
    dtype = torch.promote_types(first.dtype, torch.float32)
    with _no_autocast(first.device):
        u = _key_vector(query, key_weight, dtype)
        n = None if norm_weight is None else norm_weight.to(dtype)
        flat = [source.reshape(-1, width) for source in sources]
        parts = [
            _forward_chunk([f[piece].to(dtype) for f in flat], u, n, eps, scale, norm_eps, gain, first.dtype)
            for piece in _chunks(flat[0].shape[0], width)
        ]
    if len(parts) == 1:
        h, alpha, r, t, q = parts[0]
    else:
        h, alpha, r, t, q = (
            torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), (0, 1, 1, 1, 0), strict=True)
        )
    return h.reshape(first.shape), alpha.reshape(len(sources), *first.shape[:-1]), r, t, q


def _forward_chunk(
    rows: Sequence[Tensor],
    u: Tensor,
    n: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r = torch.stack([_mean_square(row) for row in rows]).add_(eps).rsqrt_()
    t = torch.stack([_row_dot(row, u) for row in rows])
    if len(rows) == 1:  # one source has weight one whatever its score is, infinite or NaN too
        alpha = torch.ones_like(r)
        h = gain * rows[0]
    else:
        score = scale * r * t
        e = (score - score.amax(0)).exp_()
        total = e.sum(0)
        alpha = e / total
        # gain / total before the product: with equal scores and gain N every weight is then exactly 1.
        h = _mix(rows, e * (gain / total))
    q = h.new_empty(0)
    if n is not None:
        q = (_mean_square(h) + norm_eps).rsqrt_()
        h = h * q.unsqueeze(-1) * n
    return h.to(out_dtype), alpha, r, t, q


def _backward(
    settings: tuple[float, ...],
    needs: tuple[bool, ...],
    d_output: Tensor | None,
    d_alpha: Tensor | None,
    scalars: tuple[Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor | None, ...],
    sources: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key weight, norm weight and every source, each in its own dtype."""
    _, scale, _, gain = settings
    query, key_weight, norm_weight = vectors
    assert query is not None
    alpha, r, t, q = scalars
    shape, width = sources[0].shape, sources[0].shape[-1]
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    with _no_autocast(sources[0].device):
        u = _key_vector(query, key_weight, dtype)
        n = None if norm_weight is None else norm_weight.to(dtype)
        flat = [source.reshape(-1, width) for source in sources]
        tokens = flat[0].shape[0]
        dy = (
            flat[0].new_zeros(1, 1).expand(tokens, width) if d_output is None else d_output.reshape(-1, width)
        )
        alpha = alpha.reshape(len(sources), tokens)
        dp = None if d_alpha is None else d_alpha.reshape(len(sources), tokens)
        d_flat = [torch.empty_like(f) if need else None for f, need in zip(flat, needs[7:], strict=True)]
        du, dn = torch.zeros_like(u), None if n is None else torch.zeros_like(n)
        for piece in _chunks(tokens, width):
            rows = [f[piece].to(dtype) for f in flat]
            dh = dy[piece].to(dtype)
            if n is not None:
                dh, dn_piece = _norm_backward(_mix(rows, gain * alpha[:, piece]), q[piece], n, dh)
                dn = dn + dn_piece
            ds = _score_backward(rows, dh, alpha[:, piece], None if dp is None else dp[:, piece], gain)
            b = ds * r[:, piece] * scale
            c = b * r[:, piece].square() * t[:, piece] / -width
            a = alpha[:, piece] * gain
            for i, row in enumerate(rows):
                du = (
                    du + (b[i].unsqueeze(-1) * row).sum(0)
                    if torch.compiler.is_compiling()
                    else du.addmv_(row.t(), b[i])
                )
                if (d_source := d_flat[i]) is not None:
                    d_row = torch.mul(a[i].unsqueeze(-1), dh)
                    d_row.addcmul_(b[i].unsqueeze(-1), u).addcmul_(c[i].unsqueeze(-1), row)
                    d_source[piece] = d_row
    return (
        _query_gradient(du, key_weight, query) if needs[4] else None,
        _query_gradient(du, query, key_weight) if needs[5] and key_weight is not None else None,
        dn.to(norm_weight.dtype) if needs[6] and dn is not None and norm_weight is not None else None,
        *(None if d is None else d.reshape(shape) for d in d_flat),
    )


def _query_gradient(du: Tensor, other: Tensor | None, of: Tensor) -> Tensor:
    """d(w*g) times the other factor, in the dtype of the vector it belongs to."""
    return (du if other is None else du * other.to(du.dtype)).to(of.dtype)


def _norm_backward(h: Tensor, q: Tensor, n: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Backward of y = q * h * n: dh [c, D] and this chunk's dn [D]."""
    h_hat = h * q.unsqueeze(-1)
    dn = (dy * h_hat).sum(0)
    dy_n = dy * n
    inner = (dy_n * h_hat).sum(-1, keepdim=True) / h.shape[-1]
    return (dy_n - h_hat * inner) * q.unsqueeze(-1), dn


def _score_backward(
    rows: Sequence[Tensor], dh: Tensor, alpha: Tensor, d_alpha: Tensor | None, gain: float
) -> Tensor:
    """ds [N, c]: through the mixture, and through the returned weights where they were used."""
    if len(rows) == 1:
        return torch.zeros_like(alpha)
    p = torch.stack([(dh * row).sum(-1) for row in rows])
    p = p * gain if d_alpha is None else p * gain + d_alpha
    return alpha * (p - (alpha * p).sum(0))
