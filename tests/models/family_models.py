"""Tiny random models of every family, for `test_families.py` and `test_recognise.py`."""

from __future__ import annotations

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from attention_residuals.config import AttnResConfig
from attention_residuals.models.auto import model_class, our_config

SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 8}
DELTA_NET = {**tiny.QWEN3_5, "layer_types": ["linear_attention", "full_attention"] * 2}
# model type -> fields of its config beside the number of layers
FIELDS: dict[str, dict] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **SHARED},
    "qwen3_next": {**DELTA_NET, **SHARED, "rope_parameters": None},
    "llama": tiny.COMMON,
    "mistral": {**tiny.COMMON, "sliding_window": 4},
    "mixtral": {**tiny.COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": tiny.COMMON,
    "qwen3": tiny.COMMON,
    "qwen3_moe": {**tiny.COMMON, **SPARSE},
    "deepseek_v3": {
        **{name: value for name, value in tiny.COMMON.items() if name != "head_dim"},
        "num_key_value_heads": 2,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "granite": {**tiny.COMMON, "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
    "phi3": tiny.COMMON,
    "smollm3": tiny.COMMON,
    "olmo": tiny.COMMON,
    "gemma2": {**tiny.COMMON, "sliding_window": 4},
    "gemma3_text": {**tiny.COMMON, "sliding_window": 4},
    "gpt2": {
        **{
            name: tiny.COMMON[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")
        },
        "n_embd": 16,
        "n_head": 2,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mamba": {**tiny.COMMON, "state_size": 4},
    "vit": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 5,
    },
}
# those with experts
SPARSE_FAMILIES = ("qwen3_5_moe_text", "qwen3_next", "mixtral", "qwen3_moe", "deepseek_v3")


def auto_class(model_type: str):
    return AutoModelForImageClassification if model_type == "vit" else AutoModelForCausalLM


def plain_config(model_type: str, layers: int = 4, **fields):
    known = FIELDS.get(model_type, tiny.COMMON)
    return AutoConfig.for_model(model_type, **{**known, "num_hidden_layers": layers, **fields})


def plain_model(model_type: str, layers: int = 4, *, dtype=torch.float32, **fields):
    """transformers' own model with a head and random weights, norms moved away from their start."""
    torch.manual_seed(1)
    model = auto_class(model_type).from_config(plain_config(model_type, layers, **fields))
    tiny.randomize(model, 0.2)
    return model.to(dtype).eval()


def our_model(plain, attn_res: dict, family: dict | None = None):
    """Our model with the weights of a plain one; its queries are still zero."""
    config = our_config(plain.config, AttnResConfig(**attn_res), family)
    model = model_class(type(plain), plain.config.model_type)(config).to(plain.dtype)
    incompatible = model.load_state_dict(plain.state_dict(), strict=False)
    assert not incompatible.unexpected_keys
    assert all(".read." in key for key in incompatible.missing_keys)
    return model.eval()


def trained_model(plain, attn_res: dict, family: dict | None = None):
    """Our model with random queries and key weights, as if trained."""
    model = our_model(plain, attn_res, family)
    for module in model.modules():
        if isinstance(module, tiny.ar.DepthRead):
            tiny.randomize(module, 0.7)
    return model


def inputs(model_type: str, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Tokens, or images for a vision model; two rows."""
    if model_type == "vit":
        generator = torch.Generator().manual_seed(3)
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator, dtype=dtype)}
    return {"input_ids": tiny.token_ids(2, 9)}
