"""Sources and gradients in any layout in memory, and what the compiled kernel keeps of them."""

import pytest
import torch
from depth_cases import assert_within_contract, make_case, run
from test_lean import ARRIVING, LAYOUTS
from test_saved_memory import call, saved_beside

from attention_residuals import depth_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 13, 65]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("every", [1, 2])
def test_source_layouts(layout, dtype, width, every, kernel):
    case = make_case(4, width, tokens=(3, 5), dtype=dtype, norm=True)
    case.sources = [LAYOUTS[layout](x) if i % every == 0 else x for i, x in enumerate(case.sources)]
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_many_tokens(layout, threads, kernel):
    """Beyond what one thread takes."""
    threads(2)
    case = make_case(3, 65, tokens=(41, 23), norm=True)
    case.sources = [LAYOUTS[layout](x) for x in case.sources]
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("layout", ARRIVING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_any_gradient_strides(layout, dtype, norm, kernel):
    case = make_case(4, 9, tokens=(3, 2), dtype=dtype, norm=norm)
    case.d_output = ARRIVING[layout](case.d_output)
    case.d_weights = case.d_weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_backward_sends_stride_zero(dtype, kernel):
    case = make_case(4, 9, dtype=dtype, vector_dtype=torch.float32)
    results = {}
    for backend in ("reference", "cpu"):
        leaves = [x.clone().requires_grad_() for x in (*case.sources, case.query)]
        output, weights = depth_attention(leaves[:4], leaves[4], return_weights=True, backend=backend)
        (output.sum() + weights.sum()).backward()
        results[backend] = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(results["cpu"], results["reference"])


@pytest.mark.parametrize("vector", ["query", "key_weight", "norm_weight"])
@pytest.mark.parametrize("layout", ["strided", "all expanded", "offset"])
def test_vector_layouts(vector, layout, kernel):
    case = make_case(4, 13, norm=True)
    setattr(case, vector, LAYOUTS[layout](getattr(case, vector).unsqueeze(0)).reshape_as(case.query))
    if layout == "strided":
        setattr(case, vector, getattr(case, vector).repeat_interleave(2)[::2])
    assert_within_contract(case, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 13), (2, 3, 13), (13,)])
def test_packed_equals_listed(dtype, shape, kernel):
    packed = torch.randn(5, *shape).to(dtype).requires_grad_()
    query, arriving = torch.randn(13), torch.randn(shape).to(dtype)
    output = depth_attention(packed, query, norm_weight=torch.ones(13), backend="cpu")
    listed = [x.detach().clone().requires_grad_() for x in packed]
    again = depth_attention(listed, query, norm_weight=torch.ones(13), backend="cpu")
    output.backward(arriving)
    again.backward(arriving)
    assert torch.equal(output, again)
    assert torch.equal(packed.grad, torch.stack([x.grad for x in listed]))


def test_packed_with_the_sources_inside(kernel):
    """[tokens, N, D] in memory: rows that are padded by each other."""
    base = torch.randn(7, 5, 13)
    case = make_case(5, 13, tokens=(7,))
    case.sources = list(base.transpose(0, 1))
    apart = make_case(5, 13, tokens=(7,))
    apart.sources = [x.contiguous() for x in case.sources]
    apart.query, apart.key_weight = case.query, case.key_weight
    apart.d_output, apart.d_weights = case.d_output, case.d_weights
    assert_within_contract(case, "cpu")
    for name, want in run(apart, "cpu").items():
        assert torch.equal(run(case, "cpu")[name], want), name


def test_one_tensor_as_several_sources(kernel):
    source, query = torch.randn(3, 5), torch.randn(5)
    results = []
    for backend in ("reference", "cpu"):
        leaf = source.clone().requires_grad_()
        depth_attention([leaf, leaf.sin(), leaf], query, backend=backend).square().sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("width", [1, 6])
def test_lazily_negated_sources(width, kernel):
    """The imaginary part of a conjugate is a view whose memory holds the opposite sign."""
    made = torch.randn(3, 4, width, dtype=torch.complex64)
    sources = made.conj().imag
    assert sources.is_neg()
    query = torch.randn(width)
    expected = depth_attention(sources, query, backend="reference")
    torch.testing.assert_close(depth_attention(sources, query, backend="cpu"), expected)


# --- what is kept ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
def test_a_few_numbers_a_token_are_saved(packed, dtype, norm, kernel):
    n, tokens, width = 8, 40, 100
    sources = torch.randn(n, 2, tokens // 2, width).to(dtype)
    sources = sources.requires_grad_() if packed else [x.clone().requires_grad_() for x in sources]
    vectors = [torch.randn(width, requires_grad=True) for _ in range(3)]
    if not norm:
        vectors[2] = None
    inputs = [*([sources] if packed else sources), *(v for v in vectors if v is not None)]
    kept, _ = saved_beside(inputs, lambda: call(sources, vectors, "cpu"))
    assert 4 * tokens * 3 * n <= kept <= 4 * tokens * (3 * n + 1)


@pytest.mark.parametrize("layout", ["transposed", "strided", "padded rows", "expanded"])
def test_no_contiguous_copy_is_kept(layout, kernel):
    bases = [torch.randn(4, 10, 50) for _ in range(6)]
    listed = [LAYOUTS[layout](x).requires_grad_() for x in bases]
    vectors = [torch.randn(50, requires_grad=True), None, None]
    kept, _ = saved_beside([*listed, vectors[0]], lambda: call(listed, vectors, "cpu"))
    assert kept <= 4 * 40 * (3 * 6 + 1)


def test_nothing_is_kept_without_gradients(kernel):
    sources = [torch.randn(3, 8) for _ in range(4)]
    kept, (output, weights) = saved_beside([], lambda: call(sources, [torch.randn(8), None, None], "cpu"))
    assert kept == 0
    assert not output.requires_grad
    assert not weights.requires_grad


def test_the_graph_does_not_keep_the_output_alive(kernel):
    sources = [torch.randn(3, 8, requires_grad=True) for _ in range(4)]
    output = call(sources, [torch.ones(8), None, torch.ones(8)], "cpu")[0]
    with torch.no_grad():
        output.fill_(float("nan"))
    output.backward(torch.ones(3, 8))
    assert all(x.grad.isfinite().all() for x in sources)


def test_a_source_changed_in_place_before_backward_raises(kernel):
    sources = [torch.randn(3, 8, requires_grad=True) for _ in range(4)]
    output = call(sources, [torch.ones(8), None, None], "cpu")[0]
    with torch.no_grad():
        sources[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
