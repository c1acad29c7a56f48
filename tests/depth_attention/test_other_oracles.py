"""Our backends against fla-core's oracle, Liger's equation and the article's function."""

import pytest
import torch
from depth_cases import FLOAT32_STEP, poisoned_memory
from oracles import article_equation, fla_equation, liger_equation

from attention_residuals import available_backends, depth_attention

ORACLES = {"fla": fla_equation, "liger": liger_equation, "article": article_equation}
# N x B x T x D: those of Liger's and FLA's tests, with fewer tokens where theirs fill a GPU, and small ones
SHAPES = [
    (3, 5, 37, 123),
    (4, 2, 16, 4096),
    (8, 2, 4, 4096),
    (4, 1, 4, 8192),
    (8, 2, 32, 256),
    (1, 1, 10, 4096),
    (3, 1, 10, 4096),
    (15, 1, 15, 4096),
    (7, 1, 10, 1000),
    (7, 1, 10, 2000),
    (29, 3, 2, 7186),
    (15, 5, 2, 7186),
    (29, 5, 3, 512),
    (1, 1, 1, 1),
    (2, 1, 1, 3),
    (4, 4, 4, 4),
]
BACKENDS = ["reference", "lean", "cpu"]
NAMES = ["output", "weights", "d sources", "d query", "d key_weight", "d norm_weight"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if reason := available_backends("cpu", torch.float32)[request.param]:
        pytest.skip(f"{request.param} {reason}")
    return request.param


def inputs(shape, norm=False):
    *_, width = shape
    values = [torch.randn(shape), torch.randn(width) / width**0.5, 1 + torch.randn(width) / 4]
    return values + [1 + torch.randn(width) / 4] * norm


def results(function, tensors, arriving, dtype):
    """Output, weights and all gradients, in float64 or in the dtype that a backend computes in."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    outputs = function(*leaves)
    grads = [grad.to(output.dtype) for grad, output in zip(arriving, outputs, strict=True)]
    found = torch.autograd.grad(outputs, leaves, grads)
    return [x.detach() for x in (*outputs, *found)]


def compare(oracle, ours, tensors, dtype=torch.float32):
    """Root mean square errors against float64: at most twice the oracle's own, and one rounding."""
    arriving = [torch.randn(tensors[0].shape[1:]), torch.randn(tensors[0].shape[:-1])]
    exact = results(oracle, tensors, arriving, torch.float64)
    plain = results(oracle, tensors, arriving, dtype)
    with poisoned_memory():
        found = results(ours, tensors, arriving, dtype)
    for name, got, theirs, want in zip(NAMES, found, plain, exact, strict=False):
        assert got.shape == want.shape, name
        rounding = torch.finfo(got.dtype).eps * rms(want)
        luck = 4 * FLOAT32_STEP * max(want.abs().max().item(), 1.0)
        error, allowed = rms(got - want), 2 * rms(theirs - want) + rounding + luck
        assert error <= allowed, f"{name}: {error / allowed:.2f} times the allowed error"


def rms(x):
    return x.double().square().mean().sqrt().item()


def called(backend, **settings):
    def function(sources, query, key_weight, norm_weight=None):
        return depth_attention(
            sources,
            query,
            key_weight,
            norm_weight=norm_weight,
            return_weights=True,
            backend=backend,
            **settings,
        )

    return function


def in_float64(oracle, *args, **kwargs):
    """FLA's oracle computes in float32 whatever it is given; its `float()` is asked for more here."""
    with pytest.MonkeyPatch.context() as patch:
        if args[0].dtype is torch.float64:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return oracle(*args, **kwargs)


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_every_gradient(oracle, shape, backend):
    compare(lambda *args: in_float64(ORACLES[oracle], *args), called(backend), inputs(shape))


@pytest.mark.parametrize("shape", [(3, 5, 37, 123), (15, 1, 15, 4096), (29, 3, 2, 7186)], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_scale_and_output_norm_of_fla(shape, norm, backend):
    settings = {"eps": 1e-3, "scale": shape[-1] ** -0.5}
    tensors = inputs(shape, norm)

    def oracle(sources, query, key_weight, norm_weight=None):
        return in_float64(fla_equation, sources, query, key_weight, norm_weight=norm_weight, **settings)

    compare(oracle, called(backend, norm_eps=1e-3, **settings), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 37, 123), (7, 1, 10, 1000), (29, 3, 2, 7186)], ids=str)
def test_sixteen_bits_against_fla(dtype, shape, backend):
    """In FLA's oracle too everything between the sources and the result is in float32."""
    rounded = [x.to(dtype) for x in inputs(shape)]
    compare(lambda *args: in_float64(fla_equation, *args), called(backend), rounded, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_keys_are_the_less_exact_way(dtype, backend):
    """Liger's equation rounds the keys to the sources' dtype; a float32 score is closer to float64 (O3)."""
    sources, query, key_weight = (x.to(dtype) for x in inputs((8, 2, 8, 4096)))
    key_weight = (30 * torch.randn(4096)).to(dtype)
    exact = liger_equation(sources.double(), query.double(), key_weight.double())[1]
    theirs = liger_equation(sources, query, key_weight)[1]
    _, ours = depth_attention(sources, query, key_weight, return_weights=True, backend=backend)
    assert rms(ours - exact) < rms(theirs - exact) / 10


def test_the_oracles_agree_with_each_other():
    tensors = [x.double() for x in inputs((5, 2, 3, 33))]
    outputs = [in_float64(oracle, *tensors)[0] for oracle in ORACLES.values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-12, atol=1e-12)
