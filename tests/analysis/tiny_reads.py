"""Tiny models with random weights whose reads choose: queries and key weights are away from their start."""

from __future__ import annotations

from typing import Any

import torch

import attention_residuals as ar

VOCABULARY = 61
BLOCK = {"mode": "block", "sublayers_per_block": 3}
FIELDS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}


def choosing_model(family: str = "Llama", **attn_res: Any) -> Any:
    """Four layers of width 16 in float64, in eval mode: "Llama", or "Qwen3_5" with three delta nets."""
    fields = {**FIELDS, **(LINEAR if family == "Qwen3_5" else {})}
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
