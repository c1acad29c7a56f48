"""Inputs of one depth attention call, every result it has, and the contract that compares two of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from attention_residuals import depth_attention

FLOAT32_STEP = torch.finfo(torch.float32).eps


@dataclasses.dataclass
class Case:
    """Sources and vectors of a call, its settings, and the gradients that arrive at its two results."""

    sources: list[Tensor]
    query: Tensor
    key_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    settings: dict = dataclasses.field(default_factory=dict)
    d_output: Tensor | None = None
    d_weights: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype."""

        def cast(x):
            return None if x is None else x.detach().to(dtype)

        return dataclasses.replace(
            self,
            sources=[cast(source) for source in self.sources],
            **{name: cast(getattr(self, name)) for name in ("query", "key_weight", "norm_weight")},
            **{name: cast(getattr(self, name)) for name in ("d_output", "d_weights")},
        )


def make_case(
    n: int,
    width: int,
    *,
    tokens: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float32,
    vector_dtype: torch.dtype | None = None,
    key_weight: bool = True,
    norm: bool = False,
    weights: bool = True,
    **settings,
) -> Case:
    """Random inputs whose scores are of the order of one, so that the depth weights differ."""

    def vector(mean):
        return (mean + torch.randn(width) / (1 if mean else width**0.5)).to(vector_dtype or dtype)

    return Case(
        sources=[(torch.randn(*tokens, width) * (0.3 + i % 4)).to(dtype) for i in range(n)],
        query=vector(0.0),
        key_weight=vector(1.0) if key_weight else None,
        norm_weight=vector(1.0) if norm else None,
        settings=settings,
        d_output=torch.randn(*tokens, width).to(dtype),
        d_weights=torch.randn(n, *tokens) if weights else None,
    )


def run(case: Case, backend: str) -> dict[str, Tensor]:
    """Output, depth weights and the gradient of every input, by name."""
    inputs = {"query": case.query, "key_weight": case.key_weight, "norm_weight": case.norm_weight}
    inputs |= {f"source {i}": source for i, source in enumerate(case.sources)}
    # `view_as` keeps the strides, where a clone would make the source contiguous.
    leaves = {name: x.detach().view_as(x).requires_grad_() for name, x in inputs.items() if x is not None}
    output, weights = depth_attention(
        [leaves[f"source {i}"] for i in range(len(case.sources))],
        leaves["query"],
        leaves.get("key_weight"),
        norm_weight=leaves.get("norm_weight"),
        return_weights=True,
        backend=backend,
        **case.settings,
    )
    arriving = [(output, case.d_output), (weights, case.d_weights)]
    arriving = [(result, grad.to(result.dtype)) for result, grad in arriving if grad is not None]
    found = torch.autograd.grad(
        [result for result, _ in arriving], list(leaves.values()), [grad for _, grad in arriving]
    )
    for name, grad in zip(leaves, found, strict=True):
        assert grad.dtype == leaves[name].dtype, name
        assert grad.shape == leaves[name].shape, name
    gradients = {f"d {name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {"output": output.detach(), "weights": weights.detach(), **gradients}


def assert_within_contract(case: Case, backend: str = "lean", *, poison: bool = True) -> None:
    """At most twice plain PyTorch's error against float64, plus one rounding step, in every result.

    The step is that of each number in the result's dtype, and of float32 at the size of the largest: where a
    gradient is a small difference of large terms, the terms' rounding can't be seen in plain PyTorch's luck.
    """
    exact = run(case.to(torch.float64), "reference")
    plain = run(case, "reference")
    with poisoned_memory() if poison else contextlib.nullcontext():
        found = run(case, backend)
    assert found.keys() == exact.keys()
    for name, want in exact.items():
        assert found[name].isfinite().all(), name
        info = torch.finfo(found[name].dtype)
        step = (info.eps * want.abs()).clamp(min=info.smallest_normal) + FLOAT32_STEP * want.abs().max()
        allowed = 2 * (plain[name].double() - want).abs().max() + step
        error = (found[name].double() - want).abs()
        assert (error <= allowed).all(), (
            f"{name}: error {(error - allowed).max():.3g} above the allowed {allowed.min():.3g}"
        )


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written to holds NaN: PyTorch fills what it hands out, and freed blocks hold it."""
    blocks = [torch.full((size,), float("nan")) for size in (16, 256, 4096, 65536, 1 << 20) for _ in range(4)]
    del blocks
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
