"""Sequence-sharded prefill: equal to one process's, for a share of its block sums.

Ranks are forked gloo processes. Each test parameter is a case that they run once for all tests of the module.
"""

from __future__ import annotations

import datetime
import gc
import os
import re
import traceback
from pathlib import Path
from unittest import mock

import family_models
import pytest
import tiny
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import DynamicCache, PreTrainedTokenizerFast

import attention_residuals as ar
from attention_residuals.sharded_prefill import sharded_prefill

FULL, BLOCK = {"mode": "full"}, {"mode": "block", "sublayers_per_block": 3}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
BATCH, NEW_TOKENS = 2, 4
# tokens, chunk: at once, a short last chunk, a last chunk of one token, fewer tokens than ranks
PROMPTS = ((23, 100), (23, 9), (19, 6), (1, 4))
CASES = [
    (family, mode, tokens, chunk)
    for family in ("qwen3_5", "llama")
    for mode in ("full", "block")
    for tokens, chunk in PROMPTS
]
TOLERANCE = 1e-12
# Gated DeltaNet computes in float32 whatever the model's dtype, so other chunks round otherwise
DELTA_RULE_TOLERANCE = 1e-4
TIMEOUT = 300


def on_ranks(size, function, tmp_path, *args):
    """`function(*args)` on forked gloo processes; what each rank returned."""
    tmp_path.mkdir(exist_ok=True)
    context = torch.multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, tmp_path / "store", found, function, args))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
        process.kill()
    results = {}
    while not found.empty():
        rank, result, error = found.get()
        assert error is None, f"rank {rank}: {error}"
        results[rank] = result
    assert len(results) == size, "a rank ended without a result"
    return [results[rank] for rank in range(size)]


def _rank(rank, size, store, found, function, args):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    wait = datetime.timedelta(seconds=TIMEOUT / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
    try:
        with torch.no_grad():
            found.put((rank, function(*args), None))
    except Exception:
        found.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def build(family, mode, **fields):
    fields = {**(HYBRID if family == "qwen3_5" else {}), **fields}
    return tiny.trained_model(FULL if mode == "full" else BLOCK, family, **fields)


def in_pieces(model, ids, chunk):
    """The last logits and the cache, by transformers alone."""
    cache = None
    for piece in ids.split(chunk, 1):
        outputs = model(piece, cache=cache, use_cache=True, logits_to_keep=1)
        cache = outputs.cache
    return outputs.logits, cache


def states(cache):
    """Every tensor that a cache holds."""
    found = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, name, None)
            value = list(value.values()) if isinstance(value, dict) else value
            found += [value] if isinstance(value, torch.Tensor) else (value or [])
    return [state for state in found if state is not None]


def difference(found, expected):
    """The largest over pairs of tensors, each relative to the largest expected number."""
    assert [x.shape for x in found] == [x.shape for x in expected] and expected
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def continued(model, ids, logits, cache):
    ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return model.generate(
        ids, cache=cache, do_sample=False, max_new_tokens=NEW_TOKENS - 1, pad_token_id=0
    ).tolist()


def compare(family, mode, tokens, chunk):
    model, ids = build(family, mode), tiny.token_ids(BATCH, tokens)
    logits, cache = sharded_prefill(model, ids, chunk=chunk)
    whole, pieces = in_pieces(model, ids, tokens), in_pieces(model, ids, chunk)
    found = {
        "logits in pieces": difference([logits], [pieces[0]]),
        "cache in pieces": difference(states(cache), states(pieces[1])),
        "logits": difference([logits], [whole[0]]),
        "cache": difference(states(cache), states(whole[1])),
    }
    found["tokens"] = continued(model, ids, logits, cache) == (
        model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0).tolist()
    )
    return found


def compare_all(cases):
    return {case: compare(*case) for case in cases}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_ranks(2, compare_all, tmp_path_factory.mktemp("prefill"), CASES)


