"""Groups of reads, and their memory traffic against the paper's formulas."""

from __future__ import annotations

import pytest

from attention_residuals import AttnResConfig, DepthPlan
from attention_residuals.schedule import least_traffic_groups, read_groups, traffic

CONFIGS = (
    AttnResConfig(mode="full"),
    *(AttnResConfig(sublayers_per_block=length) for length in (1, 2, 3, 4, 5, 12)),
    AttnResConfig(num_blocks=8),
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("blocks_per_group", [1, 2, 5])
def test_groups_cover_every_read_once_and_split_its_sources(config, layers, blocks_per_group):
    plan = DepthPlan(2 * layers, config)
    groups = read_groups(plan, blocks_per_group)
    assert [read for group in groups for read in group.reads] == list(range(plan.num_reads))
    for group in groups:
        assert group.reads[0] % 2 == 0  # with a decoder layer
        assert group.two_phase == (group.reads[0] > 0 and group.num_shared > 1)
        for read in group.reads:
            names = plan.source_names(read)
            own = group.own_sources(plan, read)
            assert names == plan.source_names(group.reads[0])[: group.num_shared] + own
            assert len(names) == group.num_shared + len(own)


def test_a_block_that_begins_inside_a_layer():
    plan = DepthPlan(12, AttnResConfig(sublayers_per_block=3))
    groups = read_groups(plan, 1)
    assert [(group.reads[0], group.num_shared) for group in groups] == [(0, 1), (4, 2), (6, 3), (10, 4)]
    assert groups[0].own_sources(plan, 3) == ("block 1",)  # the block that closed in the middle of layer 1
    assert groups[1].own_sources(plan, 4) == ("partial",)
    assert groups[3].own_sources(plan, plan.num_sublayers) == ("block 4",)


def test_without_groups_every_read_fetches_all_its_sources():
    plan = DepthPlan(12, AttnResConfig(sublayers_per_block=3))
    found = traffic(plan)
    assert found.phase_2_reads == sum(plan.num_sources(read) for read in range(plan.num_reads))
    assert (found.phase_1_reads, found.phase_1_writes, found.phase_2_writes) == (0, 0, 13)


def inner_traffic(plan, groups, passes):
    """The count without what the paper's formula leaves out, the final read; phase 1 in every group.

    The paper runs phase 1 over the embedding alone as well (a source read, S outputs written and read),
    where this package reads the embedding itself.
    """
    whole = traffic(plan, groups, passes=passes)
    final = 1 + 1 + 1 + passes * len(groups[-1].own_sources(plan, plan.num_sublayers))
    length = len(groups[0].reads)
    embedding_alone = passes + length + length * (1 - passes)
    return whole.total - final + embedding_alone


@pytest.mark.parametrize("num_blocks, length", [(8, 16), (4, 6), (12, 8), (8, 2), (16, 8)])
def test_block_traffic_is_the_papers(num_blocks, length):
    """(N/S + 5) d a sublayer, keys and values counted apart: N(N+1)/2 twice, then 1 + 3 + 1 per read.

    The first read of a block has no partial sum, which saves two; the embedding is one source more.
    """
    sublayers = num_blocks * length
    plan = DepthPlan(sublayers, AttnResConfig(sublayers_per_block=length))
    found = inner_traffic(plan, read_groups(plan, 1), passes=2)
    assert found == num_blocks * (num_blocks + 1) + 5 * sublayers - 2 * num_blocks
    assert found / sublayers == pytest.approx(num_blocks / length + 5, abs=1 / length + 1e-9)
    once = inner_traffic(plan, read_groups(plan, 1), passes=1)
    assert once == num_blocks * (num_blocks + 1) // 2 + 4 * sublayers - num_blocks


@pytest.mark.parametrize("num_groups, length", [(8, 16), (4, 6), (12, 8), (8, 2), (16, 8)])
def test_full_traffic_is_the_papers(num_groups, length):
    """(S + N) d a sublayer; reading the output of phase 1 again is one more, the embedding 2 / S more."""
    sublayers = num_groups * length
    plan = DepthPlan(sublayers, AttnResConfig(mode="full"))
    found = inner_traffic(plan, read_groups(plan, length), passes=2)
    assert found == (length + num_groups + 1) * sublayers + 2 * num_groups
    once = inner_traffic(plan, read_groups(plan, length), passes=1)
    assert 2 * once == (length + num_groups + 4) * sublayers + 2 * num_groups


def test_the_papers_model():
    """L = 128, N = 8, S = 16: 5.5 d for Block and 24 d for Full; read by read 12 d and 132 d."""
    block, full = DepthPlan(128, AttnResConfig(num_blocks=8)), DepthPlan(128, AttnResConfig(mode="full"))
    assert inner_traffic(block, read_groups(block, 1), 2) / 128 == 5.4375
    assert inner_traffic(full, read_groups(full, 16), 2) / 128 == 25.125
    assert traffic(block, passes=2).total / 128 == pytest.approx(12, abs=0.1)
    assert traffic(full, passes=2).total / 128 == pytest.approx(132, abs=0.1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layers", [4, 12, 24, 64])
def test_the_chosen_groups_move_least(config, layers):
    plan = DepthPlan(2 * layers, config)
    chosen = traffic(plan, least_traffic_groups(plan)).total
    assert chosen <= min(
        traffic(plan, read_groups(plan, count)).total for count in range(1, plan.num_blocks + 1)
    )
    assert chosen <= traffic(plan).total


def test_full_mode_takes_about_the_square_root_of_the_depth():
    for layers, length in ((24, 8), (32, 8), (64, 12)):
        plan = DepthPlan(2 * layers, AttnResConfig(mode="full"))
        assert len(least_traffic_groups(plan)[0].reads) == length


def test_no_blocks_make_no_group():
    with pytest.raises(ValueError, match="blocks_per_group"):
        read_groups(DepthPlan(4, AttnResConfig(mode="full")), 0)
