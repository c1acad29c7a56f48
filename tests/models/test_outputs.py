"""What a forward hands out: hidden states, attentions, depth weights, loss; and what records it."""

from __future__ import annotations

import inspect

import pytest
import tiny
import torch

import attention_residuals as ar

BLOCK = {"mode": "block", "sublayers_per_block": 3}


@pytest.mark.parametrize("attn_res", tiny.MODES, ids=str)
def test_depth_weights_have_the_plans_shapes_and_sum_to_one(attn_res):
    model, ids = tiny.trained_model(attn_res), tiny.token_ids()
    plan = model.model.depth_plan
    out = model(ids, output_depth_weights=True)
    assert len(out.depth_weights) == plan.num_reads == 9
    for read, weights in enumerate(out.depth_weights):
        assert weights.shape == (plan.num_sources(read), *ids.shape)
        torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    torch.testing.assert_close(out.logits, model(ids).logits, rtol=0, atol=1e-4)


def test_fresh_queries_give_equal_weights():
    out = tiny.attn_res_model(BLOCK)(tiny.token_ids(), output_depth_weights=True)
    for weights in out.depth_weights:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[0]))


@pytest.mark.parametrize("attn_res", ({"mode": "standard"}, *tiny.MODES), ids=str)
def test_the_last_hidden_state_through_the_head_gives_the_logits(attn_res):
    """Case M6."""
    model = (tiny.attn_res_model if attn_res["mode"] == "standard" else tiny.trained_model)(attn_res)
    out = model(tiny.token_ids(), output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)


def test_hidden_states_are_the_mixtures_that_the_layers_read():
    """The hidden state of a layer, through its own norm, is what its token mixer received."""
    model, received = tiny.trained_model(BLOCK), []
    layers = model.model.layers
    mixers = [getattr(layer, "linear_attn", None) or layer.self_attn for layer in layers]
    handles = [
        mixer.register_forward_pre_hook(
            lambda _, args, kwargs: received.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for mixer in mixers
    ]
    out = model(tiny.token_ids(), output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for layer, h, x in zip(layers, out.hidden_states, received, strict=False):
        norm = layer.input_layernorm
        torch.testing.assert_close(norm.attn_res_plain_class.forward(norm, h), x, rtol=0, atol=1e-5)
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(tiny.token_ids()))


def test_hidden_states_by_index():
    model, ids = tiny.trained_model(BLOCK), tiny.token_ids()
    everything = model(ids, output_hidden_states=True).hidden_states
    chosen = model(ids, output_hidden_states=[1, -1]).hidden_states
    assert [h is None for h in chosen] == [True, False, True, True, False]
    assert torch.equal(chosen[1], everything[1]) and torch.equal(chosen[-1], everything[-1])


def test_attentions():
    model = tiny.trained_model(BLOCK, attn_implementation="eager")
    out = model(tiny.token_ids(), output_attentions=True)
    assert [a.shape for a in out.attentions] == [(2, 2, 11, 11)]


def test_everything_at_once_and_as_a_tuple():
    model, ids = tiny.trained_model(BLOCK, attn_implementation="eager"), tiny.token_ids()
    want = {
        "output_hidden_states": True,
        "output_attentions": True,
        "output_depth_weights": True,
        "use_cache": False,
    }
    named = model(ids, labels=ids, **want)
    plain = model(ids, labels=ids, return_dict=False, **want)
    assert list(named.keys()) == ["loss", "logits", "hidden_states", "attentions", "depth_weights"]
    assert torch.equal(plain[1], named.logits) and len(plain) == 5
    assert len(model.model(ids, return_dict=False, **want)) == 4


def test_config_can_ask_for_outputs():
    model = tiny.trained_model(BLOCK)
    model.config.output_depth_weights = True
    assert len(model(tiny.token_ids()).depth_weights) == 9


def test_labels_and_logits_to_keep():
    model, ids = tiny.trained_model(BLOCK), tiny.token_ids()
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )
    torch.testing.assert_close(out.loss.float(), expected)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, out.logits[:, -1:])


def test_resize_token_embeddings():
    model = tiny.trained_model(BLOCK, dtype=torch.float32, tie_word_embeddings=True)
    ids = tiny.token_ids()
    expected = model(ids).logits
    model.resize_token_embeddings(tiny.VOCABULARY + 5)
    assert model(ids).logits.shape[-1] == tiny.VOCABULARY + 5
    torch.testing.assert_close(model(ids).logits[..., : tiny.VOCABULARY], expected)


def test_the_signature_is_that_of_the_plain_model_plus_one():
    for ours in (ar.Qwen3_5AttnResForCausalLM, ar.Qwen3_5AttnResModel, ar.LlamaAttnResForCausalLM):
        plain = inspect.signature(ours.__bases__[1].forward).parameters
        found = inspect.signature(ours.forward).parameters
        assert [n for n in found if n != "output_depth_weights"] == list(plain)


def test_standard_mode_has_no_depth_weights_to_give():
    model = tiny.attn_res_model({"mode": "standard"})
    with pytest.raises(ValueError, match="standard"):
        model(tiny.token_ids(), output_depth_weights=True)
    with pytest.raises(ValueError, match="standard"), ar.record_depth_weights(model):
        pass


def test_recording():
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids(1, 7)
    with ar.record_depth_weights(model) as record, torch.no_grad():
        out = model(ids, output_depth_weights=True, output_hidden_states=True)
    for found, expected in zip(record.weights, out.depth_weights, strict=True):
        assert torch.equal(found, expected)
    assert record.read_names[:2] == ["layer 0 delta net", "layer 0 mlp"]
    assert record.read_names[6:] == ["layer 3 attention", "layer 3 mlp", "final"]
    assert record.source_names[5] == ("embedding", "block 1", "partial")
    assert [n.shape for n in record.output_norms] == [(1, 7)] * 8
    torch.testing.assert_close(record.input_norms[2], out.hidden_states[1].norm(dim=-1))
    with torch.no_grad():
        model(ids)
    assert len(record.forwards) == 1  # nothing is recorded after the context


def test_recording_norms_of_sublayer_outputs():
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids()
    written = []
    handles = [
        layer.mlp.register_forward_hook(lambda _, __, out: written.append(out))
        for layer in model.model.layers
    ]
    with ar.record_depth_weights(model) as record, torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    for found, out in zip(record.output_norms[1::2], written, strict=True):
        torch.testing.assert_close(found, out.norm(dim=-1), rtol=1e-3, atol=1e-4)


def test_recording_a_generation_joins_the_tokens():
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids(1, 7)
    with ar.record_depth_weights(model) as record:
        found = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    with ar.record_depth_weights(model) as at_once, torch.no_grad():
        model(found[:, :-1])
    for joined, expected in zip(record.weights, at_once.weights, strict=True):
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-5)


def test_recording_refuses_to_join_different_batches():
    model = tiny.trained_model(BLOCK, dtype=torch.float32)
    with ar.record_depth_weights(model) as record, torch.no_grad():
        model(tiny.token_ids(1))
        model(tiny.token_ids(2))
    with pytest.raises(ValueError, match="batch sizes"):
        _ = record.weights
    with ar.record_depth_weights(model) as empty, pytest.raises(ValueError, match="empty"):
        _ = empty.weights
