"""Shapes of the smallest models that tests build: fields of configs of transformers and of ours."""

from __future__ import annotations

from typing import Any

# a decoder of width 16; tests add the number of layers
DECODER: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
# what a Qwen3.5 of that width has beside it
DELTA_NET: dict[str, Any] = {
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
# a --model-config of two layers
LLAMA_TO_TRAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
