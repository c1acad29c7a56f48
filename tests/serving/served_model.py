"""A folder as training leaves it: a tiny Qwen3.5 with reads that choose, and a BPE tokenizer for chat."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import attention_residuals as ar

END = "<|im_end|>"
TEXT = (
    "A read sees the finished blocks, and the partial sum of the open one. What does a read see? All sources "
    "add up to the residual stream, so nothing is lost. Who closes a block? The last sublayer that writes."
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII and merges of `TEXT`: whatever a model writes is text, with no half of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = ["Ġ", "Ċ", *map(chr, range(33, 127))]  # how bytes of a space and a line end are written
    trainer = trainers.BpeTrainer(
        vocab_size=160,
        initial_alphabet=printable,
        special_tokens=[END, "<|im_start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def save_served_model(folder: Path) -> None:
    """Random weights, wide enough apart that the likeliest token is not a matter of rounding."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = ar.Qwen3_5AttnResConfig(
        vocab_size=len(tokenizer),
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
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        attn_res={"mode": "block", "num_blocks": 4},
    )
    model = ar.Qwen3_5AttnResForCausalLM(config).eval()
    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            torch.nn.init.normal_(module.query, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
