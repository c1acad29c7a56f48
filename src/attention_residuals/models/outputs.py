"""Model outputs with the field `depth_weights`: one tensor [N, B, T] per read, the final read last."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import ModelOutput


@dataclasses.dataclass
class AttnResModelOutputWithPast(BaseModelOutputWithPast):
    depth_weights: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass
class AttnResCausalLMOutputWithPast(CausalLMOutputWithPast):
    depth_weights: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass
class AttnResSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    depth_weights: tuple[torch.Tensor, ...] | None = None


_WITH_DEPTH_WEIGHTS: dict[type, Any] = {
    BaseModelOutputWithPast: AttnResModelOutputWithPast,
    CausalLMOutputWithPast: AttnResCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast: AttnResSequenceClassifierOutputWithPast,
}


def with_depth_weights(outputs: ModelOutput, depth_weights: tuple[torch.Tensor, ...]) -> ModelOutput:
    """The same output with `depth_weights` added, in the class that declares that field."""
    fields = {**outputs, "depth_weights": depth_weights}
    return _WITH_DEPTH_WEIGHTS[type(outputs)](**fields)
