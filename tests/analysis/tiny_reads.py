"""Tiny models with random weights whose reads choose: queries and key weights are away from their start."""

from __future__ import annotations

from typing import Any

import torch

import attention_residuals as ar
from tiny_shapes import DECODER, DELTA_NET

VOCABULARY = 61
BLOCK = {"mode": "block", "sublayers_per_block": 3}
FIELDS: dict[str, Any] = {**DECODER, "vocab_size": VOCABULARY, "num_hidden_layers": 4}


def choosing_model(family: str = "Llama", **attn_res: Any) -> Any:
    """Four layers of width 16 in float64, in eval mode: "Llama", or "Qwen3_5" with three delta nets."""
    fields = {**FIELDS, **(DELTA_NET if family == "Qwen3_5" else {})}
    config = getattr(ar, f"{family}AttnResConfig")(**fields, attn_res=attn_res or BLOCK)
    torch.manual_seed(0)
    model = getattr(ar, f"{family}AttnResForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def token_ids(batch: int = 2, tokens: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)