def check_exact(found, family):
    tolerance = DELTA_RULE_TOLERANCE if family == "qwen3_5" else TOLERANCE
    assert found["logits in pieces"] <= TOLERANCE and found["cache in pieces"] <= TOLERANCE
    assert found["logits"] <= tolerance and found["cache"] <= tolerance
    assert found["tokens"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_cache_and_greedy_tokens_equal_one_process(two_ranks, case):
    for found in two_ranks:
        check_exact(found[case], case[0])


@pytest.mark.slow
def test_four_ranks(tmp_path):
    for rank in on_ranks(4, compare_all, tmp_path, CASES):
        for case, found in rank.items():
            check_exact(found, case[0])


def source_bytes(model):
    """Hooks that note the most bytes that one read's sources hold on to; views count as what they view."""
    most = [0]

    def count(_module, args):
        storages = {source.untyped_storage().data_ptr(): source for source in args[0]}
        most[0] = max(most[0], sum(source.untyped_storage().nbytes() for source in storages.values()))

    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            module.register_forward_pre_hook(count)
    return most


def whole_tensors(model, tokens):
    """A hook on the last MLP that counts the live tensors [B, T, D] of all tokens."""
    found = []

    def count(*_):
        shape = (BATCH, tokens, model.config.hidden_size)
        found.append(sum(type(x) is torch.Tensor and x.shape == shape for x in gc.get_objects()))

    model.model.layers[-1].mlp.register_forward_pre_hook(count)
    return found


def measure(prefill, mode, chunk):
    """A prompt of 200 tokens: of how many tokens all sources are held at most, and how many whole tensors."""
    model, ids = build("qwen3_5", mode), tiny.token_ids(BATCH, 200)
    model.base_model.read_groups = ()  # reads one by one are given all their sources
    most, whole = source_bytes(model), whole_tensors(model, chunk)
    prefill(model, ids, chunk=chunk)
    plan = model.base_model.depth_plan
    per_token = plan.num_sources(plan.num_sublayers) * BATCH * model.config.hidden_size * 8
    return most[0] / per_token, max(whole)


def measure_all(prefill, modes=("full", "block")):
    return [measure(prefill, mode, chunk) for mode in modes for chunk in (200, 60)]


def test_a_rank_holds_its_share_of_the_sources(tmp_path):
    for found in on_ranks(2, measure_all, tmp_path, sharded_prefill):
        assert found == [(100, 0), (30, 0)] * 2


def test_one_process_holds_all_sources_of_a_chunk():
    """The same counts see everything where nothing is sharded."""
    with torch.no_grad():
        found = measure_all(in_pieces, ["block"])
    assert [tokens for tokens, _ in found] == [200, 60]
    assert all(whole > 0 for _, whole in found)


def with_other_prompts():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="the same input_ids and chunk"):
        sharded_prefill(build("llama", "block"), tiny.token_ids(1, 9 + rank), chunk=6)
    with pytest.raises(ValueError, match=r"chunks \[4, 5\]"):
        sharded_prefill(build("llama", "block"), tiny.token_ids(1, 9), chunk=4 + rank)


def test_ranks_that_differ_are_refused(tmp_path):
    on_ranks(2, with_other_prompts, tmp_path)


def tensor_parallel(folder):
    ids = tiny.token_ids(BATCH, 23)
    whole = ar.LlamaAttnResForCausalLM.from_pretrained(folder).eval()
    shared = {"distributed_config": {"tp_size": dist.get_world_size(), "tp_plan": "auto"}}
    model = ar.LlamaAttnResForCausalLM.from_pretrained(folder, **shared).eval()
    expected, own_heads = in_pieces(whole, ids, 23), in_pieces(model, ids, 23)
    logits, cache = sharded_prefill(model, ids, chunk=9)
    errors = difference([logits], [expected[0]]), difference(states(cache), states(own_heads[1]))
    generated = whole.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0).tolist()
    return *errors, continued(model, ids, logits, cache) == generated


@pytest.mark.slow
def test_tensor_parallel_weights(tmp_path):
    """Under transformers' own plan mixers, MLPs, embedding and head are sharded, and a cache by heads."""
    build("llama", "block", num_key_value_heads=2).save_pretrained(tmp_path / "model")
    for logits, cache, same_tokens in on_ranks(2, tensor_parallel, tmp_path, tmp_path / "model"):
        assert logits <= TOLERANCE and cache <= TOLERANCE and same_tokens


def compare_families(families):
    found = {}
    for family in families:
        plain = family_models.plain_model(family, dtype=torch.float64)
        model, ids = family_models.trained_model(plain, BLOCK), tiny.token_ids(BATCH, 23)
        if family in family_models.SPARSE_FAMILIES:
            model.set_experts_implementation("eager")  # the default has no float64
        chunk = 23 if family == "mamba" else 9
        (logits, cache), expected = sharded_prefill(model, ids, chunk=chunk), in_pieces(model, ids, chunk)
        found[family] = max(
            difference([logits], [expected[0]]), difference(states(cache), states(expected[1]))
        )
    return found


