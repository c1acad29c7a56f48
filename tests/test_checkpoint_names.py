"""Others' checkpoints: names and settings there and back, and a decoder that runs by their rules."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import attention_residuals as ar
from attention_residuals.checkpoint_names import (
    STYLES,
    export_keys,
    export_names,
    export_settings,
    import_keys,
    import_names,
    import_settings,
)
from attention_residuals.models.families import Family

LAYERS, EPS = 3, 1e-5
LLAMA = {
    "num_hidden_layers": LAYERS,
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "rms_norm_eps": EPS,
}
GPT2_LIKE = Family(layers="h", pre_norms=("ln_1", "ln_2"), final_norm="ln_f")
styles = pytest.mark.parametrize("style", STYLES)


def our_keys(layers, prefix="model.", family=Family()):  # noqa: B008
    norms = [f"{prefix}{family.layers}.{i}.{norm}" for i in range(layers) for norm in family.pre_norms]
    norms.append(f"{prefix}{family.final_norm}")
    reads = [f"{norm}.read.{part}" for norm in norms[1:] for part in ("query", "key_weight")]
    return ["lm_head.weight", *(f"{norm}.weight" for norm in norms), *reads]


def their_weights(style, layers=3, width=4):
    keys = our_keys(layers)
    vectors = {key: torch.randn(width, generator=torch.Generator().manual_seed(len(key))) for key in keys}
    return export_names(vectors, style)


def empty_model(settings):
    config = ar.LlamaAttnResConfig(**LLAMA, attn_res=settings.to_dict())
    return ar.LlamaAttnResForCausalLM(config).to(torch.float64).eval()


def model_of(attn_res):
    """A tiny Llama with reads, every parameter away from its start."""
    model = empty_model(ar.AttnResConfig(**attn_res, eps=EPS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


def token_ids(tokens=11):
    return torch.randint(LLAMA["vocab_size"], (2, tokens))


def exported(model, style):
    config = model.config
    settings = ar.AttnResConfig.from_dict(config.attn_res)
    fields = export_settings(settings, config.num_hidden_layers, style, norm_eps=config.rms_norm_eps)
    return export_names(model.state_dict(), style), fields


CASES = [
    ("k3", {"sublayers_per_block": 2}),
    ("k3", {"sublayers_per_block": 4}),
    ("k3", {"num_blocks": 1}),
    ("fla", {"mode": "full"}),
    ("fla", {"sublayers_per_block": 4}),
]


@pytest.mark.parametrize(("style", "attn_res"), CASES)
def test_a_model_comes_back_to_the_bit(style, attn_res, tmp_path):
    model = model_of(attn_res)
    weights, fields = exported(model, style)
    save_file(weights, tmp_path / "model.safetensors")
    again = empty_model(import_settings(fields))
    again.load_state_dict(import_names(load_file(tmp_path / "model.safetensors")))
    ids = token_ids()
    assert torch.equal(again(ids).logits, model(ids).logits)


def their_read(weights, name, sources, eps):
    """Scores from a linear map of normalised sources, as in the others' modules."""
    stacked = torch.stack(sources)
    norm = F.rms_norm(stacked, stacked.shape[-1:], weights[f"{name}_norm.weight"], eps)
    return (F.linear(norm, weights[f"{name}_proj.weight"]).softmax(0) * stacked).sum(0)


def their_logits(plain, weights, stems, final, block, eps, ids):
    """A Llama run by the others' rules; `block` counts sublayers.

    The running sum joins the finished blocks just before a sublayer whose number is a multiple of the
    block length, and the output reads finished blocks and running sum.
    """
    backbone = plain.model
    total, finished, sublayer = backbone.embed_tokens(ids), [], 0
    rotary = backbone.rotary_emb(total, position_ids=torch.arange(ids.shape[1])[None])
    for i, layer in enumerate(backbone.layers):
        mixer = lambda x, layer=layer: layer.self_attn(x, position_embeddings=rotary)[0]  # noqa: E731
        parts = ((layer.input_layernorm, mixer), (layer.post_attention_layernorm, layer.mlp))
        for stem, (norm, part) in zip(stems, parts, strict=True):
            sources = [*finished, total]
            if finished:
                x = their_read(weights, f"model.layers.{i}.{stem}", sources, eps)
                x = F.rms_norm(x, x.shape[-1:], norm.weight, eps)
            else:
                x = norm(total)  # rounds to float32 inside, as it does in ours
            if sublayer % block == 0:
                finished, total = sources, None
            out = part(x)
            total = out if total is None else total + out
            sublayer += 1
    x = their_read(weights, f"model.{final}", [*finished, total], eps)
    return plain.lm_head(F.rms_norm(x, x.shape[-1:], backbone.norm.weight, eps))


