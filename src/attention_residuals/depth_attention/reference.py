"""The equation of depth attention in plain autograd: the oracle that every other backend is held against.

For one token, with sources v_1..v_N in R^D (arXiv 2603.15031, section 3):

    key_i   = v_i / sqrt(mean(v_i^2) + eps) * g          score_i = scale * <w, key_i>
    alpha   = softmax over i of score_i                  h       = gain * sum_i alpha_i v_i
    y       = h / sqrt(mean(h^2) + norm_eps) * norm_weight        (only when norm_weight is given)

gain is 1 for read_scale "mean" and N for "sum". Everything in float32 (float64 for float64 sources),
one downcast at the end, to the sources' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def depth_attention_reference(
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
    """Mix N sources [..., D]; returns h (or y) [..., D] and the depth weights [N, ...].

    Keeps several tensors of N x tokens x D for the backward pass: clear rather than lean.
    """
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    v = torch.stack([source.to(dtype) for source in sources])
    w = query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
    key = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    score = scale * (key * w).sum(-1)
    e = torch.exp(score - score.amax(0, keepdim=True).detach())
    total = e.sum(0, keepdim=True)
    # e * gain / total in this order: with equal scores and gain N every factor is N / N, exactly 1.
    h = ((e * gain / total).unsqueeze(-1) * v).sum(0)
    if norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(dtype)
    return h.to(sources[0].dtype), e / total