@pytest.mark.slow
def test_every_family(tmp_path):
    families = [family for family in family_models.FIELDS if family != "vit"]
    for found in on_ranks(2, compare_families, tmp_path, families):
        # DeepSeek's router computes in float32
        assert all(
            error <= (1e-6 if family == "deepseek_v3" else TOLERANCE) for family, error in found.items()
        )


def test_one_process_without_torch_distributed():
    model, ids = build("llama", "block"), tiny.token_ids(BATCH, 23)
    with torch.no_grad():
        logits, cache = sharded_prefill(model, ids, chunk=9)
        expected = in_pieces(model, ids, 23)
    assert difference([logits], [expected[0]]) <= TOLERANCE
    assert difference(states(cache), states(expected[1])) <= TOLERANCE


def test_a_second_prompt_continues_the_cache():
    model, ids = build("llama", "block"), tiny.token_ids(BATCH, 23)
    with torch.no_grad():
        _, cache = sharded_prefill(model, ids[:, :10], chunk=9)
        logits, _ = sharded_prefill(model, ids[:, 10:], chunk=9, cache=cache)
        assert difference([logits], [in_pieces(model, ids, 23)[0]]) <= TOLERANCE


def run_documented(script, folder):
    os.chdir(folder)
    with mock.patch("torch.distributed.init_process_group"):  # `_rank` has done it, without a port
        scope = {}
        exec(script, scope)
    return scope["ids"].tolist()


def test_the_documented_script(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "long_prompts.md"
    (script,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert "chunk=16384" in script
    words = [f"w{i}" for i in range(tiny.VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Whitespace()
    model = build("llama", "block")
    model.save_pretrained(tmp_path / "my-model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "my-model")
    ids = tiny.token_ids(1, 23)
    (tmp_path / "prompt.txt").write_text(" ".join(words[i] for i in ids[0]))
    expected = model.generate(ids, do_sample=False, max_new_tokens=21).tolist()
    for chunk in ("chunk=16384", "chunk=9"):
        run = script.replace("chunk=16384", chunk)
        assert on_ranks(2, run_documented, tmp_path / chunk, run, tmp_path) == [expected] * 2


def headless():
    return ar.LlamaAttnResModel(tiny.attn_res_config(BLOCK, "llama", 2)).eval()


def recorded():
    model = build("llama", "block")
    model.base_model.depth_records.append([])
    return model


def unknown():
    model = build("llama", "block")
    model.config.family = "no_family"
    return model


def mamba():
    return family_models.our_model(family_models.plain_model("mamba"), BLOCK)


@pytest.mark.parametrize(
    ("build_model", "given", "message"),
    [
        (lambda: build("llama", "block"), {"chunk": 0}, "at least 1, got 0"),
        (lambda: build("llama", "block"), {"chunk": 1.5}, "at least 1, got 1.5"),
        (lambda: build("llama", "block"), {"input_ids": torch.ones(3, dtype=torch.long)}, r"shape \(3,\)"),
        (lambda: build("llama", "block"), {"input_ids": tiny.token_ids()[:, :0]}, r"shape \(2, 0\)"),
        (lambda: build("llama", "block").train(), {}, r"model.eval\(\)"),
        (lambda: tiny.attn_res_model({"mode": "standard"}, "llama"), {}, "no depth reads"),
        (lambda: tiny.plain_model("llama"), {}, "no depth reads"),
        (headless, {}, "no language head"),
        (recorded, {}, "depth weights are recorded"),
        (mamba, {"chunk": 4}, "pass chunk=11 and no cache"),
        (mamba, {"cache": DynamicCache()}, "after a cache"),
        (unknown, {}, "'no_family' isn't among the known families"),
    ],
)
def test_refusals(build_model, given, message):
    given = {"input_ids": tiny.token_ids(), **given}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        sharded_prefill(build_model(), **given)


def test_gradients_are_refused():
    with pytest.raises(ValueError, match="gradients are enabled"):
        sharded_prefill(build("llama", "block"), tiny.token_ids())
