"""Generation with a cache equals the uncached forward, in every way that generate() offers."""

from __future__ import annotations

import pytest
import tiny
import torch

BLOCK = {"mode": "block", "sublayers_per_block": 3}
GENERATE = {"max_new_tokens": 12, "pad_token_id": 0}


def uncached_greedy(model, ids, steps):
    """The definition: argmax of a full forward over everything so far."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], -1)
    return ids


@pytest.mark.parametrize("attn_res", tiny.MODES, ids=str)
def test_greedy_equals_the_uncached_forward(attn_res):
    model, ids = tiny.trained_model(attn_res, dtype=torch.float32), tiny.token_ids()
    found = model.generate(ids, do_sample=False, **GENERATE)
    assert torch.equal(found, uncached_greedy(model, ids, 12))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_of_other_families(family):
    model, ids = tiny.trained_model(BLOCK, family, dtype=torch.float32), tiny.token_ids()
    assert torch.equal(model.generate(ids, do_sample=False, **GENERATE), uncached_greedy(model, ids, 12))


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=str,
)
def test_sampling_and_beams_with_and_without_cache(how):
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(ids, use_cache=use_cache, **how, **GENERATE))
    assert torch.equal(*found)


def test_static_cache():
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids()
    found = model.generate(
        ids, do_sample=False, cache_implementation="static", disable_compile=True, **GENERATE
    )
    assert torch.equal(found, uncached_greedy(model, ids, 12))


def test_left_padding():
    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids(1, 9)
    other = tiny.token_ids(2, 13)[1:]
    padded = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], -1), other])
    found = model.generate(padded, attention_mask=(padded != 0).long(), do_sample=False, **GENERATE)
    assert torch.equal(found[:1, 13:], uncached_greedy(model, ids, 12)[:, 9:])
    assert torch.equal(found[1:, 13:], uncached_greedy(model, other, 12)[:, 13:])


@pytest.mark.parametrize("tokens", [5, 63, 64, 65, 150])
def test_prefill_then_decode_equals_one_forward(tokens):
    """Case Q5: prompt lengths around the delta rule's chunk of 64; logits to float error."""
    model, ids = tiny.trained_model(BLOCK), tiny.token_ids(2, tokens + 6)
    expected = model(ids, use_cache=False).logits
    out = model(ids[:, :tokens], use_cache=True)
    logits = [out.logits]
    for i in range(tokens, tokens + 6):
        out = model(ids[:, i : i + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    assert (torch.cat(logits, 1) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("pieces", [(30, 20, 27), (64, 13), (1, 76), (63, 1, 13)], ids=str)
def test_prefill_in_pieces_equals_one_forward(pieces):
    model, ids = tiny.trained_model(BLOCK), tiny.token_ids(2, 77)
    expected = model(ids, use_cache=False).logits
    cache, logits = None, []
    for piece in ids.split(pieces, 1):
        out = model(piece, cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    assert (torch.cat(logits, 1) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_nothing_of_the_stream_outlives_a_forward():
    """No depth cache: after a forward, and after one that raised, no thread-local state is left."""
    from attention_residuals.models.model_pass import LOCAL

    model, ids = tiny.trained_model(BLOCK, dtype=torch.float32), tiny.token_ids()
    expected = model(ids).logits
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    handle.remove()
    assert LOCAL.model_pass is None and LOCAL.frame is None
    assert torch.equal(model(ids).logits, expected)


def test_two_threads_on_one_model_dont_mix():
    from concurrent.futures import ThreadPoolExecutor

    model = tiny.trained_model(BLOCK, dtype=torch.float32)
    inputs = [tiny.token_ids(1, n) for n in range(3, 19)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in inputs]

    def run(ids):
        with torch.no_grad():
            return model(ids).logits

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(run, inputs), expected, strict=True):
            assert torch.equal(found, wanted)
