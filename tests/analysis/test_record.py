"""Records of real forwards: what they hold, generation included, and that looking changes nothing."""

from __future__ import annotations

import pytest
import torch
from tiny_reads import choosing_model, token_ids

import attention_residuals as ar
from attention_residuals.pipeline import plan_stages, split_model

SETTINGS = (
    ("Llama", {"mode": "full"}),
    ("Llama", {"mode": "block", "num_blocks": 2, "read_schedule": "two_phase"}),
    ("Qwen3_5", {"mode": "block", "sublayers_per_block": 3}),
)


def recorded(model, run) -> ar.DepthRecord:
    with ar.record_depth_weights(model) as record, torch.no_grad():
        run()
    return record


def assert_same(found: ar.DepthRecord, expected: ar.DepthRecord) -> None:
    for field in ("weights", "input_norms", "output_norms"):
        for ours, theirs in zip(getattr(found, field), getattr(expected, field), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "attn_res"), SETTINGS)
def test_a_generation_with_cache_is_recorded_as_one_forward_over_all_its_tokens(family, attn_res) -> None:
    model, ids = choosing_model(family, **attn_res), token_ids()
    made = []
    found = recorded(model, lambda: made.append(model.generate(ids, max_new_tokens=5, do_sample=False)))
    (everything,) = made
    assert everything.shape == (2, 14) and len(found.forwards) == 5
    # the last new token is never read
    assert_same(found, recorded(model, lambda: model(everything[:, :-1], use_cache=False)))


def test_a_prompt_in_pieces_is_recorded_as_one_forward() -> None:
    model, ids = choosing_model("Qwen3_5"), token_ids()

    def in_pieces() -> None:
        first = model(ids[:, :4], use_cache=True)
        model(ids[:, 4:], cache=first.cache, use_cache=True)

    assert_same(recorded(model, in_pieces), recorded(model, lambda: model(ids, use_cache=False)))


@pytest.mark.parametrize("attn_res", [{"mode": "full"}, {"mode": "block", "sublayers_per_block": 3}])
def test_input_norms_are_those_of_the_mixtures(attn_res) -> None:
    model, ids = choosing_model(**attn_res), token_ids()
    outputs = []
    record = recorded(model, lambda: outputs.append(model(ids, output_hidden_states=True)))
    for layer, mixture in enumerate(outputs[0].hidden_states[:-1]):
        torch.testing.assert_close(record.input_norms[2 * layer], mixture.norm(dim=-1).float())


def test_output_norms_are_those_of_what_the_sublayers_add() -> None:
    model, ids = choosing_model(), token_ids()
    added = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: added.append(output))
        for layer in model.model.layers
        for module in (layer.self_attn, layer.mlp)
    ]
    record = recorded(model, lambda: model(ids))
    for hook in hooks:
        hook.remove()
    for norm, output in zip(record.output_norms, added, strict=True):
        output = output[0] if isinstance(output, tuple) else output
        torch.testing.assert_close(norm, output.norm(dim=-1).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "attn_res"), [SETTINGS[0], SETTINGS[2]])
def test_looking_changes_no_logit_and_leaves_nothing_behind(family, attn_res, dtype) -> None:
    model, ids = choosing_model(family, **attn_res).to(dtype), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
    logits = []
    record = recorded(model, lambda: logits.append(model(ids).logits))
    assert torch.equal(logits[0], expected)
    assert model.model.depth_records == []
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert len(record.forwards) == 1 and not record.forwards[0].mixtures


def test_what_is_recorded_of_a_forward_lies_in_one_piece_of_memory() -> None:
    model, ids = choosing_model().float(), token_ids()
    (trace,) = recorded(model, lambda: model(ids)).forwards
    # the first read has nothing to weigh
    tensors = [*trace.weights[1:], *trace.input_norms[1:], *trace.output_norms]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert_same(recorded(model, lambda: model(ids)), with_gradients(model, ids))


def with_gradients(model, ids) -> ar.DepthRecord:
    with ar.record_depth_weights(model) as record:
        model(ids)
    return record


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_training_step_with_checkpointing_is_recorded(use_reentrant: bool) -> None:
    model, ids = choosing_model(), token_ids()
    expected = recorded(model, lambda: model(ids))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    with ar.record_depth_weights(model) as record:
        model(ids, labels=ids).loss.backward()
    assert_same(record, expected)
    assert len(record.forwards) == 1 and not record.weights[-1].requires_grad


def test_a_pipeline_stage_is_refused() -> None:
    model = choosing_model()
    plan = plan_stages(model, 2)
    for stage in (*split_model(model, plan, 0), *split_model(model, plan, 1)):
        with pytest.raises(ValueError, match="got a pipeline stage with"), ar.record_depth_weights(stage):
            pass
