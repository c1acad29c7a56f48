"""The `fla` backend: its arguments, through a stand-in for the kernel; and the kernel, where a GPU is."""

import itertools
import logging
import sys

import pytest
import torch
from depth_cases import assert_within_contract, error_ratio, make_case
from oracles import fused_attnres_arguments, naive_attnres

from attention_residuals import depth_attention
from attention_residuals.depth_attention import dispatch, fla

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CUDA = torch.device("cuda")
SETTINGS = [
    {},
    {"norm": True},
    {"norm": True, "eps": 1e-2, "norm_eps": 1e-2, "scale": -0.5},
    {"norm": True, "eps": 1e-2},
    {"read_scale": "sum"},
    {"read_scale": "sum", "norm": True},
    {"key_weight": False, "scale": 2.0},
]


class StandIn:
    """`fused_attnres` on any device: fla-core's oracle with the kernel's signature and its restrictions."""

    def __init__(self):
        self.calls = []

    def __call__(
        self,
        query,
        residuals,
        rms_weight,
        output_rms_weight=None,
        rms_eps=1e-6,
        scale=1.0,
        return_weights=False,
        checkpoint_level=1,
    ):
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        shape = residuals[0].shape
        flat = [residual.reshape(-1, shape[-1]).contiguous() for residual in residuals]
        assert all(x.data_ptr() % 16 == 0 for x in flat), "sources must be 16-byte aligned"
        arguments = (query, flat, rms_weight, output_rms_weight, rms_eps, scale)
        h, weights = naive_attnres()(*arguments, return_weights=True)
        h, weights = h.view(shape), weights.view(len(flat), *shape[:-1]).detach()
        return (h, weights) if return_weights else h


@pytest.fixture
def stand_in(monkeypatch):
    """Backend "fla" with the stand-in behind it, on the CPU."""
    kernel = StandIn()
    monkeypatch.setattr(fla, "_fused_attnres", lambda: kernel)
    monkeypatch.setattr(fla, "why_not", lambda *args, **kwargs: None)
    monkeypatch.setitem(dispatch.BACKENDS, "fla", fla.depth_attention_fla)
    return kernel


def combinations():
    rounds = zip(
        itertools.product([1, 2, 3, 9, 17], DTYPES),
        itertools.cycle([65, 1, 48, 7, 1000, 127]),
        itertools.cycle([(2, 3), (7,), (), (5, 1, 2)]),
        strict=False,
    )
    return [(n, width, tokens, dtype) for (n, dtype), width, tokens in rounds]


@pytest.mark.parametrize("n, width, tokens, dtype", combinations())
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_arguments_mean_the_same(n, width, tokens, dtype, settings, stand_in):
    case = make_case(n, width, tokens=tokens, dtype=dtype, weights=False, **settings)
    assert_within_contract(case, "fla")
    assert len(stand_in.calls) == (n > 1)


@pytest.mark.parametrize("vector_dtype", [torch.float32, torch.bfloat16])
def test_mixed_dtypes(vector_dtype, stand_in):
    case = make_case(5, 33, dtype=torch.bfloat16, vector_dtype=vector_dtype, norm=True, weights=False)
    assert_within_contract(case, "fla")


def test_what_the_kernel_receives(stand_in):
    sources, query, ones = [torch.randn(2, 3, 8) for _ in range(4)], torch.randn(8), torch.ones(8)
    depth_attention(sources, query, eps=0.25, scale=0.5, norm_weight=2 * ones, norm_eps=0.25, backend="fla")
    (call,) = stand_in.calls
    assert call["query"] is query
    assert all(given is source for given, source in zip(call["residuals"], sources, strict=True))
    assert torch.equal(call["rms_weight"], ones)
    assert torch.equal(call["output_rms_weight"], 2 * ones)
    assert (call["rms_eps"], call["scale"], call["checkpoint_level"]) == (0.25, 0.5, 1)


@pytest.mark.parametrize("settings", [{"norm_eps": 0.5}, {"read_scale": "sum"}])
def test_the_kernel_has_one_eps_and_no_gain(settings, stand_in):
    arguments = {"eps": 0.25, "norm_eps": 0.25, "norm_weight": torch.ones(8), **settings}
    depth_attention([torch.randn(3, 8)] * 2, torch.randn(8), backend="fla", **arguments)
    assert stand_in.calls[0]["output_rms_weight"] is None


def test_the_stand_in_has_the_kernels_arguments():
    code = StandIn.__call__.__code__
    assert fused_attnres_arguments() == list(code.co_varnames[1 : code.co_argcount])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 4, 7])
def test_sources_in_the_middle_of_sixteen_bytes_are_copied(dtype, offset, stand_in):
    packed = torch.randn(3, 5, 7)  # every second source of these starts between two multiples of 16
    shifted = torch.randn(offset + 5 * 7).to(dtype)[offset:].view(5, 7)
    case = make_case(4, 7, tokens=(5,), dtype=dtype, weights=False)
    case.sources = [*packed.to(dtype).unbind(0), shifted]
    assert_within_contract(case, "fla")


