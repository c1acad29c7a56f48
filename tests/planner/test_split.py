"""The split against all splits there are."""

from __future__ import annotations

import itertools
import random

import pytest

from attention_residuals.planner.split import balanced_split


def stage_costs(costs, split, first, last):
    bounds = [0, *itertools.accumulate(split)]
    found = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(3))
def test_no_split_has_a_cheaper_dearest_stage(num_stages, seed):
    source = random.Random(seed)
    costs = [source.choice((1.0, 2.0, 3.5)) for _ in range(7)]
    first, last = source.random(), 4 * source.random()
    found = balanced_split(costs, num_stages, first=first, last=last)
    assert len(found) == num_stages and sum(found) == 7 and min(found) >= 1
    every = (
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, 7)))
        for cuts in itertools.combinations(range(1, 7), num_stages - 1)
    )
    best = min(max(stage_costs(costs, split, first, last)) for split in every)
    assert max(stage_costs(costs, found, first, last)) == pytest.approx(best)


def test_equal_layers_and_a_head():
    assert sorted(balanced_split([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert balanced_split([1.0] * 10, 4, last=2.0) == (3, 3, 3, 1)
    with pytest.raises(ValueError, match="fewer"):
        balanced_split([1.0], 2)
