"""Model outputs with the field `depth_weights`: one tensor [N, B, T] per read, the final read last."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
from transformers.utils import ModelOutput


@functools.cache
def _with_field(plain: Any) -> Any:
    """The class of a plain output with one field more."""
    name = f"AttnRes{plain.__name__}"
    fields = {
        "__module__": __name__,
        "__annotations__": {"depth_weights": tuple[torch.Tensor, ...] | None},
        "depth_weights": None,
    }
    made: Any = dataclasses.dataclass(type(name, (plain,), fields))
    setattr(sys.modules[__name__], name, made)  # where pickle looks
    return made


def with_depth_weights(outputs: ModelOutput, depth_weights: tuple[torch.Tensor, ...]) -> ModelOutput:
    """The same output with `depth_weights` added, in a subclass that declares that field."""
    return _with_field(type(outputs))(**{**outputs, "depth_weights": depth_weights})
