"""Models whose reads are variants: what reads receive, gradients, checkpointing, generation, saving."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import attention_residuals as ar
from attention_residuals.conversion.folder import convert_folder, restore_folder
from attention_residuals.models import model_pass
from attention_residuals.training.optimizer import parameter_groups
from variant_cases import VARIANTS

FULL, BLOCK = {"mode": "full"}, {"mode": "block", "sublayers_per_block": 3}
# what a model can have: the variants of a read, and windows
MODELS = {**VARIANTS, "window": {"window": 1}, "wider window": {"window": 2, "heads": 2}}
LOSSLESS = {
    name: fields
    for name, fields in MODELS.items()
    if "window" not in fields and "values" not in fields and fields.get("weights") != "uniform"
}
models = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
modes = pytest.mark.parametrize("mode", [FULL, BLOCK], ids=["full", "block"])


def reads_of(model):
    return [module for module in model.modules() if isinstance(module, ar.DepthRead)]


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def expected_sources(embedding, outputs, length, window):
    """Sources of every read after the first, and whether the last is a partial sum, from sublayer outputs."""
    blocks, partial, expected = [embedding], [], []
    for sublayer, output in enumerate(outputs):
        partial.append(output)
        if len(partial) == length or sublayer == len(outputs) - 1:
            blocks, partial = [*blocks, sum(partial)], []
        others = blocks[1:] + ([sum(partial)] if partial else [])
        others = others if window is None else others[-window:]
        expected.append(([embedding, *others], bool(partial)))
    return expected


@models
def test_looking_changes_nothing(fields):
    """A recorded forward gives the same logits and gradients; the norm is then apart from its read."""
    model, ids = tiny.trained_model({**BLOCK, **fields}), tiny.token_ids()
    logits, expected = model(ids).logits, gradients(model, ids)
    with ar.record_depth_weights(model) as record:
        assert torch.allclose(model(ids).logits, logits, rtol=1e-9, atol=1e-9)
        found = gradients(model, ids)
    assert len(record.forwards) == 2
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("mode", [FULL, BLOCK, {"mode": "block", "sublayers_per_block": 4}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_reads_receive_the_sources_of_their_window(mode, window):
    """Reconstructed from what the model's attention and MLPs returned."""
    model = tiny.trained_model({**mode, "window": window, "values": "normalised_blocks"}, "llama")
    received, outputs, embedding = [], [], []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: embedding.append(out))
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
        layer.mlp.register_forward_hook(lambda module, args, out: outputs.append(out))
    for read in reads_of(model):
        read.register_forward_hook(lambda read, args, out: received.append((args[0], read.has_partial)))
    weights = model(tiny.token_ids(), output_depth_weights=True).depth_weights
    expected = expected_sources(embedding[0], outputs, mode.get("sublayers_per_block", 1), window)
    assert len(received) == len(expected) == 8
    for (found, found_partial), (sources, partial), alpha in zip(
        received, expected, weights[1:], strict=True
    ):
        assert found_partial == partial
        assert len(found) == len(sources) == len(alpha)
        for one, other in zip(found, sources, strict=True):
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()


@models
@modes
def test_a_fresh_model_weighs_its_sources_alike_and_starts_to_learn(fields, mode):
    """Also one whose parameters held anything before `init_weights`."""
    config = tiny.attn_res_config({**mode, **fields}, "llama", 3)
    with torch.device("meta"):
        model = ar.LlamaAttnResForCausalLM(config)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    for read in reads_of(model):
        for parameter in read.parameters():
            parameter.data.fill_(1.9e38)
        model._init_weights(read)
    built = ar.LlamaAttnResForCausalLM(config)
    for one, other in zip(reads_of(model), reads_of(built), strict=True):
        for parameter, like in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, like)
    for alpha in built(tiny.token_ids(), output_depth_weights=True).depth_weights:
        assert torch.equal(alpha, torch.full_like(alpha, 1 / len(alpha)))
    found = gradients(built.train(), tiny.token_ids())
    for name, gradient in found.items():
        assert ".read." not in name or gradient.any() == (not name.endswith("key_weight")), name


@models
@pytest.mark.parametrize(("family", "mode"), [("llama", FULL), ("llama", BLOCK), ("qwen3_5", BLOCK)], ids=str)
def test_checkpointing_gives_the_same_gradients(fields, mode, family):
    ids = tiny.token_ids()
    model = tiny.trained_model({**mode, **fields}, family, 4 if family == "qwen3_5" else 3).train()
    expected = gradients(model, ids)
    assert all(gradient.any() for name, gradient in expected.items() if ".read." in name)
    for use_reentrant in (True, False):
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        found = gradients(model, ids)
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() <= 1e-12 * max(1.0, gradient.abs().max()), name


@models
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_generation_with_a_cache_equals_the_uncached_forward(fields, family):
    ids, model = tiny.token_ids(), tiny.trained_model({**BLOCK, **fields}, family, dtype=torch.float32)
    found = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    for _ in range(6):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], -1)
    assert torch.equal(found, ids)


@models
def test_saved_and_loaded_again(fields, tmp_path):
    model = tiny.trained_model({**FULL, **fields}, "llama", 2, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["attn_res"]
    assert written == ar.AttnResConfig(mode="full", **fields).to_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        again.state_dict().keys()
        == model.state_dict().keys()
        == load_file(tmp_path / "model.safetensors").keys() | {"lm_head.weight"}
    )
    assert torch.equal(again(tiny.token_ids()).logits, model(tiny.token_ids()).logits)


