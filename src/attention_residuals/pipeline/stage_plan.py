"""StagePlan: which layers each pipeline stage runs, and what crosses each hop. Integers only, no tensors."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property

from attention_residuals.plan import DepthPlan


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as equal as they can be; the first stages take what is over.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"a stage needs at least one layer, got {num_stages} stages and {num_layers} layers; take fewer "
            "ranks or virtual stages"
        )
    each, over = divmod(num_layers, num_stages)
    return tuple(each + (stage < over) for stage in range(num_stages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Decoder layers in C stages on P ranks, and the tensors [B, T, D] of each hop between neighbours.

    Stage c runs on rank c mod P; placed as a "v", on ranks 0 to P - 1 and back again. Block sums are numbered
    as in the paper: 0 is the embedding. A hop carries the partial sum, if a block is open, and the block sums
    that the receiving rank lacks. With `cache` a rank keeps every block sum that it has received or made, so
    that later hops carry what was finished in the last P stages only (arXiv 2603.15031, cross-stage caching);
    without it every hop carries all of them.

    Args:
        depth: where blocks close.
        layers: decoder layers of each stage, in order.
        num_ranks: P.
        cache: whether a rank keeps block sums from one of its stages to the next.
        sublayers_per_layer: sublayers of a decoder layer.
        placement: "loop" or "v", which some zero-bubble schedules need; a "v" has no cache.

    Raises:
        ValueError: the layers don't add up to the depth, a stage is empty, ranks differ in stages, or the
            placement is unknown or doesn't go with the cache.
    """

    depth: DepthPlan
    layers: tuple[int, ...]
    num_ranks: int
    cache: bool = True
    sublayers_per_layer: int = 2
    placement: str = "loop"

    def __post_init__(self) -> None:
        total = self.depth.num_sublayers // self.sublayers_per_layer
        if min(self.layers, default=0) < 1 or sum(self.layers) != total:
            raise ValueError(
                f"every stage needs at least one layer and all together {total}, got {self.layers}"
            )
        if self.num_ranks < 1 or self.num_stages % self.num_ranks:
            raise ValueError(
                f"each rank must have the same number of stages, got {self.num_stages} stages on "
                f"{self.num_ranks} ranks; give a multiple"
            )
        if self.placement not in ("loop", "v") or (self.placement == "v" and self.cache):
            raise ValueError(
                f"placement must be 'loop', or 'v' with cache=False, got {self.placement!r} with "
                f"cache={self.cache}"
            )

    @property
    def num_stages(self) -> int:
        """C = P V."""
        return len(self.layers)

    @property
    def virtual_stages(self) -> int:
        """V: stages per rank."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        turn, position = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - position if self.placement == "v" and turn % 2 else position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def layer_range(self, stage: int) -> range:
        """The decoder layers of a stage."""
        return range(self._layer_bounds[stage], self._layer_bounds[stage + 1])

    @cached_property
    def _layer_bounds(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.layers))

    def blocks_after(self, stage: int) -> int:
        """Block sums that exist once the stage has run, the embedding counted; none in standard mode."""
        if self.depth.config.mode == "standard":
            return 0
        return 1 + self.depth.num_finished_blocks(self._next_read(stage))

    def partial_after(self, stage: int) -> bool:
        """Whether a sum is open after the stage; in standard mode the residual stream always is."""
        return self.depth.config.mode == "standard" or self.depth.has_partial(self._next_read(stage))

    def held_before(self, stage: int) -> int:
        """Block sums that the stage's rank has kept: those that existed when its stage before had run."""
        earlier = stage - self.num_ranks
        return self.blocks_after(earlier) if self.cache and earlier >= 0 else 0

    def received(self, stage: int) -> range:
        """The block sums that the hop into the stage carries; the first stage receives none."""
        if stage == 0:
            return range(0)
        return range(self.held_before(stage), self.blocks_after(stage - 1))

    def hop_tensors(self, stage: int) -> int:
        """Tensors [B, T, D] of the hop into the stage: block sums and the partial sum."""
        return 0 if stage == 0 else len(self.received(stage)) + int(self.partial_after(stage - 1))

    def hop_bytes(self, stage: int, *, rows: int, tokens: int, width: int, itemsize: int) -> int:
        """Bytes of the hop into the stage for B rows of T tokens of width D; none within one rank.

        The gradients that come back are as many.
        """
        if stage == 0 or self.rank_of(stage) == self.rank_of(stage - 1):
            return 0
        return self.hop_tensors(stage) * rows * tokens * width * itemsize

    def block_tensors(self) -> int:
        """Block sums that one microbatch sends over all hops: the paper's count, without partial sums."""
        return sum(len(self.received(stage)) for stage in range(1, self.num_stages))

    def kept_blocks(self, rank: int) -> int:
        """Block sums that a rank holds for one microbatch once its last stage has received what it lacks."""
        return self.blocks_after(self.stages_of(rank)[-1])

    def _next_read(self, stage: int) -> int:
        return self.layer_range(stage).stop * self.sublayers_per_layer
