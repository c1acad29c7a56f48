"""AttnResConfig: how a model's residual additions become attention over depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MODES = ("standard", "full", "block")
READ_SCALES = ("mean", "sum")
READ_SCHEDULES = ("auto", "per_read", "two_phase")
DEFAULT_NUM_BLOCKS = 8


def _require(rule: bool, message: str) -> None:
    if not rule:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResConfig:
    """The settings of Attention Residuals (arXiv 2603.15031), validated once, immutable.

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

    def __post_init__(self) -> None:
        _require(self.mode in MODES, f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        _require(
            self.read_scale in READ_SCALES,
            f"read_scale must be 'mean' (the paper) or 'sum' (lossless conversion), got {self.read_scale!r}",
        )
        _require(
            self.read_schedule in READ_SCHEDULES,
            f"read_schedule must be one of {', '.join(READ_SCHEDULES)}, got {self.read_schedule!r}",
        )
        for name in ("num_blocks", "sublayers_per_block"):
            self._check_count(name)
        _require(
            self.num_blocks is None or self.sublayers_per_block is None,
            f"give num_blocks or sublayers_per_block, not both; got num_blocks={self.num_blocks} and "
            f"sublayers_per_block={self.sublayers_per_block}",
        )
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)):
            raise TypeError(f"eps must be a number, got {type(self.eps).__name__}")
        _require(
            math.isfinite(self.eps) and self.eps > 0,
            f"eps must be a finite number above 0, got {self.eps}; the default is 1e-6",
        )
        if self.mode == "block" and self.num_blocks is None and self.sublayers_per_block is None:
            object.__setattr__(self, "num_blocks", DEFAULT_NUM_BLOCKS)

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        _require(
            value >= 1, f"{name} must be at least 1, got {value}; use mode='full' for one sublayer a block"
        )
        _require(
            self.mode == "block",
            f"{name} belongs to mode='block', got {name}={value} with mode={self.mode!r}; "
            "leave it out or set mode='block'",
        )

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
