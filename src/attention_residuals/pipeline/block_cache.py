"""BlockCache: the block sums that a rank keeps from one of its stages to the next, and their gradients.

The next stage of the rank reads a kept block through a leaf of its own, so that the backward of a stage ends
where the stage began. The schedule runs that backward first; it leaves the leaf's gradient behind, with what
still later stages added. The backward of the earlier stage then takes this gradient as that of one more
output, where it received or made the block. So each block's gradient is that of one process, up to the order
of sums.
"""

from __future__ import annotations

from torch import Tensor


class BlockCache:
    """What one rank keeps, by microbatch; empty between steps."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        self._kept: dict[tuple[int, int], tuple[tuple[Tensor, Tensor], ...]] = {}

    def __len__(self) -> int:
        """Kept block sums that wait for a later stage, and those that wait for their gradients."""
        return sum(map(len, (*self._leaves.values(), *self._kept.values())))

    def keep(self, stage: int, microbatch: int, blocks: tuple[Tensor, ...], *, has_backward: bool) -> None:
        """Keep the block sums [B, T, D] that exist after a stage for the rank's next stage."""
        leaves = tuple(
            block.detach().requires_grad_(has_backward and block.requires_grad) for block in blocks
        )
        self._leaves[microbatch] = leaves
        if has_backward:
            self._kept[stage, microbatch] = tuple(zip(blocks, leaves, strict=True))

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """The blocks that the rank's stage before has kept; none before its first stage."""
        return self._leaves.pop(microbatch, ())

    def take_gradients(self, stage: int, microbatch: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Blocks in a stage's graph, and the gradients that later stages of the rank left for them."""
        pairs = self._kept.pop((stage, microbatch), ())
        returned = [(block, leaf.grad) for block, leaf in pairs if leaf.grad is not None]
        return tuple(block for block, _ in returned), tuple(grad for _, grad in returned)