RULES = {
    "k3": (("self_attention_res", "mlp_res"), "output_attn_res", "attn_res_block_size", 2, "rms_norm_eps"),
    "fla": (("attn_res", "mlp_res"), "res", "attnres_block_size", 1, "norm_eps"),
}


@pytest.mark.parametrize(("style", "attn_res"), CASES)
def test_their_rules_give_our_logits(style, attn_res):
    model = model_of(attn_res)
    weights, fields = exported(model, style)
    stems, final, block_size, sublayers_per_unit, eps = RULES[style]
    assert set(fields) == {block_size, eps}
    plain = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.float64).eval()
    plain.load_state_dict({key: value for key, value in weights.items() if "res_" not in key})
    ids = token_ids(tokens=1)  # no causal mask to build
    block = fields[block_size] * sublayers_per_unit
    theirs = their_logits(plain, weights, stems, final, block, fields[eps], ids)
    torch.testing.assert_close(theirs, model(ids).logits, rtol=0, atol=1e-12)


@styles
@given(
    layers=st.integers(1, 13),
    prefix=st.sampled_from(["", "model.", "model.language_model.", "language_model.model."]),
    family=st.sampled_from([Family(), GPT2_LIKE]),
)
def test_keys_there_and_back(style, layers, prefix, family):
    ours = our_keys(layers, prefix, family)
    theirs = export_keys(ours, style, family)
    assert list(theirs) == ours and len(set(theirs.values())) == len(ours)
    assert not any(".read." in key for key in theirs.values())
    for name in ("auto", style):
        assert import_keys(theirs.values(), name, family) == {new: old for old, new in theirs.items()}


@given(
    layers=st.integers(1, 13),
    style=st.sampled_from(list(STYLES)),
    block=st.one_of(
        st.just({"mode": "full"}),
        st.builds(lambda n: {"sublayers_per_block": n}, st.integers(1, 30)),
        st.builds(lambda n: {"num_blocks": n}, st.integers(1, 30)),
    ),
)
def test_settings_there_and_back(layers, style, block):
    settings = ar.AttnResConfig(**block, eps=1e-5)
    plan = ar.DepthPlan(2 * layers, settings)
    length = plan.sublayers_per_block
    sayable = length % 2 == 0 or length > 2 * layers or (length == 1 and style == "fla")
    if not sayable:
        with pytest.raises(ValueError, match="a block must be whole decoder layers"):
            export_settings(settings, layers, style, norm_eps=1e-5)
        return
    again = import_settings(export_settings(settings, layers, style, norm_eps=1e-5))
    there = ar.DepthPlan(2 * layers, again)
    reads = range(plan.num_reads)
    assert [there.num_sources(read) for read in reads] == [plan.num_sources(read) for read in reads]
    assert [there.has_partial(read) for read in reads] == [plan.has_partial(read) for read in reads]
    assert (again.eps, again.read_scale) == (1e-5, "mean")


def test_k3_names_and_shapes():
    assert {key: list(value.shape) for key, value in their_weights("k3", layers=1).items()} == {
        "lm_head.weight": [4],
        "model.layers.0.input_layernorm.weight": [4],
        "model.layers.0.post_attention_layernorm.weight": [4],
        "model.norm.weight": [4],
        "model.layers.0.self_attention_res_proj.weight": [1, 4],
        "model.layers.0.self_attention_res_norm.weight": [4],
        "model.layers.0.mlp_res_proj.weight": [1, 4],
        "model.layers.0.mlp_res_norm.weight": [4],
        "model.output_attn_res_proj.weight": [1, 4],
        "model.output_attn_res_norm.weight": [4],
    }


