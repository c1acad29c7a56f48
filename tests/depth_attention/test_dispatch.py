import pytest
import torch

from attention_residuals import DepthRead, available_backends, depth_attention
from attention_residuals.depth_attention import dispatch

SOURCES = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
QUERY = torch.zeros(4)


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], ValueError, "at least one tensor, got none; the embedding is the first source"),
        ((), ValueError, "at least one tensor"),
        (torch.ones(0, 3, 4), ValueError, "at least one tensor"),
        (torch.ones(4), ValueError, r"packed sources must have at least two axes .*got shape \(4,\)"),
        (
            [torch.ones(2, 4), torch.ones(3, 4)],
            ValueError,
            r"sources\[0\] has \(2, 4\).*sources\[1\] has \(3, 4\)",
        ),
        ([torch.ones(2, 4), torch.ones(1, 4)], ValueError, "expand it first if broadcasting is meant"),
        ([torch.ones(2, 4), torch.ones(2, 5)], ValueError, r"sources\[1\] has \(2, 5\)"),
        ([torch.ones(4), torch.ones(4).double()], TypeError, r"sources\[1\] is torch.float64; cast one"),
        ([torch.ones(4), torch.ones(4, device="meta")], ValueError, r"sources\[1\] on meta; move one"),
        ([torch.ones(4), [1.0] * 4], TypeError, r"sources\[1\] must be a tensor .*got list"),
        ([None], TypeError, r"sources\[0\] must be a tensor .*got NoneType"),
        ([torch.ones(4, dtype=torch.int64)], TypeError, "sources must be float16.*got torch.int64"),
        ([torch.ones(4, dtype=torch.complex64)], TypeError, "got torch.complex64"),
        ([torch.tensor(1.0)], ValueError, r"last axis of width D >= 1, got shape \(\)"),
        ([torch.ones(3, 0)], ValueError, r"last axis of width D >= 1, got shape \(3, 0\)"),
        (3.0, TypeError, "sources must be a sequence of tensors or one packed tensor, got float"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_sources_that_do_not_fit(sources, error, message, backend):
    with pytest.raises(error, match=message):
        depth_attention(sources, QUERY, backend=backend)


@pytest.mark.parametrize("name", ["query", "key_weight", "norm_weight"])
@pytest.mark.parametrize(
    ("vector", "error", "message"),
    [
        (torch.ones(5), ValueError, r"must have shape \[4\], the sources' width, got \(5,\)"),
        (torch.ones(1), ValueError, r"must have shape \[4\]"),
        (torch.ones(1, 4), ValueError, r"must have shape \[4\].*got \(1, 4\)"),
        (torch.ones(4, dtype=torch.int32), TypeError, "must be floating point, got torch.int32"),
        (torch.ones(4, device="meta"), ValueError, "must be on the sources' device cpu, got meta; move it"),
        ([1.0] * 4, TypeError, r"must be a tensor \[D\], got list"),
    ],
)
def test_vectors_that_do_not_fit(name, vector, error, message):
    with pytest.raises(error, match=f"{name} {message}"):
        depth_attention(SOURCES, **{"query": QUERY, name: vector})


@pytest.mark.parametrize("backend", ["cpu", "lean", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_offset_of_the_norm_is_part_of_its_weight(backend, dtype):
    """Value and gradient are those of a weight that holds it already."""
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 3, 8, generator=generator, dtype=torch.float32) for _ in range(3)]
    weight = torch.randn(8, generator=generator).to(dtype).requires_grad_()
    whole = (1.0 + weight.detach().float()).requires_grad_()
    arguments = {"query": torch.randn(8, generator=generator), "backend": backend}
    h = depth_attention(sources, norm_weight=weight, norm_offset=1.0, **arguments)
    expected = depth_attention(sources, norm_weight=whole, **arguments)
    assert torch.equal(h, expected)
    h.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(weight.grad, whole.grad.to(dtype)) and weight.grad.abs().max() > 0
    with torch.no_grad():
        assert torch.equal(depth_attention(sources, norm_weight=weight, norm_offset=1.0, **arguments), h)


def test_a_query_is_needed():
    with pytest.raises(TypeError, match=r"query must be a tensor \[D\], got None"):
        depth_attention(SOURCES, None)


def test_unknown_backend_and_read_scale():
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*lean, reference.*got 'triton'"):
        depth_attention(SOURCES, QUERY, backend="triton")
    with pytest.raises(ValueError, match="read_scale must be 'mean' or 'sum', got 'max'"):
        depth_attention(SOURCES, QUERY, read_scale="max")


@pytest.mark.parametrize("name", ["lean", "reference"])
@pytest.mark.parametrize("other", ["lean", "reference"])
def test_an_explicit_backend_runs_what_it_says(name, other, monkeypatch):
    calls = []

    def fake(sources, *args, **kwargs):
        calls.append(other)
        return sources[0], torch.zeros(2, 2, 3)

    monkeypatch.setitem(dispatch.BACKENDS, other, fake)
    depth_attention(SOURCES, QUERY, backend=name)
    assert calls == ([other] if name == other else [])


def test_an_explicit_backend_never_falls_back(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("cannot run")

    monkeypatch.setitem(dispatch.BACKENDS, "lean", broken)
    with pytest.raises(RuntimeError, match="cannot run"):
        depth_attention(SOURCES, QUERY, backend="lean")
    read = DepthRead(4, backend="lean")
    with pytest.raises(RuntimeError, match="cannot run"):
        read(SOURCES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lean_and_reference_run_on_every_floating_point_dtype(dtype):
    backends = available_backends("cpu", dtype)
    assert backends["lean"] is None and backends["reference"] is None
    for name in ("lean", "reference"):
        sources = [source.to(dtype) for source in SOURCES]
        assert torch.equal(depth_attention(sources, QUERY, backend=name), sources[0])


def test_available_backends_gives_reasons():
    reasons = available_backends("cpu", torch.int64)
    assert set(reasons) == set(dispatch.BACKENDS)
    assert all("floating point" in reason for reason in reasons.values())
    with pytest.raises(RuntimeError):
        available_backends("abacus")


@pytest.mark.parametrize("backend", ["lean", "reference"])
def test_meta_tensors_give_shapes(backend):
    sources = [torch.ones(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    query = torch.ones(4, device="meta", requires_grad=True)
    output, weights = depth_attention(sources, query, return_weights=True, backend=backend)
    output.sum().backward()
    assert (output.shape, output.dtype) == ((2, 3, 4), torch.bfloat16)
    assert (weights.shape, weights.dtype) == ((3, 2, 3), torch.float32)
    assert query.grad.shape == (4,)


def test_any_sequence_of_sources_will_do():
    expected = depth_attention(SOURCES, torch.ones(4))
    assert torch.equal(depth_attention(tuple(SOURCES), torch.ones(4)), expected)
    assert torch.equal(depth_attention(torch.stack(SOURCES), torch.ones(4)), expected)
