"""Every family of the table: lossless at the start, trains, generates, saves and reloads."""

from __future__ import annotations

import json

import family_models
import pytest
import tiny
import torch
from family_models import FIELDS, SPARSE_FAMILIES, plain_model
from safetensors.torch import load_file

from attention_residuals.models.attach import AttnResLayer, attach
from attention_residuals.models.auto import our_model_type, plain_model_type
from attention_residuals.models.export import export_with_code
from attention_residuals.models.families import FAMILIES, TESTED_MODES
from attention_residuals.models.mixins import AttnResBackbone

LANGUAGE = tuple(name for name in FIELDS if name != "vit")
# Experts run in 32 and 16 bit only.
DENSE = tuple(name for name in FIELDS if name not in SPARSE_FAMILIES)
# The others' own RMSNorm computes in float32 inside a float64 model, where a read with the norm doesn't.
SAME_NORM = ("gpt2", "vit", "olmo")
ODD_BLOCK = {"mode": "block", "sublayers_per_block": 3}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


def test_every_row_is_tested():
    assert FIELDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FIELDS)
def test_converts_losslessly(family):
    plain, inputs = plain_model(family), family_models.inputs(family)
    with torch.no_grad():
        expected = plain(**inputs).logits
        for mode in TESTED_MODES:
            found = family_models.our_model(plain, {**mode, "read_scale": "sum"})(**inputs).logits
            assert relative(found, expected) <= 1e-5, mode


@pytest.mark.parametrize("family", DENSE)
def test_converts_losslessly_in_float64(family):
    plain, inputs = plain_model(family, dtype=torch.float64), family_models.inputs(family, torch.float64)
    tolerance = 1e-14 if family in SAME_NORM else 5e-6
    with torch.no_grad():
        expected = plain(**inputs).logits
        for mode in TESTED_MODES:
            found = family_models.our_model(plain, {**mode, "read_scale": "sum"})(**inputs).logits
            assert relative(found, expected) <= tolerance, mode


@pytest.mark.parametrize("family", FIELDS)
def test_a_step_with_checkpointing(family):
    """Gradients equal those without, for both kinds of checkpointing; a step along them lowers the loss."""
    inputs = family_models.inputs(family)
    labels = inputs.get("input_ids", torch.tensor([1, 3]))
    model = family_models.trained_model(plain_model(family), ODD_BLOCK).train()

    def gradients():
        model.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    before, expected = gradients()
    assert all(name in expected for name, _ in model.named_parameters() if ".read." in name)
    for use_reentrant in (True, False):
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        loss, found = gradients()
        assert loss == before
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-6), name
    slope = sum(gradient.square().sum().item() for gradient in expected.values())
    torch.optim.SGD(model.parameters(), lr=1e-3 * before / slope).step()
    assert gradients()[0] < before


@pytest.mark.parametrize("family", LANGUAGE)
def test_generation_with_cache_equals_the_uncached_forward(family):
    ids = tiny.token_ids(2, 5)
    model = family_models.trained_model(plain_model(family), ODD_BLOCK)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(ids, output_logits=True, **options)
    with torch.no_grad():
        full = model(out.sequences, use_cache=False).logits[:, 4:-1]
    assert relative(torch.stack(out.logits, 1), full) <= 1e-4
    assert out.sequences.shape == (2, 11)


