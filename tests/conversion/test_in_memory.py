"""convert() on a model: in place, nothing else changes, and the way back."""

from __future__ import annotations

import copy
import pickle

import plain_checkpoints as plain
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedConfig,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

import attention_residuals as ar
from attention_residuals import DepthRead
from attention_residuals.models.auto import plain_model_type

THREE = ar.AttnResConfig(num_blocks=3, read_scale="sum")


def auto_class(kind):
    return AutoModelForImageTextToText if "composite" in kind else AutoModelForCausalLM


def attributes(model):
    """Per module its class and what its instance holds; parameters by identity."""
    return {
        name: (type(module), {*vars(module)}, {key: id(p) for key, p in module._parameters.items()})
        for name, module in model.named_modules()
    }


def config_types(model):
    """Model types of the configs that modules hold, as the classes have them."""
    configs = [vars(module).get("config") for module in model.modules()]
    return {type(config).model_type for config in configs if isinstance(config, PreTrainedConfig)}


def train_a_query(model):
    read = next(module for module in model.modules() if isinstance(module, DepthRead))
    torch.nn.init.normal_(read.query)


@pytest.mark.parametrize("kind", plain.KINDS)
def test_a_model_is_converted_in_place(kind):
    model = plain.plain_model(kind, dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    generation_config = model.generation_config
    converted = ar.convert(model, THREE)
    assert converted is model and "AttnRes" in type(model).__name__ and not model.training
    assert model.generation_config is generation_config
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    added = {name: parameter for name, parameter in after.items() if name not in parameters}
    assert added and all(".read." in name and p.dtype == torch.bfloat16 for name, p in added.items())
    assert not any(p.any() for name, p in added.items() if name.endswith("query"))
    settings = model.config.get_text_config().attn_res
    assert settings == THREE.to_dict()
    types = {found for found in config_types(model) if "vision" not in found}
    assert all(plain_model_type(model_type) for model_type in types)


@pytest.mark.parametrize("kind", plain.KINDS)
def test_back_leaves_no_trace(kind):
    model = plain.plain_model(kind)
    before, config, expected = attributes(model), model.config, model(plain.token_ids()).logits
    assert ar.convert(ar.convert(model, THREE), back=True) is model
    assert attributes(model) == before
    assert model.config.to_dict() == config.to_dict() and type(model.config) is type(config)
    assert config_types(model) == config_types(plain.plain_model(kind))
    assert torch.equal(model(plain.token_ids()).logits, expected)


@pytest.mark.parametrize("kind", plain.KINDS)
def test_what_was_converted_is_what_loads(kind, tmp_path):
    """Same classes and outputs through the Auto classes; the same keys however often it is saved."""
    model = ar.convert(plain.plain_model(kind), THREE)
    train_a_query(model)
    model.save_pretrained(tmp_path / "once")
    loaded = auto_class(kind).from_pretrained(tmp_path / "once")
    assert {n: type(m) for n, m in loaded.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert plain.change(model, loaded) <= 1e-6  # BLAS may add in another order where weights lie elsewhere
    assert loaded.config.attn_res_conversion == model.config.attn_res_conversion
    assert loaded.config.attn_res_conversion["model_type"] == plain.plain_model(kind).config.model_type
    loaded.save_pretrained(tmp_path / "twice")
    plain.assert_same_tensors(
        plain.stored_tensors(tmp_path / "once"), plain.stored_tensors(tmp_path / "twice")
    )
    again = auto_class(kind).from_pretrained(tmp_path / "twice")
    assert again.config.attn_res_conversion == model.config.attn_res_conversion


def test_the_language_model_of_a_converted_composite_loads_alone(tmp_path):
    whole = ar.convert(plain.plain_model("composite"), THREE)
    whole.save_pretrained(tmp_path)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(alone) is ar.Qwen3_5AttnResForCausalLM
    assert plain.change(whole, alone) == 0


def test_tied_weights_stay_tied_through_a_step_and_a_save(tmp_path):
    model = ar.convert(plain.plain_model("dense", tie_word_embeddings=True)).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(plain.token_ids(), labels=plain.token_ids()).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in plain.stored_tensors(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert plain.change(model.eval(), again) == 0


def test_training_flags_and_frozen_weights_are_kept():
    model = plain.plain_model("llama").train().requires_grad_(False)
    model.model.layers[0].eval()
    ar.convert(model)
    assert model.training and not model.model.layers[0].training
    assert model.model.layers[1].input_layernorm.read.training
    assert not model.model.layers[0].post_attention_layernorm.read.training
    assert not model.lm_head.weight.requires_grad and model.model.norm.read.query.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_switched_on_before_stays_on(use_reentrant):
    model = plain.plain_model("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    ar.convert(model, THREE)
    assert model.is_activation_checkpointing
    model(plain.token_ids(), labels=plain.token_ids()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_chosen_implementation_is_kept():
    model = plain.plain_model("moe")
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ar.convert(model)
    assert model.config._attn_implementation == model.config._experts_implementation == "eager"


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = LlamaModel(LlamaConfig(**plain.TEXT))
    ar.convert(model)
    assert type(model).__name__ == "LlamaAttnResModel"
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_classifier_and_a_copy_and_a_pickle():
    config = LlamaConfig(**plain.TEXT, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    other = copy.deepcopy(model)
    ar.convert(model)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert plain.change(other, again, input_ids=plain.token_ids(1)) < 1e-6


def test_converting_again_after_the_way_back():
    model = plain.plain_model("dense")
    expected = copy.deepcopy(model)
    for settings in (THREE, ar.AttnResConfig(mode="full", read_scale="sum")):
        ar.convert(model, settings)
        assert model.model.depth_plan.config == settings
        assert plain.change(expected, model) < 1e-5
        ar.convert(model, back=True)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (ar.AttnResConfig(read_scale="mean"), ValueError, "read_scale must be 'sum'"),
        (ar.AttnResConfig(mode="standard"), ValueError, "has no reads"),
        ({"mode": "full"}, TypeError, "must be an AttnResConfig"),
    ],
)
def test_settings_that_would_change_the_function_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        ar.convert(plain.plain_model("llama"), settings)


def test_a_second_conversion_is_refused():
    model = ar.convert(plain.plain_model("llama"))
    with pytest.raises(ValueError, match="already"):
        ar.convert(model)


def test_the_way_back_is_refused_once_a_query_is_trained():
    model = ar.convert(plain.plain_model("llama"))
    train_a_query(model)
    with pytest.raises(ValueError, match=r"layers\.0\.post_attention_layernorm\.read"):
        ar.convert(model, back=True)
    assert "AttnRes" in type(model).__name__


def test_the_way_back_needs_a_converted_model_of_the_sum_scale():
    with pytest.raises(ValueError, match="no way back"):
        ar.convert(plain.plain_model("llama"), back=True)
    config = ar.LlamaAttnResConfig(**plain.TEXT, attn_res={"mode": "full"})
    with pytest.raises(ValueError, match="read_scale='sum'"):
        ar.convert(ar.LlamaAttnResForCausalLM(config), back=True)
    with pytest.raises(ValueError, match="leave config out"):
        ar.convert(ar.convert(plain.plain_model("llama")), THREE, back=True)


def test_standard_mode_goes_back_as_well():
    config = ar.LlamaAttnResConfig(**plain.TEXT, attn_res={"mode": "standard"})
    model = ar.convert(ar.LlamaAttnResForCausalLM(config), back=True)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="must be a model of transformers or a path, got Linear"):
        ar.convert(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"\['dtype'\] are for loading"):
        ar.convert(plain.plain_model("llama"), dtype="auto")


def test_a_dispatched_or_hooked_model_is_refused_and_untouched():
    model = plain.plain_model("llama")
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="device_map="):
        ar.convert(model)
    del model.hf_device_map
    layer = model.model.layers[1]
    layer.forward = layer.forward
    before = attributes(model)
    with pytest.raises(ValueError, match=r"model\.layers\.1 was replaced"):
        ar.convert(model)
    assert attributes(model) == before
    del layer.forward
    model.lm_head.weight.placements = ()  # what a DTensor has
    with pytest.raises(ValueError, match=r"lm_head\.weight is sharded"):
        ar.convert(model)


def test_another_algorithm_is_refused():
    model = plain.plain_model("llama")
    model.model.layers[0].register_parameter("attn_res_bias", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="attn_res_bias belongs to another algorithm"):
        ar.convert(model)


@pytest.mark.parametrize("kind", ["llama", "composite"])
def test_an_architecture_that_cannot_have_reads_stays_as_it_was(kind, monkeypatch):
    def refuse(*args):
        raise ValueError("reads the stream elsewhere")

    model = plain.plain_model(kind)
    before, types = attributes(model), config_types(model)
    monkeypatch.setattr("attention_residuals.models.mixins.attach", refuse)
    with pytest.raises(ValueError, match="elsewhere"):
        ar.convert(model)
    assert attributes(model) == before and config_types(model) == types


def test_an_architecture_without_a_row_is_recognised(tmp_path):
    torch.manual_seed(0)
    plain_model = Starcoder2ForCausalLM(Starcoder2Config(**plain.TEXT)).eval()
    plain_model.save_pretrained(tmp_path / "plain")
    for model in (ar.convert(tmp_path / "plain", THREE), ar.convert(copy.deepcopy(plain_model), THREE)):
        assert model.config.attn_res_family["layers"] == "layers"
        assert 0 < plain.change(plain_model, model) < 1e-6
        model.save_pretrained(tmp_path / "ours")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert plain.change(model, again) == 0
        assert type(ar.convert(again, back=True)) is Starcoder2ForCausalLM


def test_an_architecture_without_pre_norms_is_refused(tmp_path):
    model = Olmo2ForCausalLM(Olmo2Config(**plain.TEXT))
    model.save_pretrained(tmp_path)
    for model_or_path in (model, tmp_path):
        with pytest.raises(ValueError, match="post-norm"):
            ar.convert(model_or_path)
