"""The two phases of depth attention and their derivatives for one chunk of tokens, as `two_phase` runs them.

Phase 1, for S reads with vectors u_s = w_s * g_s over N shared sources v_i (symbols as in `formulas`):

    score_si = scale * r_i * <u_s, v_i>      alpha_s = softmax over i of score_s
    o_s = sum_i alpha_si v_i                 lse_s = log sum_i exp(score_si)

Phase 2, for one read with its o and lse, and its own sources p_1..p_K (z_k are their scores):

    w = softmax over (lse, z_1 .. z_K)       h = gain * (w_0 o + sum_k w_k p_k)       y = q * h * n

Backward of phase 2 from dy is that of `formulas` with o as a source whose score is lse; it gives do and dlse.
Backward of phase 1 from do_s, dlse_s and the gradient dalpha_s of the returned weights:

    x_si = <do_s, v_i> + dalpha_si           ds_si = alpha_si (x_si - sum_j alpha_sj x_sj + dlse_s)
    b_si = scale * ds_si * r_i               c_i = -sum_s b_si t_si r_i^2 / D
    dv_i = sum_s (alpha_si do_s + b_si u_s) + c_i v_i          du_s = sum over tokens and i of b_si v_i

Rows are held as in `formulas`: a list of [c, D], or stacked [N, c, D], which writes nothing in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_residuals.depth_attention.formulas import (
    Rows,
    Settings,
    dots,
    inner,
    mean_squares,
    mix,
    weighted_sum,
)


class SharedScalars(NamedTuple):
    """What phase 1 keeps for its backward, beside the sources."""

    alpha: Tensor  # [S, N, c]
    r: Tensor  # [N, c]
    t: Tensor  # [S, N, c]


class MergeScalars(NamedTuple):
    """What phase 2 keeps for its backward, beside o, lse and the read's own sources."""

    weights: Tensor  # [1 + K, c], the shared part first
    r: Tensor  # [K, c]
    t: Tensor  # [K, c]
    q: Tensor  # [c], or [0] without an output norm


def attend(settings: Settings, rows: Rows, u: Tensor) -> tuple[list[Tensor], Tensor, SharedScalars]:
    """Phase 1 with u [S, D]: S outputs [c, D], lse [S, c], and the scalars that the derivative needs."""
    r = (mean_squares(rows) + settings.eps).rsqrt()
    t = torch.stack([dots(rows, vector) for vector in u.unbind(0)])
    score = settings.scale * r * t
    highest = score.amax(1).detach()
    e = (score - highest.unsqueeze(1)).exp()
    total = e.sum(1)
    alpha = e / total.unsqueeze(1)
    outputs = [mix(rows, weights) for weights in alpha.unbind(0)]
    return outputs, highest + total.log(), SharedScalars(alpha, r, t)


def attend_gradients(
    settings: Settings,
    rows: Rows,
    u: Tensor,
    scalars: SharedScalars,
    d_outputs: Sequence[Tensor],
    d_lse: Tensor | None,
    d_alpha: Tensor | None,
) -> tuple[Sequence[Tensor], Tensor]:
    """dv_i [c, D] of every source, and this chunk's part of du [S, D]."""
    alpha, r, t = scalars
    x = torch.stack([inner(rows, d_output) for d_output in d_outputs])
    x = x if d_alpha is None else x + d_alpha
    arriving = -(alpha * x).sum(1)
    arriving = arriving if d_lse is None else arriving + d_lse
    b = settings.scale * alpha * (x + arriving.unsqueeze(1)) * r
    c = (b * t).sum(0) * r.square() / -u.shape[1]
    du = torch.stack([weighted_sum(rows, weights) for weights in b.unbind(0)])
    return _shared_gradients(rows, u, (alpha, b, c), d_outputs), du


def _shared_gradients(
    rows: Rows, u: Tensor, factors: tuple[Tensor, Tensor, Tensor], d_outputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    alpha, b, c = (factor.unsqueeze(-1) for factor in factors)
    if isinstance(rows, Tensor):
        total = c * rows
        for s, d_output in enumerate(d_outputs):
            total = torch.addcmul(torch.addcmul(total, alpha[s], d_output), b[s], u[s])
        return total.unbind(0)
    found = []
    for i, row in enumerate(rows):
        total = c[i] * row
        for s, d_output in enumerate(d_outputs):
            total.addcmul_(alpha[s, i], d_output).addcmul_(b[s, i], u[s])
        found.append(total)
    return found


def merge(
    settings: Settings, rows: Rows, lse: Tensor, u: Tensor | None, n: Tensor | None
) -> tuple[Tensor, MergeScalars]:
    """Phase 2: h, or y where n is given. rows: o, then the K >= 0 sources of the read's own; lse [c].

    u is None where K is 0.
    """
    # Two tensors, since a compiler takes one that is returned twice for one output.
    r, t = lse.new_empty(0, *lse.shape), lse.new_empty(0, *lse.shape)
    score = lse.unsqueeze(0)
    if u is not None:
        r = (mean_squares(rows[1:]) + settings.eps).rsqrt()
        t = dots(rows[1:], u)
        score = torch.cat([score, settings.scale * r * t])
    e = (score - score.amax(0).detach()).exp()
    total = e.sum(0)
    h = mix(rows, e * settings.gain / total)
    q = h.new_empty(0)
    if n is not None:
        q = (h.square().mean(-1) + settings.norm_eps).rsqrt()
        h = h * q.unsqueeze(-1) * n
    return h, MergeScalars(e / total, r, t, q)


class MergeGradients(NamedTuple):
    """Of one chunk: do and the own sources' dv [c, D] in one list, dlse [c], parts of du and dn [D]."""

    rows: Sequence[Tensor]
    lse: Tensor
    u: Tensor | None
    n: Tensor | None


def merge_gradients(
    settings: Settings,
    rows: Rows,
    u: Tensor | None,
    n: Tensor | None,
    scalars: MergeScalars,
    dy: Tensor,
    d_weights: Tensor | None,
) -> MergeGradients:
    """The derivative of `merge` from dy [c, D] and the gradient of its weights [1 + K, c]."""
    weights, r, t, q = scalars
    a = settings.gain * weights
    dh, dn = dy, None
    if n is not None:
        h_hat = mix(rows, a) * q.unsqueeze(-1)
        dn = (dy * h_hat).sum(0)
        dy_n = dy * n
        dh = (dy_n - h_hat * (dy_n * h_hat).mean(-1, keepdim=True)) * q.unsqueeze(-1)
    p = settings.gain * inner(rows, dh)
    p = p if d_weights is None else p + d_weights
    ds = weights * (p - (weights * p).sum(0))
    found = [a[0].unsqueeze(-1) * dh]
    if u is None:
        return MergeGradients(found, ds[0], None, dn)
    b = settings.scale * ds[1:] * r
    c = b * r.square() * t / -len(u)
    for k in range(len(rows) - 1):
        straight = a[k + 1].unsqueeze(-1) * dh
        towards_u = torch.addcmul(straight, b[k].unsqueeze(-1), u)
        found.append(torch.addcmul(towards_u, c[k].unsqueeze(-1), rows[k + 1]))
    return MergeGradients(found, ds[0], weighted_sum(rows[1:], b), dn)
