"""A recorded read: the same output and depth weights, and the norms of its mixture."""

import pytest
import torch
from depth_cases import FLOAT32_STEP, make_case, poisoned_memory

from attention_residuals import DepthRead, depth_attention
from attention_residuals.depth_attention.recorded import (
    ReadMemory,
    ReadRecord,
    depth_attention_recorded,
    difference_norms,
)
from attention_residuals.variant import ReadVariant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# the last one has more rows than the kernel mixes at once
SHAPES = ((1, 7, (2, 3)), (2, 1, (5,)), (3, 48, ()), (9, 65, (2, 3)), (4, 1000, (0,)), (40, 7168, (2,)))


def recorded(case, backend, *, memory=None, norm_offset=0.0, read_scale="mean", norm_eps=1e-5):
    return depth_attention_recorded(
        case.sources,
        case.query,
        case.key_weight,
        case.norm_weight,
        eps=1e-6,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        read_scale=read_scale,
        backend=backend,
        memory=memory,
    )


def unrecorded(case, backend, **settings):
    return depth_attention(
        case.sources,
        case.query,
        case.key_weight,
        norm_weight=case.norm_weight,
        norm_eps=1e-5,
        return_weights=True,
        backend=backend,
        **settings,
    )


def memory_for(case) -> ReadMemory:
    shape = case.sources[0].shape[:-1]
    return ReadMemory(torch.empty(len(case.sources), *shape), torch.empty(shape))


def assert_norms(found, rows, dtype=torch.float32) -> None:
    """Against rows in float64: float32's error of a sum over the width, or rows rounded to `dtype`."""
    want = rows.double().norm(dim=-1)
    step = max(4 * FLOAT32_STEP, torch.finfo(dtype).eps if dtype is not torch.float32 else 0)
    assert found.dtype == torch.float32 and found.shape == want.shape and not found.requires_grad
    assert ((found - want).abs() <= step * want).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width", "tokens"), SHAPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_the_kernel_makes_all_of_it_in_the_pass_of_the_read(
    instruction_set, n, width, tokens, dtype, norm, read_scale
):
    """Output and depth weights to the bit; norms of the mixture that is not rounded yet."""
    case = make_case(n, width, tokens=tokens, dtype=dtype, norm=norm, vector_dtype=torch.float32)
    settings = {"read_scale": read_scale, "norm_offset": 1.0}
    y, weights = unrecorded(case, "cpu", **settings)
    wide = case.to(torch.float64)
    wide.norm_weight = None
    mixture, _ = unrecorded(wide, "reference", read_scale=read_scale)
    with torch.no_grad(), poisoned_memory():
        plain = depth_attention(
            case.sources,
            case.query,
            case.key_weight,
            norm_weight=case.norm_weight,
            norm_eps=1e-5,
            **settings,
        )
        memory = memory_for(case)
        for found in (recorded(case, "cpu", **settings), recorded(case, "auto", memory=memory, **settings)):
            assert torch.equal(found[0], y) and torch.equal(found[0], plain)
            assert torch.equal(found[1], weights)
            assert_norms(found[2], mixture)
        assert found[1] is memory.weights and found[2] is memory.norms


@pytest.mark.parametrize("backend", ["cpu", "lean", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
def test_every_backend_hands_out_the_same(kernel, backend, dtype, norm):
    """Where the norm is made after the mixture, it sees the mixture rounded."""
    case = make_case(5, 65, dtype=dtype, norm=norm)
    exact = recorded(case.to(torch.float64), "reference")
    found = recorded(case, backend, memory=memory_for(case))
    torch.testing.assert_close(found[1], exact[1].float(), rtol=1e-5, atol=1e-6)
    step = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0], exact[0].to(dtype), rtol=step, atol=step)
    assert_norms(found[2], recorded_mixture(case), dtype if backend != "cpu" else torch.float32)


def recorded_mixture(case):
    wide = case.to(torch.float64)
    wide.norm_weight = None
    return unrecorded(wide, "reference")[0]


def test_memory_that_does_not_fit_is_left_alone(kernel):
    """As where a hook takes a source away from a read of a model."""
    case, other = make_case(3, 8, norm=True), make_case(4, 8, norm=True)
    memory = memory_for(other)
    for tensor in memory:
        tensor.zero_()
    with torch.no_grad():
        _, weights, norms = recorded(case, "cpu", memory=memory)
    assert weights.shape == (3, 2, 3) and norms.shape == (2, 3)
    assert memory.weights.count_nonzero() == 0 and memory.norms.count_nonzero() == 0


@pytest.mark.parametrize("backend", ["cpu", "lean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_a_read_that_is_not_recorded(kernel, backend, dtype):
    case = make_case(4, 33, dtype=dtype, norm=True)
    found = []
    for read in (recorded, unrecorded):
        leaves = [x.clone().requires_grad_() for x in (case.query, case.key_weight, case.norm_weight)]
        sources = [x.clone().requires_grad_() for x in case.sources]
        case.query, case.key_weight, case.norm_weight, case.sources = *leaves, sources
        y, weights, *_ = read(case, backend)
        grads = torch.autograd.grad([y, weights], [*leaves, *sources], [case.d_output, case.d_weights])
        found.append(grads)
    for ours, theirs in zip(*found, strict=True):
        if backend == "cpu":
            assert torch.equal(ours, theirs)
        else:  # the mixture is rounded, and its norm is a call of its own
            torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("fields", [{"heads": 2}, {"weights": "uniform"}])
def test_a_read_of_a_variant_hands_out_norms_too(fields):
    read = DepthRead(16, variant=ReadVariant(**fields))
    torch.nn.init.normal_(read.query) if read.query is not None else None
    sources, weight, record = [torch.randn(2, 3, 16) for _ in range(4)], torch.randn(16), ReadRecord()
    y, weights = read(sources, weight, 1e-5, 1.0, return_weights=True, record=record)
    expected, expected_weights = read(sources, weight, 1e-5, 1.0, return_weights=True)
    torch.testing.assert_close(y, expected)
    assert torch.equal(weights, expected_weights)
    assert_norms(record.norms, read(sources).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 7), (5, 48), (1000,), (0, 4), (3, 1), (2, 65)])
def test_norms_of_a_difference(instruction_set, dtype, shape):
    after, before = (torch.randn(shape).to(dtype) for _ in range(2))
    want = after.double() - before.double()
    with poisoned_memory():
        memory = torch.empty(shape[:-1])
        assert_norms(difference_norms(after, before), want)
        assert difference_norms(after, before, memory) is memory
    assert_norms(memory, want)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_norms_of_a_difference_of_tensors_that_are_not_plain(dtype):
    wide = torch.randn(6, 8).to(dtype)
    after, before = wide[:, ::2], torch.randn(4, 6).to(dtype).t()
    assert_norms(difference_norms(after, before), after.double() - before.double(), dtype)
    mapped = torch.vmap(difference_norms)(after, before)
    assert_norms(mapped, after.double() - before.double(), dtype)


def test_norms_of_a_large_difference_on_several_threads(kernel, threads):
    threads(2)
    after, before = torch.randn(300, 257), torch.randn(300, 257)
    assert_norms(difference_norms(after, before), after.double() - before.double())
