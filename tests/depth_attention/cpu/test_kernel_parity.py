"""Every result and gradient of the compiled kernel against float64, under each instruction set."""

import dataclasses
import itertools

import pytest
import torch
from depth_cases import assert_within_contract, error_ratio, make_case, poisoned_memory, run
from hypothesis import assume, given, settings
from test_lean import SETTINGS
from test_properties import SETTINGS as HYPOTHESIS
from test_properties import cases

from attention_residuals import depth_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [*range(1, 18), 33, 49, 65, 130]
WIDTHS = [1, 7, 48, 65, 127, 1000, 1536, 2560, 7168]
TOKENS = [(2, 3), (7,), (1, 1), (), (5, 1, 2)]


def combinations():
    """Each count in each dtype, with widths, settings and token shapes going round beside them."""
    rounds = zip(
        itertools.product(COUNTS, DTYPES),
        itertools.cycle(WIDTHS[:6]),
        itertools.cycle(TOKENS),
        itertools.cycle(SETTINGS[::-1] + SETTINGS[1:]),
        strict=False,
    )
    return [
        pytest.param(n, width, tokens, dtype, settings, id=f"N{n}-D{width}-{tokens}-{str(dtype)[6:]}")
        for (n, dtype), width, tokens, settings in rounds
    ]


@pytest.mark.parametrize("n, width, tokens, dtype, settings", combinations())
def test_every_count(n, width, tokens, dtype, settings, instruction_set):
    assert_within_contract(make_case(n, width, tokens=tokens, dtype=dtype, **settings), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 66, 128, 7186])
def test_every_width(width, dtype, instruction_set):
    for arguments in SETTINGS[:2] if width > 1000 else SETTINGS:
        assert_within_contract(make_case(5, width, tokens=(4,), dtype=dtype, **arguments), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, width", [(130, 1536), (65, 2560), (49, 7168), (17, 7168), (130, 7168)])
@pytest.mark.parametrize("norm", [False, True])
def test_rows_that_fill_the_cache_several_times(n, width, dtype, norm, instruction_set):
    vector_dtype = torch.float32  # since sums over 130 sources pass the range of float16
    case = make_case(
        n, width, tokens=(3,), dtype=dtype, vector_dtype=vector_dtype, norm=norm, read_scale="sum"
    )
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "n, width, tokens, draws",
    [
        (5, 3, (40,), 12),
        (9, 65, (6,), 20),
        (33, 48, (6,), 20),
        (9, 1000, (6,), 16),
        (9, 7168, (6,), 8),
        (130, 2560, (3,), 4),
        (4, 127, (2103,), 4),
        (4, 32, (16000,), 4),
    ],
)
def test_error_is_at_most_twice_that_of_plain_pytorch(n, width, tokens, draws, norm, instruction_set):
    """No rounding step allowed: sums over the width, sources and tokens must be as careful as torch.sum."""
    ratios = error_ratio(lambda: make_case(n, width, tokens=tokens, norm=norm), draws, "cpu")
    assert max(ratios.values()) <= 2, ratios


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_key_weight_far_from_one(dtype, read_scale, instruction_set):
    case = make_case(8, 7168, tokens=(2,), dtype=dtype, read_scale=read_scale)
    case.key_weight = (torch.randn(7168) * 30).to(dtype)
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mixed_dtypes(dtype, vector_dtype, kernel):
    case = make_case(5, 33, dtype=dtype, vector_dtype=vector_dtype, norm=True)
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(autocast, kernel):
    case = make_case(5, 33, norm=True)
    outside = run(case, "cpu")
    with torch.autocast("cpu", dtype=autocast):
        inside = run(case, "cpu")
    for name, want in outside.items():
        assert torch.equal(inside[name], want), name


