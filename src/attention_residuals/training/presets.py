"""Preset names to Qwen3.5 text shapes and the training defaults that suit them."""

from __future__ import annotations

import dataclasses
from typing import Any

PUBLISHED_VOCABULARY = 248_320  # rows of the published Qwen3.5 embeddings, padding rows included
BPE_VOCABULARY = 4096  # size asked of a tokenizer that is trained on the data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model shape, and the settings a run of that size starts from.

    Attributes:
        fields: fields of `Qwen3_5TextConfig`; `vocab_size` only where it is part of a published shape.
        tokenizer: default of `--tokenizer`: "bpe" trains one on the data, "qwen3.5" is the published one.
        context: default number of tokens in a row.
        batch_size: default rows per device and forward pass.
        learning_rate: default peak learning rate of AdamW.
    """

    fields: dict[str, Any]
    tokenizer: str
    context: int
    batch_size: int
    learning_rate: float


def _shape(
    hidden_size: int,
    num_hidden_layers: int,
    intermediate_size: int,
    *,
    heads: tuple[int, int],
    head_dim: int,
    linear_heads: tuple[int, int],
    linear_head_dim: int,
    mrope_section: tuple[int, int, int],
    rope_theta: float = 1e7,
    **extra: Any,
) -> dict[str, Any]:
    """Fields of `Qwen3_5TextConfig`; `heads` are (query, key/value), `linear_heads` are (key, value).

    A quarter of each attention head rotates, so the three multimodal rope sections share head_dim / 8
    frequencies.
    """
    if sum(mrope_section) * 8 != head_dim:
        raise ValueError(f"mrope_section must sum to head_dim / 8 = {head_dim / 8}, got {mrope_section}")
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "linear_num_key_heads": linear_heads[0],
        "linear_num_value_heads": linear_heads[1],
        "linear_key_head_dim": linear_head_dim,
        "linear_value_head_dim": linear_head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(mrope_section),
            "mrope_interleaved": True,
        },
        **extra,
    }


def _published(
    hidden_size: int,
    num_hidden_layers: int,
    intermediate_size: int,
    *,
    heads: tuple[int, int],
    value_heads: int,
    tied: bool,
    learning_rate: float,
) -> Preset:
    fields = _shape(
        hidden_size,
        num_hidden_layers,
        intermediate_size,
        heads=heads,
        head_dim=256,
        linear_heads=(16, value_heads),
        linear_head_dim=128,
        mrope_section=(11, 11, 10),
        tie_word_embeddings=tied,
        vocab_size=PUBLISHED_VOCABULARY,
        max_position_embeddings=262_144,
    )
    return Preset(fields=fields, tokenizer="qwen3.5", context=2048, batch_size=1, learning_rate=learning_rate)


# The small shapes use rope_theta 1e4: their rows are short, and the published 1e7 would leave most of
# their few rotating frequencies without any turn.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        fields=_shape(
            128,
            8,
            384,
            heads=(2, 1),
            head_dim=64,
            linear_heads=(2, 2),
            linear_head_dim=64,
            mrope_section=(3, 3, 2),
            rope_theta=1e4,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
        ),
        tokenizer="bpe",
        context=128,
        batch_size=8,
        learning_rate=4e-3,
    ),
    "small": Preset(
        fields=_shape(
            256,
            12,
            768,
            heads=(4, 2),
            head_dim=64,
            linear_heads=(4, 4),
            linear_head_dim=64,
            mrope_section=(3, 3, 2),
            rope_theta=1e4,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        ),
        tokenizer="bpe",
        context=256,
        batch_size=8,
        learning_rate=2e-3,
    ),
    "0.8B": _published(1024, 24, 3584, heads=(8, 2), value_heads=16, tied=True, learning_rate=6e-4),
    "2B": _published(2048, 24, 6144, heads=(8, 2), value_heads=16, tied=True, learning_rate=4e-4),
    "4B": _published(2560, 32, 9216, heads=(16, 4), value_heads=32, tied=True, learning_rate=3e-4),
    "9B": _published(4096, 32, 12288, heads=(16, 4), value_heads=32, tied=False, learning_rate=3e-4),
    "27B": _published(5120, 64, 17408, heads=(24, 4), value_heads=48, tied=False, learning_rate=2e-4),
}
