"""Model outputs with the field `depth_weights`: one tensor [N, B, T] per read, the final read last."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

# plain output class -> the one with the field
_WITH_FIELD: dict[type, Any] = {}


def _with_field(plain: Any) -> Any:
    if plain not in _WITH_FIELD:
        name = f"AttnRes{plain.__name__}"
        fields = {
            "__module__": __name__,
            "__annotations__": {"depth_weights": tuple[torch.Tensor, ...] | None},
            "depth_weights": None,
        }
        _WITH_FIELD[plain] = dataclasses.dataclass(type(name, (plain,), fields))
        setattr(sys.modules[__name__], name, _WITH_FIELD[plain])  # where pickle looks
    return _WITH_FIELD[plain]


# Made at import, since torch.compile can't make a class; a model with another output class makes its own.
for _plain in (
    modeling_outputs.BaseModelOutputWithPast,
    modeling_outputs.CausalLMOutputWithPast,
    modeling_outputs.SequenceClassifierOutputWithPast,
    modeling_outputs.MoeModelOutputWithPast,
    modeling_outputs.MoeCausalLMOutputWithPast,
):
    _with_field(_plain)


def with_depth_weights(outputs: ModelOutput, depth_weights: tuple[torch.Tensor, ...]) -> ModelOutput:
    """The same output with `depth_weights` added, in a subclass that declares that field."""
    return _with_field(type(outputs))(**{**outputs, "depth_weights": depth_weights})