# --- extremes ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("score", [1.0, 1e4])
def test_large_scores_and_values_stay_finite(dtype, size, score, instruction_set):
    case = make_case(6, 64, dtype=dtype, key_weight=False)
    case.sources = [(size * torch.randn(2, 3, 64)).to(dtype) for _ in range(6)]
    case.query = torch.randn(64) * score / 8
    case.d_output = case.d_output / 64  # the true gradients stay within float16
    case.d_weights = case.d_weights / 64
    assert_within_contract(case, "cpu")


def test_float16_up_to_its_largest_values(instruction_set):
    case = make_case(6, 65, dtype=torch.float16, vector_dtype=torch.float32)
    case.sources = [x.sign() * 6e4 for x in case.sources]
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_number_passes_through(dtype, instruction_set):
    """One source is returned itself: the conversions both ways, subnormal numbers and infinities included."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype).view(64, 1024)
    output = depth_attention([numbers], torch.ones(1024), backend="cpu")
    same = (output.view(torch.int16) == numbers.view(torch.int16)) | (output.isnan() & numbers.isnan())
    zeros = (output == 0) & (numbers == 0)  # a sum that starts at +0 loses the sign of -0
    assert (same | zeros).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype, instruction_set):
    """The mean of two neighbours, exact in float32, lies halfway between two numbers of 16 bits."""
    first = torch.arange(0x3800, 0x3800 + 500, dtype=torch.int16)
    sources = [first.view(dtype), (first + 1).view(dtype)]
    output = depth_attention(sources, torch.zeros(500), backend="cpu")
    assert torch.equal(output, ((sources[0].double() + sources[1].double()) / 2).to(dtype))


@pytest.mark.parametrize("where", ["source", "gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_token_stays_alone(where, bad, dtype, instruction_set):
    case = make_case(4, 41, tokens=(6,), dtype=dtype, norm=True)
    clean = run(case, "cpu")
    (case.sources[1] if where == "source" else case.d_output)[2, 3] = bad
    spoiled = run(case, "cpu")
    for name, want in clean.items():
        if name in ("d query", "d key_weight", "d norm_weight"):
            continue  # sums over tokens
        axis = 1 if name == "weights" else 0
        others = torch.tensor([0, 1, 3, 4, 5])
        assert torch.equal(spoiled[name].index_select(axis, others), want.index_select(axis, others)), name
    assert spoiled["d source 0"][2].isnan().any()


# --- a softmax near one-hot ---


def near_one_hot(scale, dtype):
    """Scores that differ by tens: all weights but one are as small as 1e-20, and so are their gradients."""
    case = make_case(6, 65, tokens=(9,), dtype=torch.float32, weights=True)
    case.settings = {"scale": scale}
    case.sources = [x.to(dtype) for x in case.sources]
    case.d_output = case.d_output.to(dtype)
    return case


def exact_vector_gradients(case):
    """Gradients of query and key weight in float64, without the cancellation in p_i - sum_j alpha_j p_j.

    It is sum_j alpha_j (p_i - p_j), a sum of terms that are each as exact as their factors.
    """
    v = torch.stack([source.double() for source in case.sources])
    query, key_weight = case.query.double(), case.key_weight.double()
    r = (v.square().mean(-1) + 1e-6).rsqrt()
    scale = case.settings["scale"]
    alpha = (scale * r * (v @ (query * key_weight))).softmax(0)
    p = (v * case.d_output.double()).sum(-1) + case.d_weights.double()
    differences = (alpha[None] * (p[:, None] - p[None])).sum(1)
    b = scale * r * alpha * differences
    du = torch.einsum("nt,ntd->d", b, v)
    return {"d query": du * key_weight, "d key_weight": du * query}


@pytest.mark.parametrize("scale", [10.0, 30.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_one_hot(scale, dtype, instruction_set):
    case = near_one_hot(scale, dtype)
    with poisoned_memory():
        found = run(case, "cpu")
    assert found["weights"].amax(0).median() > 0.999
    for name, want in exact_vector_gradients(case).items():
        error = (found[name] - want).norm() / want.norm()
        assert error < 3e-6 * scale, f"{name}: relative error {error:.1e}"


def test_the_oracle_near_one_hot_is_the_reference_elsewhere():
    case = near_one_hot(1.0, torch.float32)
    expected = run(case.to(torch.float64), "reference")
    for name, want in exact_vector_gradients(case).items():
        torch.testing.assert_close(want, expected[name], rtol=1e-9, atol=1e-9)


# --- what a caller may do with the graph ---


def graph_of(case, backend, dtype, together):
    """First gradients and their own gradients, where inputs are made from each other or are apart."""
    case = case.to(dtype)
    embedding, query = case.sources[0].requires_grad_(), case.query.requires_grad_()
    sources, key_weight, norm_weight = case.sources, case.key_weight, case.norm_weight
    if together:  # as in a model, where a partial sum comes from the embedding
        sources, key_weight = [embedding, embedding.sin() * query, embedding.exp(), embedding], 2 * query + 1
        norm_weight = None if norm_weight is None else query + 1
    output, weights = depth_attention(
        sources, query, key_weight, norm_weight=norm_weight, return_weights=True, backend=backend
    )
    loss = output.square().sum() + weights[0].square().sum()
    first = torch.autograd.grad(loss, (embedding, query), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), (embedding, query))
    return [x.detach().double() for x in (*first, *second)]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_second_derivatives_equal_those_of_lean(norm, together, kernel):
    case = make_case(3, 17, norm=norm)
    exact = graph_of(case, "lean", torch.float64, together)
    found = graph_of(case, "cpu", torch.float32, together)
    for got, want in zip(found, exact, strict=True):
        assert (got - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("which", ["d_output", "d_weights"])
def test_only_one_result_is_used(which, instruction_set):
    case = make_case(5, 17)
    setattr(case, which, None)
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("wanted", range(6))
def test_each_input_alone(wanted, kernel):
    """What needs no gradient gets none, and the others stay right without it."""
    case = make_case(3, 17, norm=True)
    inputs = [*case.sources, case.query, case.key_weight, case.norm_weight]

    def gradient(backend):
        leaves = [x.detach().clone().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        with poisoned_memory():
            out = depth_attention(leaves[:3], leaves[3], leaves[4], norm_weight=leaves[5], backend=backend)
            out.backward(case.d_output)
        assert all((leaf.grad is not None) == (i == wanted) for i, leaf in enumerate(leaves))
        return leaves[wanted].grad

    torch.testing.assert_close(gradient("cpu"), gradient("reference"), rtol=1e-5, atol=1e-5)


def test_backward_twice_and_results_changed_in_place(kernel):
    case = make_case(3, 5, tokens=(4, 2), norm=True)
    query = case.query.requires_grad_()
    arguments = {"norm_weight": case.norm_weight, "backend": "cpu"}
    output = depth_attention(case.sources, query, **arguments)
    once, twice = (torch.autograd.grad(output.sum(), query, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    output = depth_attention(case.sources, query, **arguments)
    output *= 2
    (after,) = torch.autograd.grad(output.sum(), query)
    torch.testing.assert_close(after, 2 * once)


@settings(max_examples=120, **HYPOTHESIS)
@given(cases())
def test_within_contract(case):
    assert_within_contract(case, "cpu")


@pytest.mark.slow
@settings(max_examples=3000, **HYPOTHESIS)
@given(cases())
def test_within_contract_at_length(case):
    """Rows of three numbers or more: with less, one call's float32 errors are mostly luck (docs/log.md)."""
    assume(len(case.query) > 2)
    assert_within_contract(case, "cpu")


def test_the_cases_are_of_use():
    """Guards the tests above: `to` keeps every field, so both sides of a comparison see the same numbers."""
    case = make_case(3, 5, norm=True)
    wide = dataclasses.asdict(case.to(torch.float64))
    assert all(wide[name] is not None for name in ("key_weight", "norm_weight", "d_output", "d_weights"))