def test_one_source_and_no_token_need_no_kernel(stand_in):
    source, query = torch.randn(2, 5, requires_grad=True), torch.full((5,), 1e38, requires_grad=True)
    output, weights = depth_attention([source], query, return_weights=True, backend="fla")
    output.sum().backward()
    assert torch.equal(output, source)
    assert (weights == 1).all()
    assert torch.equal(query.grad, torch.zeros(5))
    empty = [torch.empty(0, 5, requires_grad=True) for _ in range(3)]
    output = depth_attention(empty, query, backend="fla")
    output.sum().backward()
    assert output.shape == empty[0].grad.shape == (0, 5)
    assert not stand_in.calls


def test_gradients_of_the_depth_weights_raise(stand_in):
    sources, query = [torch.randn(2, 5, requires_grad=True) for _ in range(3)], torch.randn(5)
    output, weights = depth_attention(sources, query, return_weights=True, backend="fla")
    assert weights.requires_grad
    with pytest.raises(RuntimeError, match="no gradient of the depth weights: detach them, or use"):
        (output.sum() + weights.square().sum()).backward()
    output, weights = depth_attention(sources, query, return_weights=True, backend="fla")
    (output.sum() + weights.detach().square().sum()).backward()
    assert all(source.grad is not None for source in sources)


@pytest.mark.parametrize("settings", [{}, {"read_scale": "sum", "norm_weight": torch.ones(5)}], ids=str)
def test_second_derivatives_raise(settings, stand_in):
    sources, query = [torch.randn(2, 5) for _ in range(3)], torch.randn(5, requires_grad=True)
    output = depth_attention(sources, query, backend="fla", **settings)
    with pytest.raises(RuntimeError, match=r"no second derivative \(create_graph=True\); use backend='lean'"):
        torch.autograd.grad(output.square().sum(), query, create_graph=True)


def test_results_without_gradients_and_changed_in_place(stand_in):
    sources, query = [torch.randn(2, 5) for _ in range(3)], torch.randn(5, requires_grad=True)
    with torch.no_grad():
        output, weights = depth_attention(sources, query, return_weights=True, backend="fla")
    assert not output.requires_grad
    assert not weights.requires_grad
    output, weights = depth_attention(sources, query, return_weights=True, backend="fla")
    output *= 2
    output.sum().backward()
    expected = torch.autograd.grad(2 * depth_attention(sources, query, backend="lean").sum(), query)
    torch.testing.assert_close(query.grad, expected[0])


# --- why not ---


@pytest.mark.parametrize(
    ("device", "dtype", "limits", "reason"),
    [
        ("cpu", torch.float32, {}, "takes CUDA tensors, got them on cpu"),
        ("cuda", torch.float64, {}, "computes in float32, but the sources are torch.float64"),
        ("cuda", torch.int32, {}, "but the sources are torch.int32"),
        ("cuda", torch.float32, {"num_sources": 129}, "takes up to 128 sources, got 129"),
        ("cuda", torch.float32, {"width": 131073}, "takes rows of up to 131072 elements, got 131073"),
    ],
)
def test_reasons(device, dtype, limits, reason):
    assert reason in fla.why_not(torch.device(device), dtype, **limits)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fla.why_not(CUDA, torch.bfloat16) == "needs a GPU, and PyTorch finds none"


def test_not_installed_is_said_and_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    fla._fused_attnres.cache_clear()
    fla.why_not_installed.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger=fla.logger.name):
            reasons = {fla.why_not(CUDA, torch.bfloat16) for _ in range(3)}
    finally:
        fla.why_not_installed.cache_clear()
    (reason,) = reasons
    assert "needs fla-core 0.5.1 or later" in reason
    assert "pip install 'attention_residuals[cuda]'" in reason
    assert len(caplog.records) == 1
    assert reason in caplog.records[0].getMessage()


def test_never_falls_back():
    sources, query = [torch.randn(2, 5) for _ in range(3)], torch.randn(5)
    with pytest.raises(ValueError, match="'fla' can't run here: it takes CUDA tensors, got them on cpu"):
        fla.depth_attention_fla(sources, query, None, None, eps=1e-6, scale=1.0, norm_eps=1e-6, gain=1.0)


# --- the kernel itself ---


@pytest.fixture
def gpu(monkeypatch):
    """New tensors on the GPU, and backend "fla" there."""
    if reason := fla.why_not(CUDA, torch.float32):
        pytest.skip(f"fla {reason}")
    monkeypatch.setitem(dispatch.BACKENDS, "fla", fla.depth_attention_fla)
    with CUDA:
        yield


@pytest.mark.parametrize("n, width, tokens, dtype", combinations())
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_a_gpu(n, width, tokens, dtype, settings, gpu):
    case = make_case(n, width, tokens=tokens, dtype=dtype, weights=False, **settings)
    assert_within_contract(case, "fla")


@pytest.mark.parametrize("n, width", [(33, 1000), (49, 2560), (65, 48), (9, 7168), (29, 7186)])
def test_model_sizes_on_a_gpu(n, width, gpu):
    assert_within_contract(make_case(n, width, dtype=torch.bfloat16, norm=True, weights=False), "fla")


def test_error_on_a_gpu_is_at_most_twice_that_of_plain_pytorch(gpu):
    ratios = error_ratio(lambda: make_case(9, 1000, tokens=(300,), norm=True, weights=False), 8, "fla")
    assert max(ratios.values()) <= 2, ratios
