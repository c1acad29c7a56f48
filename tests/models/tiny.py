"""Tiny random models for the tests in this folder."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import attention_residuals as ar
from tiny_shapes import DECODER, DELTA_NET

VOCABULARY = DECODER["vocab_size"]
COMMON = DECODER
QWEN3_5 = {**DECODER, **DELTA_NET}
FAMILIES = {
    "qwen3_5": (
        QWEN3_5,
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        ar.Qwen3_5AttnResConfig,
        ar.Qwen3_5AttnResForCausalLM,
    ),
    "llama": (COMMON, LlamaConfig, LlamaForCausalLM, ar.LlamaAttnResConfig, ar.LlamaAttnResForCausalLM),
    "qwen3": (COMMON, Qwen3Config, Qwen3ForCausalLM, ar.Qwen3AttnResConfig, ar.Qwen3AttnResForCausalLM),
}
MODES = (
    {"mode": "full"},
    {"mode": "block", "sublayers_per_block": 2},
    {"mode": "block", "sublayers_per_block": 3},
    {"mode": "block", "num_blocks": 2},
)


def plain_model(family: str = "qwen3_5", layers: int = 4, *, dtype=torch.float64, **fields):
    """transformers' own model with random weights, norms and embedding moved away from their start."""
    base, config_class, model_class, _, _ = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**{**base, "num_hidden_layers": layers, **fields}))
    randomize(model)
    return model.to(dtype).eval()


def randomize(model, std: float = 0.3) -> None:
    """Move every parameter away from where it starts, reads included."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=std)


def attn_res_config(attn_res: dict, family: str = "qwen3_5", layers: int = 4, **fields):
    base, _, _, config_class, _ = FAMILIES[family]
    return config_class(**{**base, "num_hidden_layers": layers, **fields}, attn_res=attn_res)


def attn_res_model(
    attn_res: dict, family: str = "qwen3_5", layers: int = 4, *, dtype=torch.float64, **fields
):
    """Our model with the weights of `plain_model`; its queries are still zero."""
    model = FAMILIES[family][4](attn_res_config(attn_res, family, layers, **fields)).to(dtype)
    plain = plain_model(family, layers, dtype=dtype, **fields)
    incompatible = model.load_state_dict(plain.state_dict(), strict=False)
    assert not incompatible.unexpected_keys
    assert all(".read." in key for key in incompatible.missing_keys)
    return model.eval()


def trained_model(attn_res: dict, family: str = "qwen3_5", layers: int = 4, **kwargs):
    """Our model with random queries and key weights, as if trained."""
    model = attn_res_model(attn_res, family, layers, **kwargs)
    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            randomize(module, 0.7)
    return model


def token_ids(batch: int = 2, tokens: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)
