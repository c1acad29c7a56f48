"""ResidualStream: the state carried through depth, as an immutable value."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidualStream(NamedTuple):
    """Finished blocks and the open block's partial sum; `write` returns a new stream.

    Sources are increments, never cumulative states: together they always sum to the residual stream of a
    standard Transformer. The embedding is the first block, exactly once. A block that has just closed
    leaves `partial` at None, so no zero tensor is ever a source.

    Attributes:
        blocks: the embedding, then the finished blocks' sums, each [B, T, D].
        partial: the open block's sum so far [B, T, D], or None where no sublayer of it has written.
    """

    blocks: tuple[torch.Tensor, ...]
    partial: torch.Tensor | None = None

    @classmethod
    def start(cls, embedding: torch.Tensor) -> ResidualStream:
        """The stream before the first sublayer: the embedding [B, T, D] alone."""
        return cls((embedding,), None)

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        """What a read at this depth sees: the blocks, then the partial sum if there is one."""
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def write(self, output: torch.Tensor, *, closes_block: bool) -> ResidualStream:
        """Add one sublayer's output [B, T, D] to the open block; `closes_block` turns it into a source.

        Raises:
            ValueError: the output's shape differs from the blocks'.
        """
        if output.shape != self.blocks[0].shape:
            raise ValueError(
                f"a sublayer's output must have the stream's shape {tuple(self.blocks[0].shape)}, "
                f"got {tuple(output.shape)}"
            )
        total = output if self.partial is None else self.partial + output
        if closes_block:
            return ResidualStream((*self.blocks, total), None)
        return ResidualStream(self.blocks, total)

    def total(self) -> torch.Tensor:
        """The sum of all sources [B, T, D]: the residual stream of a standard Transformer."""
        first, *rest = self.sources
        for source in rest:
            first = first + source
        return first
