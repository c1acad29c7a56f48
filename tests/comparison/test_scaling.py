"""Power laws and compute multipliers, on made-up runs that follow known laws."""

from __future__ import annotations

import numpy as np
import pytest
from test_results import made_up

from attention_residuals.comparison import page, plots
from attention_residuals.comparison.results import summarise_arms
from attention_residuals.comparison.scaling import (
    PFLOPS_DAY,
    fit_power_law,
    fit_scaling,
    training_compute,
)

SIZES = {"a": (10, 1000), "b": (20, 3000), "c": (40, 8000), "d": (80, 20000)}  # parameters and tokens


def runs(laws, *, seeds=2, noise=0.0, sizes=SIZES):
    """Losses exactly A C^-b per arm, times a factor that differs by seed and is the same for all arms."""
    generator = np.random.default_rng(0)
    records = []
    for size, (parameters, tokens) in sizes.items():
        for seed in range(seeds):
            factor = np.exp(noise * generator.standard_normal())
            for arm, (coefficient, exponent) in laws.items():
                compute = 6 * parameters * tokens / PFLOPS_DAY
                reads = 0 if arm == "baseline" else 3
                records.append(
                    made_up(
                        arm, seed, factor * coefficient * compute**-exponent, size=size, tokens=tokens,
                        parameters=parameters + reads, read_parameters=reads,
                    )
                )  # fmt: skip
    return records


def fitted(records):
    return fit_scaling(summarise_arms(records), records)


def test_laws_come_back_and_the_multiplier_is_their_horizontal_distance():
    baseline, full = fitted(runs({"baseline": (2.0, 0.06), "full": (1.9, 0.06)}))
    assert (baseline.law.coefficient, baseline.law.exponent) == pytest.approx((2.0, 0.06))
    assert (full.law.coefficient, full.law.exponent) == pytest.approx((1.9, 0.06))
    assert baseline.multiplier is None and baseline.interval is None
    # equal exponents: 2.0 (m C)^-b = 1.9 C^-b at every C
    assert full.multiplier == pytest.approx((2.0 / 1.9) ** (1 / 0.06))
    assert full.interval == pytest.approx((full.multiplier, full.multiplier))
    assert [point.size for point in full.points] == list(SIZES)
    assert full.points[-1].compute == pytest.approx(6 * 80 * 20000 / 8.64e19)


def test_reads_are_left_out_of_compute():
    _, full = runs({"baseline": (2.0, 0.06), "full": (1.9, 0.06)}, seeds=1, sizes={"a": (10, 1000)})
    assert training_compute(full) == pytest.approx(6 * 10 * 1000 / PFLOPS_DAY)


def test_seeds_that_move_both_arms_alike_hardly_widen_the_interval():
    laws = {"baseline": (2.0, 0.06), "full": (1.9, 0.06)}
    paired = fitted(runs(laws, seeds=5, noise=0.01))[1]
    low, high = paired.interval
    assert low < paired.multiplier < high
    assert paired.multiplier == pytest.approx((2.0 / 1.9) ** (1 / 0.06), rel=0.3)
    # drawn apart for each arm, one per cent of the loss would be 17 per cent of the compute each
    assert high / low < 1.6


def test_one_seed_has_no_interval_and_two_sizes_no_law():
    laws = {"baseline": (2.0, 0.06), "full": (1.9, 0.06)}
    assert fitted(runs(laws, seeds=1))[1].interval is None
    assert fitted(runs(laws, sizes=dict(list(SIZES.items())[:2]))) == ()


def test_sizes_that_an_arm_lacks_are_left_out():
    records = runs({"baseline": (2.0, 0.06), "full": (1.9, 0.06)})
    records = [
        made_up("full", r.seed, None, size="b") if (r.arm, r.size) == ("full", "b") else r for r in records
    ]
    baseline, full = fitted(records)
    assert [p.size for p in baseline.points] == [p.size for p in full.points] == ["a", "c", "d"]


def test_a_baseline_whose_loss_rises_gives_no_multiplier():
    full = fitted(runs({"baseline": (2.0, -0.01), "full": (1.9, 0.06)}))[1]
    assert full.multiplier is None and full.interval is None


def test_a_law_needs_different_values_of_compute():
    with pytest.raises(ValueError, match="two different values of compute"):
        fit_power_law([1.0, 1.0], [2.0, 3.0])


def test_table_and_picture_say_what_was_fitted():
    results = fitted(runs({"baseline": (2.0, 0.06), "full": (1.9, 0.06)}))
    html = page.scaling_table(results)
    assert "1.9000" in html and "0.0600" in html and f"{results[1].multiplier:.2f}" in html
    (axes,) = plots.draw_scaling(results).axes
    assert "full: 1.900 C^-0.0600" in axes.get_legend_handles_labels()[1]
    law = axes.lines[0].get_xydata()
    np.testing.assert_allclose(law[:, 1], 2.0 * law[:, 0] ** -0.06)