def test_fla_names():
    reads = [key for key in their_weights("fla", layers=2) if "res_" in key]
    assert sorted(reads) == sorted(
        f"model.{place}_{part}.weight"
        for place in ("layers.0.attn_res", "layers.0.mlp_res", "layers.1.attn_res", "layers.1.mlp_res", "res")
        for part in ("proj", "norm")
    )


@styles
def test_the_read_that_never_runs_is_dropped_and_said(style, caplog):
    weights = their_weights(style)
    unused = next(key for key in weights if re.search(r"layers\.0\.\w*attn?\w*_res_proj", key))
    assert torch.count_nonzero(weights[unused]) == 0
    weights[unused] = torch.ones_like(weights[unused])  # whatever it holds
    with caplog.at_level(logging.WARNING):
        ours = import_names(weights)
    assert not any(key.startswith("model.layers.0.input_layernorm.read") for key in ours)
    assert sorted(ours) == sorted(our_keys(3))
    assert f"left out {unused}" in caplog.text
    assert import_keys(weights)[unused] is None


def test_dtypes_stay():
    weights = {key: torch.ones(4, dtype=torch.bfloat16) for key in our_keys(2)}
    for key in weights:
        if ".read." in key:
            weights[key] = weights[key].float()
    theirs = export_names(weights, "k3")
    assert theirs["model.layers.0.self_attention_res_proj.weight"].dtype == torch.float32
    assert {key: value.dtype for key, value in import_names(theirs).items()} == {
        key: value.dtype for key, value in weights.items()
    }


LAST = "model.layers.2."
BAD_WEIGHTS = {
    "a bias": ("fla", [], ["model.layers.0.attn_res_bias"], "no bias, got model.layers.0.attn_res_bias"),
    "a stranger": ("fla", [], ["model.layers.1.attn_res_gate.weight"], r"'\*res_\*' key must be .*res_gate"),
    "another tower's": ("k3", [], ["mtp.layers.0.mlp_res_proj.weight"], "take them out"),
    "a lost query": ("k3", [LAST + "mlp_res_proj.weight"], [], r"got none of model.layers.2.mlp_res_proj"),
    "a lost norm": ("fla", ["model.res_norm.weight"], [], "got none of model.res_norm.weight; give all"),
    "no final read": ("k3", ["model.output_attn_res_proj.weight"], [], "plain from the final read, but none"),
    "two styles": ("k3", [], ["model.res_proj.weight"], "k3 and fla of k3, fla fits; name the style"),
    "two models": ("k3", [], ["teacher.output_attn_res_proj.weight"], "exactly one final read .*, got 2"),
    "renamed already": ("fla", [], ["model.norm.read.query"], "got model.norm.read.query as well"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_mean_something_else(case):
    style, lost, added, message = BAD_WEIGHTS[case]
    weights = {key: value for key, value in their_weights(style).items() if key not in lost}
    weights |= {key: torch.ones(1) for key in added}
    with pytest.raises(ValueError, match=message):
        import_names(weights)


def test_a_layer_without_any_read():
    weights = their_weights("k3")
    weights["model.layers.4.mlp.down_proj.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"got none of model.layers.3.self_attention_res_proj.* and 4 more"):
        import_names(weights)


def test_final_read_without_layers():
    with pytest.raises(ValueError, match=r"must hold decoder layers as model\.layers\.0"):
        import_keys(["model.res_proj.weight", "model.res_norm.weight"])


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 4), (1, 1, 4)])
def test_a_projection_has_one_row(shape):
    weights = their_weights("fla")
    weights["model.layers.1.mlp_res_proj.weight"] = torch.ones(shape)
    message = f"must be [1, D], got {list(shape)} for model.layers.1.mlp_res_proj.weight"
    with pytest.raises(ValueError, match=re.escape(message)):
        import_names(weights)


