"""The oracle against numbers worked out by hand and against loops in numpy; `lean` passes the same tests."""

import math

import numpy as np
import pytest
import torch

from attention_residuals import depth_attention

BACKENDS = ["reference", "lean"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def loops(sources, query, key_weight, norm_weight, eps, scale, norm_eps, gain):
    """The equation one number at a time; sources [N, tokens, D] in float64."""
    n, tokens, width = sources.shape
    output, weights = np.zeros((tokens, width)), np.zeros((n, tokens))
    for token in range(tokens):
        scores = []
        for i in range(n):
            mean_square = sum(x * x for x in sources[i, token]) / width
            score = 0.0
            for d in range(width):
                score += query[d] * key_weight[d] * sources[i, token, d] / math.sqrt(mean_square + eps)
            scores.append(scale * score)
        total = sum(math.exp(score) for score in scores)
        for i in range(n):
            weights[i, token] = math.exp(scores[i]) / total
            for d in range(width):
                output[token, d] += gain * weights[i, token] * sources[i, token, d]
        if norm_weight is not None:
            mean_square = sum(x * x for x in output[token]) / width
            for d in range(width):
                output[token, d] *= norm_weight[d] / math.sqrt(mean_square + norm_eps)
    return output, weights


def by_hand():
    """Keys [1, 1] and [1, -1]; the query makes the scores +-ln(3)/2, so the weights are 3/4 and 1/4."""
    sources = [torch.tensor([1.0, 1.0]).double(), torch.tensor([2.0, -2.0]).double()]
    query = torch.tensor([5.0, math.log(3) / 2]).double()
    return sources, query


def test_by_hand(backend):
    sources, query = by_hand()
    output, weights = depth_attention(sources, query, eps=0.0, return_weights=True, backend=backend)
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.25]).double())
    torch.testing.assert_close(output, torch.tensor([1.25, 0.25]).double())


@pytest.mark.parametrize("read_scale, gain", [("mean", 1.0), ("sum", 2.0)])
def test_by_hand_with_every_setting(backend, read_scale, gain):
    sources, query = by_hand()
    output = depth_attention(
        sources,
        query / 6,
        torch.tensor([-1.0, 2.0]).double(),  # the first component shifts both scores alike
        eps=0.0,
        scale=3.0,
        norm_weight=torch.tensor([1.0, -2.0]).double(),
        norm_eps=0.1875,
        read_scale=read_scale,
        backend=backend,
    )
    # h = gain * [1.25, 0.25], so mean(h^2) = gain^2 * 0.8125.
    root = math.sqrt(gain**2 * 0.8125 + 0.1875)
    torch.testing.assert_close(output, gain * torch.tensor([1.25, -0.5]).double() / root)


def test_query_gradient_by_hand(backend):
    sources, query = by_hand()
    query.requires_grad_()
    _, weights = depth_attention(sources, query, eps=0.0, return_weights=True, backend=backend)
    weights[0].backward()
    # d alpha_1 / d w = alpha_1 * alpha_2 * (key_1 - key_2)
    torch.testing.assert_close(query.grad, torch.tensor([0.0, 3 / 16 * 2]).double())


