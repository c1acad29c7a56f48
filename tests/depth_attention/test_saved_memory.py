"""What autograd keeps for the backward pass: the sources, the vectors, and a few numbers a token (O2)."""

import pytest
import torch

from attention_residuals import depth_attention
from attention_residuals.depth_attention import lean


def saved_beside(inputs, function):
    """Numbers kept for backward in storages that are none of the inputs', and their dtypes."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    return sum(kept.values()), result


def call(sources, vectors, backend):
    query, key_weight, norm_weight = vectors
    return depth_attention(
        sources, query, key_weight, norm_weight=norm_weight, return_weights=True, backend=backend
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_few_numbers_a_token(packed, dtype, norm, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(lean, "STACK_ELEMENTS", -1)
        monkeypatch.setattr(lean, "CHUNK_ELEMENTS", 300)
    n, tokens, width = 8, 40, 100
    sources = torch.randn(n, 2, tokens // 2, width).to(dtype)
    sources = sources.requires_grad_() if packed else [x.clone().requires_grad_() for x in sources]
    vectors = [torch.randn(width, requires_grad=True) for _ in range(3)]
    if not norm:
        vectors[2] = None
    inputs = [*([sources] if packed else sources), *(v for v in vectors if v is not None)]
    kept, _ = saved_beside(inputs, lambda: call(sources, vectors, "lean"))
    # alpha, r and t for each source, q for the norm, in float32
    assert kept <= 4 * tokens * (3 * n + 1)
    assert kept >= 4 * tokens * 3 * n
    plain, _ = saved_beside(inputs, lambda: call(sources, vectors, "reference"))
    assert plain >= 4 * n * tokens * width  # the measurement sees what it is meant to see


@pytest.mark.parametrize("layout", ["transposed", "strided", "padded"])
def test_no_contiguous_copy_is_kept(layout):
    if layout == "transposed":
        base = torch.randn(6, 20, 2, 50)
        sources = base.transpose(1, 2)
    elif layout == "strided":
        base = torch.randn(6, 2, 20, 100)
        sources = base[..., ::2]
    else:
        base = torch.randn(6, 2, 20, 64)
        sources = base[..., :50]
    listed = [x.requires_grad_() for x in sources.detach()]
    vectors = [torch.randn(50, requires_grad=True), None, None]
    kept, _ = saved_beside([base, vectors[0]], lambda: call(listed, vectors, "lean"))
    assert kept <= 4 * 40 * (3 * 6 + 1)


def test_nothing_is_kept_without_gradients():
    sources = [torch.randn(3, 8) for _ in range(4)]
    kept, (output, weights) = saved_beside([], lambda: call(sources, [torch.randn(8), None, None], "lean"))
    assert kept == 0
    assert not output.requires_grad
    assert not weights.requires_grad


def test_the_graph_does_not_keep_the_output_alive():
    sources = [torch.randn(3, 8, requires_grad=True) for _ in range(4)]
    output = call(sources, [torch.ones(8), None, torch.ones(8)], "lean")[0]
    with torch.no_grad():
        output.fill_(float("nan"))  # raises in backward where the output is among the saved tensors
    output.backward(torch.ones(3, 8))
    assert all(x.grad.isfinite().all() for x in sources)
