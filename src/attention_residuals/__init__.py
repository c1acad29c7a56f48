"""Attention Residuals: attention over depth for Transformers (arXiv 2603.15031)."""

from typing import Any

from attention_residuals.analysis.record import DepthRecord, record_depth_weights
from attention_residuals.config import AttnResConfig
from attention_residuals.convert import convert
from attention_residuals.depth_attention import available_backends, depth_attention
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.stream import ResidualStream

import attention_residuals.models.auto as _auto  # isort: skip  (makes the Auto classes know our model types)

__version__ = "0.1.0"

__all__ = [
    "AttnResConfig",
    "DepthPlan",
    "DepthRead",
    "DepthRecord",
    "LlamaAttnResConfig",
    "LlamaAttnResForCausalLM",
    "LlamaAttnResForSequenceClassification",
    "LlamaAttnResModel",
    "Qwen3AttnResConfig",
    "Qwen3AttnResForCausalLM",
    "Qwen3AttnResForSequenceClassification",
    "Qwen3AttnResModel",
    "Qwen3_5AttnResConfig",
    "Qwen3_5AttnResForCausalLM",
    "Qwen3_5AttnResForSequenceClassification",
    "Qwen3_5AttnResModel",
    "ResidualStream",
    "available_backends",
    "convert",
    "depth_attention",
    "record_depth_weights",
]


def __getattr__(name: str) -> Any:
    """Config and model classes of every family, e.g. `Qwen3_5AttnResForCausalLM`, made when asked for."""
    if "AttnRes" in name:
        return getattr(_auto, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
