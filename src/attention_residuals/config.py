"""AttnResConfig: how a model's residual additions become attention over depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from attention_residuals.variant import ReadVariant, check_count, require

MODES = ("standard", "full", "block")
READ_SCALES = ("mean", "sum")
READ_SCHEDULES = ("auto", "per_read", "two_phase")
DEFAULT_NUM_BLOCKS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResConfig(ReadVariant):
    """The settings of Attention Residuals (arXiv 2603.15031), validated once, immutable.

    The fields of `ReadVariant` change what each read computes, for ablations; their defaults are the paper's.

    Args:
        mode: "standard" keeps the residual additions, "full" makes every sublayer a source, "block" sums
            consecutive sublayers into one source.
        num_blocks: how many blocks the sublayers are divided into (block mode; 8 when neither is given).
            The block length is rounded up, so a short last block, or fewer blocks, may result.
        sublayers_per_block: block length in sublayers (a decoder layer has two); instead of `num_blocks`.
        read_scale: "mean" mixes the sources with weights that sum to one (the paper); "sum" multiplies the
            mixture by the number of sources, so that zero queries give the standard residual stream.
        eps: added to the mean square inside the key norm's root.
        read_schedule: how a model forward runs its reads, with the same result: "per_read" one by one over
            all their sources; "two_phase" first several reads in one pass over the sources they share, then
            each with its own; "auto" the one that was measured to be faster (docs/design.md).
        window: a read sees the embedding and the last `window` sources only; None for all.

    Raises:
        ValueError: a value breaks its rule; the message names rule, value and remedy.
        TypeError: a value has the wrong type, or a field is unknown (from `from_dict`).
    """

    mode: str = "block"
    num_blocks: int | None = None
    sublayers_per_block: int | None = None
    read_scale: str = "mean"
    eps: float = 1e-6
    read_schedule: str = "auto"
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mode in MODES, f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        require(
            self.read_scale in READ_SCALES,
            f"read_scale must be 'mean' (the paper) or 'sum' (lossless conversion), got {self.read_scale!r}",
        )
        require(
            self.read_schedule in READ_SCHEDULES,
            f"read_schedule must be one of {', '.join(READ_SCHEDULES)}, got {self.read_schedule!r}",
        )
        for name in ("num_blocks", "sublayers_per_block"):
            check_count(name, getattr(self, name), "use mode='full' for one sublayer a block")
            require(
                getattr(self, name) is None or self.mode == "block",
                f"{name} belongs to mode='block', got {name}={getattr(self, name)} with mode={self.mode!r}; "
                "leave it out or set mode='block'",
            )
        check_count("window", self.window, "None lets a read see all sources")
        require(
            self.num_blocks is None or self.sublayers_per_block is None,
            f"give num_blocks or sublayers_per_block, not both; got num_blocks={self.num_blocks} and "
            f"sublayers_per_block={self.sublayers_per_block}",
        )
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)):
            raise TypeError(f"eps must be a number, got {type(self.eps).__name__}")
        require(
            math.isfinite(self.eps) and self.eps > 0,
            f"eps must be a finite number above 0, got {self.eps}; the default is 1e-6",
        )
        self._check_variant()
        if self.mode == "block" and self.num_blocks is None and self.sublayers_per_block is None:
            object.__setattr__(self, "num_blocks", DEFAULT_NUM_BLOCKS)

    def _check_variant(self) -> None:
        changed = {**self.changed_fields(), **({} if self.window is None else {"window": self.window})}
        if not changed:
            return
        name, value = next(iter(changed.items()))
        require(
            self.mode != "standard",
            f"{name} changes reads, which mode='standard' has not, got {name}={value!r}; leave it out",
        )
        require(
            self.read_schedule != "two_phase",
            f"read_schedule='two_phase' has the paper's reads only, got {name}={value!r}; "
            "use read_schedule='per_read'",
        )

    @property
    def variant(self) -> ReadVariant:
        """The fields that say what a read computes."""
        return ReadVariant(**self.changed_fields())  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any] | AttnResConfig) -> AttnResConfig:
        """Build from the dictionary that `to_dict` (and `config.json`) holds; unknown fields are refused."""
        if isinstance(fields, AttnResConfig):
            return fields
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"attn_res must be an AttnResConfig or a dict of its fields, got {type(fields).__name__}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise TypeError(f"attn_res has unknown fields {unknown}; known are {sorted(known)}")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values; `AttnResConfig.from_dict` reverses it."""
        return dataclasses.asdict(self)
