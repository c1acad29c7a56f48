"""Two-phase reads against the oracle: every result and gradient, layouts, extremes, memory, transforms."""

from __future__ import annotations

import dataclasses

import depth_cases
import pytest
import torch
from depth_cases import assert_within_contract, error_ratio, make_case
from test_saved_memory import saved_beside

from attention_residuals import depth_attention
from attention_residuals.depth_attention import lean
from attention_residuals.depth_attention.two_phase import SharedRead, attend_to_shared, merge_own_sources

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def two_phase_call(num_own):
    """A function with `depth_attention`'s signature whose last `num_own` sources come in phase 2.

    Another read shares phase 1, so that a mix-up of reads would show.
    """

    def call(
        sources, query, key_weight=None, *, norm_weight=None, return_weights=True, backend=None, **settings
    ):
        split = len(sources) - num_own
        both = {name: settings[name] for name in ("eps", "scale") if name in settings}
        other = torch.ones_like(query.detach())
        _, shared = attend_to_shared(sources[:split], [other, query], [None, key_weight], **both)
        return merge_own_sources(
            shared,
            sources[split:],
            query,
            key_weight,
            dtype=sources[0].dtype,
            norm_weight=norm_weight,
            return_weights=return_weights,
            **settings,
        )

    return call


@pytest.fixture(params=[0, 1, 3], ids=lambda k: f"{k} own")
def num_own(request, monkeypatch):
    """`depth_cases` compares backend "two_phase", with this many sources left to phase 2, like any other."""
    both, original = two_phase_call(request.param), depth_cases.depth_attention

    def call(*args, backend, **kwargs):
        return (both if backend == "two_phase" else original)(*args, backend=backend, **kwargs)

    monkeypatch.setattr(depth_cases, "depth_attention", call)
    return request.param


