"""What moves, against the paper's figures (arXiv 2603.15031) and against `StagePlan`."""

from __future__ import annotations

import pytest

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.traffic import bytes_per_step, hops, prefill_block_bytes, read_traffic
from attention_residuals.schedule import read_groups, traffic

WIDTH = 7168  # of the paper's example: 8 blocks of 128 Ki tokens in bfloat16 are 15 GB


def depth_of(sublayers, **attn_res):
    return DepthPlan(sublayers, AttnResConfig(**attn_res))


def test_the_papers_traffic():
    """L = 128, N = 8, S = 16: 3 d, 5.5 d and 24 d a token and sublayer, keys and values fetched apart.

    Full reads what phase 1 found again, which is one more. One fetch serves both here, so the planner's own
    figures are smaller.
    """
    block, full = depth_of(128, num_blocks=8), depth_of(128, mode="full")
    assert read_traffic(depth_of(128, mode="standard")).per_sublayer == 3
    paper = [
        traffic(plan, read_groups(plan, n), passes=2).total / 128 for plan, n in ((block, 1), (full, 16))
    ]
    assert paper == [pytest.approx(5.5, abs=0.15), pytest.approx(25, abs=0.5)]
    assert read_traffic(block).two_phase_per_sublayer < paper[0]
    assert read_traffic(full).two_phase_per_sublayer < paper[1]


@pytest.mark.parametrize("attn_res", [{"num_blocks": 8}, {"mode": "full"}, {"sublayers_per_block": 5}])
def test_read_by_read_is_each_source_and_the_result(attn_res):
    plan = depth_of(48, **attn_res)
    found = read_traffic(plan)
    assert found.per_read == sum(plan.num_sources(read) + 1 for read in range(plan.num_reads))
    assert found.two_phase <= found.per_read
    assert found.per_sublayer == found.per_read / 48


def test_variants_have_one_phase():
    assert (
        read_traffic(depth_of(48, num_blocks=8, window=3)).two_phase
        == read_traffic(depth_of(48, num_blocks=8, window=3)).per_read
    )


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_pipeline_traffic_is_the_papers(ranks, virtual):
    """N_p = 1 block a stage: C(C-1)/2 naive; P(P-1)/2 + (V-1) P^2 cached, less (V-1) P that ours has made
    itself. The embedding, which the paper leaves out, crosses each hop where it is not held yet.
    """
    stages = ranks * virtual
    depth = depth_of(4 * stages, sublayers_per_block=4)
    layout = Layout(pipeline_ranks=ranks, virtual_stages=virtual, batch=2, context=8, dtype="bfloat16")

    def tensors(cache):
        plan = StagePlan(depth=depth, layers=(2,) * stages, num_ranks=ranks, cache=cache)
        found = hops(plan, layout, 16)
        assert [hop.tensors for hop in found] == [plan.hop_tensors(s) for s in range(1, stages)]
        assert all(hop.bytes == hop.tensors * 2 * 8 * 16 * 2 for hop in found)
        assert bytes_per_step(found, layout) == 2 * layout.num_microbatches * sum(h.bytes for h in found)
        return sum(hop.tensors for hop in found)

    assert tensors(cache=False) - (stages - 1) == stages * (stages - 1) // 2
    paper = ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2
    assert tensors(cache=True) - (ranks - 1) == paper - (virtual - 1) * ranks


def test_one_rank_sends_nothing():
    plan = StagePlan(depth=depth_of(8, num_blocks=2), layers=(2, 2), num_ranks=1)
    assert hops(plan, Layout(virtual_stages=2), 16) == ()


def test_the_papers_prefill():
    """N T d: 15 GB for 128 Ki tokens and 8 blocks, 1.9 GB over 8 ranks, below 0.3 GB in chunks of 16 Ki.

    The paper's N doesn't count the embedding, one source more.
    """
    depth = depth_of(128, num_blocks=8)

    def gigabytes(**fields):
        layout = Layout(context=128 * 1024, dtype="bfloat16", **fields)
        return prefill_block_bytes(depth, layout, WIDTH) * 8 / 9 / 1e9

    assert gigabytes() == pytest.approx(15, rel=0.01)
    assert gigabytes(tensor_parallel=8) == pytest.approx(1.9, rel=0.02)
    assert gigabytes(tensor_parallel=8, prefill_chunk=16 * 1024) < 0.3
    assert gigabytes(prefill_chunk=10**9) == gigabytes()


def test_a_layout_says_what_is_wrong():
    with pytest.raises(ValueError, match="pipeline_ranks must be at least 1, got 0"):
        Layout(pipeline_ranks=0)
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        Layout(dtype="int8")
    with pytest.raises(ValueError, match="bandwidth must be a finite number"):
        Layout(bandwidth=0)
    with pytest.raises(ValueError, match="data_parallel must be at least 2, got 1"):
        Layout(fsdp=True)
    with pytest.raises(TypeError, match="batch must be an int"):
        Layout(batch=None)
    assert (Layout().num_microbatches, Layout(pipeline_ranks=4).num_microbatches) == (1, 8)
