"""What moves: tensors that reads fetch from memory, and tensors that cross a pipeline's hops. Integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.layout import Layout
from attention_residuals.schedule import least_traffic_groups, traffic

STANDARD_TENSORS = 3  # of an addition: the stream and the output read, the sum written


@dataclasses.dataclass(frozen=True)
class ReadTraffic:
    """Tensors [B, T, D] that the reads of one forward read and write, all layers together.

    Attributes:
        per_read: each read fetches all its sources.
        two_phase: reads that share sources fetch them together (`read_schedule="two_phase"`).
        sublayers: L, to divide by.
    """

    per_read: int
    two_phase: int
    sublayers: int

    @property
    def per_sublayer(self) -> float:
        """In units of D numbers per token; a residual addition is `STANDARD_TENSORS`."""
        return self.per_read / self.sublayers

    @property
    def two_phase_per_sublayer(self) -> float:
        return self.two_phase / self.sublayers


def read_traffic(depth: DepthPlan, sublayers_per_layer: int = 2) -> ReadTraffic:
    """Count them; in standard mode the additions take the place of the reads."""
    if depth.config.mode == "standard":
        moved = STANDARD_TENSORS * depth.num_sublayers
        return ReadTraffic(moved, moved, depth.num_sublayers)
    one_by_one = traffic(depth).total
    # A window or a variant has no second phase, and groups of one block each are a choice as well.
    grouped = depth.config.window is None and not depth.config.changed_fields()
    shared = traffic(depth, least_traffic_groups(depth, sublayers_per_layer)).total if grouped else one_by_one
    return ReadTraffic(one_by_one, min(shared, one_by_one), depth.num_sublayers)


@dataclasses.dataclass(frozen=True)
class Hop:
    """What one microbatch sends to a stage from the one before it.

    Attributes:
        stage: the receiving stage; it runs on rank `stage` mod P.
        tensors: [B, T, D], block sums and the partial sum.
        bytes: of them, forward, from each tensor-parallel rank; their gradients are as many.
    """

    stage: int
    tensors: int
    bytes: int


def hops(stages: StagePlan, layout: Layout, width: int) -> tuple[Hop, ...]:
    """The hops of one microbatch; none where all stages are on one rank."""
    if stages.num_ranks == 1:
        return ()
    one = layout.stream_bytes(width)
    counts = (stages.hop_tensors(stage) for stage in range(1, stages.num_stages))
    return tuple(Hop(stage, count, count * one) for stage, count in enumerate(counts, 1))


def bytes_per_step(crossed: Sequence[Hop], layout: Layout) -> int:
    """All hops of all microbatches of a step, forward and backward, of one replica's tensor-parallel rank."""
    return 2 * layout.num_microbatches * sum(hop.bytes for hop in crossed)


def prefill_block_bytes(depth: DepthPlan, layout: Layout, width: int) -> int:
    """Bytes of the sources that a rank holds at the final read of a prefill: N T D of the paper.

    The embedding is one of them; a window hides blocks, but doesn't free them. With `prefill_chunk` T is a
    chunk: no source outlives its forward.
    """
    tokens = min(layout.prefill_chunk or layout.context, layout.context)
    return (1 + depth.num_finished_blocks(depth.num_sublayers)) * layout.stream_bytes(width, tokens)
