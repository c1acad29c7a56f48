"""From a depth plan to the columns of its depth map: one for the embedding and one for every block.

A read's sources, in their order, stand in rising columns. Under a window W these are the embedding's and the
last W: the columns between are of sources that the read doesn't see.
"""

from __future__ import annotations

import dataclasses

from attention_residuals.plan import DepthPlan, in_window


def column_names(plan: DepthPlan) -> tuple[str, ...]:
    """What the final read sees, or would see without a window."""
    without_window = dataclasses.replace(plan.config, window=None)
    return DepthPlan(plan.num_sublayers, without_window).source_names(plan.num_sublayers)


def source_columns(plan: DepthPlan, read: int) -> tuple[int, ...]:
    """The column of each of a read's sources; the partial sum of the open block k has that of block k."""
    num_so_far = 1 + plan.num_finished_blocks(read) + int(plan.has_partial(read))
    return in_window(tuple(range(num_so_far)), plan.config.window)


def shown_source_names(plan: DepthPlan, read: int) -> list[str]:
    """The names of a read's sources; the partial sum of the open block 2 is called "block 2 so far"."""
    columns = column_names(plan)
    names = [columns[i] for i in source_columns(plan, read)]
    if plan.has_partial(read):
        names[-1] += " so far"
    return names