@styles
def test_keys_that_are_not_ours(style):
    with pytest.raises(ValueError, match=r"exactly one final read must be there \(norm.read.query\), got 0"):
        export_keys(["model.norm.weight", "model.layers.0.input_layernorm.weight"], style)
    incomplete = [key for key in our_keys(2) if key != "model.layers.1.input_layernorm.read.key_weight"]
    with pytest.raises(ValueError, match=r"got none of model.layers.1.input_layernorm.read.key_weight"):
        export_keys(incomplete, style)


@pytest.mark.parametrize("call", [export_keys, import_keys])
def test_unknown_style(call):
    with pytest.raises(ValueError, match="style must be one of k3, fla, got 'kimi'"):
        call(our_keys(1), "kimi")


def test_published_k3_settings():
    fields = {"text_config": {"attn_res_block_size": 12, "num_hidden_layers": 93, "rms_norm_eps": 1e-5}}
    settings = import_settings(fields)
    assert settings == ar.AttnResConfig(sublayers_per_block=24, eps=1e-5)
    exported_fields = export_settings(settings, 93, "k3", norm_eps=1e-5)
    assert exported_fields == {"attn_res_block_size": 12, "rms_norm_eps": 1e-5}


def test_fla_settings_count_sublayers():
    assert import_settings({"attnres_block_size": 8, "norm_eps": 1e-6}).sublayers_per_block == 8
    assert import_settings({"attnres_block_size": 1, "norm_eps": 1e-6}).mode == "full"


BAD_FIELDS = [
    ({}, ValueError, "plain from the block size, but none of k3, fla fits"),
    ({"attnres_block_size": 2, "attn_res_block_size": 1}, ValueError, "k3 and fla of k3, fla fits"),
    ({"attn_res_block_size": None}, ValueError, "attn_res_block_size must be given, got None"),
    ({"attn_res_block_size": 0}, ValueError, "attn_res_block_size must be at least 1, got 0"),
    ({"attnres_block_size": 3}, ValueError, "attnres_block_size must be even, or 1, got 3"),
    ({"attnres_block_size": -2}, ValueError, "attnres_block_size must be even, or 1, got -2"),
    ({"attn_res_block_size": True}, TypeError, "attn_res_block_size must be an int, got True"),
    ({"attn_res_block_size": 1.5}, TypeError, "attn_res_block_size must be an int, got 1.5"),
    ({"attn_res_block_size": 2, "attn_res_gate": 1}, ValueError, "fields attn_res_gate have no counterpart"),
    ({"attn_res_block_size": 2, "norm_eps": 1e-6}, ValueError, "rms_norm_eps is missing"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FIELDS)
def test_settings_that_cannot_be_read(fields, error, message):
    with pytest.raises(error, match=message):
        import_settings(fields)


BAD_SETTINGS = [
    ("k3", {"mode": "full"}, "whole decoder layers in 'k3', got 1 sublayers; train with an even"),
    ("k3", {"sublayers_per_block": 3}, "whole decoder layers in 'k3', got 3 sublayers"),
    ("fla", {"sublayers_per_block": 3}, r"layers or one sublayer \(mode='full'\) in 'fla', got 3"),
    ("fla", {"num_blocks": 3}, "got 3 sublayers"),  # 8 sublayers in 3 blocks
    ("k3", {"read_scale": "sum"}, "read_scale must be 'mean', got 'sum'.*train with read_scale='mean'"),
    ("k3", {"mode": "standard"}, "mode must be 'full' or 'block', got 'standard'"),
    ("k3", {"heads": 2}, r"reads must be the paper's, got heads=2: 'k3' has no such field; train without it"),
    ("fla", {"window": 3}, r"reads must be the paper's, got window=3: 'fla' has no such field"),
    ("fla", {"eps": 1e-5}, r"share one eps in 'fla' \(norm_eps\), got 1e-05 for reads and 1e-06 for norms"),
]


@pytest.mark.parametrize(("style", "attn_res", "message"), BAD_SETTINGS)
def test_settings_that_cannot_be_said(style, attn_res, message):
    with pytest.raises(ValueError, match=message):
        export_settings(ar.AttnResConfig(**attn_res), 4, style, norm_eps=1e-6)


def test_the_page_runs():
    page = Path(__file__).parents[1] / "docs" / "checkpoint_names.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(example, str(page), "exec"), {})
