"""Second derivatives of `lean`: right, and right where sources depend on each other."""

import itertools

import pytest
import torch
from depth_cases import make_case

from attention_residuals import depth_attention
from attention_residuals.depth_attention import lean


def small(norm, n=3):
    case = make_case(n, 4, tokens=(2,), norm=norm).to(torch.float64)
    return [x.requires_grad_() for x in (case.query, case.key_weight, *case.sources)] + (
        [case.norm_weight.requires_grad_()] if norm else []
    )


def call(norm, read_scale="sum"):
    def function(query, key_weight, *rest):
        sources, norm_weight = (rest[:-1], rest[-1]) if norm else (rest, None)
        return depth_attention(
            sources,
            query,
            key_weight,
            eps=0.1,
            scale=0.7,
            norm_weight=norm_weight,
            norm_eps=0.2,
            read_scale=read_scale,
            return_weights=True,
            backend="lean",
        )

    return function


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradcheck(norm, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
        monkeypatch.setattr(lean, "CHUNK_ELEMENTS", 1)
    assert torch.autograd.gradcheck(call(norm), small(norm))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_gradgradcheck(norm, n):
    assert torch.autograd.gradgradcheck(call(norm), small(norm, n))


def test_second_derivative_at_a_zero_token():
    """mean(v^2) is smooth at zero, where a norm isn't."""
    inputs = small(False)
    with torch.no_grad():
        inputs[2].zero_()
    assert torch.autograd.gradgradcheck(call(False), inputs)


@pytest.mark.parametrize("norm", [False, True])
def test_create_graph_when_sources_depend_on_each_other(norm):
    """A partial sum comes from the embedding, whose gradient leaves out the paths through the others."""
    case = make_case(1, 6, norm=norm).to(torch.float64)
    results = []
    for backend, create_graph in itertools.product(("reference", "lean"), (False, True)):
        embedding = case.sources[0].clone().requires_grad_()
        query = case.query.clone().requires_grad_()
        first = embedding.sin() * query
        output = depth_attention(
            [embedding, first, embedding, first.exp()],
            query,
            query * 2,
            norm_weight=query + 1 if norm else None,
            backend=backend,
        )
        found = torch.autograd.grad(output.square().sum(), (embedding, query), create_graph=create_graph)
        results.append(torch.cat([x.detach().flatten() for x in found]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-12)


def test_gradient_penalty():
    """A loss made of first derivatives, through both backends."""
    results = []
    case = make_case(3, 6, norm=True).to(torch.float64)
    for backend in ("reference", "lean"):
        leaves = [x.clone().requires_grad_() for x in (*case.sources, case.query, case.norm_weight)]
        output = depth_attention(leaves[:3], leaves[3], norm_weight=leaves[4], backend=backend)
        found = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        sum(x.square().sum() for x in found).backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*results)
