"""Pictures: named axes, no text over other text, sizes that can be read at 100% zoom."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from records import make_record

from attention_residuals.analysis import plots
from attention_residuals.analysis.ablation import SourceAblation
from attention_residuals.analysis.over_training import DepthHistory
from attention_residuals.analysis.summary import DepthSummary, summarise
from attention_residuals.analysis.training_curve import TrainingCurve

SIZES = {
    "4 sublayers": (4, {"num_blocks": 2}),
    "8 sublayers": (8, {"num_blocks": 4}),
    "16 sublayers, odd blocks": (16, {"sublayers_per_block": 3}),
    "48 sublayers": (48, {"num_blocks": 8}),
    "128 sublayers": (128, {"num_blocks": 8}),
    "128 sublayers, 32 blocks": (128, {"num_blocks": 32}),
    "48 sublayers, full": (48, {"mode": "full"}),
    "128 sublayers, full": (128, {"mode": "full"}),
    "8 sublayers, window": (8, {"num_blocks": 4, "window": 2}),
    "48 sublayers, full, window": (48, {"mode": "full", "window": 8}),
}


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def summary(request: pytest.FixtureRequest) -> DepthSummary:
    num_sublayers, config = request.param
    return summarise(make_record(num_sublayers, **config))


def shown_texts(figure: Figure) -> list[Text]:
    figure.canvas.draw()
    undrawn = undrawn_labels(figure)
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in undrawn
    ]


def undrawn_labels(figure: Figure) -> set[Text]:
    """Labels of ticks outside the limits of their axis: matplotlib keeps them, and does not draw them."""
    labels: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                labels |= {tick.label1, tick.label2}
    return labels


def assert_readable(figure: Figure) -> None:
    texts = shown_texts(figure)
    assert all(text.get_fontsize() >= 9 for text in texts)
    assert figure.dpi >= 110
    renderer = figure.canvas.get_renderer()
    # a pixel less all around: text that touches is not yet text that overlaps
    found = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in texts]
    page = figure.bbox.padded(1)
    for name, box in found:
        assert page.containsx(box.x0) and page.containsx(box.x1), f"{name!r} leaves the page"
        assert page.containsy(box.y0) and page.containsy(box.y1), f"{name!r} leaves the page"
    corners = np.array([box.extents for _, box in found])
    low, high = corners[:, :2], corners[:, 2:]
    overlaps = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(axis=-1)
    pairs = [(found[i][0], found[j][0]) for i, j in np.argwhere(np.triu(overlaps, k=1))]
    assert not pairs, f"these lie over each other: {pairs}"


def test_depth_map_is_readable(summary: DepthSummary) -> None:
    figure = plots.draw_depth_map(summary)
    assert_readable(figure)
    axes, bar = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("source", "read")
    assert bar.get_ylabel().startswith("mean depth weight")
    rows = [label.get_text() for label in axes.get_yticklabels()]
    columns = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    assert rows[0] == summary.read_names[0] and rows[-1] == "final"
    assert columns[0] == "embedding" and columns[-1] == summary.source_names[-1]
    assert set(rows) <= set(summary.read_names) and set(columns) <= set(summary.source_names)


def test_depth_map_names_sit_at_their_rows(summary: DepthSummary) -> None:
    axes = plots.draw_depth_map(summary).axes[0]
    for position, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        assert label.get_text() == summary.read_names[int(position)]
    for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        assert label.get_text().replace("\n", " ") == summary.source_names[int(position)]


@pytest.mark.parametrize("window", [None, 2])
def test_small_maps_show_every_name_and_number(window: int | None) -> None:
    summary = summarise(make_record(8, num_blocks=4, window=window))
    figure = plots.draw_depth_map(summary)
    axes = figure.axes[0]
    assert len(axes.get_yticks()) == 9 and len(axes.get_xticks()) == 5
    numbers = {text.get_text() for text in axes.texts}
    assert f"{summary.depth_map[8, 4]:.2f}" in numbers
    assert len(axes.texts) == int(summary.num_sources.sum())


def test_partial_sums_are_marked_and_explained() -> None:
    with_partials = plots.draw_depth_map(summarise(make_record(8, num_blocks=4))).axes[0]
    assert len(with_partials.patches) == 4
    assert "partial sum" in with_partials.get_legend().get_texts()[0].get_text()
    assert plots.draw_depth_map(summarise(make_record(8, mode="full"))).axes[0].get_legend() is None


def test_entropy_and_norms_is_readable(summary: DepthSummary) -> None:
    figure = plots.draw_entropy_and_norms(summary)
    assert_readable(figure)
    above, below = figure.axes
    assert above.get_ylabel() == "entropy (nats)" and below.get_ylabel() == "mean L2 norm"
    assert below.get_xlabel() == "read or sublayer"
    assert [label.get_text() for label in below.get_xticklabels()][-1] == "final"
    assert above.lines[1].get_ydata().tolist() == summary.entropy.tolist()
    assert below.lines[1].get_ydata().tolist() == summary.output_norm.tolist()


@pytest.mark.parametrize("size", ["8 sublayers", "48 sublayers", "48 sublayers, full", "8 sublayers, window"])
def test_source_ablation_is_readable_and_stands_beside_the_depth_map(size: str) -> None:
    num_sublayers, config = SIZES[size]
    summary = summarise(make_record(num_sublayers, **config))
    generator = np.random.default_rng(0)
    change = np.where(np.isnan(summary.depth_map), np.nan, generator.normal(size=summary.depth_map.shape))
    change[0] = np.nan
    change *= 10.0 ** generator.integers(-5, 1, size=change.shape)
    ablation = SourceAblation(summary.read_names, summary.source_names, 2.0, change)
    figure = plots.draw_source_ablation(summary, ablation)
    assert_readable(figure)
    left, right, _, bar = figure.axes
    assert bar.get_ylabel() == "change of the loss (nats per token)"
    np.testing.assert_array_equal(left.images[0].get_array().filled(np.nan), summary.depth_map)
    np.testing.assert_array_equal(right.images[0].get_array().filled(np.nan), change)
    low, high = right.images[0].get_clim()
    assert low == -high == -np.nanmax(np.abs(change))  # zero is in the middle
    columns = [[label.get_text() for label in axes.get_xticklabels()] for axes in (left, right)]
    assert columns[0] == columns[1]


@pytest.mark.parametrize(("num_steps", "num_sublayers"), [(1, 4), (3, 16), (90, 48)])
def test_over_training_is_readable(num_steps: int, num_sublayers: int) -> None:
    summary = summarise(make_record(num_sublayers, num_blocks=2))
    measures = {name: np.tile(getattr(summary, name), (num_steps, 1)) for name in plots.SHOWN_MEASURES}
    steps = 1000 * np.arange(1, num_steps + 1)
    figure = plots.draw_over_training(DepthHistory(steps, summary.read_names, measures))
    assert_readable(figure)
    for axes, title in zip(figure.axes[:4], plots.SHOWN_MEASURES.values(), strict=True):
        assert axes.get_title(loc="left") == title and axes.get_xlabel() == "step"
    shown = figure.axes[3].images[0].get_array()
    assert shown.shape == (num_sublayers + 1, num_steps)
    assert shown.mask[0].all()  # the first read has no choice
    np.testing.assert_array_equal(shown[1:, 0], summary.embedding_weight[1:])


@pytest.mark.parametrize(
    "curve",
    [
        TrainingCurve(((1, 5.0), (2, 4.0), (3, 3.5)), ((2, 4.1),)),
        TrainingCurve(((1, 5.0),), ()),
        TrainingCurve((), ()),
        TrainingCurve(((1, 5.0), (2, math.nan)), ((1, math.nan),)),
        TrainingCurve(tuple((1000 * i, 11.0 / (i + 1)) for i in range(500)), ()),
    ],
)
def test_training_curve_is_readable(curve: TrainingCurve) -> None:
    figure = plots.draw_training_curve(curve)
    assert_readable(figure)
    assert figure.axes[0].get_xlabel() == "step"
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"


@pytest.mark.parametrize("count", [1, 2, 3, 9, 49, 129])
@pytest.mark.parametrize("inches", [0.05, 0.1, 0.18, 0.7])
def test_shown_ticks_keep_both_ends_and_their_distance(count: int, inches: float) -> None:
    shown = plots.shown_ticks(count, inches)
    assert shown[0] == 0 and shown[-1] == count - 1
    if len(shown) > 2:
        assert min(b - a for a, b in itertools.pairwise(shown)) * inches >= plots.TEXT_INCHES - 1e-9


def test_pictures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    figure = plots.draw_training_curve(TrainingCurve(((1, 2.0),), ()))
    path = plots.save_picture(figure, tmp_path / "training.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["training.png"]


def test_no_global_figures_are_left() -> None:
    plots.draw_training_curve(TrainingCurve(((1, 2.0),), ()))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
