"""torch.compile, torch.func, copies and state dicts of reads."""

import copy
import io
import pickle

import pytest
import torch
from depth_cases import make_case, run

from attention_residuals import DepthRead, depth_attention
from attention_residuals.depth_attention import lean


def read_with_weights(width=8, **kwargs):
    read = DepthRead(width, **kwargs)
    with torch.no_grad():
        read.query.normal_()
        read.key_weight.normal_(1, 0.2)
    return read


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Each test compiles anew: dynamo gives up on a function that many tests have recompiled."""
    torch.compiler.reset()


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", ["lean", "auto"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_call_equals_eager(compiler, backend, norm, dtype):
    case = make_case(4, 24, dtype=dtype, vector_dtype=torch.float32, norm=norm)

    @torch.compile(backend=compiler, fullgraph=True)
    def function(sources, query, key_weight, norm_weight):
        return depth_attention(
            sources, query, key_weight, norm_weight=norm_weight, return_weights=True, backend=backend
        )

    inputs = [x for x in (*case.sources, case.query, case.key_weight, case.norm_weight) if x is not None]
    leaves = [x.requires_grad_() for x in inputs]
    outputs = function(leaves[:4], *leaves[4:6], leaves[6] if norm else None)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, (case.d_output, case.d_weights))]
    expected = run(case, "lean").values()
    order = [0, 1, *range(4 + norm, 8 + norm), *range(2, 4 + norm)]  # `run` puts the vectors first
    expected = [list(expected)[i] for i in order]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", ["lean", "auto"])
def test_compiled_module_without_gradients_and_in_autocast(compiler, backend):
    read = read_with_weights(backend=backend)
    compiled = torch.compile(read, backend=compiler, fullgraph=True)
    sources = [torch.randn(2, 3, 8) for _ in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(compiled(sources), read(sources))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = compiled(sources)
    torch.testing.assert_close(inside, read(sources))


def test_compiled_read_with_as_many_sources_as_it_is_given():
    read = read_with_weights()
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    for n in (1, 2, 5):
        sources = [torch.randn(2, 3, 8) for _ in range(n)]
        torch.testing.assert_close(compiled(sources), read(sources))


def test_compiled_graph_does_not_grow_with_tokens(monkeypatch):
    """The chunks are for eager mode; a compiler gets one expression and tiles it itself."""
    monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
    monkeypatch.setattr(lean, "CHUNK_ELEMENTS", 80)
    sizes = []

    def count(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph

    read = read_with_weights(backend="lean")
    for tokens in (10, 200):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(read, backend=count, fullgraph=True)([torch.randn(tokens, 8) for _ in range(3)])
    assert sizes[0] == sizes[1]


def test_functional_call():
    read = read_with_weights()
    sources = [torch.randn(2, 3, 8) for _ in range(3)]
    other = {name: torch.randn(8) for name, _ in read.named_parameters()}
    output = torch.func.functional_call(read, other, (sources,))
    torch.testing.assert_close(output, depth_attention(sources, other["query"], other["key_weight"]))
    assert not torch.allclose(output, read(sources))


def loss(backend, sources, query, norm_weight):
    output, weights = depth_attention(
        [*sources, sources[0].sin()], query, norm_weight=norm_weight, return_weights=True, backend=backend
    )
    return output.square().sum() + weights[0].square().sum()


TRANSFORMS = {
    "grad": lambda f, s, q, n: torch.func.grad(f, argnums=(0, 1, 2))(s, q, n),
    "vjp": lambda f, s, q, n: torch.func.vjp(f, s, q, n)[1](torch.ones((), dtype=q.dtype)),
    "jacrev": lambda f, s, q, n: torch.func.jacrev(f, argnums=(0, 1))(s, q, n),
    "jacrev of grad": lambda f, s, q, n: torch.func.jacrev(torch.func.grad(f, argnums=1), argnums=(1, 2))(
        s, q, n
    ),
    "vmap": lambda f, s, q, n: torch.func.vmap(f, in_dims=(1, None, None))(s, q, n),
    "gradient per sample": lambda f, s, q, n: torch.func.vmap(
        torch.func.grad(f, argnums=(0, 1)), in_dims=(1, None, None)
    )(s, q, n),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms(name):
    arguments = torch.randn(3, 2, 4, 6).double(), torch.randn(6).double(), torch.randn(6).double()
    found, expected = (
        TRANSFORMS[name](lambda *args, backend=backend: loss(backend, *args), *arguments)
        for backend in ("lean", "reference")
    )
    torch.testing.assert_close(found, expected)


def test_vmap_over_chunks(monkeypatch):
    monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
    monkeypatch.setattr(lean, "CHUNK_ELEMENTS", 12)
    test_function_transforms("vmap")


def test_forward_mode_is_refused_where_gradients_are_wanted():
    with pytest.raises(NotImplementedError, match="jvp"):
        arguments = torch.randn(3, 4, 6), torch.randn(6), torch.randn(6)
        torch.func.hessian(lambda q: loss("lean", arguments[0], q, arguments[2]))(arguments[1])


def test_copies_are_equal_and_apart():
    read = read_with_weights(eps=1e-5, read_scale="sum", backend="reference")
    sources = [torch.randn(2, 3, 8) for _ in range(3)]
    for copied in (copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
        assert torch.equal(copied(sources), read(sources))
        assert repr(copied) == repr(read)
        with torch.no_grad():
            copied.query.zero_()
        assert read.query.abs().min() > 0


def test_names_in_checkpoints_are_frozen():
    assert list(DepthRead(4).state_dict()) == ["query", "key_weight"]
    assert [tuple(x.shape) for x in DepthRead(4).state_dict().values()] == [(4,), (4,)]


def test_save_and_load():
    read, buffer = read_with_weights(), io.BytesIO()
    torch.save(read.state_dict(), buffer)
    buffer.seek(0)
    fresh = DepthRead(8)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    sources = [torch.randn(2, 8) for _ in range(3)]
    assert torch.equal(fresh(sources), read(sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_read_starts_at_the_uniform_mean(dtype):
    read = DepthRead(4, dtype=dtype)
    assert torch.equal(read.query, torch.zeros(4, dtype=dtype))
    assert torch.equal(read.key_weight, torch.ones(4, dtype=dtype))
    _, weights = read([torch.randn(3, 4).to(dtype) for _ in range(5)], return_weights=True)
    assert torch.equal(weights, torch.full((5, 3), 1 / 5))


def test_reset_parameters_after_meta():
    read = DepthRead(4, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        read.query.fill_(float("nan"))
        read.key_weight.fill_(float("nan"))
    read.reset_parameters()
    assert torch.equal(read.query, torch.zeros(4))
    assert torch.equal(read.key_weight, torch.ones(4))


def test_a_read_passes_its_settings_on():
    sources = [torch.randn(2, 8) for _ in range(3)]
    read = read_with_weights(eps=0.5, read_scale="sum")
    expected = depth_attention(
        sources,
        read.query,
        read.key_weight,
        eps=0.5,
        norm_weight=torch.full((8,), 2.0),
        norm_eps=0.25,
        read_scale="sum",
    )
    assert torch.equal(read(sources, torch.full((8,), 2.0), 0.25), expected)
    assert not torch.allclose(expected, read(sources))
