"""Case M4 and relatives: what a model starts with, and what survives saving and loading."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import attention_residuals as ar

BLOCK = {"mode": "block", "sublayers_per_block": 3}


def reads(model):
    return [module for module in model.modules() if isinstance(module, ar.DepthRead)]


def assert_fresh(model):
    assert reads(model)
    for read in reads(model):
        assert torch.equal(read.query, torch.zeros_like(read.query))
        assert torch.equal(read.key_weight, torch.ones_like(read.key_weight))


def assert_same_logits(one, other):
    ids = tiny.token_ids()
    assert torch.equal(one.eval()(ids).logits, other.eval()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_has_zero_queries(dtype):
    assert_fresh(AutoModelForCausalLM.from_config(tiny.attn_res_config(BLOCK), dtype=dtype))


def test_a_plain_checkpoint_gets_zero_queries(tmp_path):
    plain = tiny.plain_model(dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    config = tiny.attn_res_config({**BLOCK, "read_scale": "sum"})
    model, report = ar.Qwen3_5AttnResForCausalLM.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert_fresh(model)
    assert report["missing_keys"] and all(".read." in key for key in report["missing_keys"])
    assert not report["unexpected_keys"]
    ids = tiny.token_ids()
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=5e-5)


def test_meta_device_then_init():
    with torch.device("meta"):
        model = ar.Qwen3_5AttnResForCausalLM(tiny.attn_res_config(BLOCK))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(1.9e38)
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    model.init_weights()
    for read in reads(model):
        model._init_weights(read)
    assert_fresh(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["50GB", "4KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_trained_values_survive(tmp_path, dtype, shard, tied):
    model = tiny.trained_model(BLOCK, dtype=dtype, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "4KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert isinstance(again, ar.Qwen3_5AttnResForCausalLM)
    for name, value in model.state_dict().items():  # A_log and dt_bias among them (case Q7)
        assert torch.equal(value, again.state_dict()[name]), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert_same_logits(model, again)


def test_keys_are_those_of_the_plain_model_and_the_reads(tmp_path):
    """Checkpoint names are API: these may not change."""
    plain, ours = (set(m.state_dict()) for m in (tiny.plain_model(), tiny.attn_res_model(BLOCK)))
    assert plain < ours
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(4) for n in ("input", "post_attention")]
    expected = {f"{norm}.read.{p}" for norm in (*norms[1:], "model.norm") for p in ("query", "key_weight")}
    assert ours - plain == expected


def test_save_load_save_load_gives_identical_keys(tmp_path):
    model = tiny.trained_model(BLOCK, dtype=torch.float32)
    for i in range(2):
        model.save_pretrained(tmp_path / str(i))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(i))
    first, second = (load_file(tmp_path / str(i) / "model.safetensors") for i in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_composite_checkpoint_keys(tmp_path):
    """Published Qwen3.5 checkpoints keep the language model under a prefix, beside a vision tower and MTP."""
    model = tiny.trained_model(BLOCK, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {key.replace("model.", "model.language_model.", 1): t for key, t in load_file(file).items()}
    renamed["model.visual.patch_embed.proj.weight"] = torch.ones(2)
    renamed["mtp.fc.weight"] = torch.ones(2)
    save_file(renamed, file, metadata={"format": "pt"})
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_logits(model, again)


def test_config_json_holds_the_fields_as_a_dict(tmp_path):
    config = ar.Qwen3_5AttnResConfig(**tiny.QWEN3_5, attn_res={"mode": "block", "sublayers_per_block": 3})
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "qwen3_5_attn_res"
    assert written["attn_res"] == ar.AttnResConfig(mode="block", sublayers_per_block=3).to_dict()
    assert AutoConfig.from_pretrained(tmp_path).attn_res == written["attn_res"]


def test_a_wrong_attn_res_field_is_refused_when_the_config_is_built():
    with pytest.raises(ValueError, match="sublayers_per_block must be at least 1, got 0"):
        ar.Qwen3_5AttnResConfig(**tiny.QWEN3_5, attn_res={"mode": "block", "sublayers_per_block": 0})
    with pytest.raises(TypeError, match="unknown fields"):
        ar.Qwen3_5AttnResConfig(**tiny.QWEN3_5, attn_res={"block_size": 2})


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_auto_classes_build_our_models(family):
    config = tiny.attn_res_config(BLOCK, family, num_labels=3)
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        model = auto.from_config(config)
        assert "AttnRes" in type(model).__name__
        assert_fresh(model)


def test_sequence_classification_round_trip(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny.attn_res_config(BLOCK, num_labels=3)).eval()
    tiny.randomize(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same_logits(model, again)
    out = again(tiny.token_ids(), labels=torch.tensor([0, 2]), output_depth_weights=True)
    assert out.logits.shape == (2, 3) and out.loss.ndim == 0 and len(out.depth_weights) == 9


def test_one_step_then_save_keeps_the_head_tied(tmp_path):
    """Case Q3."""
    model = tiny.trained_model(BLOCK, dtype=torch.float32, tie_word_embeddings=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tiny.token_ids(), labels=tiny.token_ids()).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert_same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path))