@pytest.fixture(params=["stacked", "chunks"])
def path(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
        monkeypatch.setattr(lean, "CHUNK_ELEMENTS", 200)
    return request.param


def group(n, width, count, *, dtype=torch.float64, tokens=(2, 3), leaf=True):
    """Shared sources, one own source per read but the first, queries, key weights."""
    made = [torch.randn(*tokens, width).to(dtype) for _ in range(n + count - 1)]
    made += [(torch.randn(width) + 0.5).to(dtype) for _ in range(2 * count)]
    made = [x.requires_grad_(leaf) for x in made]
    return made[:n], made[n : n + count - 1], made[n + count - 1 : -count], made[-count:]


def read_group(blocks, partials, queries, key_weights, **settings):
    shared = attend_to_shared(blocks, queries, key_weights)
    own = [[], *([partial] for partial in partials)]
    rows = zip(shared, own, queries, key_weights, strict=True)
    return [merge_own_sources(s, p, w, g, dtype=blocks[0].dtype, **settings) for s, p, w, g in rows]


# --- equal to the oracle ---


@pytest.mark.parametrize("width", [1, 7, 48, 65, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_every_width_and_dtype(width, dtype, norm, num_own, path):
    assert_within_contract(make_case(5, width, dtype=dtype, norm=norm), "two_phase")


@pytest.mark.parametrize("n", [1, 2, 8, 33, 130])
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_every_number_of_shared_sources(n, read_scale, num_own, path):
    case = make_case(n + num_own, 24, norm=True, read_scale=read_scale, eps=1e-3, scale=0.7)
    assert_within_contract(case, "two_phase")


@pytest.mark.parametrize("width", [1536, 7168])
@pytest.mark.parametrize("dtype", DTYPES)
def test_model_widths_and_key_weights_far_from_one(width, dtype, num_own):
    case = make_case(8, width, tokens=(3,), dtype=dtype, norm=True)
    case.key_weight = (torch.randn(width) * 30).to(dtype)
    assert_within_contract(case, "two_phase")


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_vectors_beside_16_bit_sources(dtype, num_own):
    assert_within_contract(make_case(6, 65, dtype=dtype, vector_dtype=torch.float32, norm=True), "two_phase")


@pytest.mark.parametrize(
    "n, width, tokens, draws", [(9, 65, (6,), 20), (33, 48, (6,), 20), (9, 1000, (6,), 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_plain_pytorch(n, width, tokens, draws, dtype, num_own, path):
    """No rounding step allowed. With 16-bit sources the vectors are float32, where a rounded o would show."""

    def make():
        return make_case(n, width, tokens=tokens, norm=True, dtype=dtype, vector_dtype=torch.float32)

    ratios = error_ratio(make, draws, "two_phase")
    assert max(ratios.values()) <= 2, ratios


def test_many_tokens_in_the_real_chunks(num_own):
    ratios = error_ratio(lambda: make_case(6, 127, tokens=(2103,), norm=True), 2, "two_phase")
    assert max(ratios.values()) <= 2, ratios


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "padded"])
def test_layouts(layout, num_own, path):
    case = make_case(5, 12, tokens=(4, 6), norm=True)
    views = {
        "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "expanded": lambda x: x[:1].expand(4, 6, 12),
        "padded": lambda x: torch.cat([x, x], -1)[..., :12],
    }
    case.sources = [views[layout](x) for x in case.sources]
    case.d_output = torch.ones(()).expand(4, 6, 12)  # what .sum().backward() sends
    assert_within_contract(case, "two_phase")


@pytest.mark.parametrize("which", ["d_output", "d_weights"])
def test_only_one_result_is_used(which, num_own):
    case = dataclasses.replace(make_case(5, 17), **{which: None})
    assert_within_contract(case, "two_phase")


@pytest.mark.parametrize("count", [1, 4])
def test_a_group_of_reads_shares_its_gradients(count, path):
    """Gradients of the shared sources are the sums over all reads."""
    inputs = group(5, 9, count)
    leaves = [x for kind in inputs for x in kind]
    blocks, partials, queries, key_weights = inputs
    found = [h for h, _ in read_group(*inputs)]
    own = [[], *([partial] for partial in partials)]
    expected = [
        depth_attention([*blocks, *p], w, g, backend="reference")
        for p, w, g in zip(own, queries, key_weights, strict=True)
    ]
    torch.testing.assert_close(found, expected)
    arriving = [torch.randn_like(h) for h in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, arriving), torch.autograd.grad(expected, leaves, arriving)
    )


def test_as_many_tokens_as_sources_and_reads():
    """Swapped axes would go unnoticed with other sizes (case O4)."""
    inputs = group(4, 4, 4, tokens=(4,), leaf=False)
    for s, (h, weights) in enumerate(read_group(*inputs, return_weights=True)):
        sources = [*inputs[0], *inputs[1][max(s - 1, 0) : s]]
        expected = depth_attention(
            sources, inputs[2][s], inputs[3][s], return_weights=True, backend="reference"
        )
        torch.testing.assert_close((h, weights), expected)


# --- edges ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_queries_at_the_sum_scale_give_the_plain_sum(dtype, num_own):
    for n in range(1, 50):
        sources = [(torch.randn(3, 16) * 2).to(dtype) for _ in range(n + num_own)]
        call = two_phase_call(num_own)
        h, _ = call(sources, torch.zeros(16), return_weights=False, read_scale="sum")
        exact = torch.stack(sources).double().sum(0)
        size = torch.stack(sources).double().abs().sum(0)
        allowed = torch.finfo(dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * size
        assert ((h.double() - exact).abs() <= allowed).all(), n


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_large_scores_and_values_stay_finite(size, num_own, path):
    case = make_case(6, 32, norm=True)
    case.sources = [x * size for x in case.sources]
    case.query = case.query * (1e4 / case.query.norm())
    for name, value in depth_cases.run(case, "two_phase").items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("where", ["shared", "own"])
def test_nan_stays_in_its_token(where, path):
    blocks, partials, queries, key_weights = group(4, 8, 3, tokens=(5,), leaf=False)
    clean = [h for h, _ in read_group(blocks, partials, queries, key_weights)]
    (blocks[1] if where == "shared" else partials[1])[2] = float("nan")
    found = [h for h, _ in read_group(blocks, partials, queries, key_weights)]
    others = [0, 1, 3, 4]
    for s, (h, expected) in enumerate(zip(found, clean, strict=True)):
        torch.testing.assert_close(h[others], expected[others])
        assert h[2].isnan().all() == (where == "shared" or s == 2)


def test_no_tokens():
    inputs = group(3, 8, 2, tokens=(0,))
    found = read_group(*inputs, return_weights=True)
    assert [(h.shape, weights.shape) for h, weights in found] == [((0, 8), (3, 0)), ((0, 8), (4, 0))]
    leaves = [x for kind in inputs for x in kind]
    gradients = torch.autograd.grad(sum(h.sum() for h, _ in found), leaves)
    assert all(not gradient.any() for gradient in gradients)


def test_one_shared_source():
    """o is the source itself, and its score still competes with the read's own source."""
    inputs = group(1, 8, 2)
    shared = attend_to_shared(inputs[0], inputs[2], inputs[3])
    assert all(torch.equal(read.output, inputs[0][0]) for read in shared)
    h, _ = read_group(*inputs)[1]
    expected = depth_attention([*inputs[0], *inputs[1]], inputs[2][1], inputs[3][1], backend="reference")
    torch.testing.assert_close(h, expected)


def test_a_read_whose_result_is_not_used():
    inputs = group(3, 8, 3)
    h, _ = read_group(*inputs)[1]
    gradients = torch.autograd.grad(h.sum(), [*inputs[0], *inputs[2]], allow_unused=True)
    expected = depth_attention([*inputs[0], inputs[1][0]], inputs[2][1], inputs[3][1], backend="reference")
    wanted = torch.autograd.grad(expected.sum(), inputs[0])
    torch.testing.assert_close(gradients[:3], wanted)
    assert not gradients[3].any()


def test_what_does_not_fit_is_refused():
    blocks, partials, queries, key_weights = group(3, 8, 2, leaf=False)
    shared = attend_to_shared(blocks, queries, key_weights)[1]
    with pytest.raises(ValueError, match="one key weight"):
        attend_to_shared(blocks, queries, key_weights[:1])
    with pytest.raises(ValueError, match="at least one query"):
        attend_to_shared(blocks, [], [])
    with pytest.raises(ValueError, match="at least one tensor"):
        attend_to_shared([], queries, key_weights)
    with pytest.raises(ValueError, match="query must have shape"):
        attend_to_shared(blocks, [queries[0][:4], queries[1]], key_weights)
    with pytest.raises(ValueError, match="shape"):
        merge_own_sources(shared, [partials[0][:1]], queries[1], dtype=torch.float64)
    with pytest.raises(TypeError, match="dtype"):
        merge_own_sources(shared, [partials[0].float()], queries[1], dtype=torch.float64)
    with pytest.raises(ValueError, match="read_scale"):
        merge_own_sources(shared, [], queries[1], dtype=torch.float64, read_scale="max")
    with pytest.raises(ValueError, match="norm_weight"):
        merge_own_sources(shared, [], queries[1], dtype=torch.float64, norm_weight=queries[0][:3])


# --- memory, derivatives, transforms ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_backward(dtype, path):
    """Phase 1: numbers per token beside the sources. Phase 2: o and lse too."""
    n, count, tokens, width = 8, 3, 40, 100
    blocks, partials, queries, key_weights = group(n, width, count, dtype=dtype, tokens=(tokens,))
    inputs = [*blocks, *partials, *queries, *key_weights]
    kept, shared = saved_beside(inputs, lambda: attend_to_shared(blocks, queries, key_weights))
    vectors = 4 * width * count * 3
    assert kept <= 4 * tokens * (2 * n * count + n) + vectors
    phase_1 = [x for read in shared for x in read]
    kept, _ = saved_beside(
        [*inputs, *phase_1],
        lambda: [
            merge_own_sources(s, p, w, g, dtype=dtype, norm_weight=w)
            for s, p, w, g in zip(shared, ([], *([p] for p in partials)), queries, key_weights, strict=True)
        ],
    )
    assert kept <= count * 4 * tokens * 5 + vectors


def test_gradcheck(path):
    blocks, partials, queries, key_weights = group(3, 4, 2, tokens=(2,))
    norm_weight = torch.randn(4).double().requires_grad_()

    def function(*x):
        results = read_group(x[:3], x[3:4], x[4:6], x[6:8], norm_weight=x[8], return_weights=True)
        return tuple(x for result in results for x in result)

    inputs = (*blocks, *partials, *queries, *key_weights, norm_weight)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_second_derivatives_of_sources_made_from_each_other():
    """A partial sum made from the embedding: paths between sources must not be counted twice."""
    x, query = torch.randn(3, 5).double().requires_grad_(), torch.randn(5).double().requires_grad_()
    results = []
    for call in (two_phase_call(1), depth_attention):
        backend = "reference" if call is depth_attention else None
        sources = [x, x.sin(), (x * x.sin()).cos()]
        h, _ = call(sources, query, return_weights=True, backend=backend)
        first = torch.autograd.grad(h.square().sum(), (x, query), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, query))
        results.append((*first, *second))
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["grad", "vmap", "gradient per sample"])
def test_function_transforms(name):
    def loss(call, sources, query):
        h, weights = call(list(sources), query, return_weights=True)
        return h.square().sum() + weights[0].square().sum()

    def transformed(call, backend):
        def function(*args):
            return loss(lambda *a, **kw: call(*a, backend=backend, **kw), *args)

        if name == "grad":
            return torch.func.grad(function, argnums=(0, 1))(sources, query)
        if name == "gradient per sample":
            function = torch.func.grad(function, argnums=(0, 1))
        return torch.func.vmap(function, in_dims=(1, None))(sources, query)

    sources, query = torch.randn(4, 2, 3, 6).double(), torch.randn(6).double()
    torch.testing.assert_close(
        transformed(two_phase_call(2), None), transformed(depth_attention, "reference")
    )


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_equals_eager(compiler, dtype):
    torch._dynamo.reset()
    inputs = group(3, 24, 3, dtype=dtype)
    leaves = [x for kind in inputs for x in kind]
    norm_weight = torch.ones(24, requires_grad=True)

    def function(blocks, partials, queries, key_weights):
        results = read_group(
            blocks, partials, queries, key_weights, norm_weight=norm_weight, return_weights=True
        )
        return [x for result in results for x in result]

    found = torch.compile(function, backend=compiler, fullgraph=True)(*inputs)
    expected = function(*inputs)
    arriving = [torch.randn_like(x) for x in expected]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = torch.autograd.grad(found, [*leaves, norm_weight], arriving)
    wanted = torch.autograd.grad(expected, [*leaves, norm_weight], arriving)
    torch.testing.assert_close(gradients, wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    inputs = group(3, 24, 2, dtype=dtype)
    leaves = [x for kind in inputs for x in kind]

    def everything():
        found = read_group(*inputs, return_weights=True)
        return [
            *(x for pair in found for x in pair),
            *torch.autograd.grad(sum(h.sum() for h, _ in found), leaves),
        ]

    expected = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = everything()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_phase_1_is_as_wide_as_its_arithmetic():
    blocks, _, queries, key_weights = group(3, 8, 2, dtype=torch.bfloat16, leaf=False)
    for read in attend_to_shared(blocks, queries, key_weights):
        assert isinstance(read, SharedRead)
        assert {x.dtype for x in read} == {torch.float32}
        assert [tuple(x.shape) for x in read] == [(2, 3, 8), (2, 3), (3, 2, 3)]