@pytest.mark.parametrize("family", FIELDS)
def test_saves_and_reloads_through_the_auto_classes(family, tmp_path):
    inputs = family_models.inputs(family)
    model = family_models.trained_model(plain_model(family), ODD_BLOCK)
    model.save_pretrained(tmp_path / "first")
    again = family_models.auto_class(family).from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    assert type(again) is type(model)
    assert again.config.model_type == our_model_type(family)
    assert plain_model_type(again.config.model_type) == family
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    with torch.no_grad():  # the weights are equal; BLAS may add in another order where they lie elsewhere
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("family", FIELDS)
def test_the_exported_auto_map_names_our_classes(family, tmp_path):
    model = family_models.our_model(plain_model(family), ODD_BLOCK)
    export_with_code(model, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert found[family_models.auto_class(family).__name__].endswith(f".{type(model).__name__}")
    assert found["AutoModel"].endswith(f".{type(model.base_model).__name__}")


@pytest.mark.parametrize("family", ["gpt2", "mamba", "qwen3_moe"])
@pytest.mark.parametrize("mode", TESTED_MODES, ids=str)
def test_both_read_schedules_agree(family, mode):
    """Layers of one sublayer and layers with positional arguments read in two phases too."""
    plain, inputs = plain_model(family), family_models.inputs(family)
    one_by_one, in_two = (
        family_models.trained_model(plain, {**mode, "read_schedule": schedule})
        for schedule in ("per_read", "two_phase")
    )
    with torch.no_grad():
        assert relative(in_two(**inputs).logits, one_by_one(**inputs).logits) <= 1e-5


@pytest.mark.parametrize("family", FIELDS)
def test_records_and_hidden_states_follow_the_layers(family):
    model, inputs = family_models.trained_model(plain_model(family), ODD_BLOCK), family_models.inputs(family)
    backbone = next(m for m in model.modules() if isinstance(m, AttnResBackbone))
    with torch.no_grad(), tiny.ar.record_depth_weights(model) as record:
        out = model(**inputs, output_hidden_states=True, output_depth_weights=True)
    reads = FAMILIES[family].sublayers_per_layer * 4 + 1
    assert len(record.read_names) == len(record.weights) == len(out.depth_weights) == reads
    assert len(record.output_norms) == reads - 1
    assert len(out.hidden_states) == 5
    assert backbone.depth_plan.num_reads == reads
    assert not any(name.endswith(" mixer") for name in record.read_names)


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_router_logits_are_recorded(family):
    plain, inputs = plain_model(family), family_models.inputs(family)
    ours = family_models.our_model(plain, {**ODD_BLOCK, "read_scale": "sum"})
    with torch.no_grad():
        expected = plain(**inputs, output_router_logits=True)
        found = ours(**inputs, output_router_logits=True)
    assert len(found.router_logits) == len(expected.router_logits) > 0
    for logits, wanted in zip(found.router_logits, expected.router_logits, strict=True):
        assert relative(logits, wanted) <= 1e-5


@pytest.mark.parametrize("family", FIELDS)
def test_layers_keep_the_names_by_which_others_find_them(family):
    plain = plain_model(family)
    ours = family_models.our_model(plain, ODD_BLOCK)
    layers = {type(m).__name__ for m in ours.modules() if isinstance(m, AttnResLayer)}
    assert ours._no_split_modules == plain._no_split_modules
    assert layers <= {type(m).__name__ for m in plain.modules()}
    assert plain.state_dict().keys() == {key for key in ours.state_dict() if ".read." not in key}


def test_mamba_in_bfloat16_adds_in_float32():
    """Its layers return float32; what they hand on has the dtype of the embedding."""
    plain, inputs = plain_model("mamba", dtype=torch.bfloat16), family_models.inputs("mamba")
    assert plain.config.residual_in_fp32
    exact = plain_model("mamba")
    ours = family_models.our_model(plain, {**ODD_BLOCK, "read_scale": "sum"})
    with torch.no_grad():
        expected = exact(**inputs).logits
        error, plain_error = (relative(model(**inputs).logits.float(), expected) for model in (ours, plain))
    assert error <= 2 * plain_error


def test_cross_attention_is_refused():
    with pytest.raises(ValueError, match=r"GPT2Block must read .* at ln_1, ln_2 only, but it has 'crossatt"):
        family_models.our_model(plain_model("gpt2", add_cross_attention=True), ODD_BLOCK)


def test_layers_that_return_a_tuple_are_refused():
    class Tupled(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.input_layernorm = layer.input_layernorm
            self.post_attention_layernorm = layer.post_attention_layernorm

        def forward(self, hidden_states):
            middle = hidden_states + self.input_layernorm(hidden_states)
            return (middle + self.post_attention_layernorm(middle),)

    backbone = plain_model("llama", layers=1).model
    backbone.layers[0] = Tupled(backbone.layers[0])
    attach(backbone, tiny.ar.AttnResConfig(mode="full"), FAMILIES["llama"])
    with pytest.raises(TypeError, match="Tupled must return one tensor, got tuple"):
        backbone.layers[0](torch.randn(1, 3, 16), torch.randn(1, 3, 16))
