"""The call without gradients that leaves every check to the kernel's own code, and what it hands back."""

import statistics
import sys
import time

import pytest
import torch
from torch import nn

from attention_residuals import depth_attention
from attention_residuals.depth_attention.cpu.binding import read_plain_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain(sources, query, key_weight=None, norm_weight=None, read_scale="mean", norm_offset=0.0):
    with torch.no_grad():
        return read_plain_tensors(
            sources, query, key_weight, norm_weight, 1e-6, 1.0, 1e-6, norm_offset, read_scale
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 37), (7,), (0, 9), (2, 1000), (4, 1)])
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_it_is_the_same_read_to_the_bit(kernel, dtype, vector_dtype, shape, read_scale):
    """As through the way that keeps scalars for a backward."""
    for count in (1, 2, 9):
        sources = [torch.randn(shape).to(dtype) for _ in range(count)]
        query, key, norm = (torch.randn(shape[-1]).to(vector_dtype) for _ in range(3))
        for vectors in ((query,), (query, key), (query, None, norm), (query, key, norm)):
            h = plain(sources, *vectors, **{"read_scale": read_scale})
            named = dict(zip(("key_weight", "norm_weight"), vectors[1:], strict=False))
            expected, _ = depth_attention(
                sources, query, **named, read_scale=read_scale, return_weights=True, backend="cpu"
            )
            assert h.dtype == dtype and h.shape == shape and h.is_contiguous()
            assert torch.equal(h, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector_dtype", DTYPES)
def test_the_norms_offset_is_added_in_float32(kernel, dtype, vector_dtype):
    """To the bit as adding it first; the weight itself is left as it was."""
    sources = [torch.randn(2, 37).to(dtype) for _ in range(3)]
    query, norm = torch.randn(37), torch.randn(37).to(vector_dtype)
    before = norm.clone()
    h = plain(sources, query, norm_weight=norm, norm_offset=1.0)
    assert torch.equal(h, plain(sources, query, norm_weight=1.0 + norm.float()))
    assert torch.equal(norm, before)


def test_parameters_tuples_and_axes_of_length_one_are_plain(kernel):
    sources = tuple(nn.Parameter(torch.randn(2, 8)) for _ in range(3))
    query = nn.Parameter(torch.randn(8))
    expected = depth_attention(list(sources), query, backend="reference")
    assert torch.allclose(plain(sources, query), expected, atol=1e-6)
    strided = [torch.randn(4, 8)[::4] for _ in range(3)]  # one row; its stride says 32
    assert torch.allclose(
        plain(strided, query), depth_attention(strided, query, backend="reference"), atol=1e-6
    )


ODD = {
    "transposed": lambda s: [x.t().contiguous().t() for x in s],
    "padded rows": lambda s: [torch.cat([x, x], -1)[:, :8] for x in s],
    "expanded": lambda s: [x[:1].expand(4, 8) for x in s],
    "lazily negated": lambda s: [torch._neg_view(x) for x in s],
    "packed": torch.stack,
    "float64": lambda s: [x.double() for x in s],
    "integers": lambda s: [x.long() for x in s],
    "different shapes": lambda s: [s[0], s[1][:2]],
    "different ranks": lambda s: [s[0], s[1][None]],
    "different dtypes": lambda s: [s[0], s[1].bfloat16()],
    "not a tensor": lambda s: [s[0], None],
    "a subclass": lambda s: [x.as_subclass(type("Mine", (torch.Tensor,), {})) for x in s],
    "meta": lambda s: [x.to("meta") for x in s],
    "sparse": lambda s: [x.to_sparse() for x in s],
    "none": lambda s: [],
    "no axis": lambda s: [torch.tensor(1.0)] * 2,
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_plain_is_handed_back(kernel, name):
    """None and no error left behind; `depth_attention` then copies, or says what is wrong."""
    sources = ODD[name]([torch.randn(4, 8), torch.randn(4, 8)])
    assert plain(sources, torch.randn(8)) is None


UNFIT = {
    "width": torch.randn(7),
    "rank": torch.randn(1, 8),
    "strided": torch.randn(16)[::2],
    "float64": torch.randn(8).double(),
    "integers": torch.ones(8).long(),
    "number": 1.0,
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", UNFIT)
def test_vectors_that_do_not_fit_are_handed_back(kernel, which, name):
    vectors = [torch.randn(8), torch.randn(8), torch.randn(8)]
    vectors[which] = UNFIT[name]
    assert plain([torch.randn(4, 8), torch.randn(4, 8)], *vectors) is None
    assert plain([torch.randn(4, 8)], None) is None


def test_odd_layouts_give_the_same_without_gradients(kernel):
    for name in ("transposed", "padded rows", "expanded", "lazily negated", "packed"):
        sources, query = ODD[name]([torch.randn(4, 8), torch.randn(4, 8)]), torch.randn(8)
        with torch.no_grad():
            found = depth_attention(sources, query)
        assert torch.allclose(found, depth_attention(sources, query, backend="reference"), atol=1e-6), name


def test_errors_are_the_same_without_gradients(kernel):
    with torch.no_grad():
        with pytest.raises(ValueError, match="one shape"):
            depth_attention([torch.ones(2, 8), torch.ones(3, 8)], torch.ones(8))
        with pytest.raises(TypeError, match="one dtype"):
            depth_attention([torch.ones(2, 8), torch.ones(2, 8).bfloat16()], torch.ones(8))
        with pytest.raises(TypeError, match="query must be a tensor"):
            depth_attention([torch.ones(2, 8)], None)


def test_transforms_do_not_take_it(kernel):
    sources, query = torch.randn(5, 3, 4, 8), torch.randn(8)
    with torch.no_grad():
        mapped = torch.vmap(lambda s: depth_attention(list(s.unbind(0)), query), in_dims=1)(sources)
    assert torch.allclose(mapped, depth_attention(sources, query), atol=1e-6)


def test_results_do_not_share_memory_and_nothing_leaks(kernel):
    sources, query = [torch.randn(1, 16) for _ in range(3)], torch.randn(16)
    first, second = plain(sources, query), plain(sources, query)
    first.zero_()
    assert second.abs().sum() > 0 and sources[0].abs().sum() > 0
    before = [sys.getrefcount(x) for x in (*sources, query, None)]
    for _ in range(1000):
        plain(sources, query, query, query)
        plain([sources[0], None], query)
    after = [sys.getrefcount(x) for x in (*sources, query, None)]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 100


def test_weights_far_below_the_top_cost_no_more(kernel, instruction_set):
    """Their products are denormal numbers, which processors multiply up to a hundred times slower."""
    sources = [torch.randn(128, 512) for _ in range(9)]
    queries = torch.zeros(512), torch.randn(512) * 1.5
    times = ([], [])
    for i in range(40):
        for which in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            plain(sources, queries[which])
            times[which].append(time.perf_counter() - start)
    _, alpha = depth_attention(sources, queries[1], return_weights=True)
    assert ((alpha < 1e-35) & (alpha > 0)).sum() > 0 or (alpha == 0).sum() > 0
    flat, sharp = map(statistics.median, times)
    assert sharp < 1.6 * flat, (flat, sharp)
