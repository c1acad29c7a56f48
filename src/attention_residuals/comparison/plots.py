"""From results to pictures: loss curves with bands over seeds, learning-rate sweeps, depth of each arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_residuals.analysis import plots
from attention_residuals.analysis.plots import DPI, FONT_PT, TITLE_PT
from attention_residuals.analysis.training_curve import TrainingCurve
from attention_residuals.comparison.depth import DepthMeasures
from attention_residuals.comparison.results import ArmResult
from attention_residuals.comparison.scaling import ScalingResult

# matplotlib comes last: importing the pictures above tells what to install where it is missing
from matplotlib.axes import Axes  # isort: skip
from matplotlib.backends.backend_agg import FigureCanvasAgg  # isort: skip
from matplotlib.figure import Figure  # isort: skip
from matplotlib.ticker import MaxNLocator, ScalarFormatter  # isort: skip

# Okabe and Ito's palette, told apart by colour-blind eyes; dashes and markers tell apart what shares a colour
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^v"
SMOOTHED = 20  # a training loss is averaged over the twentieth of the run that leads to it

Series = Sequence[tuple[int, float]]


def draw_losses(curves: Mapping[str, Sequence[TrainingCurve]], title: str) -> Figure:
    """Validation and smoothed training loss against steps: per arm the mean and the range over seeds.

    Args:
        curves: per arm, one curve a seed.
    """
    figure = _figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    for index, (arm, seeds) in enumerate(curves.items()):
        _draw_band(
            left, [curve.evaluation for curve in seeds], arm, index, marker=MARKERS[index % len(MARKERS)]
        )
        _draw_band(right, [_smooth(curve.train) for curve in seeds], arm, index, marker="")
    for axes, what in ((left, "validation loss"), (right, "training loss")):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, f"{title}: {what}", "step", f"{what} (nats per token)")
    return figure


def draw_sweep(results: Sequence[ArmResult], title: str) -> Figure:
    """Final validation loss against the learning rate, one line per arm, with standard errors."""
    figure = _figure(7.0, 4.4)
    axes = figure.add_subplot()
    for index, result in enumerate(results):
        rates = sorted(
            (rate.peak, rate.loss.value, rate.loss.error)
            for rate in result.rates
            if rate.peak is not None and rate.loss.by_seed
        )
        if rates:
            x, y, error = map(np.array, zip(*rates, strict=True))
            error = np.nan_to_num(error)  # a single seed has no standard error
            axes.errorbar(x, y, error, capsize=3, label=result.arm, **_look(index))
    axes.set_xscale("log")
    _finish(axes, f"{title}: learning-rate sweep", "peak learning rate", "validation loss (nats per token)")
    return figure


def draw_scaling(results: Sequence[ScalingResult]) -> Figure:
    """Loss against compute on logarithmic axes: each arm's means, seeds, and power law."""
    figure = _figure(7.0, 4.8)
    axes = figure.add_subplot()
    for index, result in enumerate(results):
        look = _look(index)
        compute = [point.compute for point in result.points]
        law = f"{result.law.coefficient:.3f} C^-{result.law.exponent:.4f}"
        axes.plot(
            compute,
            [result.law.loss(c) for c in compute],
            label=f"{result.arm}: {law}",
            **{**look, "marker": None},
        )
        axes.plot(compute, [point.loss for point in result.points], **{**look, "linestyle": "none"})
        seeds = [(p.compute, loss) for p in result.points for loss in p.loss_by_seed.values()]
        axes.plot(*zip(*seeds, strict=True), ".", color=look["color"], markersize=3, alpha=0.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(which="minor", labelsize=FONT_PT)
    _finish(axes, "loss against compute", "PFLOP/s-days", "validation loss (nats per token)")
    return figure


def draw_depth(measures: Mapping[str, DepthMeasures], title: str) -> Figure:
    """Input and output norm of each sublayer and gradient norm of each layer, one line per arm."""
    names = next(iter(measures.values())).sublayer_names
    figure = _figure(min(16.0, max(8.0, 0.2 * len(names) + 2.0)), 10.0)
    panels = figure.subplots(3, 1)
    for index, (arm, found) in enumerate(measures.items()):
        look = {**_look(index), "label": arm}
        panels[0].plot(found.input_norm, **look)
        panels[1].plot(found.output_norm, **look)
        panels[2].plot(found.gradient_norm, **look)
    headings = (
        ("what each sublayer receives", "sublayer", "mean L2 norm"),
        ("what each sublayer writes", "sublayer", "mean L2 norm"),
        ("gradient of each layer's weights", "layer", "L2 norm"),
    )
    for axes, (what, depth, unit) in zip(panels, headings, strict=True):
        axes.set_yscale("log")
        _finish(axes, f"{title}: {what}", depth, unit)
    panels[0].set_xlabel("")
    panels[0].set_xticks([])
    shown = plots.shown_ticks(len(names), (figure.get_figwidth() - 1.2) / len(names))
    panels[1].set_xticks(shown, [names[i] for i in shown], rotation=90)
    panels[2].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_band(axes: Axes, series: Sequence[Series], label: str, index: int, *, marker: str) -> None:
    """The mean at the steps that all seeds have, and the range of the seeds around it."""
    by_step = [dict(one) for one in series if one]
    if not by_step:
        return
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    values = np.array([[one[step] for step in steps] for one in by_step])
    look = {**_look(index), "marker": marker or None}
    (line,) = axes.plot(steps, values.mean(axis=0), label=label, **look)
    if len(by_step) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _smooth(series: Series) -> Series:
    """Running mean over the last twentieth of the steps so far; starts with what there is."""
    window = max(1, math.ceil(len(series) / SMOOTHED))
    losses = [loss for _, loss in series]
    return [
        (step, float(np.mean(losses[max(0, i + 1 - window) : i + 1]))) for i, (step, _) in enumerate(series)
    ]


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.5,
    }


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=TITLE_PT, loc="left")
    axes.set_xlabel(x, fontsize=FONT_PT + 1)
    axes.set_ylabel(y, fontsize=FONT_PT + 1)
    axes.tick_params(labelsize=FONT_PT)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=FONT_PT, frameon=False)
