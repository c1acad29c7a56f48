"""Which layers each pipeline stage gets, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attention_residuals.pipeline.stage_plan import even_split


def balanced_split(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Layers per stage with the least cost of the dearest stage; among these the most even one.

    Args:
        costs: of each layer, in any unit.
        first: cost of what comes before the layers (the embedding), on the first stage.
        last: cost of what comes after them (the head), on the last stage.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    even_split(len(costs), num_stages)  # raises where a stage would be empty
    weights = [*costs]
    weights[0] += first
    weights[-1] += last
    sums = [0.0, *itertools.accumulate(weights)]
    # best[i]: (dearest stage, sum of squares, where its last stage begins) of the first i layers
    best = [(sums[i], sums[i] ** 2, 0) for i in range(len(sums))]
    begins = []
    for stage in range(1, num_stages):
        row = [(float("inf"), float("inf"), 0)] * len(sums)
        for end in range(stage + 1, len(sums)):
            row[end] = min(
                (max(best[at][0], sums[end] - sums[at]), best[at][1] + (sums[end] - sums[at]) ** 2, at)
                for at in range(stage, end)
            )
        begins.append([at for _, _, at in row])
        best = row
    ends = [len(costs)]
    for row_begins in reversed(begins):
        ends.append(row_begins[ends[-1]])
    ends.append(0)
    return tuple(end - begin for begin, end in itertools.pairwise(reversed(ends)))
