"""Bytes of a training step on each pipeline rank: weights and their states, and what backward needs.

Without checkpointing a layer keeps what the plain layer keeps, but for its pre-norms, which the read replaces
where it norms as well; instead each read keeps 3 N + 1 numbers a token (depth weights, root mean squares,
scores; one for the norm) and every source is kept once: the embedding, each block's sum, and each partial sum
that a read sees. With checkpointing a layer keeps its own input, and the block sums are kept once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.dry_run import DryRun, PartCount, variant_read_bytes
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import PlainModel

MOMENTS = 2  # numbers that AdamW keeps per weight


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the peak of a training step.

    Attributes:
        weights, gradients, optimizer: AdamW, all in the layout's dtype; under FSDP2 the rank's share, and
            what is gathered beside it.
        activations: kept for backward by the microbatches in flight, block sums included.
        blocks: block sums and embedding among them.
        recomputed: what one layer keeps while it runs again, under checkpointing.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    blocks: int
    recomputed: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.recomputed


def read_parameters(depth: DepthPlan, width: int) -> tuple[int, ...]:
    """Numbers that each read learns, the final read last; none where there is one source."""
    counts = []
    for read in range(depth.num_reads):
        num_sources = depth.num_sources(read)
        shapes = depth.config.variant.parameter_shapes(width, num_sources) if num_sources > 1 else {}
        counts.append(sum(math.prod(shape) for shape in shapes.values()))
    return tuple(counts)


class KeptBytes:
    """What one microbatch keeps for backward, by layer and by stage.

    Args:
        run: the plain model's counts for the layout's rows and dtype.
    """

    def __init__(self, model: PlainModel, depth: DepthPlan, run: DryRun, layout: Layout) -> None:
        self.model, self.depth, self.run, self.layout = model, depth, run, layout
        self.one = layout.stream_bytes(model.width)
        self.has_reads = depth.config.mode != "standard"
        self.fused = self.has_reads and model.family.norm_weight is not None
        self.scalars = functools.cache(self._scalars)

    def _scalars(self, num_sources: int, has_partial: bool) -> int:
        """Bytes that a read keeps beside its sources."""
        if self.depth.config.variant.beyond_kernels is None:
            return (3 * num_sources + 1) * self.layout.scalar_bytes()
        tokens = self.layout.batch * -(-self.layout.context // self.layout.tensor_parallel)
        return variant_read_bytes(
            self.depth.config.variant,
            num_sources,
            has_partial,
            width=self.model.width,
            tokens=tokens,
            dtype=getattr(torch, self.layout.dtype),
        )

    def norm(self, part: PartCount, which: int, read: int) -> int:
        """A norm with what comes before it: the stream it receives, or the read of it."""
        own = self._share(part.norms[which])
        keeps_input = self.one if part.norm_keeps_input[which] else 0
        if not self.has_reads:
            return own + keeps_input
        num_sources, has_partial = self.depth.num_sources(read), self.depth.has_partial(read)
        partial = self.one if has_partial else 0
        if num_sources == 1:  # the embedding, which is counted among the blocks
            return own + partial
        scalars = self.scalars(num_sources, has_partial)
        return partial + scalars + (0 if self.fused else own + keeps_input)

    def layer(self, index: int) -> int:
        """One layer without checkpointing, block sums apart."""
        part, count = self.run.layers[self.model.kinds[index]], self.model.family.sublayers_per_layer
        norms = (self.norm(part, i, count * index + i) for i in range(count))
        return self._share(part.kept) + sum(norms)

    def stage(self, stages: StagePlan, stage: int) -> int:
        """What the stage keeps, block sums apart; under checkpointing the input of each layer."""
        layers = stages.layer_range(stage)
        if self.layout.gradient_checkpointing:
            kept = len(layers) * self.one
        else:
            kept = sum(self.layer(index) for index in layers)
        kept += self._share(self.run.embedding.kept) if stage == 0 else 0
        if stage == stages.num_stages - 1:
            kept += self._share(self.run.head.kept) + self.norm(self.run.head, 0, self.depth.num_sublayers)
        return kept

    def blocks(self, stages: StagePlan, stage: int) -> int:
        """Block sums that the stage adds to what its rank keeps: received, and made."""
        if not self.has_reads:
            return 0
        before = stages.blocks_after(stage - 1) if stage else 0
        received = 0 if stages.num_ranks == 1 else len(stages.received(stage))
        return (received + stages.blocks_after(stage) - before) * self.one

    def recomputed(self, layers: Sequence[int]) -> int:
        """The most that one of these layers keeps while it runs again; its inputs are kept already."""
        return max(self.layer(index) for index in layers) if self.layout.gradient_checkpointing else 0

    def _share(self, size: int) -> int:
        return -(-size // self.layout.tensor_parallel)


def in_flight(stages: StagePlan, rank: int, num_microbatches: int) -> list[int]:
    """The stages whose forwards a rank has run before its first backward is done; one entry a microbatch.

    1F1B: rank p begins with P - p forwards. Interleaved over V stages: 2 (P - 1 - p) + (V - 1) R + 1, where R
    microbatches go through one stage before the next one's turn (Narayanan et al., arXiv 2104.04473).
    """
    ranks, virtual = stages.num_ranks, stages.virtual_stages
    if virtual == 1:
        return [rank] * min(num_microbatches, ranks - rank)
    round_length = num_microbatches // max(1, num_microbatches // ranks)
    count = min(2 * (ranks - 1 - rank) + (virtual - 1) * round_length + 1, virtual * num_microbatches)
    own = stages.stages_of(rank)
    return [own[i // round_length % virtual] for i in range(count)]


def _held(layers: Sequence[int], ends: int, layout: Layout, *, in_stages: bool) -> tuple[int, int, int]:
    """Numbers in the weights and gradients on a rank at their peak, and those that it has moments of.

    Under FSDP2 a rank has its share. With it are whole: of a whole model the ends, the layer at work and the
    one gathered next; of a stage, which stays whole from microbatch to microbatch, everything.
    """
    numbers = sum(layers) + ends
    if not layout.fsdp:
        return numbers, numbers, numbers
    share = -(-numbers // layout.data_parallel)
    if in_stages:
        return share + numbers, share + numbers, share
    largest = max(layers)
    return share + ends + min(2, len(layers)) * largest, share + ends + largest, share


def rank_memory(
    model: PlainModel, kept: KeptBytes, stages: StagePlan, layout: Layout
) -> tuple[RankMemory, ...]:
    """The memory of every pipeline rank, on each of its tensor-parallel ranks."""
    reads = read_parameters(kept.depth, model.width)
    count, found = model.family.sublayers_per_layer, []
    for rank in range(stages.num_ranks):
        own = [index for stage in stages.stages_of(rank) for index in stages.layer_range(stage)]
        layers = [model.layer_parameters[i] + sum(reads[count * i : count * (i + 1)]) for i in own]
        ends = model.embedding_parameters if rank == 0 else 0
        if rank == stages.num_ranks - 1:
            ends += model.head_parameters + reads[-1]
            if rank == 0:  # a tied matrix is on the rank once
                ends = model.parameters - sum(model.layer_parameters) + reads[-1]
        weights, gradients, states = (
            -(-numbers // layout.tensor_parallel) * layout.itemsize
            for numbers in _held(layers, ends, layout, in_stages=stages.num_stages > 1)
        )
        flight = in_flight(stages, rank, layout.num_microbatches)
        blocks = sum(kept.blocks(stages, stage) for stage in flight)
        found.append(
            RankMemory(
                weights=weights,
                gradients=gradients,
                optimizer=MOMENTS * states,
                activations=blocks + sum(kept.stage(stages, stage) for stage in flight),
                blocks=blocks,
                recomputed=kept.recomputed(own),
            )
        )
    return tuple(found)
