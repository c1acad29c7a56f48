"""A converted model against the plain one: rounding, and no more."""

from __future__ import annotations

import copy

import plain_checkpoints as plain
import pytest
import torch

import attention_residuals as ar

BLOCKS = ar.AttnResConfig(num_blocks=8, read_scale="sum")
FULL = ar.AttnResConfig(mode="full", read_scale="sum")
SETTINGS = {"block": BLOCKS, "full": FULL}
# Largest change of a logit in units of their range.
ROUNDING = 1e-5
# How far parameters are from where pretraining starts.
NEAR_THE_START = 0.02


def deep_model(kind, layers, **fields):
    if kind != "llama":  # a pair of layers holds both kinds of token mixer
        fields["layer_types"] = ["linear_attention", "full_attention"] * (layers // 2)
    return plain.plain_model(kind, num_hidden_layers=layers, **fields)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layers", [2, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["llama", "dense", "moe"])
@pytest.mark.parametrize("embedding_std", [None, 0.005])
def test_every_depth(kind, layers, settings, embedding_std):
    model = deep_model(kind, layers, std=NEAR_THE_START)
    if embedding_std is not None:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=embedding_std)
    converted = ar.convert(copy.deepcopy(model), SETTINGS[settings])
    assert plain.change(model, converted) <= ROUNDING


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", plain.KINDS)
def test_far_from_the_start(kind, settings):
    model = plain.plain_model(kind, std=0.3)
    converted = ar.convert(copy.deepcopy(model), SETTINGS[settings])
    assert plain.change(model, converted) <= ROUNDING
    generate = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        model.generate(plain.token_ids(), **generate), converted.generate(plain.token_ids(), **generate)
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["composite", "composite moe"])
def test_with_an_image(kind, settings):
    model = plain.plain_model(kind)
    converted = ar.convert(copy.deepcopy(model), SETTINGS[settings])
    assert plain.change(model, converted, **plain.with_image()) <= ROUNDING
    other = plain.with_image() | {"pixel_values": torch.zeros(16, 96)}
    assert (model(**other).logits - model(**plain.with_image()).logits).abs().max() > 1e-2, "image unseen"


def test_a_scale_that_is_not_lossless_would_be_noticed():
    """eps keeps the mean of the sources from being the same as their sum, where the embedding is small."""
    model = plain.plain_model("llama", std=NEAR_THE_START)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.005)
    config = ar.LlamaAttnResConfig(**plain.TEXT, attn_res={"num_blocks": 8, "read_scale": "mean"})
    mean = ar.LlamaAttnResForCausalLM(config).eval()
    mean.load_state_dict(model.state_dict(), strict=False)
    assert plain.change(model, mean) > 10 * ROUNDING


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "dense"])
def test_bfloat16_is_as_exact_as_the_plain_model(kind, settings):
    """Against float64, root mean square over draws of the weights."""
    ids = plain.token_ids(4, 33)
    squares = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for seed in range(8):
            model = plain.plain_model(kind, seed=seed, num_hidden_layers=8, dtype=torch.bfloat16)
            exact = copy.deepcopy(model).double()(ids).logits
            found = model(ids).logits, ar.convert(model, SETTINGS[settings])(ids).logits
            squares += torch.stack([(logits - exact).pow(2).mean() for logits in found])
    assert squares[1].sqrt() <= 1.1 * squares[0].sqrt()
