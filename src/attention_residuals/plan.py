"""DepthPlan: which sources each read sees, and where blocks close. Integers only, no tensors."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from attention_residuals.config import AttnResConfig

_Source = TypeVar("_Source")


def in_window(sources: tuple[_Source, ...], window: int | None) -> tuple[_Source, ...]:
    """The first source (the embedding) and the last `window` ones; all of them without a window."""
    if window is None or len(sources) <= 1 + window:
        return sources
    return (sources[0], *sources[-window:])


@dataclasses.dataclass(frozen=True)
class DepthPlan:
    """The schedule of a model with `num_sublayers` sublayers (L) under `config`.

    Read r (0 <= r < L) makes the input of sublayer r; read L is the final read, before the final norm.
    A read sees the embedding, every finished block and, if the open block has one, its partial sum
    (arXiv 2603.15031, section on Block Attention Residuals). A block closes when its last sublayer has
    written, so the first read of a block sees finished blocks only. The last block may be shorter.
    Under `config.window` W a read sees the embedding and the last W of its other sources.

    In standard mode there is one source, the residual stream itself, and no block ever closes.

    Raises:
        ValueError: `num_sublayers` is below 1.
        IndexError: a read or sublayer outside the model.
    """

    num_sublayers: int
    config: AttnResConfig

    def __post_init__(self) -> None:
        if isinstance(self.num_sublayers, bool) or not isinstance(self.num_sublayers, int):
            raise TypeError(f"num_sublayers must be an int, got {type(self.num_sublayers).__name__}")
        if self.num_sublayers < 1:
            raise ValueError(
                f"num_sublayers must be at least 1, got {self.num_sublayers}; a decoder layer has two"
            )

    @property
    def num_reads(self) -> int:
        """L + 1: one read per sublayer and the final read."""
        return self.num_sublayers + 1

    @property
    def sublayers_per_block(self) -> int:
        """Block length S in sublayers; the number of sublayers in standard mode."""
        if self.config.mode == "full":
            return 1
        if self.config.mode == "standard":
            return self.num_sublayers
        if self.config.sublayers_per_block is not None:
            return self.config.sublayers_per_block
        assert self.config.num_blocks is not None  # AttnResConfig fills it in
        return -(-self.num_sublayers // self.config.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of sublayers, the short last one included, the embedding not."""
        return -(-self.num_sublayers // self.sublayers_per_block)

    def num_finished_blocks(self, read: int) -> int:
        """Blocks of sublayers that have closed before this read (the embedding not counted)."""
        self._check("read", read, self.num_reads)
        if self.config.mode == "standard":
            return 0
        return self.num_blocks if read == self.num_sublayers else read // self.sublayers_per_block

    def has_partial(self, read: int) -> bool:
        """Whether the open block's partial sum is among the read's sources."""
        self._check("read", read, self.num_reads)
        if self.config.mode == "standard" or read == self.num_sublayers:
            return False
        return read % self.sublayers_per_block != 0

    def num_sources(self, read: int) -> int:
        """N of a read: the embedding, the finished blocks, and the partial sum if there is one.

        At most 1 + W under a window W.
        """
        others = self.num_finished_blocks(read) + int(self.has_partial(read))
        return 1 + (others if self.config.window is None else min(others, self.config.window))

    def closes_block(self, sublayer: int) -> bool:
        """Whether a block closes once this sublayer has written; the last sublayer always closes one."""
        self._check("sublayer", sublayer, self.num_sublayers)
        if self.config.mode == "standard":
            return False
        return (sublayer + 1) % self.sublayers_per_block == 0 or sublayer + 1 == self.num_sublayers

    def source_names(self, read: int) -> tuple[str, ...]:
        """Names of the read's sources in order: "embedding", "block 1" ..., "partial".

        Blocks are counted from 1, since the embedding is the paper's block 0. In full mode a block is one
        sublayer and is called "sublayer 1" and so on; in standard mode the one source is "residual stream".
        """
        finished = self.num_finished_blocks(read)
        if self.config.mode == "standard":
            return ("residual stream",)
        word = "sublayer" if self.config.mode == "full" else "block"
        names = ("embedding", *(f"{word} {i + 1}" for i in range(finished)))
        return in_window((*names, "partial") if self.has_partial(read) else names, self.config.window)

    @staticmethod
    def _check(what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise IndexError(f"{what} must be between 0 and {count - 1}, got {index}")
