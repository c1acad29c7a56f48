"""From summaries to pictures: depth map, entropy and norms over depth, training curve.

Everything is drawn through matplotlib's objects on the Agg canvas, so no global figure or backend is touched.
A figure's size follows from its number of rows and columns, and text is never smaller than FONT_PT, so that
a picture is readable at 100% zoom; where names would touch, every second, third ... name is shown.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attention_residuals.analysis.summary import DepthSummary
from attention_residuals.analysis.token_measures import Floats
from attention_residuals.analysis.training_curve import TrainingCurve, last_finite
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.analysis.ablation import SourceAblation
    from attention_residuals.analysis.over_training import DepthHistory


class MissingMatplotlib(UserError, ImportError):
    """matplotlib is an optional dependency, and only pictures need it."""


try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize, PowerNorm, SymLogNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise MissingMatplotlib(
        "pictures need matplotlib, which is not installed; pip install 'attention_residuals[report]'"
    ) from error

DPI = 120
FONT_PT = 9
TITLE_PT = 12
TEXT_INCHES = 0.18  # one line of FONT_PT text and a little air
LETTER_INCHES = 0.075  # mean width of a letter at FONT_PT
TITLE_INCHES = 2.5  # a panel's title beside another's
COLORMAP = "cividis"  # perceptually uniform, the same for colour-blind eyes
DIVERGING = "PuOr_r"
MANY_SOURCES = 12
NO_SOURCE = "#eceff1"
SHOWN_MEASURES = {
    "normalised_entropy": "entropy / log N",
    "effective_sources": "effective sources",
    "locality": "locality",
    "embedding_weight": "weight on embedding",
}
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#6b7280"  # Okabe and Ito's palette


def draw_depth_map(summary: DepthSummary) -> Figure:
    """Reads as rows, sources as columns, mean depth weight as colour; partial sums are marked.

    The first read's single weight is 1 by definition, so it does not stretch the colour scale.
    """
    figure, (axes,) = _figure_of_maps(summary, 1)
    _draw_weights(axes, summary)
    axes.set_title("Depth map: where each read looks", fontsize=TITLE_PT, loc="left", pad=10)
    return figure


def draw_entropy_and_norms(summary: DepthSummary) -> Figure:
    """Above: entropy of each read against its upper bound log N. Below: norms, with block starts marked."""
    num_reads = len(summary.read_names)
    spacing = 0.26 if num_reads <= 34 else max(0.09, 9.0 / num_reads)
    figure = _figure(max(6.5, spacing * num_reads + 1.2), 7.2)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_series(above, np.log(summary.num_sources), GREY, "--", "log N (uniform)", marker="")
    _draw_series(above, summary.entropy, BLUE, "-", "entropy", marker="o")
    _draw_series(below, summary.input_norm, GREY, "--", "read: norm of the mixture", marker="s")
    _draw_series(below, summary.output_norm, ORANGE, "-", "sublayer: norm of the output", marker="o")
    _finish_panel(above, summary, "Entropy of the depth weights", "entropy (nats)")
    _finish_panel(below, summary, "Input and output norm per sublayer", "mean L2 norm")
    shown = shown_ticks(num_reads, (figure.get_figwidth() - 1.2) / num_reads)
    below.set_xticks(shown, [summary.read_names[i] for i in shown], rotation=90)
    below.set_xlabel("read or sublayer", fontsize=FONT_PT + 1)
    below.set_xlim(-0.6, num_reads - 0.4)
    return figure


def draw_source_ablation(summary: DepthSummary, ablation: SourceAblation) -> Figure:
    """The depth map, and beside it the change of the loss without each source, with zero in the middle."""
    figure, (left, right) = _figure_of_maps(summary, 2)
    _draw_weights(left, summary)
    left.set_title("Depth weight", fontsize=TITLE_PT, loc="left", pad=10)
    change = ablation.loss_change
    top = max(float(np.max(np.abs(change[np.isfinite(change)]), initial=0.0)), 1e-12)
    # logarithmic but for the hundredth part around zero: one source may be worth a thousand times another
    scale = SymLogNorm(linthresh=top / 100, vmin=-top, vmax=top)
    cell = _cell_inches(*change.shape)
    image = _draw_map(
        right, change, (summary.read_names, summary.source_names), cell, scale, "+.2g", DIVERGING
    )
    _mark_partials(right, image, summary, change, outlined=_is_annotated(cell))
    right.set_ylabel("")
    right.set_title("Loss without the source", fontsize=TITLE_PT, loc="left", pad=10)
    _add_bar(right, image, change, "change of the loss (nats per token)")
    return figure


def draw_over_training(history: DepthHistory) -> Figure:
    """A map of reads by steps for each of four measures; reads without a choice are left out."""
    num_steps, num_reads = len(history.steps), len(history.read_names)
    width = min(max(LETTER_INCHES * 30, 0.18 * num_steps), 6.0)
    cell = (width / num_steps, _cell_inches(num_reads, num_steps)[1])
    margin_left = LETTER_INCHES * max(map(len, history.read_names)) + 0.4
    figure = _figure(2 * (width + 1.0) + margin_left, 2 * (cell[1] * num_reads + 1.5))
    panels = figure.subplots(2, 2, sharey=True)
    names = (history.read_names, tuple(str(step) for step in history.steps))
    has_choice = np.isfinite(history.measures["normalised_entropy"])
    for axes, (measure, title) in zip(panels.flat, SHOWN_MEASURES.items(), strict=True):
        values = np.where(has_choice, history.measures[measure], np.nan).T
        scale = Normalize(0.0, max(float(np.max(values[np.isfinite(values)], initial=0.0)), 1e-9))
        image = _draw_map(axes, values, names, cell, scale, None)
        axes.set_title(title, fontsize=TITLE_PT, loc="left", pad=10)
        axes.set_xlabel("step", fontsize=FONT_PT + 1, labelpad=8)
        axes.set_ylabel("read" if axes in panels[:, 0] else "", fontsize=FONT_PT + 1)
        _add_bar(axes, image, values, "")
    return figure


def draw_training_curve(curve: TrainingCurve) -> Figure:
    """Train and evaluation loss against the step."""
    figure = _figure(8.0, 4.2)
    axes = figure.add_subplot()
    for series, colour, marker, name in (
        (curve.train, BLUE, "", "train"),
        (curve.evaluation, ORANGE, "o", "evaluation"),
    ):
        if not series:
            continue
        end = last_finite(series)
        label = name if end is None else f"{name}, at the end {end[1]:.4g}"
        steps, losses = zip(*series, strict=True)
        marker = marker if len(series) > 1 else "o"  # a line needs two points to be seen
        axes.plot(steps, losses, color=colour, marker=marker, markersize=5, linewidth=1.5, label=label)
    axes.set_xlabel("step", fontsize=FONT_PT + 1)
    axes.set_ylabel("loss (nats per token)", fontsize=FONT_PT + 1)
    axes.set_title("Training", fontsize=TITLE_PT, loc="left")
    axes.tick_params(labelsize=FONT_PT)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(fontsize=FONT_PT, frameon=False)
    return figure


def save_picture(figure: Figure, path: Path) -> Path:
    """Write a PNG beside `path` and rename it, so that a reader never sees half a picture."""
    beside = path.with_name(f".{path.name}.part")
    figure.savefig(beside, format="png", dpi=DPI)
    os.replace(beside, path)
    return path


def shown_ticks(count: int, inches: float) -> list[int]:
    """Indices whose names fit when neighbours are `inches` apart; the first and the last are among them."""
    step = max(1, math.ceil(TEXT_INCHES / inches - 1e-9))
    shown = list(range(0, count, step))
    if shown[-1] != count - 1:
        if count - 1 - shown[-1] < step and len(shown) > 1:
            shown.pop()
        shown.append(count - 1)
    return shown


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _cell_inches(num_rows: int, num_columns: int) -> tuple[float, float]:
    width = (
        0.72
        if num_columns <= MANY_SOURCES
        else 0.26
        if num_columns <= 34
        else 0.18
        if num_columns <= 64
        else 0.1
    )
    height = 0.27 if num_rows <= 40 else 0.19 if num_rows <= 72 else 0.1
    return width, height


def _top_of_scale(summary: DepthSummary) -> float:
    """The heaviest mean weight among reads that have a choice."""
    choosing = summary.depth_map[summary.num_sources > 1]
    return float(np.nanmax(choosing)) if choosing.size else 1.0


def _ink(image: AxesImage, weight: float) -> str:
    """Black or white, whichever stands out from the colour of the weight."""
    red, green, blue, _ = image.to_rgba(np.array([weight]))[0]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _figure_of_maps(summary: DepthSummary, count: int) -> tuple[Figure, tuple[Axes, ...]]:
    num_rows, num_columns = summary.depth_map.shape
    cell_width, cell_height = _cell_inches(num_rows, num_columns)
    margin_left = LETTER_INCHES * max(map(len, summary.read_names)) + 0.4
    width = max(cell_width * num_columns, TITLE_INCHES if count > 1 else 0.0)
    figure = _figure(max(count * (width + 1.2) + margin_left, 5.5), cell_height * num_rows + 1.9)
    return figure, tuple(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _draw_weights(axes: Axes, summary: DepthSummary) -> None:
    weights = summary.depth_map
    cell = _cell_inches(*weights.shape)
    # with many sources most weights are small: the square root keeps them apart
    gamma = 1.0 if weights.shape[1] <= MANY_SOURCES else 0.5
    scale = PowerNorm(gamma, vmin=0.0, vmax=_top_of_scale(summary))
    image = _draw_map(axes, weights, (summary.read_names, summary.source_names), cell, scale, ".2f")
    _mark_partials(axes, image, summary, weights, outlined=_is_annotated(cell))
    label = "mean depth weight" if gamma == 1.0 else "mean depth weight (square-root scale)"
    _add_bar(axes, image, weights, label)


def _draw_map(
    axes: Axes,
    values: Floats,
    names: tuple[Sequence[str], Sequence[str]],
    cell: tuple[float, float],
    scale: Normalize,
    number: str | None,
    colormap: str = COLORMAP,
) -> AxesImage:
    """Values [rows, columns] as colours, and as numbers in that format where cells have room for them."""
    # masked in place of NaN, so that a cell without a source takes the axes' colour
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colormap, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_facecolor(NO_SOURCE)
    if number is not None and _is_annotated(cell):
        for row, column in np.argwhere(~np.isnan(values)):
            value = values[row, column]
            ink, text = _ink(image, value), format(value, number)
            axes.text(column, row, text, ha="center", va="center", fontsize=FONT_PT, color=ink)
    _name_rows_and_columns(axes, names, cell)
    return image


def _add_bar(axes: Axes, image: AxesImage, values: Floats, label: str) -> None:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    map_height = _cell_inches(*values.shape)[1] * len(values)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3.5 / map_height), anchor=(0.0, 1.0), pad=0.02)
    bar.set_label(label, fontsize=FONT_PT + 1)
    bar.ax.tick_params(labelsize=FONT_PT)


def _is_annotated(cell: tuple[float, float]) -> bool:
    return cell[0] >= 0.45 and cell[1] >= TEXT_INCHES


def _mark_partials(
    axes: Axes, image: AxesImage, summary: DepthSummary, values: Floats, *, outlined: bool
) -> None:
    marked = np.argwhere(summary.is_partial)
    if not len(marked):
        return
    for read, column in marked:
        ink = _ink(image, values[read, column])
        if outlined:
            corner = (column - 0.44, read - 0.38)
            axes.add_patch(Rectangle(corner, 0.88, 0.76, fill=False, linestyle=(0, (2, 2)), edgecolor=ink))
        else:
            axes.plot(column, read, marker="o", markersize=2.0, color=ink)
    handle = (
        Rectangle((0, 0), 1, 1, fill=False, linestyle=(0, (2, 2)))
        if outlined
        else Line2D([], [], marker="o", markersize=4, linestyle="", color="black")
    )
    axes.legend(
        [handle],
        ["the open block's partial sum: that block so far"],
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        fontsize=FONT_PT,
        frameon=False,
        borderaxespad=0.3,
    )


def _name_rows_and_columns(
    axes: Axes, names: tuple[Sequence[str], Sequence[str]], cell: tuple[float, float]
) -> None:
    row_names, column_names = names
    rows = shown_ticks(len(row_names), cell[1])
    axes.set_yticks(rows, [row_names[i] for i in rows])
    axes.set_ylabel("read", fontsize=FONT_PT + 1)
    columns = shown_ticks(len(column_names), cell[0])
    shown = [column_names[i] for i in columns]
    if cell[0] >= 0.7:
        axes.set_xticks(columns, [name.replace(" ", "\n") for name in shown])
    else:
        axes.set_xticks(columns, shown, rotation=90)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source", fontsize=FONT_PT + 1, labelpad=8)
    axes.tick_params(labelsize=FONT_PT)


def _draw_series(axes: Axes, y: np.ndarray, colour: str, line: str, name: str, *, marker: str) -> None:
    size = 4.0 if len(y) <= 72 else 2.5
    axes.plot(y, color=colour, linestyle=line, marker=marker, markersize=size, linewidth=1.4, label=name)


def _finish_panel(axes: Axes, summary: DepthSummary, title: str, unit: str) -> None:
    _shade_blocks(axes, summary)
    axes.set_title(title, fontsize=TITLE_PT, loc="left", pad=28)
    axes.set_ylabel(unit, fontsize=FONT_PT + 1)
    axes.tick_params(labelsize=FONT_PT)
    # between the title and the axes, where neither data nor title can be under it
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=2,
        fontsize=FONT_PT,
        frameon=False,
    )
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    top = max(float(np.max(heights[np.isfinite(heights)], initial=0.0)), 1e-9)
    axes.set_ylim(-0.03 * top, 1.08 * top)


def _shade_blocks(axes: Axes, summary: DepthSummary) -> None:
    """Shade every second block, since norms start anew where a block does; a block of one is not shaded."""
    if not summary.is_partial.any():
        return
    starts: Sequence[int] = np.flatnonzero(~summary.is_partial.any(axis=1)).tolist()
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        if index % 2 == 1:
            axes.axvspan(start - 0.5, end - 0.5, color="black", alpha=0.06, linewidth=0)
