"""read_schedule: two-phase reads in whole models give what per-read ones give, and move what is counted."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref

import pytest
import tiny
import torch
from test_checkpointing import saved_bytes

import attention_residuals as ar
from attention_residuals.depth_attention import two_phase
from attention_residuals.models import attach, model_pass
from attention_residuals.schedule import traffic

MODES = (
    *tiny.MODES,
    {"mode": "block", "sublayers_per_block": 1},
    {"mode": "block", "sublayers_per_block": 5},
)
THREE = {"mode": "block", "sublayers_per_block": 3}
FULL = {"mode": "full"}


def both(attn_res, family="llama", layers=6, **kwargs):
    """The same trained model under both schedules, in float64 throughout where the family is Llama."""
    return tuple(
        tiny.trained_model({**attn_res, "read_schedule": schedule}, family, layers, **kwargs)
        for schedule in ("per_read", "two_phase")
    )


def everything(model, ids, **want):
    """Logits, depth weights, hidden states and gradients of one training step."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **want)
    extra = sum(w.square().sum() for w in out.depth_weights or ()) if want else 0
    (out.loss + extra).backward()
    handed_out = [*out.depth_weights, *out.hidden_states] if want else []
    return [out.logits, *handed_out, *(p.grad.clone() for p in model.parameters())]


def assert_close(found, expected, bound=1e-11):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= bound * max(1.0, other.abs().max())


# --- the same model ---


@pytest.mark.parametrize("attn_res", MODES, ids=str)
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_both_schedules_give_the_same(attn_res, read_scale, layers):
    ids = tiny.token_ids()
    want = {"output_depth_weights": True, "output_hidden_states": True}
    for asked in ({}, want):
        per_read, in_two = (
            everything(model, ids, **asked)
            for model in both({**attn_res, "read_scale": read_scale}, layers=layers)
        )
        assert_close(in_two, per_read)


