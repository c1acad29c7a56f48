"""What crosses a hop, against the paper's formulas and against a walk through the stages."""

from __future__ import annotations

import pytest

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan, even_split
from attention_residuals.plan import DepthPlan


def plan_of(layers, ranks, cache=True, **attn_res):
    depth = DepthPlan(2 * sum(layers), AttnResConfig(**attn_res))
    return StagePlan(depth=depth, layers=tuple(layers), num_ranks=ranks, cache=cache)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("blocks_per_stage", [1, 2])
def test_block_traffic_is_the_papers(ranks, virtual, blocks_per_stage):
    """N_p blocks a stage: C(C-1)/2 N_p naive, P(P-1)/2 N_p + (V-1) P^2 N_p cached, the embedding left out.

    The paper's rank keeps what it has received; ours keeps what it has made as well, (V-1) P N_p blocks.
    """
    stages = ranks * virtual
    layers = (2 * blocks_per_stage,) * stages
    naive = plan_of(layers, ranks, cache=False, sublayers_per_block=4)
    assert naive.block_tensors() - (stages - 1) == stages * (stages - 1) // 2 * blocks_per_stage
    cached = plan_of(layers, ranks, sublayers_per_block=4)
    paper = ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2
    made = (virtual - 1) * ranks
    assert cached.block_tensors() - (ranks - 1) == (paper - made) * blocks_per_stage


@pytest.mark.parametrize("layers", [(1, 4, 2, 3), (3, 1, 1, 5), (2, 2, 2, 2, 2, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("attn_res", [{"sublayers_per_block": s} for s in (1, 2, 3, 5, 12)])
def test_every_rank_holds_what_its_reads_see(layers, ranks, attn_res):
    """Walk through the stages, carrying what hops say, and never miss or repeat a block."""
    plan = plan_of(layers, ranks, **attn_res)
    holds = {rank: set() for rank in range(ranks)}
    holds[0].add(0)
    for stage in range(plan.num_stages):
        rank = plan.rank_of(stage)
        arrived = set(plan.received(stage))
        if ranks > 1:
            assert not arrived & holds[rank]
        holds[rank] |= arrived
        start = 2 * plan.layer_range(stage).start
        assert holds[rank] >= set(range(1 + plan.depth.num_finished_blocks(start)))
        holds[rank] |= set(range(plan.blocks_after(stage)))
    assert all(len(holds[rank]) == plan.kept_blocks(rank) for rank in range(ranks))


def test_standard_mode_sends_the_residual_stream():
    plan = plan_of((2, 2, 2, 2), 2, mode="standard")
    assert [plan.hop_tensors(stage) for stage in range(4)] == [0, 1, 1, 1]
    assert plan.block_tensors() == 0


def test_partial_sum_crosses_only_open_blocks():
    plan = plan_of((1, 2, 1), 1, cache=False, sublayers_per_block=3)
    assert [plan.partial_after(stage) for stage in range(3)] == [True, False, False]
    assert [plan.hop_tensors(stage) for stage in range(3)] == [0, 2, 3]


def test_layer_ranges():
    plan = plan_of((1, 4, 2, 3), 2, sublayers_per_block=4)
    assert [plan.layer_range(stage) for stage in range(4)] == [
        range(0, 1),
        range(1, 5),
        range(5, 7),
        range(7, 10),
    ]


def test_even_split():
    assert even_split(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="fewer"):
        even_split(2, 3)


@pytest.mark.parametrize(
    ("layers", "ranks", "message"),
    [((2, 0), 1, "at least one"), ((1, 1), 1, "all together"), ((1,) * 3, 2, "multiple")],
)
def test_mistakes(layers, ranks, message):
    depth = DepthPlan(6 if ranks == 2 else 8, AttnResConfig())
    with pytest.raises(ValueError, match=message):
        StagePlan(depth=depth, layers=layers, num_ranks=ranks)
