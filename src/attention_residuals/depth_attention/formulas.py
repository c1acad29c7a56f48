"""The equation of depth attention and its derivative for one chunk of tokens, as `lean` runs them.

Forward, per token (symbols as in `reference`; u = w * g):

    r_i = 1 / sqrt(mean(v_i^2) + eps)      t_i = <u, v_i>      score_i = scale * r_i * t_i
    alpha = softmax(score)                 h = gain * sum_i alpha_i v_i
    q = 1 / sqrt(mean(h^2) + norm_eps)     y = q * h * n

Backward, from dy (or dh) and the gradient dalpha of the returned weights:

    dn  = sum over tokens of dy * q * h                dh  = q * (dy*n - h * q^2 * <dy*n, h> / D)
    p_i = gain * <dh, v_i> + dalpha_i                  ds_i = alpha_i * (p_i - sum_j alpha_j p_j)
    b_i = scale * ds_i * r_i                           c_i = -b_i * r_i^2 * t_i / D
    dv_i = gain * alpha_i * dh + b_i * u + c_i * v_i   du = sum over tokens and i of b_i * v_i

docs/math.md derives them. A chunk of c tokens is held in one of two ways, with the same results: as a list of
N rows [c, D], which copies nothing, or stacked [N, c, D], which needs fewer calls and pays where c is small.
alpha, r, t, p, ds, b, c are [N, c]; q [c]; h, y, dh, dy [c, D]. The stacked form writes nothing in place, so
that autograd can differentiate it again; the list form is what a compiler sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# The most terms that one BLAS call adds up: in a dot product over the width, and in a sum over tokens. BLAS
# adds in sequence, so that its error grows with the number of terms; in pieces it stays near torch.sum's.
DOT_TERMS = 512
SUM_TERMS = 128

Rows = Tensor | list[Tensor]


class Settings(NamedTuple):
    """The numbers of a call, as in `depth_attention_reference`."""

    eps: float
    scale: float
    norm_eps: float
    gain: float


class Scalars(NamedTuple):
    """What the backward keeps beside its inputs: a few numbers per token, the tokens on the last axis."""

    alpha: Tensor
    r: Tensor
    t: Tensor
    q: Tensor  # [0] without an output norm


def read(settings: Settings, rows: Rows, u: Tensor, n: Tensor | None) -> tuple[Tensor, Scalars]:
    """h, or y where n is given, and the scalars that the derivative needs."""
    r = (mean_squares(rows) + settings.eps).rsqrt()
    t = dots(rows, u)
    score = settings.scale * r * t
    # One source has weight one whatever its score is, infinite or NaN too.
    e = torch.ones_like(r) if len(rows) == 1 else (score - score.amax(0).detach()).exp()
    total = e.sum(0)
    # In this order, with equal scores and gain N, every factor is N / N, exactly 1. (A number divided by a
    # tensor is the number times its reciprocal in PyTorch, and 41 * (1 / 41) isn't 1 in float32.)
    h = mix(rows, e * settings.gain / total)
    q = h.new_empty(0)
    if n is not None:
        q = (h.square().mean(-1) + settings.norm_eps).rsqrt()
        h = h * q.unsqueeze(-1) * n
    return h, Scalars(e / total, r, t, q)


def gradients(
    settings: Settings,
    rows: Rows,
    u: Tensor,
    n: Tensor | None,
    scalars: Scalars,
    dy: Tensor,
    d_alpha: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor | None]:
    """(dh, a, b, c), from which `source_gradients` makes dv; and this chunk's part of du and dn [D]."""
    alpha, r, t, q = scalars
    a = settings.gain * alpha
    dh, dn = dy, None
    if n is not None:
        h_hat = mix(rows, a) * q.unsqueeze(-1)
        dn = (dy * h_hat).sum(0)
        dy_n = dy * n
        dh = (dy_n - h_hat * (dy_n * h_hat).mean(-1, keepdim=True)) * q.unsqueeze(-1)
    p = settings.gain * inner(rows, dh)
    p = p if d_alpha is None else p + d_alpha
    ds = alpha * (p - (alpha * p).sum(0))
    b = settings.scale * ds * r
    c = b * r.square() * t / -u.shape[0]
    return (dh, a, b, c), weighted_sum(rows, b), dn


def source_gradients(
    rows: Rows, u: Tensor, factors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Iterator[Tensor]:
    """dv_i [c, D], source after source."""
    dh = factors[0]
    a, b, c = (factor.unsqueeze(-1) for factor in factors[1:])
    if isinstance(rows, Tensor):
        yield from torch.addcmul(torch.addcmul(a * dh, b, u), c, rows).unbind(0)
        return
    for i, row in enumerate(rows):
        yield (a[i] * dh).addcmul_(b[i], u).addcmul_(c[i], row)


def mean_squares(rows: Rows) -> Tensor:
    """mean(v_i^2) [N, c]."""
    if isinstance(rows, Tensor):
        return rows.square().mean(-1)
    width = rows[0].shape[-1]
    return torch.stack([torch.linalg.vector_norm(row, dim=-1) for row in rows]).square() / width


def dots(rows: Rows, vector: Tensor) -> Tensor:
    """<v_i, vector> [N, c]: an expression that a compiler can fuse, or without one BLAS, which is faster."""
    if isinstance(rows, Tensor):
        return (rows * vector).sum(-1)
    if torch.compiler.is_compiling():
        return torch.stack([(row * vector).sum(-1) for row in rows])
    return torch.stack([_dot(row, vector) for row in rows])


def _dot(row: Tensor, vector: Tensor) -> Tensor:
    if len(vector) <= DOT_TERMS:
        return torch.mv(row, vector)
    pieces = zip(row.split(DOT_TERMS, -1), vector.split(DOT_TERMS), strict=True)
    return torch.stack([torch.mv(*piece) for piece in pieces]).sum(0)


def mix(rows: Rows, weights: Tensor) -> Tensor:
    """sum_i weights_i v_i [c, D]."""
    weights = weights.unsqueeze(-1)
    if isinstance(rows, Tensor):
        return (weights * rows).sum(0)
    h = weights[0] * rows[0]
    for i, row in enumerate(rows[1:], start=1):
        h.addcmul_(weights[i], row)
    return h


def inner(rows: Rows, dh: Tensor) -> Tensor:
    """<dh, v_i> [N, c], token by token."""
    if isinstance(rows, Tensor):
        return (rows * dh).sum(-1)
    return torch.stack([(row * dh).sum(-1) for row in rows])


def weighted_sum(rows: Rows, weights: Tensor) -> Tensor:
    """sum over tokens and sources of weights_i v_i [D]."""
    if isinstance(rows, Tensor):
        return (weights.unsqueeze(-1) * rows).sum((0, 1))
    if torch.compiler.is_compiling():
        parts = [(weight.unsqueeze(-1) * row).sum(0) for weight, row in zip(weights, rows, strict=True)]
    else:
        pairs = [
            zip(row.split(SUM_TERMS), weight.split(SUM_TERMS), strict=True)
            for row, weight in zip(rows, weights, strict=True)
        ]
        parts = [torch.mv(row.t(), weight) for row, weight in itertools.chain(*pairs)]
    return torch.stack(parts).sum(0)
