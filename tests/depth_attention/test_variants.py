"""Every variant of a read against loops over tokens, heads, sources and channels, in plain Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from attention_residuals import DepthRead, available_backends, depth_attention
from attention_residuals.variant import ReadVariant
from variant_cases import VARIANTS

WIDTH, SOURCES, EPS = 8, 4, 1e-3
variants = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


def unit(row, eps=EPS):
    root = math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x / root for x in row]


def scores_of_token(rows, read, heads):
    """[H][N] from the N sources of one token."""
    variant, parameters = read.variant, {n: p.tolist() for n, p in read.named_parameters()}
    if variant.weights == "uniform":
        found = [[0.0] * len(rows) for _ in range(heads)]
    elif variant.weights == "scalars":
        found = [[parameters["source_scores"][i][h] for i in range(len(rows))] for h in range(heads)]
    else:
        query = parameters.get("query")
        if query is None:
            newest = unit(rows[-1])
            query = [
                sum(m * x for m, x in zip(row, newest, strict=True)) for row in parameters["query_matrix"]
            ]
        rank, found = len(query), []
        for head in range(heads):
            channels = range(head * rank // heads, (head + 1) * rank // heads)
            found.append([])
            for row in rows:
                key = row[len(row) - rank :]
                key = key if variant.key_norm == "none" else unit(key)
                weight = parameters.get("key_weight", [1.0] * rank)
                score = sum(query[c] * key[c] * weight[c] for c in channels)
                found[head].append(score / math.sqrt(rank) if variant.values == "normalised" else score)
    if variant.recency_bias:
        for head in range(heads):
            found[head][-1] += parameters["recency_bias"][head]
    return found


def weigh(scores, activation):
    if activation == "sigmoid":
        return [2 / (1 + math.exp(-s)) / len(scores) for s in scores]
    if activation == "linear":
        return [(1 + s) / len(scores) for s in scores]
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def loops(sources, read, norm_weight=None, norm_eps=1e-6):
    """Output [T, D] and depth weights [N, T] of a read, token by token."""
    heads, outputs, all_weights = read.variant.heads, [], []
    for token in range(len(sources[0])):
        rows = [source[token].tolist() for source in sources]
        weights = [weigh(s, read.variant.activation) for s in scores_of_token(rows, read, heads)]
        values = list(rows)
        if read.variant.values == "normalised":
            values = [unit(row) for row in rows]
        elif read.variant.values == "normalised_blocks":
            last = len(rows) - 1 if read.has_partial else len(rows)
            values = [unit(row) if 0 < i < last else row for i, row in enumerate(rows)]
        gain = len(rows) if read.read_scale == "sum" else 1
        size = len(rows[0]) // heads
        mixed = [
            gain * sum(weights[c // size][i] * values[i][c] for i in range(len(rows)))
            for c in range(len(rows[0]))
        ]
        if norm_weight is not None:
            mixed = [x * n for x, n in zip(unit(mixed, norm_eps), norm_weight.tolist(), strict=True)]
        outputs.append(mixed)
        all_weights.append([sum(w[i] for w in weights) / heads for i in range(len(rows))])
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(all_weights, dtype=torch.float64).t()


def make(fields, *, trained=True, dtype=torch.float64, sources=SOURCES, width=WIDTH, **settings):
    """A read and its sources [5, D] of different sizes; trained, its parameters are away from their start."""
    read = DepthRead(
        width, eps=EPS, variant=ReadVariant(**fields), num_sources=sources, dtype=dtype, **settings
    )
    if trained:
        with torch.no_grad():
            for parameter in read.parameters():
                parameter.add_(0.7 * torch.randn_like(parameter))
    return read, [(torch.randn(5, width) * (0.3 + i)).to(dtype) for i in range(sources)]


@variants
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize("has_partial", [False, True])
def test_equals_the_loops(fields, read_scale, has_partial):
    read, sources = make(fields, read_scale=read_scale, has_partial=has_partial)
    norm_weight = torch.randn(WIDTH, dtype=torch.float64)
    for weight in (None, norm_weight):
        h, alpha = read(sources, weight, 1e-2, return_weights=True)
        expected_h, expected_alpha = loops(sources, read, weight, 1e-2)
        assert (h - expected_h).abs().max() <= 1e-13 * max(1, expected_h.abs().max())
        assert (alpha - expected_alpha).abs().max() <= 1e-14
        assert torch.equal(read(sources, weight, 1e-2), h)


@pytest.mark.parametrize("sources", [1, 2, 5])
@variants
def test_any_number_of_sources(fields, sources):
    for has_partial in {False, sources > 1}:
        read, given = make(fields, sources=sources, has_partial=has_partial)
        assert (read(given) - loops(given, read)[0]).abs().max() <= 1e-12


@variants
def test_gradients_of_every_parameter_and_source(fields):
    """Against differences, also through the returned depth weights and an output norm."""
    read, sources = make(fields, has_partial=True)
    names, parameters = zip(*read.named_parameters(), strict=True) if list(read.parameters()) else ((), ())
    norm_weight = torch.randn(WIDTH, dtype=torch.float64)

    def call(norm_weight, *tensors):
        values = dict(zip(names, tensors[: len(names)], strict=True))
        args = (tensors[len(names) :], norm_weight)
        return torch.func.functional_call(read, values, args, {"return_weights": True})

    leaves = [t.detach()[..., :8].clone().requires_grad_() for t in (norm_weight, *parameters)]
    leaves += [source[:2].clone().requires_grad_() for source in sources]
    assert torch.autograd.gradcheck(call, leaves)


@variants
def test_a_new_read_weighs_all_sources_alike(fields):
    read, sources = make(fields, trained=False)
    alpha = read(sources, return_weights=True)[1]
    assert torch.equal(alpha, torch.full_like(alpha, 1 / SOURCES))


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_read_of_the_sum_scale_adds_up(fields, dtype):
    """Factors are exactly 1 at any number of sources, so that conversion is exact."""
    if fields.get("values", "plain") != "plain":
        for sources in (2, 3):
            read, given = make(fields, trained=False, dtype=dtype, sources=sources, read_scale="sum")
            assert not torch.allclose(read(given), sum(given))
        return
    for sources in (2, 3, 41, 49, 107):
        read, _ = make(fields, trained=False, dtype=dtype, sources=sources, read_scale="sum")
        given = [torch.randint(-2, 3, (5, WIDTH)).to(dtype) for _ in range(sources)]
        assert torch.equal(read(given), sum(x.float() for x in given).to(dtype))


@variants
def test_every_parameter_starts_to_learn(fields):
    """At the start the key weight alone has no gradient, as in the paper's read."""
    read, sources = make(fields, trained=False)
    if not list(read.parameters()):
        assert fields == {"weights": "uniform"}
        return
    read(sources).square().sum().backward()
    for name, parameter in read.named_parameters():
        assert parameter.grad.any() == (name != "key_weight"), name


