"""Inputs of one depth attention call, every result it has, and the contract that compares two of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

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


def assert_within_contract(case: Case, backend: str = "lean") -> None:
    """At most twice plain PyTorch's error against float64, plus rounding steps, in every result.

    Errors are root mean squares over a result; the sources' gradients count as one. The steps are one of the
    result's dtype, and four of float32 at the size of the largest number or arriving gradient, since in a
    single call plain PyTorch's error may be small by luck (32 steps where a result is a few numbers, sums of
    larger terms). `error_ratio` takes the luck out.
    """
    exact = _by_kind(run(case.to(torch.float64), "reference"))
    plain = _by_kind(run(case, "reference"))
    with poisoned_memory():
        found = _by_kind(run(case, backend))
    assert found.keys() == exact.keys()
    arriving = [grad.abs().max().item() for grad in (case.d_output, case.d_weights) if grad is not None]
    for name, want in exact.items():
        assert found[name].isfinite().all(), name
        info = torch.finfo(found[name].dtype)
        luck = 4 if want.numel() >= 8 else 32
        step = _rms((info.eps * want.abs()).clamp(min=info.smallest_normal))
        size = max([want.abs().max().item(), *(arriving if name.startswith("d ") else [])])
        allowed = 2 * _rms(plain[name] - want) + step + luck * FLOAT32_STEP * size
        error = _rms(found[name] - want)
        assert error <= allowed, f"{name}: {error / allowed:.2f} times the allowed error"


def error_ratio(make: Callable[[], Case], draws: int, backend: str = "lean") -> dict[str, float]:
    """Error of the backend over that of plain PyTorch, both root mean squares over all draws, by result."""
    squares: dict[str, list[Tensor]] = {}
    for _ in range(draws):
        case = make()
        exact = _by_kind(run(case.to(torch.float64), "reference"))
        results = [_by_kind(run(case, which)) for which in (backend, "reference")]
        for name, want in exact.items():
            errors = torch.stack([(result[name] - want).square().sum() for result in results])
            squares.setdefault(name, []).append(errors)
    totals = {name: torch.stack(parts).sum(0) for name, parts in squares.items()}
    return {name: (found / plain).sqrt().item() for name, (found, plain) in totals.items()}


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def _by_kind(results: dict[str, Tensor]) -> dict[str, Tensor]:
    sources = [results.pop(name) for name in list(results) if name.startswith("d source")]
    return {**results, "d sources": torch.stack(sources)}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written to holds NaN: new tensors are filled with it, freed blocks held it."""
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
