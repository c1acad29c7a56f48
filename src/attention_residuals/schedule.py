"""From a DepthPlan to groups of reads that share one pass over their common sources. Integers only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from attention_residuals.plan import DepthPlan


@dataclasses.dataclass(frozen=True)
class ReadGroup:
    """Consecutive reads that share their first sources: those finished when the group begins.

    Attributes:
        reads: which reads; the final read belongs to the last group.
        num_shared: how many sources all of them share, the embedding counted.
    """

    reads: range
    num_shared: int

    @property
    def two_phase(self) -> bool:
        """Whether phase 1 runs. Over one source, the embedding, it would only copy it."""
        return self.num_shared > 1

    def own_sources(self, plan: DepthPlan, read: int) -> tuple[str, ...]:
        """Names of the sources that phase 2 adds to this read: blocks closed since, and the partial sum."""
        return plan.source_names(read)[self.num_shared :]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Tensors [B, T, D] that the reads of one forward read from and write to memory.

    A read that is not split reads its sources and writes its result: it counts as phase 2.
    """

    phase_1_reads: int
    phase_1_writes: int
    phase_2_reads: int
    phase_2_writes: int

    @property
    def total(self) -> int:
        return self.phase_1_reads + self.phase_1_writes + self.phase_2_reads + self.phase_2_writes


def read_groups(
    plan: DepthPlan, blocks_per_group: int, sublayers_per_layer: int = 2
) -> tuple[ReadGroup, ...]:
    """Groups of `blocks_per_group` blocks each, the last one perhaps shorter.

    The paper's two-phase schedule has one block a group in block mode, and S sublayers a group in full mode,
    where a block is one sublayer (arXiv 2603.15031). A group begins with a layer: its first phase runs before
    the layer's call, which may be checkpointed (and then runs again, in backward). Where a block begins
    inside a layer, the previous group's reads take it as a source of their own until the next layer.

    Raises:
        ValueError: `blocks_per_group` is below 1.
    """
    if blocks_per_group < 1:
        raise ValueError(f"blocks_per_group must be at least 1, got {blocks_per_group}")
    length = blocks_per_group * plan.sublayers_per_block
    begins = range(0, plan.num_sublayers, length)
    starts = {-(-at // sublayers_per_layer) * sublayers_per_layer for at in begins}
    bounds = [*sorted(at for at in starts if at < plan.num_sublayers), plan.num_reads]
    return tuple(
        ReadGroup(range(first, end), 1 + plan.num_finished_blocks(first))
        for first, end in itertools.pairwise(bounds)
    )


def least_traffic_groups(plan: DepthPlan, sublayers_per_layer: int = 2) -> tuple[ReadGroup, ...]:
    """The groups of equal size that read and write least; in full mode about sqrt(L) sublayers each."""
    candidates = (read_groups(plan, blocks, sublayers_per_layer) for blocks in range(1, plan.num_blocks + 1))
    return min(candidates, key=lambda groups: traffic(plan, groups).total)


def traffic(plan: DepthPlan, groups: Sequence[ReadGroup] = (), *, passes: int = 1) -> Traffic:
    """Count what one forward reads and writes under these groups; without groups, read by read.

    Phase 1 of a group reads each shared source and writes one output per read. Phase 2 of a read reads that
    output and the read's own sources, and writes the result.

    Args:
        passes: how often an operator fetches a source. Once in this package, where the key is made from
            the value on the way; the paper counts keys and values apart, which is 2.
    """
    split = {read: group for group in groups if group.two_phase for read in group.reads}
    phase_1_reads = sum(passes * group.num_shared for group in groups if group.two_phase)
    phase_2_reads = 0
    for read in range(plan.num_reads):
        if read in split:
            phase_2_reads += 1 + passes * len(split[read].own_sources(plan, read))
        else:
            phase_2_reads += passes * plan.num_sources(read)
    return Traffic(phase_1_reads, len(split), phase_2_reads, plan.num_reads)
