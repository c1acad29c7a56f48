"""Simulation over P ranks and N blocks: what hops carry and cost, up to thousands of ranks. No tensors.

The same counts as `StagePlan`, over all stages at once. Where there are more stages than the model has
layers, the model is deepened to one layer a stage, so that long pipelines can be looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention_residuals.config import AttnResConfig
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.times import TimeModel

RANKS = tuple(2**i for i in range(13))  # 1 to 4096
BLOCKS = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One number of ranks and of blocks.

    Attributes:
        layers: of the model, deepened where stages would be empty.
        hops: between stages, C - 1; none on one rank.
        tensors: [B, T, D] over all hops of one microbatch, block sums and partial sums.
        naive_tensors: the same without cross-stage caching.
        widest_hop: the most tensors of one hop.
        bytes: of all hops of one microbatch, forward and backward.
        overhead: of a training step over the plain model's in the same pipeline; None if nothing was timed.
    """

    pipeline_ranks: int
    num_blocks: int
    layers: int
    hops: int
    tensors: int
    naive_tensors: int
    widest_hop: int
    bytes: int
    overhead: float | None


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """What a step takes where every layer is like the average one, in seconds of one microbatch.

    Attributes:
        layer: forward and backward of a plain layer.
        head: of embedding and head.
        read: what a read of no source adds.
        source: of each source of a read.
    """

    layer: float
    head: float
    read: float
    source: float


def layer_seconds(times: TimeModel) -> LayerSeconds:
    """The average layer of a timed model."""
    layers, phases = times.model.num_layers, times.training_phases()
    one, two = (sum(times.read(n, phase) for phase in phases) for n in (2, 3))
    return LayerSeconds(
        layer=sum(times.layer_training(index, None) for index in range(layers)) / layers,
        head=times.head_training(None),
        read=one - 2 * (two - one),
        source=two - one,
    )


def hop_tensors(
    depth: DepthPlan,
    layers: Sequence[int] | np.ndarray,
    num_ranks: int,
    *,
    cache: bool,
    sublayers_per_layer: int = 2,
) -> np.ndarray:
    """Tensors of the hop into each stage: `StagePlan.hop_tensors` for all stages at once."""
    ends = np.cumsum(np.asarray(layers)) * sublayers_per_layer
    after = 1 + ends // depth.sublayers_per_block
    after[-1] = 1 + depth.num_blocks
    partial = ends % depth.sublayers_per_block != 0
    held = np.zeros_like(after)
    if cache:
        held[num_ranks:] = after[:-num_ranks]
    found = np.zeros_like(after)
    found[1:] = after[:-1] - held[1:] + partial[:-1]
    return found


def simulate(
    layout: Layout,
    *,
    num_layers: int,
    width: int,
    sublayers_per_layer: int = 2,
    seconds: LayerSeconds | None = None,
    ranks: Sequence[int] = RANKS,
    blocks: Sequence[int] = BLOCKS,
) -> list[SweepPoint]:
    """Every number of ranks with every number of blocks that the model can be divided into.

    Args:
        layout: all of it holds but `pipeline_ranks`.
        num_layers, width: of the model.
        seconds: what was timed; without it there is no overhead.
    """
    points = []
    for num_ranks in ranks:
        stages = num_ranks * layout.virtual_stages
        layers = max(num_layers, stages)
        split = np.full(stages, layers // stages) + (np.arange(stages) < layers % stages)
        for num_blocks in blocks:
            depth = DepthPlan(sublayers_per_layer * layers, AttnResConfig(num_blocks=num_blocks))
            if depth.num_blocks != num_blocks:
                continue
            arguments: dict[str, Any] = {"sublayers_per_layer": sublayers_per_layer}
            found, naive = (
                hop_tensors(depth, split, num_ranks, cache=cache, **arguments) for cache in (True, False)
            )
            used = found if layout.cache else naive
            if num_ranks == 1:  # nothing leaves the rank
                found, naive, used = (np.zeros_like(found) for _ in range(3))
            one = layout.stream_bytes(width)
            overhead = None
            if seconds is not None:
                overhead = _overhead(depth, split, num_ranks, used * one, one, seconds, layout)
            points.append(
                SweepPoint(
                    pipeline_ranks=num_ranks,
                    num_blocks=num_blocks,
                    layers=layers,
                    hops=0 if num_ranks == 1 else stages - 1,
                    tensors=int(found.sum()),
                    naive_tensors=int(naive.sum()),
                    widest_hop=int(used.max()),
                    bytes=2 * one * int(used.sum()),
                    overhead=overhead,
                )
            )
    return points


def _overhead(
    depth: DepthPlan,
    split: np.ndarray,
    num_ranks: int,
    received: np.ndarray,
    plain_hop: int,
    seconds: LayerSeconds,
    layout: Layout,
) -> float:
    """Of the slowest rank; bubble and microbatches multiply both sides alike."""
    length, sublayers = depth.sublayers_per_block, np.arange(depth.num_sublayers)
    sources = 1 + sublayers // length + (sublayers % length != 0)
    reads = np.where(sources > 1, seconds.read + sources * seconds.source, 0.0)
    ends = np.cumsum(split) * (depth.num_sublayers // split.sum())
    of_stage = np.diff(np.concatenate([[0.0], np.cumsum(reads)[ends - 1]]))
    of_stage[-1] += seconds.read + (1 + depth.num_blocks) * seconds.source

    def slowest(stage_seconds: np.ndarray) -> float:
        by_rank = stage_seconds.reshape(-1, num_ranks).sum(axis=0)
        by_rank[-1] += seconds.head
        return float(by_rank.max())

    link = 2 / (1e9 * layout.bandwidth)
    plain_link = np.where(np.arange(len(split)) > 0, link * plain_hop, 0.0) * (num_ranks > 1)
    plain = slowest(split * seconds.layer + plain_link)
    return slowest(split * seconds.layer + of_stage + link * received) / plain - 1
