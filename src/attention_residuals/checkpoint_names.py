"""From the names and units of others' attention residuals to ours, and back: Kimi K3 and FLA.

Both compute the paper's reads, so a checkpoint changes in nothing but names, the query's shape and the unit
of the block size. One row of `STYLES` says how a style spells them; every table here, in either direction,
is made from that row and the architecture's row in `models/families.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from attention_residuals.config import AttnResConfig
from attention_residuals.models.families import Family
from attention_residuals.plan import DepthPlan

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """How others spell reads and their settings.

    Attributes:
        layer_reads: stems of a layer's reads before its token mixer and before its MLP, in that order.
        final_read: stem of the final read; like the layers, it is a child of the backbone.
        block_size: config field of the block length.
        sublayers_per_unit: how many sublayers one unit of the block length is.
        has_full: whether a block length of one sublayer can be said.
        eps: config field of the eps that all norms share, those of the reads included.
    """

    layer_reads: tuple[str, str]
    final_read: str
    block_size: str
    sublayers_per_unit: int
    has_full: bool
    eps: str

    @property
    def final_query(self) -> str:
        return f"{self.final_read}_{_PARTS['query']}.weight"


# Parameter of a DepthRead -> what others put after the stem: a linear map [1, D] and a norm [D].
_PARTS = {"query": "proj", "key_weight": "norm"}
_LEFTOVER = re.compile(r"(^|[._])res_")

STYLES: dict[str, Style] = {
    "k3": Style(
        layer_reads=("self_attention_res", "mlp_res"),
        final_read="output_attn_res",
        block_size="attn_res_block_size",
        sublayers_per_unit=2,
        has_full=False,
        eps="rms_norm_eps",
    ),
    "fla": Style(
        layer_reads=("attn_res", "mlp_res"),
        final_read="res",
        block_size="attnres_block_size",
        sublayers_per_unit=1,
        has_full=True,
        eps="norm_eps",
    ),
}


def import_keys(
    keys: Iterable[str], style: str = "auto", family: Family | None = None
) -> dict[str, str | None]:
    """Our name of every key of somebody else's complete checkpoint.

    Args:
        keys: all keys, of all shards; whatever precedes `layers.0.` is kept as it is.
        style: a key of `STYLES`, or "auto" to tell it from the keys.
        family: the architecture's row; None for the names that Llama, Qwen3 and Qwen3.5 share.

    Returns:
        Their name -> ours, in order. None for layer 0's attention read: both styles store one that never
        runs, since it has one source, and we have none.

    Raises:
        ValueError: the style is unknown or can't be told; the keys belong to another algorithm
            (`*_res_bias`); a read is missing; a key looks like a read's but isn't; our names are there.
    """
    keys, family = list(keys), family or Family()
    if biases := [key for key in keys if key.endswith("res_bias")]:
        raise ValueError(
            f"reads must have no bias, got {_listed(biases)}: that code mixes cumulative states and has no "
            "final read, so its weights mean something else; train with attention residuals anew"
        )
    fits = [name for name, row in STYLES.items() if _prefixes(keys, row.final_query)]
    row = _told(fits, "final read") if style == "auto" else _style(style)
    names, unused = _names(keys, row, _backbone(keys, row.final_query), family)
    theirs_to_ours = {theirs: ours for ours, theirs in names.items()} | dict.fromkeys(unused.values())
    strangers = [key for key in keys if key not in theirs_to_ours and _LEFTOVER.search(key)]
    if strangers:
        raise ValueError(
            f"every '*res_*' key must be a read's projection or norm, got {_listed(strangers)}; take them "
            "out if they belong to another part of the model"
        )
    _check(keys, required=names.values(), taken=(*names, *unused))
    return {key: theirs_to_ours.get(key, key) for key in keys}


def export_keys(keys: Iterable[str], style: str, family: Family | None = None) -> dict[str, str]:
    """Their name of every key of our complete checkpoint; `import_keys` the other way round.

    Raises:
        ValueError: the style is unknown; there are no reads, or one is missing; their names are there.
    """
    return _export(list(keys), style, family or Family())[0]


def import_names(
    weights: Mapping[str, Tensor], style: str = "auto", family: Family | None = None
) -> dict[str, Tensor]:
    """Somebody else's complete state dict under our names; arguments and errors as in `import_keys`.

    A projection [1, D] becomes a query [D]; every tensor keeps its values, dtype and device, and is a view.
    That layer 0's attention read is left out is logged.

    Raises:
        ValueError: also where a projection isn't [1, D].
    """
    names = import_keys(weights, style, family)
    if dropped := [theirs for theirs, ours in names.items() if ours is None]:
        logger.warning("left out %s: the first read has one source, so it never runs", _listed(dropped))
    ours_to_tensor = {}
    for theirs, ours in names.items():
        tensor = weights[theirs]
        if ours is None:
            continue
        if ours != theirs and ours.endswith(".query"):
            if tensor.ndim != 2 or tensor.shape[0] != 1:
                raise ValueError(
                    f"a read's projection must be [1, D], got {list(tensor.shape)} for {theirs}; "
                    "a query that depends on the input has no place in a read"
                )
            tensor = tensor[0]
        ours_to_tensor[ours] = tensor
    return ours_to_tensor


def export_names(
    weights: Mapping[str, Tensor], style: str, family: Family | None = None
) -> dict[str, Tensor]:
    """Our complete state dict under somebody else's names; arguments and errors as in `export_keys`.

    A query [D] becomes a projection [1, D]. Layer 0's attention read is added as it starts (a projection of
    zeros, a norm of ones): their models have these parameters, though they never run.
    """
    names, unused = _export(list(weights), style, family or Family())
    queries = [ours for ours, theirs in names.items() if ours != theirs and ours.endswith(".query")]
    theirs_to_tensor = {
        theirs: weights[ours][None] if ours in queries else weights[ours] for ours, theirs in names.items()
    }
    like = weights[queries[-1]]
    for ours, theirs in unused.items():
        start = torch.zeros_like(like)[None] if ours.endswith(".query") else torch.ones_like(like)
        theirs_to_tensor[theirs] = start
    return theirs_to_tensor


def import_settings(fields: Mapping[str, Any], style: str = "auto") -> AttnResConfig:
    """Our settings from the fields of somebody else's `config.json`; a `text_config` is looked into.

    Raises:
        ValueError: the style is unknown or can't be told; there are no attention residuals; a field is
            missing, unknown or breaks the style's own rule.
        TypeError: the block size is not an int.
    """
    fields = fields.get("text_config") or fields
    fits = [name for name, row in STYLES.items() if row.block_size in fields]
    row = _told(fits, "block size") if style == "auto" else _style(style)
    if others := [name for name in fields if re.match("attn_?res_", name) and name != row.block_size]:
        raise ValueError(
            f"fields {_listed(others)} have no counterpart; take them out if they change nothing"
        )
    size = fields.get(row.block_size)
    if size is None:
        raise ValueError(f"{row.block_size} must be given, got None: this model has no attention residuals")
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{row.block_size} must be an int, got {size!r} of type {type(size).__name__}")
    sublayers = size * row.sublayers_per_unit
    if size < 1 or (sublayers % 2 and sublayers > 1):
        rule = "even, or 1" if row.has_full else "at least 1"
        raise ValueError(f"{row.block_size} must be {rule}, got {size}; that is what its own code allows")
    if row.eps not in fields:
        raise ValueError(f"{row.eps} is missing; add the eps that the model was trained with")
    if sublayers == 1:
        return AttnResConfig(mode="full", eps=fields[row.eps])
    return AttnResConfig(sublayers_per_block=sublayers, eps=fields[row.eps])


def export_settings(
    settings: AttnResConfig, num_layers: int, style: str, *, norm_eps: float
) -> dict[str, Any]:
    """The two fields of somebody else's `config.json` that say the same as `settings`.

    Args:
        settings: ours; `num_blocks` is turned into the block length it means at this depth.
        num_layers: decoder layers, of two sublayers each.
        style: a key of `STYLES`.
        norm_eps: eps of the model's own norms; others have one field for these and the reads.

    Raises:
        ValueError: the style is unknown, or it can't say this: standard mode, `read_scale="sum"`, another
            read than the paper's, a block that is no whole number of layers, two different eps.
    """
    row = _style(style)
    if settings.mode == "standard":
        raise ValueError("mode must be 'full' or 'block', got 'standard'; a plain model needs no other names")
    if settings.read_scale != "mean":
        raise ValueError(
            f"read_scale must be 'mean', got {settings.read_scale!r}: {style!r} can't multiply a read by its "
            "number of sources; train with read_scale='mean' to export"
        )
    for name, value in {**settings.changed_fields(), "window": settings.window}.items():
        if value is not None:
            raise ValueError(
                f"reads must be the paper's, got {name}={value!r}: {style!r} has no such field; "
                "train without it to export"
            )
    if settings.eps != norm_eps:
        raise ValueError(
            f"reads and norms must share one eps in {style!r} ({row.eps}), got {settings.eps} for reads and "
            f"{norm_eps} for norms; train with AttnResConfig(eps={norm_eps}) to export"
        )
    # One block over everything is the same however long its length says it is.
    sublayers = min(DepthPlan(2 * num_layers, settings).sublayers_per_block, 2 * num_layers)
    if sublayers % 2 and not (sublayers == 1 and row.has_full):
        also = " or one sublayer (mode='full')" if row.has_full else ""
        raise ValueError(
            f"a block must be whole decoder layers{also} in {style!r}, got {sublayers} sublayers; "
            "train with an even sublayers_per_block to export"
        )
    return {row.block_size: sublayers // row.sublayers_per_unit, row.eps: norm_eps}


def _style(name: str) -> Style:
    if name not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, got {name!r}")
    return STYLES[name]


def _told(fits: list[str], evidence: str) -> Style:
    """The style that "auto" means."""
    if len(fits) != 1:
        raise ValueError(
            f"style must be plain from the {evidence}, but {' and '.join(fits) or 'none'} of "
            f"{', '.join(STYLES)} fits; name the style, if these are attention residuals at all"
        )
    return STYLES[fits[0]]


def _prefixes(keys: list[str], name: str) -> list[str]:
    """What stands before `name` in each key that ends with it."""
    return [key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")]


def _backbone(keys: list[str], final_query: str) -> str:
    """What stands before the names of layers and final read."""
    found = _prefixes(keys, final_query)
    if len(found) != 1:
        raise ValueError(
            f"exactly one final read must be there ({final_query}), got {len(found)}; give all keys of one "
            "model, and train anew if its code has no final read, since that is another algorithm"
        )
    return found[0]


def _names(
    keys: list[str], style: Style, prefix: str, family: Family
) -> tuple[dict[str, str], dict[str, str]]:
    """Our name -> theirs of every read's parameters; apart from these, those of the read that never runs."""
    layers = f"{prefix}{family.layers}."
    numbers = [key.removeprefix(layers).split(".")[0] for key in keys if key.startswith(layers)]
    num_layers = 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)
    if not num_layers:
        raise ValueError(
            f"keys must hold decoder layers as {layers}0 and so on, beside the final read; got none"
        )
    reads = {
        f"{layers}{i}.{norm}": f"{layers}{i}.{stem}"
        for i in range(num_layers)
        for norm, stem in zip(family.pre_norms, style.layer_reads, strict=True)
    }
    reads[f"{prefix}{family.final_norm}"] = f"{prefix}{style.final_read}"
    tables: list[dict[str, str]] = [{}, {}]
    for i, (ours, theirs) in enumerate(reads.items()):
        for part, ending in _PARTS.items():
            tables[i == 0][f"{ours}.read.{part}"] = f"{theirs}_{ending}.weight"
    return tables[0], tables[1]


def _export(keys: list[str], style: str, family: Family) -> tuple[dict[str, str], dict[str, str]]:
    """Our name -> theirs of every key; and of the read that we don't have."""
    prefix = _backbone(keys, f"{family.final_norm}.read.query")
    names, unused = _names(keys, _style(style), prefix, family)
    _check(keys, required=names, taken=(*names.values(), *unused.values()))
    return {key: names.get(key, key) for key in keys}, unused


def _check(keys: list[str], *, required: Iterable[str], taken: Iterable[str]) -> None:
    present = set(keys)
    if missing := [name for name in required if name not in present]:
        raise ValueError(f"every read must be there, got none of {_listed(missing)}; give all shards at once")
    if clash := [name for name in taken if name in present]:
        raise ValueError(
            f"names must be of one side, got {_listed(clash)} as well; the keys are renamed already"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