@pytest.mark.parametrize("attn_res", MODES, ids=str)
def test_qwen3_5(attn_res):
    """Within what transformers' float32 norms allow."""
    per_read, in_two = (everything(model, tiny.token_ids()) for model in both(attn_res, "qwen3_5"))
    assert_close(in_two, per_read, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_against_float64(dtype):
    ids = tiny.token_ids(4, 33)
    for attn_res in (THREE, FULL):
        exact = both(attn_res, "llama", 8)[0](ids).logits
        per_read, in_two = (model(ids).logits - exact for model in both(attn_res, "llama", 8, dtype=dtype))
        assert in_two.square().mean() <= 1.5**2 * per_read.square().mean()


def test_zero_queries_with_the_sum_scale_are_the_plain_model():
    ids = tiny.token_ids()
    expected = tiny.plain_model("llama", 6)(ids).logits
    for attn_res in MODES:
        fields = {**attn_res, "read_scale": "sum", "read_schedule": "two_phase"}
        logits = tiny.attn_res_model(fields, "llama", 6)(ids).logits
        assert (logits - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_generation_with_a_cache():
    ids = tiny.token_ids()
    for attn_res in (THREE, FULL):
        found = [
            model.generate(ids, max_new_tokens=8, do_sample=False) for model in both(attn_res, "qwen3_5")
        ]
        assert torch.equal(*found)


def test_recording():
    records = []
    for model in both(THREE, dtype=torch.float32):
        with ar.record_depth_weights(model) as record, torch.no_grad():
            model(tiny.token_ids())
        records.append(record)
    for field in ("weights", "input_norms", "output_norms"):
        assert_close(getattr(records[1], field), getattr(records[0], field), 1e-4)


@pytest.mark.parametrize("attn_res", MODES, ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(attn_res, use_reentrant):
    """Case M1: both kinds, two steps, with and without outputs that a loss uses."""
    ids, model = tiny.token_ids(), both(attn_res)[1].train()
    for want in ({}, {"output_depth_weights": True, "output_hidden_states": True}):
        expected = everything(model, ids, **want)
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        for _ in range(2):
            assert_close(everything(model, ids, **want), expected, 1e-12)
        model.activation_checkpointing_disable()


@pytest.mark.parametrize("attn_res", [THREE, FULL], ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_still_saves_memory(attn_res, use_reentrant):
    """Less than half of what is kept without it, though more than read by read: the outputs of phase 1."""
    per_read, in_two = both(attn_res, "qwen3_5", 8)
    ids = tiny.token_ids(2, 64)
    plain = saved_bytes(in_two.train(), ids)
    for model in (per_read.train(), in_two):
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert saved_bytes(per_read, ids) < saved_bytes(in_two, ids) < 0.5 * plain


@pytest.mark.parametrize("attn_res", [THREE, FULL], ids=str)
def test_fullgraph(attn_res):
    torch._dynamo.reset()
    model, ids = both(attn_res, layers=3)[1], tiny.token_ids()
    found = everything(torch.compile(model, fullgraph=True, backend="aot_eager"), ids)
    assert_close(found, everything(model, ids), 1e-5)


def test_autocast():
    results = []
    for model in both(THREE, dtype=torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(tiny.token_ids(), output_depth_weights=True)
        assert all(w.dtype == torch.float32 for w in out.depth_weights)
        results.append(out.logits.float())
    assert (results[1] - results[0]).abs().mean() <= 0.05 * results[0].abs().mean()


# --- nothing stays, nothing mixes ---


def test_copies_and_pickles():
    model, ids = both(FULL)[1], tiny.token_ids()
    expected = model(ids).logits
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.model.read_groups == model.model.read_groups
        assert torch.equal(again(ids).logits, expected)


def test_functional_call():
    model, ids = both(THREE)[1], tiny.token_ids()
    other = {name: value.clone() * 1.5 for name, value in model.state_dict().items()}
    found = torch.func.functional_call(model, other, (ids,)).logits
    model.load_state_dict(other)
    assert torch.equal(found, model(ids).logits)


def test_nothing_outlives_a_forward(monkeypatch):
    alive = []

    def spy(*args, **kwargs):
        found = two_phase.attend_to_shared(*args, **kwargs)
        alive.extend(weakref.ref(x.untyped_storage()) for read in found for x in read)
        return found

    monkeypatch.setattr(model_pass, "attend_to_shared", spy)
    with torch.no_grad():
        both(FULL)[1](tiny.token_ids())
    gc.collect()
    assert alive and not any(reference() for reference in alive)
    assert getattr(model_pass.LOCAL, "model_pass", None) is None


def test_a_forward_that_fails_leaves_nothing():
    model, ids = both(FULL)[1], tiny.token_ids()
    expected = model(ids).logits
    handle = model.model.layers[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    handle.remove()
    assert torch.equal(model(ids).logits, expected)


def test_threads_run_one_model_at_once():
    model = both(FULL)[1]
    inputs = [tiny.token_ids(1, tokens) for tokens in (5, 9, 13, 17)]
    expected = [model(ids).logits for ids in inputs]
    found: list = [None] * 4

    def work(i):
        for _ in range(5):
            found[i] = model(inputs[i]).logits

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_queries_on_another_device_are_refused():
    model = both(FULL)[1]
    model.model.layers[-1].mlp.requires_grad_(False)
    read = model.model.layers[4].input_layernorm.read
    read.query = torch.nn.Parameter(read.query.detach().to("meta"))
    with pytest.raises(ValueError, match="per_read"):
        model(tiny.token_ids())


def test_a_read_with_a_backend_of_its_own_is_refused():
    model = both(FULL)[1]
    model.model.layers[4].input_layernorm.read.backend = "reference"
    with pytest.raises(ValueError, match="backend='reference'"):
        model(tiny.token_ids())


def test_layers_called_outside_a_model_forward_read_one_by_one():
    """A pipeline stage gives a layer all its blocks."""
    per_read, in_two = both(THREE)
    x, *blocks = (torch.randn(1, 4, 16).double() for _ in range(3))
    rotary = per_read.model.rotary_emb(x, torch.arange(4)[None])
    found = [model.model.layers[4](x, *blocks, position_embeddings=rotary)[0] for model in (per_read, in_two)]
    assert torch.equal(*found)


# --- the setting ---


def phases_run(model, ids, monkeypatch, **kwargs):
    """How many groups of one forward ran a first phase."""
    calls = []
    with monkeypatch.context() as patch:
        original = model_pass.attend_to_shared
        patch.setattr(model_pass, "attend_to_shared", lambda *a, **k: calls.append(a) or original(*a, **k))
        model(ids, **kwargs)
    return len(calls)


def test_auto_takes_two_phases_where_they_were_measured_to_be_faster(monkeypatch):
    """In plain PyTorch on a CPU, for inputs that aren't small, unless memory is being saved."""
    model, ids = tiny.trained_model(FULL, "llama", 6, dtype=torch.float32), tiny.token_ids()
    groups = sum(group.two_phase for group in model.model.read_groups)
    assert model.model.depth_plan.config.read_schedule == "auto" and groups > 1
    without_kernel = {"cpu": "is not compiled", "lean": None}
    with_kernel = {"cpu": None, "lean": None}
    monkeypatch.setattr(model_pass, "available_backends", lambda *_: without_kernel)
    assert phases_run(model, ids, monkeypatch) == 0  # small
    monkeypatch.setattr(model_pass, "LEAST_ELEMENTS", ids.numel() * 16)
    assert phases_run(model, ids, monkeypatch) == groups
    monkeypatch.setattr(model_pass, "available_backends", lambda *_: with_kernel)
    assert phases_run(model, ids, monkeypatch) == 0
    monkeypatch.setattr(model_pass, "available_backends", lambda *_: without_kernel)
    model.train().activation_checkpointing_enable()
    assert phases_run(model, ids, monkeypatch, use_cache=False) == 0
    model.activation_checkpointing_disable()
    assert phases_run(model, ids, monkeypatch) == groups
    model.model.layers[-1].input_layernorm.read.backend = "reference"  # refused when asked for, else avoided
    assert phases_run(model, ids, monkeypatch) == groups - 1


@pytest.mark.parametrize("attn_res", MODES, ids=str)
def test_per_read_has_no_groups(attn_res):
    assert both(attn_res)[0].model.read_groups == ()


def test_the_setting_survives_saving(tmp_path):
    model = both(THREE, "qwen3_5", 2, dtype=torch.float32)[1]
    model.save_pretrained(tmp_path)
    again = ar.Qwen3_5AttnResForCausalLM.from_pretrained(tmp_path)
    assert again.model.depth_plan.config.read_schedule == "two_phase"
    assert again.model.read_groups == model.model.read_groups
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["attn_res"]["read_schedule"]  # as an older version wrote it
    file.write_text(json.dumps(fields))
    old = ar.Qwen3_5AttnResForCausalLM.from_pretrained(tmp_path)
    assert old.model.depth_plan.config.read_schedule == "auto"


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"read_schedule must be one of .*, got 'fast'"):
        ar.AttnResConfig(read_schedule="fast")


# --- what is read and written ---


def counted(model, monkeypatch):
    """Tensors [B, T, D] that the operators of one forward received and gave, by phase."""
    count = dict.fromkeys(("phase_1_reads", "phase_1_writes", "phase_2_reads", "phase_2_writes"), 0)

    def phase_1(sources, *args, **kwargs):
        found = two_phase.attend_to_shared(sources, *args, **kwargs)
        count["phase_1_reads"] += len(sources)
        count["phase_1_writes"] += len(found)
        return found

    def mix(self, sources, made, shared, dtype):
        count["phase_2_reads"] += len(sources) + (shared is not None)
        count["phase_2_writes"] += 1
        return original(self, sources, made, shared, dtype)

    original = attach.AttnResNorm.mix_and_norm
    monkeypatch.setattr(model_pass, "attend_to_shared", phase_1)
    monkeypatch.setattr(attach.AttnResNorm, "mix_and_norm", mix)
    with torch.no_grad():
        model(tiny.token_ids())
    monkeypatch.undo()
    return count


@pytest.mark.parametrize("attn_res", MODES, ids=str)
@pytest.mark.parametrize("layers", [1, 4, 9])
def test_a_run_moves_what_the_count_says(attn_res, layers, monkeypatch):
    for model in both(attn_res, layers=layers):
        backbone = model.model
        expected = traffic(backbone.depth_plan, backbone.read_groups)
        assert counted(model, monkeypatch) == vars(expected)
    assert traffic(backbone.depth_plan, backbone.read_groups).total <= traffic(backbone.depth_plan).total
