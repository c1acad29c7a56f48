"""Architectures without a row: their parts are found by structure, or they are refused with the reason."""

from __future__ import annotations

import family_models
import pytest
import tiny
import torch
from family_models import plain_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attention_residuals.models.families import FAMILIES
from attention_residuals.models.recognise import recognise

LLAMA_NAMES = FAMILIES["llama"].to_dict()
BLOCK = {"mode": "block", "sublayers_per_block": 3, "read_scale": "sum"}
# model type, fields -> where the parts are
UNKNOWN = {
    "seed_oss": ({}, LLAMA_NAMES),
    "starcoder2": ({}, LLAMA_NAMES),
    "stablelm": ({}, LLAMA_NAMES),
    "olmoe": ({}, LLAMA_NAMES),
    "gpt_neox": ({"use_parallel_residual": False}, {**LLAMA_NAMES, "final_norm": "final_layer_norm"}),
    "lfm2": (
        {},
        {"layers": "layers", "pre_norms": ["operator_norm", "ffn_norm"], "final_norm": "embedding_norm"},
    ),
    "nemotron_h": (
        {
            "mamba_num_heads": 2,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 4,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
        },
        {"layers": "layers", "pre_norms": ["norm"], "final_norm": "norm_f"},
    ),
}
REFUSED = {
    "gpt_neox": ({}, "input_layernorm and post_attention_layernorm receive the same input, as in parallel"),
    "cohere": ({}, "self_attn and mlp share input_layernorm, as in parallel"),
    "stablelm": ({"use_parallel_residual": True}, "share input_layernorm, as in parallel"),
    "olmo2": ({}, "no norm receives the input of Olmo2DecoderLayer, as in post-norm"),
    "bert": ({"is_decoder": True}, "no norm receives the input of BertLayer, as in post-norm"),
    "minimax": ({}, "MiniMaxDecoderLayer uses its input outside input_layernorm, or scales it"),
    "gemma4_text": (
        {"vocab_size_per_layer_input": 8, "hidden_size_per_layer_input": 8},
        "uses its input outside input_layernorm and pre_feedforward_layernorm, or scales it",
    ),
    "bloom": ({}, "its forward fails on layers that return one tensor"),
    "llama4_text": ({}, "its backbone is not where base_model_prefix says"),
}


@pytest.mark.parametrize("family", [name for name in family_models.FIELDS if name != "vit"])
def test_finds_what_the_table_says(family):
    model = plain_model(family)
    before = {name: tensor.clone() for name, tensor in model.train().state_dict().items()}
    assert recognise(model).to_dict() == FAMILIES[family].to_dict()
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_finds_the_parts_of_an_unknown_architecture(model_type):
    fields, expected = UNKNOWN[model_type]
    plain = plain_model(model_type, **fields)
    found = recognise(plain)
    assert found.to_dict() == expected
    ours, ids = family_models.our_model(plain, BLOCK, found.to_dict()), tiny.token_ids()
    with torch.no_grad():
        logits, wanted = ours(ids).logits, plain(ids).logits
    assert (logits - wanted).abs().max() <= 1e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_needs_no_weights(model_type, dtype):
    config = family_models.plain_config(model_type)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        assert recognise(model).to_dict() == LLAMA_NAMES
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_a_head_is_its_own_backbone():
    assert recognise(plain_model("llama").model).to_dict() == LLAMA_NAMES


def test_an_unknown_architecture_trains_and_reloads(tmp_path):
    """The paths are in config.json, so nothing has to be found again."""
    plain, ids = plain_model("starcoder2"), tiny.token_ids()
    family = recognise(plain).to_dict()
    ours = family_models.trained_model(plain, BLOCK, family)
    ours.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in ours.named_parameters() if ".read." in name)
    ours.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(ours)
    assert again.config.attn_res_family == family
    assert again.state_dict().keys() == ours.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refuses_other_structures_with_the_reason(model_type):
    fields, reason = REFUSED[model_type]
    with pytest.raises(ValueError, match=reason):
        recognise(plain_model(model_type, **fields))


def test_refuses_what_is_no_decoder_over_token_ids():
    with pytest.raises(TypeError, match="only models of transformers can be recognised, got Linear"):
        recognise(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not a decoder over token ids"):
        recognise(plain_model("vit"))
    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(ValueError, match="not a decoder over token ids"):
        recognise(T5ForConditionalGeneration(t5))


class _Gated(LlamaDecoderLayer):
    def forward(self, x, **kwargs):
        middle = x + self.mlp(self.input_layernorm(x))
        return middle + self.mlp(self.post_attention_layernorm(middle)) * x.sigmoid()


class _Halved(LlamaDecoderLayer):
    def forward(self, x, **kwargs):
        middle = 0.5 * x + self.mlp(self.input_layernorm(x))
        return middle + self.mlp(self.post_attention_layernorm(middle))


class _Tupled(LlamaDecoderLayer):
    def forward(self, x, **kwargs):
        return (x + self.mlp(self.input_layernorm(x)),)


class _Swapped(LlamaDecoderLayer):
    def forward(self, x, **kwargs):
        middle = x + self.mlp(self.post_attention_layernorm(x))
        return middle + self.mlp(self.input_layernorm(middle))


@pytest.mark.parametrize(
    ("layer_class", "reason"),
    [
        (_Gated, "_Gated uses its input outside input_layernorm and post_attention_layernorm"),
        (_Halved, "_Halved uses its input outside input_layernorm, or scales it"),
        (_Tupled, "_Tupled returns something else than hidden states"),
        (_Swapped, "its layers differ in their pre-norms"),
    ],
)
def test_refuses_a_layer_that_is_almost_right(layer_class, reason):
    model = plain_model("llama")
    model.model.layers[2].__class__ = layer_class
    with pytest.raises(ValueError, match=reason):
        recognise(model)


class _Skipping(LlamaModel):
    """Adds the embedding again between two layers."""

    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary) + self.embed_tokens(input_ids)
        return self.norm(x)


class _Unnormed(LlamaModel):
    """Scales the last layer's output before the final norm."""

    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary)
        return self.norm(2.0 * x)


class _Branching(LlamaModel):
    """Reads the residual stream with a norm between layers too."""

    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for i, layer in enumerate(self.layers):
            x = layer(x, position_embeddings=rotary)
            branch = self.branch(x) if i == 1 else None
        return self.norm(x), branch


@pytest.mark.parametrize(
    ("backbone_class", "reason"),
    [
        (_Skipping, "a layer does not receive what the layer before it returned"),
        (_Unnormed, "the last layer's output does not go to one final norm"),
        (_Branching, "branch read the residual stream between layers"),
    ],
)
def test_refuses_a_backbone_that_is_almost_right(backbone_class, reason):
    model = plain_model("llama")
    model.model.branch = nn.LayerNorm(16)
    model.model.__class__ = backbone_class
    with pytest.raises(ValueError, match=reason):
        recognise(model)


def test_refuses_a_model_of_several_parts():
    config = Qwen3_5Config(
        text_config=family_models.plain_config("qwen3_5_text").to_dict(), vision_config={"depth": 1}
    )
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="it has several parts; take its language model alone"):
        recognise(model)
