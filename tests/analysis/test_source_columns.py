"""The columns of a depth map against the names that the plan gives each read's sources."""

from __future__ import annotations

import pytest

from attention_residuals.analysis.source_columns import column_names, shown_source_names, source_columns
from attention_residuals.config import AttnResConfig
from attention_residuals.plan import DepthPlan


@pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("blocks", [{"mode": "full"}, {"sublayers_per_block": 3}, {"num_blocks": 1}])
def test_every_source_stands_in_the_column_of_its_name(blocks: dict[str, object], window: int | None) -> None:
    plan = DepthPlan(8, AttnResConfig(**blocks, window=window))
    columns = column_names(plan)
    assert len(columns) == 1 + plan.num_blocks
    for read in range(plan.num_reads):
        seen, names = source_columns(plan, read), plan.source_names(read)
        assert list(seen) == sorted(set(seen)) and seen[0] == 0
        for column, name in zip(seen, names, strict=True):
            assert columns[column] == name or name == "partial"
        if names[-1] == "partial":
            assert seen[-1] == plan.num_finished_blocks(read) + 1


def test_a_partial_sum_is_named_as_its_block_so_far() -> None:
    plan = DepthPlan(8, AttnResConfig(sublayers_per_block=2, window=1))
    assert shown_source_names(plan, 5) == ["embedding", "block 3 so far"]
    assert shown_source_names(plan, 6) == ["embedding", "block 3"]