# Four sources and four tokens of width four: swapped axes would go unnoticed by shapes alone.
@pytest.mark.parametrize("n, tokens, width", [(4, 4, 4), (1, 3, 5), (2, 1, 1), (7, 5, 3), (3, 2, 65)])
@pytest.mark.parametrize("norm", [False, True])
def test_equals_loops(backend, n, tokens, width, norm):
    rng = np.random.default_rng(1)
    sources = rng.normal(size=(n, tokens, width)) * rng.uniform(0.1, 5, size=(n, tokens, 1))
    query, key_weight, norm_weight = rng.normal(size=(3, width))
    settings = {"eps": 0.1, "scale": 0.7, "norm_eps": 0.3}
    for read_scale, gain in (("mean", 1.0), ("sum", float(n))):
        output, weights = depth_attention(
            torch.from_numpy(sources),
            torch.from_numpy(query),
            torch.from_numpy(key_weight),
            norm_weight=torch.from_numpy(norm_weight) if norm else None,
            read_scale=read_scale,
            return_weights=True,
            backend=backend,
            **settings,
        )
        expected = loops(sources, query, key_weight, norm_weight if norm else None, **settings, gain=gain)
        np.testing.assert_allclose(output.numpy(), expected[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(weights.numpy(), expected[1], rtol=1e-12, atol=1e-14)


def test_tokens_never_mix(backend):
    sources = torch.randn(3, 5, 8, requires_grad=True)
    query = torch.randn(8)
    output = depth_attention(sources, query, norm_weight=torch.ones(8), backend=backend)
    (gradient,) = torch.autograd.grad(output[2].square().sum(), sources)
    others = [0, 1, 3, 4]
    assert (gradient[:, others] == 0).all()
    assert (gradient[:, 2] != 0).all()
    changed = sources.detach().clone()
    changed[:, 2] = torch.randn(3, 8)
    again = depth_attention(changed, query, norm_weight=torch.ones(8), backend=backend)
    assert torch.equal(again[others], output[others])
    assert not torch.equal(again[2], output[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_one_source_is_returned_itself(backend, dtype, read_scale):
    source = (1e3 * torch.randn(2, 3, 7)).to(dtype).requires_grad_()
    query = torch.randn(7, dtype=dtype, requires_grad=True)
    key_weight = torch.randn(7, dtype=dtype, requires_grad=True)
    output, weights = depth_attention(
        [source], query, key_weight, read_scale=read_scale, return_weights=True, backend=backend
    )
    arriving = torch.randn_like(output)
    output.backward(arriving)
    assert torch.equal(output, source)
    assert (weights == 1).all()
    assert weights.shape == (1, 2, 3)
    assert torch.equal(source.grad, arriving)
    assert torch.equal(query.grad, torch.zeros_like(query))
    assert torch.equal(key_weight.grad, torch.zeros_like(key_weight))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 5, 8)])
def test_zero_tokens(backend, n, shape):
    sources = [torch.randn(shape, requires_grad=True) for _ in range(n)]
    vectors = [torch.randn(8, requires_grad=True) for _ in range(3)]
    output, weights = depth_attention(
        sources, *vectors[:2], norm_weight=vectors[2], return_weights=True, backend=backend
    )
    assert output.shape == shape
    assert weights.shape == (n, *shape[:-1])
    (output.sum() + weights.sum()).backward()
    assert all(source.grad.shape == shape for source in sources)
    assert all(torch.equal(vector.grad, torch.zeros(8)) for vector in vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zero_query_and_sum_give_the_plain_sum_exactly(backend, dtype):
    for n in range(1, 131):
        # Small integers: every partial sum is exact, so any weight that isn't exactly one shows.
        sources = torch.randint(-1, 2, (n, 3, 5)).to(dtype)
        output = depth_attention(
            sources, torch.zeros(5), torch.randn(5), eps=0.5, read_scale="sum", backend=backend
        )
        assert torch.equal(output, sources.sum(0)), n


def test_permuted_sources_permute_the_weights(backend):
    sources, query = torch.randn(6, 4, 8).double(), torch.randn(8).double()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    output, weights = depth_attention(sources, query, return_weights=True, backend=backend)
    again, permuted = depth_attention(sources[order], query, return_weights=True, backend=backend)
    torch.testing.assert_close(permuted, weights[order])
    torch.testing.assert_close(again, output)
    torch.testing.assert_close(weights.sum(0), torch.ones(4).double())


def test_mean_is_sum_with_an_eps_that_grows_with_the_square_of_the_count(backend):
    """Why conversion uses "sum": docs/math.md."""
    sources, zero, ones = (
        torch.randn(7, 5, 16).double() / 100,
        torch.zeros(16).double(),
        torch.ones(16).double(),
    )
    mean = depth_attention(sources, zero, norm_weight=ones, norm_eps=1e-6, backend=backend)
    total = depth_attention(
        sources, zero, norm_weight=ones, norm_eps=49e-6, read_scale="sum", backend=backend
    )
    torch.testing.assert_close(mean, total, rtol=1e-12, atol=1e-12)
