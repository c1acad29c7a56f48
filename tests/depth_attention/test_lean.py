"""Every result and gradient of `lean` against the float64 reference: sizes, layouts, dtypes, extremes."""

import itertools

import pytest
import torch
from depth_cases import Case, assert_within_contract, error_ratio, make_case, poisoned_memory, run

from attention_residuals import depth_attention
from attention_residuals.depth_attention import lean

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [*range(1, 18), 33, 49, 65, 130]
WIDTHS = [1, 7, 48, 65, 127, 1000]
TOKENS = [(2, 3), (7,), (1, 1), (), (5, 1, 2)]
SETTINGS = [
    {},
    {"norm": True},
    {"read_scale": "sum", "weights": False},
    {"norm": True, "read_scale": "sum", "scale": 0.5},
    {"key_weight": False, "eps": 1e-2},
    {"key_weight": False, "norm": True, "norm_eps": 1e-2, "weights": False},
]


def list_of_rows(monkeypatch, chunk_elements=lean.CHUNK_ELEMENTS):
    """Lets small inputs take the path of large ones; `chunk_elements` says how soon a chunk is full."""
    monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
    monkeypatch.setattr(lean, "CHUNK_ELEMENTS", chunk_elements)


@pytest.fixture(params=["stacked", "rows", "chunks"])
def path(request, monkeypatch):
    """The three ways through `lean`."""
    if request.param != "stacked":
        list_of_rows(monkeypatch, *([1] if request.param == "chunks" else []))
    return request.param


def combinations() -> list:
    """Each count in each dtype, with widths, settings and token shapes going round beside them."""
    rounds = zip(
        itertools.product(COUNTS, DTYPES),
        itertools.cycle(WIDTHS),
        itertools.cycle(TOKENS),
        itertools.cycle(SETTINGS[::-1] + SETTINGS[1:]),
        strict=False,
    )
    return [
        pytest.param(n, width, tokens, dtype, settings, id=f"N{n}-D{width}-{tokens}-{str(dtype)[6:]}")
        for (n, dtype), width, tokens, settings in rounds
    ]


@pytest.mark.parametrize("n, width, tokens, dtype, settings", combinations())
def test_every_gradient(n, width, tokens, dtype, settings, path):
    assert_within_contract(make_case(n, width, tokens=tokens, dtype=dtype, **settings))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_width_with_every_setting(width, settings, path):
    assert_within_contract(make_case(5, width, tokens=(4,), **settings))


