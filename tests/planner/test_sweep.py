"""The simulation against `StagePlan` and the time model, its speed, and its picture."""

from __future__ import annotations

import time

import numpy as np
import pytest
from test_times import planner_of, timed

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plots import draw_sweep
from attention_residuals.planner.sweep import (
    BLOCKS,
    RANKS,
    LayerSeconds,
    hop_tensors,
    layer_seconds,
    simulate,
)


@pytest.mark.parametrize("attn_res", [{"num_blocks": 3}, {"mode": "full"}, {"sublayers_per_block": 5}])
@pytest.mark.parametrize(("layers", "ranks"), [((1,) * 12, 4), ((3, 1, 4, 1, 5, 9), 2), ((7,), 1)])
@pytest.mark.parametrize("cache", [True, False])
def test_hops_are_those_of_the_stage_plan(attn_res, layers, ranks, cache):
    depth = DepthPlan(2 * sum(layers), AttnResConfig(**attn_res))
    plan = StagePlan(depth=depth, layers=layers, num_ranks=ranks, cache=cache)
    found = hop_tensors(depth, layers, ranks, cache=cache)
    assert found.tolist() == [plan.hop_tensors(stage) for stage in range(len(layers))]


def test_thousands_of_ranks_take_less_than_ten_seconds():
    started = time.process_time()
    points = simulate(
        Layout(virtual_stages=2, context=4096),
        num_layers=64,
        width=5120,
        seconds=LayerSeconds(layer=0.1, head=0.1, read=1e-4, source=1e-4),
    )
    assert time.process_time() - started < 10
    assert {point.pipeline_ranks for point in points} == set(RANKS) and max(RANKS) == 4096
    assert {point.num_blocks for point in points} == set(BLOCKS)
    assert points[-1].layers == points[-1].hops + 1 == 8192
    assert all(point.tensors <= point.naive_tensors for point in points)
    assert all(point.overhead > 0 for point in points)


def test_more_blocks_move_more():
    points = [p for p in simulate(Layout(), num_layers=64, width=16) if p.pipeline_ranks == 64]
    moved = [point.tensors for point in points]
    assert moved == sorted(moved) and moved[0] < moved[-1]
    assert all(p.bytes == 2 * p.tensors * Layout().stream_bytes(16) for p in points)
    assert all(p.overhead is None for p in points)


def test_block_counts_that_the_depth_cannot_have_are_left_out():
    points = simulate(Layout(), num_layers=3, width=16, ranks=[1], blocks=[2, 4, 6, 16])
    assert [point.num_blocks for point in points] == [2, 6]  # six sublayers in fours are three blocks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_overhead_is_that_of_the_time_model(num_ranks):
    """Where layers are alike, the average layer is every layer."""
    planner = timed(planner_of(pipeline_ranks=num_ranks, bandwidth=1e-6))
    one, *more = simulate(
        planner.layout,
        num_layers=4,
        width=16,
        seconds=layer_seconds(planner.times),
        ranks=[num_ranks],
        blocks=[2],
    )
    depth = planner.depth_plan(AttnResConfig(num_blocks=2))
    stages = StagePlan(depth=depth, layers=(4 // num_ranks,) * num_ranks, num_ranks=num_ranks)
    from attention_residuals.planner.traffic import hops

    crossed = hops(stages, planner.layout, 16)
    expected = planner.times.training_step(stages, crossed, planner.layout.stream_bytes(16))
    assert not more and one.overhead == pytest.approx(expected.overhead)
    assert one.tensors == sum(hop.tensors for hop in crossed)


@pytest.mark.parametrize("seconds", [None, LayerSeconds(layer=0.1, head=0.1, read=1e-4, source=1e-4)])
def test_the_picture_shows_every_point(tmp_path, seconds):
    points = simulate(Layout(), num_layers=24, width=1024, seconds=seconds, ranks=[1, 2, 8, 64])
    figure = draw_sweep(points, "0.8B")
    path = tmp_path / "sweep.png"
    figure.savefig(path)
    assert path.stat().st_size > 10_000
    panels = figure.axes
    assert len(panels) == (1 if seconds is None else 2)
    drawn = [line for line in panels[0].lines if line.get_linestyle() == "-"]
    for line, count in zip(drawn, sorted({p.num_blocks for p in points}), strict=True):
        own = [p for p in points if p.num_blocks == count and p.hops]
        assert np.allclose(line.get_ydata(), [p.tensors / p.hops for p in own])
        assert list(line.get_xdata()) == [p.pipeline_ranks for p in own]
    if seconds is not None:
        assert panels[1].get_ylabel() == "overhead (%)"
