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

    def to_dict(self) -> dict[str, Any]:
        """The names alone, as JSON values: what `config.json` keeps of a recognised architecture."""
        return {name: getattr(self, name) for name in ("layers", "pre_norms", "final_norm")}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Family:
        """A row without the norms' scale, so that each norm computes itself after its read."""
        names = {name: fields[name] for name in ("layers", "final_norm")}
        return cls(**names, pre_norms=tuple(fields["pre_norms"]), norm_weight=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composite:
    """A model that holds a language model beside other towers.

    Attributes:
        text_type: model type of the language model; a key of `FAMILIES`.
        path: where the language model is in the model without a head.
    """

    text_type: str
    path: str = "language_model"

    def path_in(self, plain: Any) -> str:
        """Where the language model is in a class of this architecture, with or without a head."""
        return self.path if plain.__name__.endswith("Model") else f"{plain.base_model_prefix}.{self.path}"


_QWEN3_5 = Family(
    norm_weight=_zero_centred_rms_norm,
    mixer_names=(("self_attn", "attention"), ("linear_attn", "delta net")),
)

# model_type of the plain architecture -> its row
FAMILIES: dict[str, Family] = {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "llama": Family(),
    "qwen3": Family(),
}

# model_type of the whole -> where its language model is
COMPOSITES: dict[str, Composite] = {
    "qwen3_5": Composite(text_type="qwen3_5_text"),
    "qwen3_5_moe": Composite(text_type="qwen3_5_moe_text"),
}
