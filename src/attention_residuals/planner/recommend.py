"""Recommendation: how many blocks, and how to split the layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from attention_residuals.config import AttnResConfig
from attention_residuals.planner.prediction import Planner, Prediction

# The paper finds most of the gain at about 8 blocks (arXiv 2603.15031).
ABOUT_EIGHT = range(6, 11)
PREFERRED = 8
OVERHEAD = 0.04  # of a training step in a pipeline, the paper's claim


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A block count and a split, and why."""

    num_blocks: int
    split: tuple[int, ...]
    reason: str


def recommend(
    planner: Planner, base: AttnResConfig, *, memory_limit: float | None = None
) -> Recommendation | None:
    """About 8 blocks that end where stages end, if they can; else as many as memory and hops allow.

    Args:
        base: settings to keep beside mode and block length.
        memory_limit: bytes a rank has; None for no limit.

    Returns:
        None where not even one block fits the memory.
    """
    lengths = ("mode", "num_blocks", "sublayers_per_block")
    kept = {name: value for name, value in base.to_dict().items() if name not in lengths}

    @functools.cache
    def prediction(num_blocks: int) -> Prediction | None:
        """None where the depth can't be divided into so many, or memory is short."""
        config = AttnResConfig.from_dict({**kept, "mode": "block", "num_blocks": num_blocks})
        if planner.depth_plan(config).num_blocks != num_blocks:
            return None
        found = planner.predict(config)
        return found if memory_limit is None or found.peak_memory <= memory_limit else None

    counts = range(min(planner.model.num_sublayers, ABOUT_EIGHT[-1]), 0, -1)
    # Where a pipeline was timed, hops may make fewer blocks the better choice.
    bounds = (OVERHEAD, None) if planner.times is not None and planner.layout.pipeline_ranks > 1 else (None,)
    for bound in bounds:
        near = {n: p for n in counts if n in ABOUT_EIGHT and (p := prediction(n)) and _is_cheap(p, bound)}
        if near:
            best = min(near, key=lambda n: (_open_hops(near[n]), abs(n - PREFERRED), n))
            return Recommendation(best, near[best].split, _why(best, near[best]))
        for fewer in (n for n in counts if n < ABOUT_EIGHT[0]):
            found = prediction(fewer)
            if found is not None and _is_cheap(found, bound):
                return Recommendation(fewer, found.split, _why_fewer(planner, found, memory_limit, bound))
    return None


def _is_cheap(found: Prediction, bound: float | None) -> bool:
    return bound is None or found.times is None or found.times["training step"].overhead <= bound


def _open_hops(found: Prediction) -> int:
    """Hops that carry a partial sum beside block sums, since a block is open where a stage ends."""
    ends = itertools.accumulate(found.split[:-1])
    per_layer = found.depth.num_sublayers // sum(found.split)
    return sum(found.depth.has_partial(per_layer * end) for end in ends) if found.hops else 0


def _why(best: int, found: Prediction) -> str:
    reason = f"about {PREFERRED} blocks, as in the paper"
    if best == PREFERRED:
        return reason
    if found.hops and _open_hops(found) == 0:
        return f"{reason}, and these end where stages end"
    return f"{reason}, and the nearest count that this depth and memory allow"


def _why_fewer(planner: Planner, found: Prediction, memory_limit: float | None, bound: float | None) -> str:
    sublayers = planner.model.num_sublayers
    if sublayers < ABOUT_EIGHT[0]:
        return f"the model has {sublayers} sublayers, too few for about {PREFERRED} blocks"
    if memory_limit is not None and found.peak_memory <= memory_limit and bound is None:
        return f"the most whose {found.peak_memory / 1e9:.3g} GB on the fullest rank are within the limit"
    assert found.times is not None  # hops are a bound only where they were timed
    return (
        f"more blocks on the hops, or in memory, cost too much: a step takes "
        f"{100 * found.times['training step'].overhead:.1f}% longer"
    )
