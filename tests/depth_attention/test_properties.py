"""One property, over shapes, strides, dtypes, settings and gradient layouts that hypothesis makes up."""

import pytest
import torch
from depth_cases import assert_within_contract, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_residuals.depth_attention import lean


def relayout(x, kind):
    """The same numbers with other strides."""
    if kind == "expanded" and x.dim() > 1:
        return x[:1].expand(x.shape)
    if kind == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    if kind == "padded":
        return torch.nn.functional.pad(x, (1, 2), value=float("nan"))[..., 1:-2]
    if kind == "reversed axes":
        axes = tuple(reversed(range(x.dim())))
        return x.permute(axes).contiguous().permute(axes)
    return x


LAYOUT = st.sampled_from(["contiguous", "expanded", "strided", "padded", "reversed axes"])


@st.composite
def cases(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    case = make_case(
        draw(st.integers(1, 20)),
        draw(st.integers(1, 70)),
        tokens=tuple(draw(st.lists(st.integers(1, 5), max_size=3))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        vector_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        key_weight=draw(st.booleans()),
        norm=draw(st.booleans()),
        weights=draw(st.booleans()),
        read_scale=draw(st.sampled_from(["mean", "sum"])),
        eps=draw(st.sampled_from([1e-6, 1e-2])),
        scale=draw(st.sampled_from([1.0, -0.5, 2.0])),
    )
    case.sources = [relayout(x, draw(LAYOUT)) for x in case.sources]
    case.d_output = relayout(case.d_output, draw(LAYOUT))
    return case


def check(case, stack, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, "STACK_ELEMENTS", stack)
        patch.setattr(lean, "CHUNK_ELEMENTS", chunk)
        assert_within_contract(case)


PATHS = (cases(), st.sampled_from([-1, lean.STACK_ELEMENTS]), st.sampled_from([1, 100, lean.CHUNK_ELEMENTS]))
SETTINGS = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=60, **SETTINGS)
@given(*PATHS)
def test_within_contract(case, stack, chunk):
    check(case, stack, chunk)


@pytest.mark.slow
@settings(max_examples=1500, **SETTINGS)
@given(*PATHS)
def test_within_contract_at_length(case, stack, chunk):
    check(case, stack, chunk)
