"""What is recommended, and why."""

from __future__ import annotations

import pytest
from test_times import planner_of, timed

from attention_residuals.config import AttnResConfig
from attention_residuals.planner.recommend import recommend


def peak(planner, num_blocks):
    return planner.predict(AttnResConfig(num_blocks=num_blocks)).peak_memory


def test_about_eight_as_in_the_paper():
    advice = recommend(planner_of(layers=8), AttnResConfig())
    assert (advice.num_blocks, advice.split) == (8, (8,))
    assert "as in the paper" in advice.reason


def test_a_shallow_model_gets_what_it_can_have():
    advice = recommend(planner_of(layers=2), AttnResConfig())
    assert advice.num_blocks == 4 and "4 sublayers" in advice.reason


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_forces_fewer(checkpointing):
    planner = planner_of(layers=8, gradient_checkpointing=checkpointing)
    limit = peak(planner, 4)
    assert peak(planner, 4) < peak(planner, 6)
    advice = recommend(planner, AttnResConfig(), memory_limit=limit)
    assert advice.num_blocks in (4, 5) and peak(planner, advice.num_blocks) <= limit
    assert "within the limit" in advice.reason
    assert recommend(planner, AttnResConfig(), memory_limit=1) is None


def test_blocks_that_end_with_stages_are_preferred():
    """12 layers on 4 ranks: 8 blocks of 3 sublayers end inside a layer, 6 of 4 with a stage."""
    planner = planner_of(layers=12, pipeline_ranks=4, microbatches=4)
    assert planner.stage_plan(planner.depth_plan(AttnResConfig())).layers == (3, 3, 3, 3)
    advice = recommend(planner, AttnResConfig())
    assert (advice.num_blocks, advice.split) == (
        8,
        (3, 3, 3, 3),
    )  # 6 sublayers a stage are two of these blocks
    planner = planner_of(layers=12, pipeline_ranks=3, microbatches=4)
    advice = recommend(planner, AttnResConfig())
    assert (advice.num_blocks, advice.split) == (6, (4, 4, 4))
    assert "end where stages end" in advice.reason


def test_slow_hops_force_fewer():
    planner = timed(planner_of(layers=12, pipeline_ranks=2, bandwidth=1e-6), read=0.0, source=0.0)
    assert planner.predict(AttnResConfig(num_blocks=6)).times["training step"].overhead > 0.04
    advice = recommend(planner, AttnResConfig())
    fewer = planner.predict(AttnResConfig(num_blocks=advice.num_blocks)).times["training step"].overhead
    assert advice.num_blocks < 6 and fewer <= 0.04 and "hops" in advice.reason


def test_settings_beside_the_block_length_are_kept(monkeypatch):
    planner, tried = planner_of(layers=8), []
    predict = planner.predict
    monkeypatch.setattr(planner, "predict", lambda config: tried.append(config) or predict(config))
    recommend(planner, AttnResConfig(mode="full", eps=1e-5, window=3))
    assert {config.num_blocks for config in tried} == {6, 8}  # 16 sublayers make no 7, 9 or 10 blocks
    assert all((config.mode, config.eps, config.window) == ("block", 1e-5, 3) for config in tried)


def test_the_split_follows_what_was_timed():
    """Four layers of 16 seconds and a head of 8 stay even; reads of many sources weigh on the last layers."""
    even = timed(planner_of(pipeline_ranks=2), read=0.0, source=0.0)
    assert recommend(even, AttnResConfig()).split == (2, 2)
    assert recommend(timed(planner_of(pipeline_ranks=2)), AttnResConfig()).split == (3, 1)
