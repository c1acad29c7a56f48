"""From runs of several sizes to a power law of loss against compute per arm, and what compute an arm saves.

Compute is C = 6 x parameters without reads x tokens, in PFLOP/s-days (8.64e19 operations), and the law is
L = A C^-b, as in the paper (arXiv 2603.15031, scaling laws): a line through the mean losses in log-log space.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from attention_residuals.analysis.token_measures import Floats
from attention_residuals.comparison.results import ArmResult, RunRecord

PFLOPS_DAY = 1e15 * 86400
LEAST_SIZES = 3  # two points always lie on a line
DRAWS = 2000  # bootstrap resamples
INTERVAL = (2.5, 97.5)  # percentiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One size of an arm: compute in PFLOP/s-days, and the validation loss of each seed."""

    size: str
    compute: float
    loss_by_seed: Mapping[int, float]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.loss_by_seed.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """L = coefficient x C^-exponent, C in PFLOP/s-days."""

    coefficient: float
    exponent: float

    def loss(self, compute: float) -> float:
        return self.coefficient * compute**-self.exponent

    def compute(self, loss: float) -> float:
        """Where the law reaches this loss."""
        return (loss / self.coefficient) ** (-1 / self.exponent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """An arm's law over the sizes.

    Attributes:
        points: in order of compute.
        law: through the means over seeds.
        multiplier: the first arm's compute for the loss that this arm's law has at the compute of the
            largest size, over that compute; None for the first arm, and where the first arm's law rises.
        interval: 95% bootstrap interval of the multiplier; seeds are drawn anew within each size, the
            same for both arms. None with a single seed, or without a multiplier.
    """

    arm: str
    points: tuple[ScalingPoint, ...]
    law: PowerLaw
    multiplier: float | None
    interval: tuple[float, float] | None


def fit_power_law(compute: Sequence[float] | Floats, loss: Sequence[float] | Floats) -> PowerLaw:
    """Least squares in log-log space.

    Raises:
        ValueError: fewer than two different values of compute.
    """
    if len(set(map(float, compute))) < 2:
        raise ValueError(f"a power law needs two different values of compute, got {list(compute)}")
    slope, intercept = np.polyfit(np.log(compute), np.log(loss), 1)
    return PowerLaw(coefficient=float(np.exp(intercept)), exponent=float(-slope))


def fit_scaling(results: Sequence[ArmResult], records: Iterable[RunRecord]) -> tuple[ScalingResult, ...]:
    """One law per arm, each size at the arm's best rate; empty below three sizes that every arm has finished.

    Args:
        results: from `results.summarise_arms`; the first arm is the one compared against.
        records: the runs themselves.
    """
    compute = {(r.size, r.arm, r.learning_rate, r.seed): training_compute(r) for r in records if r.tokens}
    arms: dict[str, list[ScalingPoint]] = {}
    for result in results:
        losses = result.best.loss.by_seed
        if losses:
            key = (result.size, result.arm, result.best.learning_rate, next(iter(losses)))
            point = ScalingPoint(size=result.size, compute=compute[key], loss_by_seed=losses)
            arms.setdefault(result.arm, []).append(point)
    shared = set.intersection(*({p.size for p in points} for points in arms.values())) if arms else set()
    if len(shared) < LEAST_SIZES:
        return ()
    kept = {
        arm: tuple(sorted((p for p in points if p.size in shared), key=lambda p: p.compute))
        for arm, points in arms.items()
    }
    if len({p.compute for p in next(iter(kept.values()))}) < LEAST_SIZES:
        return ()
    first = next(iter(kept.values()))
    return tuple(_scale(arm, points, None if points is first else first) for arm, points in kept.items())


def training_compute(record: RunRecord) -> float:
    """6 x parameters without reads x tokens, in PFLOP/s-days."""
    assert record.parameters is not None and record.read_parameters is not None and record.tokens is not None
    return 6.0 * (record.parameters - record.read_parameters) * record.tokens / PFLOPS_DAY


def _scale(
    arm: str, points: tuple[ScalingPoint, ...], first: tuple[ScalingPoint, ...] | None
) -> ScalingResult:
    law = _law(points)
    multiplier = interval = None
    if first is not None:
        multiplier = _multiplier(law, _law(first), points[-1].compute)
        interval = None if multiplier is None else _bootstrap(points, first)
    return ScalingResult(arm=arm, points=points, law=law, multiplier=multiplier, interval=interval)


def _law(points: Sequence[ScalingPoint]) -> PowerLaw:
    return fit_power_law([p.compute for p in points], [p.loss for p in points])


def _multiplier(law: PowerLaw, first: PowerLaw, compute: float) -> float | None:
    if first.exponent <= 0:
        return None
    return first.compute(law.loss(compute)) / compute


def _bootstrap(points: Sequence[ScalingPoint], first: Sequence[ScalingPoint]) -> tuple[float, float] | None:
    """Percentiles of the multiplier when each size's seeds are drawn anew, the same draw for both arms."""
    seeds = [sorted(set(a.loss_by_seed) & set(b.loss_by_seed)) for a, b in zip(points, first, strict=True)]
    if min(map(len, seeds)) < 2:
        return None
    generator = np.random.default_rng(0)
    compute = np.array([p.compute for p in points])
    means = [np.empty((DRAWS, len(points))) for _ in range(2)]
    for i, names in enumerate(seeds):
        draws = generator.integers(len(names), size=(DRAWS, len(names)))
        for mean, arm in zip(means, (points, first), strict=True):
            losses = np.array([arm[i].loss_by_seed[seed] for seed in names])
            mean[:, i] = losses[draws].mean(axis=1)
    found = [
        _multiplier(fit_power_law(compute, mine), fit_power_law(compute, others), compute[-1])
        for mine, others in zip(*means, strict=True)
    ]
    values = [math.inf if value is None else value for value in found]
    low, high = np.percentile(values, INTERVAL, method="nearest")  # infinite ones have no middle
    return float(low), float(high)
