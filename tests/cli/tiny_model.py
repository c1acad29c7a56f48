"""A tiny Qwen3.5 with attention residuals and a byte-level tokenizer, saved as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attention_residuals import DepthRead, Qwen3_5AttnResConfig, Qwen3_5AttnResForCausalLM

END = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and an end token, no merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def tiny_config(**attn_res: Any) -> Qwen3_5AttnResConfig:
    """Four layers of width 32: three delta nets and one attention, eight sublayers."""
    return Qwen3_5AttnResConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        attn_res=attn_res or {"mode": "block", "num_blocks": 4},
    )


def save_tiny_model(folder: Path, **attn_res: Any) -> Path:
    """Random weights, and queries that are not zero, so that reads choose."""
    torch.manual_seed(0)
    model = Qwen3_5AttnResForCausalLM(tiny_config(**attn_res)).eval()
    for module in model.modules():
        if isinstance(module, DepthRead):
            torch.nn.init.normal_(module.query, std=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
