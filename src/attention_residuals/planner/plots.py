"""From a sweep to a picture: what hops carry, and what they cost, against ranks and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attention_residuals.analysis import plots
from attention_residuals.analysis.plots import DPI, FONT_PT, TITLE_PT
from attention_residuals.planner.sweep import SweepPoint

# matplotlib comes last: importing the pictures above tells what to install where it is missing
from matplotlib.axes import Axes  # isort: skip
from matplotlib.backends.backend_agg import FigureCanvasAgg  # isort: skip
from matplotlib.figure import Figure  # isort: skip
from matplotlib.ticker import FuncFormatter, NullLocator  # isort: skip

# from few blocks to many: dark to light of one scale, so that the order can be seen
LIGHTEST = 0.82


def draw_sweep(points: Sequence[SweepPoint], title: str) -> Figure:
    """Left: tensors of a hop, with and without caching. Right: overhead of a training step, where timed."""
    import matplotlib

    timed = any(point.overhead is not None for point in points)
    figure = Figure(figsize=(12.2 if timed else 7.4, 4.6), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    counts = sorted({point.num_blocks for point in points})
    shades = matplotlib.colormaps[plots.COLORMAP]
    for index, count in enumerate(counts):
        own = [point for point in points if point.num_blocks == count]
        look: dict[str, Any] = {
            "color": shades(LIGHTEST * index / max(1, len(counts) - 1)),
            "linewidth": 1.6,
            "label": f"{count} blocks",
        }
        _draw_hops(panels[0], own, look)
        if timed:
            x, y = zip(*((p.pipeline_ranks, 100 * (p.overhead or 0.0)) for p in own), strict=True)
            panels[1].plot(x, y, marker="o", markersize=4, **look)
    ranks = sorted({point.pipeline_ranks for point in points})
    _finish(panels[0], f"{title}: mean of a hop", "tensors [B, T, D]", ranks)
    panels[0].plot([], [], ":", color=plots.GREY, label="without caching")
    panels[0].set_yscale("log", base=2)
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[0].yaxis.set_minor_locator(NullLocator())
    # beside the panels, since lines may be anywhere in them
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=FONT_PT, frameon=False)
    if timed:
        _finish(panels[1], "Training step", "overhead (%)", ranks)
        panels[1].set_ylim(bottom=min(0.0, panels[1].get_ylim()[0]))
    return figure


def _draw_hops(axes: Axes, points: Sequence[SweepPoint], look: dict[str, Any]) -> None:
    crossed = [point for point in points if point.tensors]
    ranks = [point.pipeline_ranks for point in crossed]
    axes.plot(ranks, [_per_hop(p, p.tensors) for p in crossed], marker="o", markersize=4, **look)
    unlabelled = {**look, "label": None}
    axes.plot(ranks, [_per_hop(p, p.naive_tensors) for p in crossed], ":", **unlabelled)


def _per_hop(point: SweepPoint, tensors: int) -> float:
    return tensors / point.hops


def _finish(axes: Axes, title: str, y: str, ranks: Sequence[int]) -> None:
    axes.set_title(title, fontsize=TITLE_PT, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], rotation=45 if len(ranks) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("pipeline ranks P", fontsize=FONT_PT + 1)
    axes.set_ylabel(y, fontsize=FONT_PT + 1)
    axes.tick_params(labelsize=FONT_PT)
    axes.grid(alpha=0.25)
