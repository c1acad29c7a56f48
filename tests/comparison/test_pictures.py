"""Pictures of made-up results: what is drawn is what the numbers say."""

from __future__ import annotations

import numpy as np
import pytest
from test_results import made_up

from attention_residuals.analysis.training_curve import TrainingCurve
from attention_residuals.comparison import plots
from attention_residuals.comparison.depth import DepthMeasures
from attention_residuals.comparison.results import summarise_arms


def curve(*evaluation: tuple[int, float]) -> TrainingCurve:
    return TrainingCurve(train=tuple((step, 1.0 * step) for step in range(1, 41)), evaluation=evaluation)


def test_loss_curves_are_means_with_bands_over_seeds():
    curves = {
        "baseline": [curve((2, 3.0), (4, 2.0)), curve((2, 5.0), (4, 2.5))],
        "full": [curve((2, 1.0), (4, 0.5))],
    }
    validation, training = plots.draw_losses(curves, "tiny").axes
    baseline, full = validation.lines
    assert baseline.get_xydata().tolist() == [[2, 4.0], [4, 2.25]]
    assert full.get_xydata().tolist() == [[2, 1.0], [4, 0.5]]
    (band,) = validation.collections  # a single seed has none
    edges = band.get_paths()[0].vertices
    assert {tuple(point) for point in edges.tolist()} == {(2, 3.0), (2, 5.0), (4, 2.0), (4, 2.5)}
    smoothed = training.lines[0].get_ydata()
    assert smoothed[0] == 1.0 and smoothed[-1] == 39.5  # the last twentieth of 40 steps is two


def test_steps_that_a_seed_lacks_are_left_out():
    curves = {"full": [curve((2, 3.0), (4, 2.0), (6, 1.0)), curve((2, 5.0), (6, 3.0))]}
    validation, _ = plots.draw_losses(curves, "tiny").axes
    assert validation.lines[0].get_xydata().tolist() == [[2, 4.0], [6, 2.0]]


def test_the_sweep_is_drawn_in_the_order_of_rates():
    losses = {2e-3: (1.0, 3.0), 1e-3: (5.0, 6.0), 1.0: (None, None)}
    records = [
        made_up("full", seed, loss, rate=rate)
        for rate, pair in losses.items()
        for seed, loss in enumerate(pair)
    ]
    (axes,) = plots.draw_sweep(summarise_arms(records), "tiny").axes
    (container,) = axes.containers
    np.testing.assert_allclose(container.lines[0].get_xydata(), [[1e-3, 5.5], [2e-3, 2.0]])
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize("num_sublayers", [4, 192])
def test_depth_of_every_arm(num_sublayers, tmp_path):
    measures = {
        arm: DepthMeasures(
            sublayer_names=tuple(f"layer {i // 2} mlp" for i in range(num_sublayers)),
            input_norm=np.full(num_sublayers, 1.0 + index),
            output_norm=np.full(num_sublayers, 3.0 + index),
            gradient_norm=np.full(num_sublayers // 2, 5.0 + index),
            summary=None,
        )
        for index, arm in enumerate(("baseline", "full"))
    }
    figure = plots.draw_depth(measures, "tiny")
    drawn = [[line.get_ydata()[0] for line in axes.lines] for axes in figure.axes]
    assert drawn == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["baseline", "full"]
    assert plots.plots.save_picture(figure, tmp_path / "depth.png").stat().st_size > 0
