"""One table: where each architecture keeps its layers, its two pre-norms and its final norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _zero_centred_rms_norm(norm: nn.Module) -> tuple[Tensor, float]:
    """Qwen3.5's RMSNorm: the scale is 1 + weight, applied in float32."""
    weight: Any = norm.weight
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32)), norm.eps  # type: ignore[return-value]


def _rms_norm(norm: nn.Module) -> tuple[Tensor, float]:
    """Llama's RMSNorm and its copies: the scale is the weight."""
    return norm.weight, norm.variance_epsilon  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one pre-norm architecture computes x = x + f(norm1(x)); x = x + g(norm2(x)).

    Attributes:
        layers: name of the backbone's list of decoder layers.
        pre_norms: a layer's norms before its token mixer and before its MLP, in that order.
        final_norm: name of the backbone's last norm.
        norm_weight: from a norm to its effective weight [D] and eps, so that a read can apply it too;
            None where the norm is not an RMSNorm.
        mixer_names: attribute that holds the token mixer -> its name in titles.
    """

    layers: str = "layers"
    pre_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    norm_weight: Callable[[nn.Module], tuple[Tensor, float]] | None = _rms_norm
    mixer_names: tuple[tuple[str, str], ...] = (("self_attn", "attention"),)


# model_type of the plain architecture -> its row
FAMILIES: dict[str, Family] = {
    "qwen3_5_text": Family(
        norm_weight=_zero_centred_rms_norm,
        mixer_names=(("self_attn", "attention"), ("linear_attn", "delta net")),
    ),
    "llama": Family(),
    "qwen3": Family(),
}