@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("width", [1536, 2560, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_widths(n, width, dtype, path):
    assert_within_contract(make_case(n, width, tokens=(3,), dtype=dtype, norm=True))


@pytest.mark.parametrize(
    "n, width, tokens, draws",
    [
        (5, 3, (40,), 12),
        (9, 65, (6,), 20),
        (33, 48, (6,), 20),
        (9, 1000, (6,), 32),
        (9, 7168, (6,), 32),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_error_is_at_most_twice_that_of_plain_pytorch(n, width, tokens, draws, norm, path):
    """No rounding step allowed: the sums over the width and over tokens must be as careful as torch.sum."""
    ratios = error_ratio(lambda: make_case(n, width, tokens=tokens, norm=norm), draws)
    assert max(ratios.values()) <= 2, ratios


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width, tokens", [(127, 2103), (32, 16000)])
def test_error_over_many_tokens_is_at_most_twice_that_of_plain_pytorch(width, tokens, norm):
    """In the chunks that real sizes have; the vectors' gradients are sums over 8412 and 64000 rows."""
    ratios = error_ratio(lambda: make_case(4, width, tokens=(tokens,), norm=norm), 4)
    assert max(ratios.values()) <= 2, ratios


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_many_tokens_in_the_real_chunks(dtype, norm):
    case = make_case(4, 127, tokens=(3, 701), dtype=dtype, norm=norm)
    assert case.sources[0].numel() > 2 * max(lean.CHUNK_ELEMENTS, lean.STACK_ELEMENTS)
    assert_within_contract(case)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1536, 2560, 7168])
@pytest.mark.parametrize("dtype", DTYPES)
def test_model_widths_with_many_tokens(width, dtype):
    assert_within_contract(make_case(9, width, tokens=(2, 65), dtype=dtype, norm=True, read_scale="sum"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_key_weight_far_from_one(dtype, read_scale):
    """w*g is multiplied after the upcast: a product in bfloat16 would lose 8 of its 16 bits (O3)."""
    case = make_case(8, 7168, tokens=(2,), dtype=dtype, read_scale=read_scale)
    case.key_weight = (torch.randn(7168) * 30).to(dtype)
    assert_within_contract(case)


# --- which gradients are asked for, and how they arrive ---


@pytest.mark.parametrize("which", ["d_output", "d_weights"])
@pytest.mark.parametrize("norm", [False, True])
def test_only_one_result_is_used(which, norm, path):
    """The weights' gradient doesn't pass the output norm, and the other way round."""
    case = make_case(5, 17, norm=norm)
    setattr(case, which, None)
    if which == "d_weights":
        assert_within_contract(case)
        return
    # Without an arriving d_output the norm weight has no gradient in plain autograd.
    exact, found = [], []
    for backend, results, dtype in (("reference", exact, torch.float64), ("lean", found, torch.float32)):
        cast = case.to(dtype)
        leaves = [x.requires_grad_() for x in (*cast.sources, cast.query, cast.key_weight)]
        with poisoned_memory():
            _, weights = depth_attention(
                leaves[:5],
                *leaves[5:],
                norm_weight=cast.norm_weight,
                return_weights=True,
                backend=backend,
            )
            results.extend(torch.autograd.grad(weights, leaves, cast.d_weights))
    for want, got in zip(exact, found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", range(6))
def test_each_input_alone(wanted, path):
    """What needs no gradient gets none, and the others stay right without it."""
    case = make_case(3, 17, norm=True).to(torch.float64)
    inputs = [*case.sources, case.query, case.key_weight, case.norm_weight]

    def gradient(backend):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        out = depth_attention(leaves[:3], leaves[3], leaves[4], norm_weight=leaves[5], backend=backend)
        out.backward(case.d_output)
        assert all((leaf.grad is not None) == (i == wanted) for i, leaf in enumerate(leaves))
        return leaves[wanted].grad

    torch.testing.assert_close(gradient("lean"), gradient("reference"))


ARRIVING = {
    "stride 0": lambda g: g.new_full((), 0.7).expand(g.shape),
    "expanded tokens": lambda g: g[:1, :1].expand(g.shape),
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda g: g.repeat_interleave(2, -1)[..., ::2],
    "flipped tokens": lambda g: g.flip(0).as_strided(g.shape, g.stride()),
}


@pytest.mark.parametrize("layout", ARRIVING)
def test_any_gradient_strides(layout, path):
    case = make_case(4, 9, tokens=(3, 2), norm=True)
    case.d_output = ARRIVING[layout](case.d_output)
    case.d_weights = case.d_weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert_within_contract(case)


def test_sum_backward_sends_stride_zero(path):
    case = make_case(4, 9)
    results = {}
    for backend in ("reference", "lean"):
        leaves = [x.double().requires_grad_() for x in (*case.sources, case.query)]
        depth_attention(leaves[:4], leaves[4], backend=backend).sum().backward()
        results[backend] = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(results["lean"], results["reference"])


# --- layouts of the sources ---

LAYOUTS = {
    "strided": lambda x: x.repeat_interleave(3, -1)[..., ::3],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "width first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "all expanded": lambda x: x.reshape(-1)[:1].expand(x.shape),
    "padded rows": lambda x: torch.nn.functional.pad(x, (3, 5), value=float("nan"))[..., 3:-5],
    "offset": lambda x: torch.cat([torch.full_like(x[:1], float("nan")), x])[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_source_layouts(layout, dtype, path):
    case = make_case(4, 13, tokens=(3, 5), dtype=dtype, norm=True)
    case.sources = [LAYOUTS[layout](x) if i % 2 == 0 else x for i, x in enumerate(case.sources)]
    assert_within_contract(case)


def test_packed_equals_listed(path):
    case = make_case(5, 13, norm=True)
    packed = torch.stack(case.sources).requires_grad_()
    output = depth_attention(packed, case.query, norm_weight=case.norm_weight, backend="lean")
    listed = [x.requires_grad_() for x in case.sources]
    again = depth_attention(listed, case.query, norm_weight=case.norm_weight, backend="lean")
    output.backward(case.d_output)
    again.backward(case.d_output)
    # not to the bit, since BLAS may add in another order where a row begins at another address
    torch.testing.assert_close(output, again)
    torch.testing.assert_close(packed.grad, torch.stack([x.grad for x in listed]))


def test_one_tensor_as_several_sources(path):
    source = torch.randn(3, 5, dtype=torch.float64)
    query = torch.randn(5, dtype=torch.float64)
    results = []
    for backend in ("reference", "lean"):
        leaf = source.clone().requires_grad_()
        depth_attention([leaf, leaf.sin(), leaf], query, backend=backend).square().sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


# --- chunks ---


@pytest.mark.parametrize("chunk_elements", [1, 26, 65, 10**6])
@pytest.mark.parametrize("norm", [False, True])
def test_chunks_change_nothing(chunk_elements, norm, monkeypatch):
    """One token, two tokens, five tokens a chunk (which doesn't divide 12), and all of them."""
    case = make_case(4, 13, tokens=(3, 4), norm=norm).to(torch.float64)
    whole = run(case, "lean")
    list_of_rows(monkeypatch, chunk_elements)
    with poisoned_memory():
        pieces = run(case, "lean")
    for name, want in whole.items():
        torch.testing.assert_close(pieces[name], want, rtol=1e-12, atol=1e-12, msg=name)


def test_results_can_be_modified_in_place(path):
    case = make_case(3, 5, tokens=(4, 2))
    query = case.query.requires_grad_()
    output, weights = depth_attention(case.sources, query, return_weights=True, backend="lean")
    (output + weights.sum(0).unsqueeze(-1)).sum().backward()
    expected, query.grad = query.grad, None
    output, weights = depth_attention(case.sources, query, return_weights=True, backend="lean")
    output += weights.sum(0).unsqueeze(-1)
    output.sum().backward()
    assert torch.equal(query.grad, expected)


# --- dtypes ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vector_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mixed_dtypes(dtype, vector_dtype, path):
    """`run` checks that each gradient arrives in its own input's dtype (O7)."""
    case = make_case(5, 33, dtype=dtype, vector_dtype=vector_dtype, norm=True)
    assert_within_contract(case)
    assert run(case, "lean")["output"].dtype == dtype


@pytest.mark.parametrize("backend", ["lean", "reference"])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(backend, autocast, path):
    case = make_case(5, 33, norm=True)
    outside = run(case, backend)
    with torch.autocast("cpu", dtype=autocast):
        inside = run(case, backend)
    for name, want in outside.items():
        assert torch.equal(inside[name], want), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_product_is_made_under_autocast(dtype, path, monkeypatch):
    """On CPU autocast leaves these products alone, on CUDA it would round them: so it must be off."""
    seen = []

    def watched(function):
        def call(*args):
            seen.append(torch.is_autocast_enabled("cpu"))
            return function(*args)

        return call

    for name in ("read", "gradients"):
        monkeypatch.setattr(lean, name, watched(getattr(lean, name)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(make_case(3, 7, dtype=dtype), "lean")
        assert torch.is_autocast_enabled("cpu")
    assert len(seen) >= 2
    assert not any(seen)


# --- extremes ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("score", [1.0, 1e4])
def test_large_scores_and_values_stay_finite(dtype, size, score, path):
    case = make_case(6, 64, dtype=dtype, key_weight=False)
    case.sources = [(size * torch.randn(2, 3, 64)).to(dtype) for _ in range(6)]
    case.query = torch.randn(64) * score / 8
    case.d_output = case.d_output / 64  # the true gradients stay within float16
    case.d_weights = case.d_weights / 64
    assert_within_contract(case)


def test_float16_up_to_its_largest_values(path):
    case = make_case(6, 64, dtype=torch.float16, vector_dtype=torch.float32)
    case.sources = [x.sign() * 6e4 for x in case.sources]
    assert_within_contract(case)


@pytest.mark.parametrize("value", [3e38, float("inf"), float("nan")])
def test_one_source_is_returned_whatever_its_score(value, path):
    """The score of such a token overflows; its weight is one all the same."""
    source = torch.ones(3, 4)
    source[1, 2] = value
    output, weights = depth_attention([source], torch.ones(4), return_weights=True, backend="lean")
    assert torch.equal(output.nan_to_num(nan=7.0), source.nan_to_num(nan=7.0))
    assert (weights == 1).all()


@pytest.mark.parametrize("where", ["source", "gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_stays_alone(where, bad, path):
    case = make_case(4, 9, tokens=(6,), norm=True)
    clean = run(case, "lean")
    target = case.sources[1] if where == "source" else case.d_output
    target[2, 3] = bad
    spoiled = run(case, "lean")
    others = [0, 1, 3, 4, 5]
    for name, want in clean.items():
        if name in ("d query", "d key_weight", "d norm_weight"):
            continue  # sums over tokens
        tokens_first = want.movedim(0, 1) if name == "weights" else want
        now = spoiled[name].movedim(0, 1) if name == "weights" else spoiled[name]
        assert torch.equal(now[others], tokens_first[others]), name
    assert spoiled["d source 0"][2].isnan().any()


def test_case_is_made_of_different_weights():
    """Guards the tests above: with all weights equal, half of the backward would go unseen."""
    case: Case = make_case(5, 48)
    weights = run(case, "reference")["weights"]
    assert (weights.max(0).values > 1.5 * weights.min(0).values).all()
