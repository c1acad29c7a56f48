"""The table of `pipeline.traffic`, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.pipeline.traffic import compare_traffic, count_traffic, papers_count, traffic
from attention_residuals.plan import DepthPlan

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def test_the_page_shows_these_numbers():
    table = PAGE.read_text(encoding="utf-8").split("<!-- traffic:")[1].split("\n\n")[0]
    rows = {row.name: row for row in compare_traffic(32, 4, 2, 8)}
    shown = re.findall(r"^\| (\w+(?:, \w+)?) \| (.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in shown] == list(rows)
    for name, cells in shown:
        row = rows[name]
        counts = (row.blocks, row.paper, row.embeddings, row.partials, row.total, row.widest)
        assert cells.split(" | ") == ["-" if count is None else str(count) for count in counts]


def test_open_blocks_are_counted_apart():
    depth = DepthPlan(8, AttnResConfig(mode="block", sublayers_per_block=3))
    row = count_traffic(StagePlan(depth=depth, layers=(1, 1, 1, 1), num_ranks=4), "a split inside blocks")
    # after 2, 4 and 6 sublayers: open, open, closed; blocks 0, 1 and 2
    assert (row.partials, row.embeddings, row.blocks, row.widest) == (2, 3, 0 + 1 + 2, 3)
    assert row.paper is None


def test_the_papers_count_needs_equal_stages():
    depth = DepthPlan(12, AttnResConfig(mode="block", sublayers_per_block=2))
    assert papers_count(StagePlan(depth=depth, layers=(2, 1, 1, 2), num_ranks=2)) is None
    assert papers_count(StagePlan(depth=depth, layers=(1,) * 6, num_ranks=2)) == 1 + 2 * 4
    assert papers_count(StagePlan(depth=depth, layers=(1,) * 6, num_ranks=2, cache=False)) == 15


def test_the_command():
    app = typer.Typer()
    app.command()(traffic)
    result = CliRunner().invoke(app, ["--layers", "32", "--ranks", "4", "--sublayers-per-block", "8"])
    assert result.exit_code == 0
    line = next(line for line in result.output.splitlines() if "Block, cached" in line)
    assert [int(cell) for cell in re.findall(r"\d+", line)] == [18, 22, 3, 0, 21, 4, 168]
    result = CliRunner().invoke(app, ["--layers", "4", "--ranks", "4"])
    assert result.exit_code == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_stage_sends_nothing(ranks):
    rows = compare_traffic(2, ranks, 1, 2)
    assert all((row.total == 0) == (ranks == 1) for row in rows)