def test_names_of_parameters():
    """Checkpoint names are API: these may not change."""
    expected = {
        "input-dependent query": {"query_matrix", "key_weight"},
        "input-independent weights": {"source_scores"},
        "no key norm": {"query"},
        "recency bias": {"query", "key_weight", "recency_bias"},
        "uniform": set(),
        "heads": {"query", "key_weight"},
    }
    for name, parameters in expected.items():
        model = tiny.attn_res_model({**BLOCK, **VARIANTS[name]}, "llama", 2)
        reads = {key for key in model.state_dict() if ".read." in key}
        norms = ["model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm"]
        norms += ["model.layers.1.post_attention_layernorm", "model.norm"]
        assert reads == {f"{norm}.read.{parameter}" for norm in norms for parameter in parameters}


@models
def test_every_parameter_is_in_exactly_one_optimizer_group(fields):
    model = tiny.attn_res_model({**FULL, **fields}, "llama", 2)
    for optimizer in ("adamw", "muon"):
        groups = parameter_groups(model, weight_decay=0.1, optimizer=optimizer)
        placed = [name for group in groups for name, _ in group.parameters]
        assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
        in_reads = {name for group in groups if group.name == "reads" for name, _ in group.parameters}
        assert in_reads == {name for name in placed if ".read." in name}
        assert all(group.weight_decay == 0 for group in groups if group.name == "reads")


@pytest.mark.parametrize("fields", LOSSLESS.values(), ids=LOSSLESS)
@modes
def test_conversion_keeps_the_function_and_goes_back(fields, mode):
    ids, plain = tiny.token_ids(), tiny.plain_model("llama", 3)
    names, expected = plain.state_dict().keys(), plain(ids).logits
    model = ar.convert(plain, ar.AttnResConfig(**mode, **fields, read_scale="sum"))
    assert (model(ids).logits - expected).abs().max() <= 5e-6 * expected.abs().max()
    assert ar.convert(model, back=True).state_dict().keys() == names
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", ["input-dependent query", "static weights", "recency bias"])
def test_a_trained_variant_has_no_way_back(name):
    model = ar.convert(
        tiny.plain_model("llama", 2), ar.AttnResConfig(**BLOCK, **VARIANTS[name], read_scale="sum")
    )
    torch.nn.init.ones_(reads_of(model)[1].weighing_parameters()[-1])
    with pytest.raises(ValueError, match="all queries must be zero for the way back, but 1 are not"):
        ar.convert(model, back=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 3}, r"window must be None to keep .*, got 3: sources outside it would be missing"),
        ({"values": "normalised"}, r"values must be 'plain' to keep .*, got 'normalised'"),
        ({"values": "normalised_blocks"}, r"values must be 'plain' .* don't add up to the residual stream"),
        ({"weights": "uniform"}, r"weights='uniform' has nothing to learn"),
    ],
    ids=str,
)
def test_what_is_not_the_plain_function_is_not_converted(fields, message):
    config = ar.AttnResConfig(**BLOCK, **fields, read_scale="sum")
    plain = tiny.plain_model("llama", 2)
    with pytest.raises(ValueError, match=message):
        ar.convert(plain, config)
    assert type(plain).__name__ == "LlamaForCausalLM"
    from_scratch = tiny.attn_res_model(config.to_dict(), "llama", 2)
    with pytest.raises(ValueError, match=message):
        ar.convert(from_scratch, back=True)


def test_folders_are_converted_and_restored(tmp_path):
    plain = tiny.plain_model("llama", 2, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    fields = {"weights": "input_query", "recency_bias": True}
    settings = ar.AttnResConfig(**BLOCK, **fields, read_scale="sum")
    convert_folder(tmp_path / "plain", tmp_path / "ours", settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.model.depth_plan.config == settings
    for one, other in zip(reads_of(model), reads_of(ar.convert(plain, settings)), strict=True):
        for parameter, like in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, like)
    restore_folder(tmp_path / "ours", tmp_path / "back")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "back")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


@models
def test_auto_reads_one_by_one(fields, monkeypatch):
    """Also where the paper's reads would run in two phases."""
    monkeypatch.setattr(model_pass, "LEAST_ELEMENTS", 1)
    per_read, auto = (
        tiny.trained_model({**BLOCK, **fields, "read_schedule": schedule}, "llama")
        for schedule in ("per_read", "auto")
    )
    assert auto.model.read_groups == ()
    assert torch.equal(auto(tiny.token_ids()).logits, per_read(tiny.token_ids()).logits)


def test_a_width_that_heads_do_not_divide_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="heads must divide the width, got heads=3 and 16"):
        tiny.attn_res_model({**BLOCK, "heads": 3}, "llama", 2)


def test_fullgraph_compilation():
    torch._dynamo.reset()
    fields = {**VARIANTS["sliced input query of heads"], "window": 1}
    model, ids = tiny.trained_model({**FULL, **fields}, "llama", 1), tiny.token_ids()
    expected = gradients(model, ids)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), ids)
    for name, wanted in expected.items():
        assert (found[f"_orig_mod.{name}"] - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max())
