"""Tiny plain models of transformers, and folders that hold them as published checkpoints do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tiny_shapes import DECODER, DELTA_NET

VOCABULARY = DECODER["vocab_size"]
TEXT: dict[str, Any] = {**DECODER, "num_hidden_layers": 4}
QWEN3_5 = {**TEXT, **DELTA_NET}
MOE = {
    **QWEN3_5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}
IMAGE_TOKEN, VISION_START, VISION_END = 60, 61, 62
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
WHOLE = {
    "vision_config": VISION,
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 63,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, TEXT),
    "dense": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, QWEN3_5),
    "moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, MOE),
    "composite": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, {**WHOLE, "text_config": QWEN3_5}),
    "composite moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, {**WHOLE, "text_config": MOE}),
}


def plain_model(
    kind: str, *, seed: int = 1, std: float = 0.3, dtype: Any = torch.float32, **text: Any
) -> Any:
    """A plain model whose parameters are all away from their start.

    Args:
        text: fields of the language model's config that differ.
    """
    config_class, model_class, fields = KINDS[kind]
    if "text_config" in fields:
        fields = {**fields, "text_config": {**fields["text_config"], **text}}
        fields |= {name: text[name] for name in ("tie_word_embeddings",) if name in text}
    else:
        fields = {**fields, **text}
    torch.manual_seed(seed)
    model = model_class(config_class(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=std)
    return model.to(dtype).eval()


BYTES = 256


def save_tokenizer(folder: Path) -> None:
    """One token a byte, for a model with vocab_size=BYTES."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BYTES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def token_ids(batch: int = 2, tokens: int = 11) -> torch.Tensor:
    return torch.randint(1, 60, (batch, tokens), generator=torch.Generator().manual_seed(3))


def with_image() -> dict[str, torch.Tensor]:
    """A row of text around an image of 4 x 4 patches, which become 2 x 2 tokens."""
    generator = torch.Generator().manual_seed(4)
    row = [5, 9, VISION_START, *[IMAGE_TOKEN] * 4, VISION_END, 11, 3, 7]
    ids = torch.tensor([row])
    patch = 3 * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(16, patch, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def change(model: Any, other: Any, **inputs: torch.Tensor) -> float:
    """Largest change of a logit, in units of the range of the logits."""
    inputs = inputs or {"input_ids": token_ids()}
    with torch.no_grad():
        expected, found = model(**inputs).logits, other(**inputs).logits
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


def rewrite(folder: Path, rename: Any = lambda key: key, **more: torch.Tensor) -> None:
    """Rename the tensors of a folder with one file of weights, and add some."""
    file = folder / "model.safetensors"
    tensors = {rename(key): tensor for key, tensor in load_file(file).items()}
    save_file(tensors | more, file, metadata={"format": "pt"})


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]), key


def _prefixed(key: str) -> str:
    return key.replace("model.", "model.language_model.", 1)


def save_layout(layout: str, folder: Path, **fields: Any) -> Any:
    """Save a plain bfloat16 model in one of LAYOUTS; gives the model."""
    kind, tied, rename, more = LAYOUTS[layout]
    model = plain_model(
        kind, dtype=torch.bfloat16, **({"tie_word_embeddings": True} if tied else {}), **fields
    )
    sharded = layout.endswith("sharded")
    model.save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
    assert sharded == (folder / "model.safetensors.index.json").is_file()
    if layout == "tied with a head":
        more = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    if rename or more:
        rewrite(folder, rename or (lambda key: key), **more)
    return model


MTP = {"mtp.fc.weight": torch.ones(2, 3), "mtp.norm.weight": torch.ones(2)}
# name -> kind of model, whether its head is tied, how tensors are renamed, and what else is stored
LAYOUTS: dict[str, tuple[str, bool, Any, dict[str, torch.Tensor]]] = {
    "single": ("llama", False, None, {}),
    "sharded": ("dense", False, None, {}),
    "prefixed": ("dense", False, _prefixed, {**MTP, "model.visual.patch_embed.weight": torch.ones(2)}),
    "tied": ("dense", True, None, {}),
    "tied with a head": ("dense", True, None, {}),
    "experts": ("moe", False, None, {}),
    "composite": ("composite", False, None, MTP),
    "composite moe, sharded": ("composite moe", False, None, {}),
}
