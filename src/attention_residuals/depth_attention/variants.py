"""Every variant of a read in plain autograd: the equation of `reference` with one of its parts exchanged.

For one token, with sources v_1..v_N in R^D, norm(x) = x / sqrt(mean(x^2) + eps), and head by head:

    key_i   = norm(v_i) * g | norm(v_i) | v_i              of all channels, or of the last r
    w       = query | query_matrix @ norm(v_N)
    score_i = <w, key_i> | source_scores_i | 0             + recency_bias for i = N
    alpha_i = softmax_i(score) | 2 sigmoid(score_i) / N | (1 + score_i) / N
    h       = gain * sum_i alpha_i v_i                     v_i as it is, or norm(v_i)

With all scores zero every alpha_i is 1 / N. Numbers are rounded where `reference` rounds them.
docs/variants.md says which work each part is from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attention_residuals.depth_attention.lean import no_autocast
from attention_residuals.variant import ReadVariant


def depth_attention_variant(
    sources: Sequence[Tensor],
    variant: ReadVariant,
    parameters: Mapping[str, Tensor],
    norm_weight: Tensor | None,
    *,
    eps: float,
    norm_eps: float,
    gain: float,
    has_partial: bool,
) -> tuple[Tensor, Tensor]:
    """Mix N sources [..., D]; returns h [..., D], or y with `norm_weight`, and the depth weights [N, ...].

    Depth weights are the mean over heads, in float32 (float64). Keeps several tensors of N x tokens x D for
    the backward pass.

    Args:
        parameters: those that `variant.parameter_shapes` names.
        has_partial: whether the last source is an open block's partial sum.

    Raises:
        ValueError: one score per source, but for another number of sources.
    """
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    with no_autocast(sources[0].device):
        v = torch.stack([source.to(dtype) for source in sources])
        score = _scores(v, variant, {name: p.to(dtype) for name, p in parameters.items()}, eps)
        factor, alpha = _depth_weights(score, variant.activation, gain)
        values = _values(v, variant.values, eps, has_partial).unflatten(-1, (variant.heads, -1))
        h = (factor.unsqueeze(-1) * values).sum(0).flatten(-2)
        if norm_weight is not None:
            h = _normalised(h, norm_eps) * norm_weight.to(dtype)
        return h.to(sources[0].dtype), alpha.mean(-1)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _scores(v: Tensor, variant: ReadVariant, p: Mapping[str, Tensor], eps: float) -> Tensor:
    """From sources [N, ..., D] to scores [N, ..., H]."""
    if variant.weights == "uniform":
        return v.new_zeros(*v.shape[:-1], variant.heads)
    if variant.weights == "scalars":
        per_source = p["source_scores"]
        if len(per_source) != len(v):
            raise ValueError(
                f"the read has learned scores of {len(per_source)} sources, got {len(v)}; give it those"
            )
        shape = (len(v), *[1] * (v.dim() - 2), variant.heads)
        score = per_source.reshape(shape).expand(*v.shape[:-1], variant.heads)
    else:
        key = v if variant.query_rank is None else v[..., -variant.query_rank :]
        key = key if variant.key_norm == "none" else _normalised(key, eps)
        w = _normalised(v[-1], eps) @ p["query_matrix"].t() if "query_matrix" in p else p["query"]
        w = w * p["key_weight"] if "key_weight" in p else w
        score = (key * w).unflatten(-1, (variant.heads, -1)).sum(-1)
        if variant.values == "normalised":
            score = score * key.shape[-1] ** -0.5
    if variant.recency_bias:
        score = torch.cat([score[:-1], score[-1:] + p["recency_bias"]])
    return score


def _depth_weights(score: Tensor, activation: str, gain: float) -> tuple[Tensor, Tensor]:
    """gain * alpha, exactly 1 where scores are zero and the gain is N; and alpha. Both [N, ..., H]."""
    if activation == "softmax":
        e = torch.exp(score - score.amax(0, keepdim=True).detach())
        total = e.sum(0, keepdim=True)
    else:
        e = 2 * torch.sigmoid(score) if activation == "sigmoid" else 1 + score
        total = torch.full_like(e[:1], len(e))  # a tensor: dividing by a number multiplies by its reciprocal
    return e * gain / total, e / total


def _values(v: Tensor, which: str, eps: float, has_partial: bool) -> Tensor:
    if which == "plain":
        return v
    if which == "normalised":
        return _normalised(v, eps)
    end = len(v) - int(has_partial)
    return torch.cat([v[:1], _normalised(v[1:end], eps), v[end:]]) if end > 1 else v
