"""One table: where each architecture keeps its layers, their pre-norms and its final norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class NormWeight(NamedTuple):
    """An RMSNorm whose scale is offset + weight [D], with eps inside its root."""

    weight: Tensor
    offset: float
    eps: float


def _zero_centred_rms_norm(norm: Any) -> NormWeight:
    """RMSNorm of Gemma and Qwen3.5: the scale is 1 + weight, applied in float32."""
    return NormWeight(norm.weight, 1.0, norm.eps)


def _rms_norm(norm: Any) -> NormWeight:
    """Llama's RMSNorm and its copies: the scale is the weight."""
    return NormWeight(norm.weight, 0.0, norm.variance_epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one pre-norm architecture computes x = x + f(norm1(x)); x = x + g(norm2(x)), or the first alone.

    Attributes:
        layers: path of the list of layers in the backbone; paths may have dots.
        pre_norms: paths in a layer of the norm before each of its sublayers, token mixer first; two or one.
        final_norm: path of the last norm in the backbone.
        norm_weight: from a norm to its weight, offset and eps, so that a read can apply it too;
            None where the norm is no RMSNorm and computes itself after the read.
        mixer_names: attribute that holds the token mixer -> its name in titles.
        reads_elsewhere: attributes that a layer may have and that read the residual stream outside
            `pre_norms`; a layer that has one is refused.
    """

    layers: str = "layers"
    pre_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    norm_weight: Callable[[nn.Module], NormWeight] | None = _rms_norm
    mixer_names: tuple[tuple[str, str], ...] = (("self_attn", "attention"),)
    reads_elsewhere: tuple[str, ...] = ()

    @property
    def sublayers_per_layer(self) -> int:
        return len(self.pre_norms)

    def layers_of(self, backbone: nn.Module) -> Any:
        """The backbone's layers.

        Raises:
            AttributeError: nothing is there.
        """
        return backbone.get_submodule(self.layers)

    def pre_norms_of(self, layer: nn.Module) -> list[Any]:
        """A layer's norms, one before each of its sublayers.

        Raises:
            AttributeError: one is missing.
        """
        return [layer.get_submodule(path) for path in self.pre_norms]

    def final_norm_of(self, backbone: nn.Module) -> Any:
        """The backbone's last norm.

        Raises:
            AttributeError: nothing is there.
        """
        return backbone.get_submodule(self.final_norm)

    def to_dict(self) -> dict[str, Any]:
        """The paths alone, as JSON values: what `config.json` keeps of a recognised architecture."""
        return {"layers": self.layers, "pre_norms": list(self.pre_norms), "final_norm": self.final_norm}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Family:
        """A row without the norms' scale, so that each norm computes itself after its read."""
        paths = {name: fields[name] for name in ("layers", "final_norm")}
        return cls(**paths, pre_norms=tuple(fields["pre_norms"]), norm_weight=None)


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


_LLAMA = Family()
_GEMMA = Family(
    pre_norms=("input_layernorm", "pre_feedforward_layernorm"), norm_weight=_zero_centred_rms_norm
)
_QWEN3_5 = Family(
    norm_weight=_zero_centred_rms_norm,
    mixer_names=(("self_attn", "attention"), ("linear_attn", "delta net")),
)

# in which `tests/models/test_families.py` runs every row
TESTED_MODES: tuple[dict[str, Any], ...] = (
    {"mode": "full"},
    {"mode": "block", "sublayers_per_block": 2},
    {"mode": "block", "sublayers_per_block": 3},
)

# model_type of the plain architecture -> its row
FAMILIES: dict[str, Family] = {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_next": _QWEN3_5,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "deepseek_v3": _LLAMA,
    "granite": _LLAMA,
    "phi3": _LLAMA,
    "smollm3": _LLAMA,
    "olmo": Family(norm_weight=None),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": Family(
        layers="h",
        pre_norms=("ln_1", "ln_2"),
        final_norm="ln_f",
        norm_weight=None,
        mixer_names=(("attn", "attention"),),
        reads_elsewhere=("crossattention",),
    ),
    "mamba": Family(pre_norms=("norm",), final_norm="norm_f", mixer_names=(("mixer", "state space"),)),
    "vit": Family(
        pre_norms=("layernorm_before", "layernorm_after"),
        final_norm="layernorm",
        norm_weight=None,
        mixer_names=(("attention", "attention"),),
    ),
}

# model_type of the whole -> where its language model is
COMPOSITES: dict[str, Composite] = {
    "qwen3_5": Composite(text_type="qwen3_5_text"),
    "qwen3_5_moe": Composite(text_type="qwen3_5_moe_text"),
}