@variants
def test_reset_and_state_dict(fields):
    read, sources = make(fields)
    fresh, _ = make(fields, trained=False)
    fresh.load_state_dict(read.state_dict())
    assert torch.equal(fresh(sources), read(sources))
    fresh.reset_parameters()
    for name, parameter in fresh.named_parameters():
        assert (parameter == (name == "key_weight")).all()
    assert [p is not None for p in fresh.weighing_parameters()] == [True] * (
        len(list(fresh.parameters())) - (fresh.key_weight is not None)
    )


@variants
def test_16_bit_sources_are_rounded_once(fields):
    """bfloat16 sources beside float32 parameters, in and outside autocast: one rounding from exact."""
    read, sources = make(fields)
    rounded = [source.bfloat16() for source in sources]
    expected = loops([source.double() for source in rounded], read.float())[0]
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)):
        with context:
            h, alpha = read(rounded, return_weights=True)
        assert h.dtype == torch.bfloat16 and alpha.dtype == torch.float32
        assert ((h.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


def test_large_scores_without_a_key_norm_stay_finite():
    read, sources = make({"key_norm": "none"}, dtype=torch.float32)
    h, alpha = read([1e4 * source for source in sources], return_weights=True)
    assert h.isfinite().all() and (alpha.sum(0) - 1).abs().max() <= 1e-6


@variants
def test_zero_tokens_and_leading_axes(fields):
    read, sources = make(fields)
    assert read([source[:0] for source in sources]).shape == (0, WIDTH)
    stacked = [source.reshape(5, 1, 1, WIDTH) for source in sources]
    assert torch.equal(read(stacked).reshape(5, WIDTH), read(sources))


def test_a_key_norm_without_weight_runs_on_every_backend():
    read, sources = make({"key_norm": "plain"}, dtype=torch.float32)
    expected = depth_attention(sources, read.query, backend="reference")
    usable = available_backends("cpu", torch.float32, read.variant)
    assert usable == available_backends("cpu", torch.float32)
    for read.backend in [name for name, reason in usable.items() if reason is None]:
        read.eps = 1e-6
        torch.testing.assert_close(read(sources), expected)


@variants
def test_kernels_refuse_what_they_do_not_compute(fields):
    read, sources = make(fields, dtype=torch.float32)
    beyond = read.variant.beyond_kernels
    if beyond is None:
        assert fields == {"key_norm": "plain"}
        return
    reasons = available_backends("cpu", torch.float32, read.variant)
    assert reasons["cpu"] == reasons["fla"] == f"computes the paper's read only, not {beyond}"
    assert reasons["lean"] is None and reasons["reference"] is None
    found = read(sources)
    for read.backend in ("lean", "reference"):
        assert torch.equal(read(sources), found)
    for read.backend in ("cpu", "fla"):
        with pytest.raises(ValueError, match=f"backend='{read.backend}' computes the paper's read only, not"):
            read(sources)
    read.backend = "cuda"
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'cuda'"):
        read(sources)


def test_wrong_sources_are_refused():
    read, sources = make({"weights": "scalars"})
    with pytest.raises(ValueError, match="learned scores of 4 sources, got 3"):
        read(sources[:3])
    with pytest.raises(ValueError, match="must have the read's width 8, got 7"):
        read([source[:, :7] for source in sources])
    with pytest.raises(ValueError, match="sources must have one shape"):
        read([*sources[:3], sources[3][:2]])
    with pytest.raises(ValueError, match=r"norm_weight must have shape \[8\]"):
        read(sources, torch.ones(7))


def test_inkling_2_mixes_like_this():
    """transformers' own mixing module, with a random query, on a random partial sum and random blocks."""
    from transformers import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    config = Inkling2TextConfig(hidden_size=WIDTH)
    config._attn_implementation = "eager"
    theirs = Inkling2BlockAttentionResidual(config)
    fields = VARIANTS["normalised values"]
    ours = DepthRead(WIDTH, eps=theirs.norm.eps, variant=ReadVariant(**fields))
    with torch.no_grad():
        theirs.query.normal_()
        ours.query.copy_(theirs.query)
    blocks, partial = torch.randn(2, 5, 3, WIDTH) * 3, torch.randn(2, 5, WIDTH)
    (expected,) = theirs(blocks, partial)
    torch.testing.assert_close(ours([*blocks.unbind(2), partial]), expected)
    names = {name for name, _ in ours.named_parameters()}
    assert names == {name for name, _ in theirs.named_parameters()} == {"query"}
