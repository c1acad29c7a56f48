"""From a TOML file and flags to the plan of a comparison: one training run per arm, size, seed and rate."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_residuals.errors import UserError
from attention_residuals.training.presets import PRESETS
from attention_residuals.training.settings import TrainSettings

FILE_KEYS = ("arms", "seeds", "sizes", "learning_rates", "output_dir", "train")
# All that an arm may change: data, their order and the number of tokens are the same for every arm.
ARM_FIELDS = (
    "mode",
    "num_blocks",
    "sublayers_per_block",
    "read_scale",
    "variant",
    "read_lr_factor",
    "optimizer",
    "weight_decay",
)
# training options that the comparison itself decides -> where they are given instead
DECIDED_ELSEWHERE = {
    "preset": "sizes",
    "model_config": "sizes",
    "from_checkpoint": "sizes",
    "mode": "arms",
    "num_blocks": "arms",
    "sublayers_per_block": "arms",
    "read_scale": "arms",
    "variant": "arms",
    "seed": "seeds",
    "learning_rate": "learning_rates",
    "output_dir": "output_dir",
    "threads": "--threads",
}
ARM_EXAMPLES = "baseline, full, block:8 (8 blocks) or sublayers:4 (blocks of 4 sublayers)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing to compare: a name, and the fields of `TrainSettings` that make it."""

    name: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """One size to train every arm at.

    Attributes:
        model: a preset, a JSON file with the fields of a model, or the folder of a saved model to start from.
        train: fields of `TrainSettings` for this size, such as a larger model's `max_steps`.
    """

    model: str
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.model if self.model in PRESETS else _slug(Path(self.model).expanduser().resolve().stem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One training run of a comparison.

    Attributes:
        name: of the run's folder.
        arm, size, seed: what tells it from the others.
        learning_rate: the rate of a sweep; None for the size's own.
        settings: what `attnres train` would be given.
    """

    name: str
    arm: str
    size: str
    seed: int
    learning_rate: float | None
    settings: TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """What is compared.

    Args:
        arms: the first is the one that the others are measured against.
        sizes: each a model, perhaps with training options of its own.
        seeds: of weights, data order and the choice of validation text.
        learning_rates: peak rates that every arm tries; empty for each size's own.
        train: other fields of `TrainSettings`, the same for all runs.
        output_dir: folder of the comparison.

    Raises:
        UserError: a value breaks its rule; the message names rule, value and remedy.
    """

    arms: tuple[Arm, ...]
    sizes: tuple[Size, ...] = (Size(model="tiny"),)
    seeds: tuple[int, ...] = (0,)
    learning_rates: tuple[float, ...] = ()
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output_dir: str = "comparison"

    def __post_init__(self) -> None:
        labels = {
            "arms": [_slug(arm.name) for arm in self.arms],
            "sizes": [size.label for size in self.sizes],
            "seeds": list(map(str, self.seeds)),
            "learning_rates": [f"{rate:g}" for rate in self.learning_rates],
        }
        for what, names in labels.items():
            if not names and what != "learning_rates":
                raise UserError(f"{what} must name at least one, got none; give --{what}")
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"{what} must differ from each other, but {', '.join(twice)} appears twice")
        for options in (self.train, *(size.train for size in self.sizes)):
            _check_options(options, () if options is self.train else ("learning_rate",))

    def plan(self) -> tuple[PlannedRun, ...]:
        """Every run, ordered so that each arm has its first seed before any has its second.

        Raises:
            UserError: a training option is unknown, has the wrong type, or breaks its rule.
        """
        rates = self.learning_rates or (None,)
        return tuple(
            self._planned(arm, size, seed, rate)
            for size, seed, rate, arm in itertools.product(self.sizes, self.seeds, rates, self.arms)
        )

    def _planned(self, arm: Arm, size: Size, seed: int, rate: float | None) -> PlannedRun:
        rate_label = "" if rate is None else f"-lr-{rate:g}"
        name = f"{size.label}-{_slug(arm.name)}{rate_label}-seed-{seed}"
        fields = {
            "keep_checkpoints": 1,
            **self.train,
            **size.train,
            **_size_fields(size.model),
            **arm.fields,
            "seed": seed,
            "learning_rate": size.train.get("learning_rate") if rate is None else rate,
            "output_dir": os.path.join(self.output_dir, "runs", name),
        }
        settings = TrainSettings(**{field: typed(field, value) for field, value in fields.items()})
        return PlannedRun(
            name=name, arm=arm.name, size=size.label, seed=seed, learning_rate=rate, settings=settings
        )


def read_settings(file: Path | None, given: Mapping[str, Any]) -> ComparisonSettings:
    """The settings in a TOML file, with those in `given` in their place.

    Args:
        file: a file with some of FILE_KEYS; `train` is a table of training options.
        given: the same keys, from flags.

    Raises:
        UserError: the file can't be read, or it or a flag breaks a rule.
    """
    content = {} if file is None else _read_toml(file)
    if unknown := sorted(set(content) - set(FILE_KEYS)):
        raise UserError(
            f"{file} holds {', '.join(unknown)}; known are {', '.join(FILE_KEYS)} (options of attnres train "
            "go into the table [train])"
        )
    train = {**_table(content.get("train", {}), "[train]"), **given.get("train", {})}
    fields = {**content, **given, "train": train}
    if "arms" not in fields:
        raise UserError(f"nothing to compare; give --arms or a file with arms, such as {ARM_EXAMPLES}")
    fields["arms"] = tuple(parse_arm(arm) for arm in _list("arms", fields["arms"], (str, dict)))
    if "sizes" in fields:
        fields["sizes"] = tuple(parse_size(size) for size in _list("sizes", fields["sizes"], (str, dict)))
    kinds: dict[str, tuple[type, ...]] = {"seeds": (int,), "learning_rates": (int, float)}
    for name, kind in kinds.items():
        if name in fields:
            fields[name] = tuple(_list(name, fields[name], kind))
    if not isinstance(fields.get("output_dir", ""), str):
        raise UserError(f"output_dir must be the name of a folder, got {fields['output_dir']!r}")
    return ComparisonSettings(**fields)


def parse_arm(arm: str | Mapping[str, Any]) -> Arm:
    """An arm from its short form (ARM_EXAMPLES), or from a table with `name` and some of ARM_FIELDS.

    Raises:
        UserError: it is neither.
    """
    if isinstance(arm, str):
        kind, _, number = arm.partition(":")
        if arm in ("baseline", "standard", "full"):
            return Arm(name=arm, fields={"mode": "full" if arm == "full" else "standard"})
        field = {"block": "num_blocks", "sublayers": "sublayers_per_block"}.get(kind)
        if field is None or not number.isdecimal():
            raise UserError(f"an arm must be {ARM_EXAMPLES}, got {arm!r}")
        return Arm(name=arm, fields={"mode": "block", field: int(number)})
    fields = dict(arm)
    name = fields.pop("name", None)
    if not isinstance(name, str) or not _slug(name):
        raise UserError(f"an arm's table must have a name, got {dict(arm)}; add name = '...'")
    if unknown := sorted(set(fields) - set(ARM_FIELDS)):
        raise UserError(
            f"arm {name} holds {', '.join(unknown)}; arms may differ in {', '.join(ARM_FIELDS)} (a rate goes "
            "into learning_rates, which every arm tries)"
        )
    return Arm(name=name, fields=fields)


def parse_size(size: str | Mapping[str, Any]) -> Size:
    """A size from the name of a model, or from a table with `model` and options of attnres train.

    Raises:
        UserError: the table has no model.
    """
    if isinstance(size, str):
        return Size(model=size)
    options = dict(size)
    model = options.pop("model", None)
    if not isinstance(model, str):
        raise UserError(f"a size's table must have a model, got {dict(size)}; add model = 'tiny' or a file")
    return Size(model=model, train=options)


def _check_options(options: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise unless all are training options that the comparison doesn't decide itself."""
    for name in options:
        if name in DECIDED_ELSEWHERE and name not in allowed:
            raise UserError(
                f"{name} can't be an option of all runs; give it as {DECIDED_ELSEWHERE[name]} instead"
            )
    if options.get("validation_fraction") == 0:
        raise UserError("validation_fraction must be above 0, got 0: arms are compared on validation text")


def typed(name: str, value: Any) -> Any:
    """A training option's value as `TrainSettings` has it: a list becomes a tuple, an integer a float.

    Raises:
        UserError: there is no such option, or the value has the wrong type.
    """
    hints = typing.get_type_hints(TrainSettings)
    if name not in hints:
        raise UserError(f"attnres train has no option {name!r}; see attnres train --help")
    hint = hints[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    origin = typing.get_origin(hint)
    if origin is tuple:
        value = (value,) if isinstance(value, str) else value
        if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif origin is Mapping and isinstance(value, dict):
        return value
    elif float in kinds and type(value) is int:
        return float(value)
    elif type(value) in kinds:
        return value
    if origin in (tuple, Mapping):
        expected = "list of str" if origin is tuple else "table"
    else:
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise UserError(f"{name} must be of type {expected}, got {value!r}")


def _size_fields(size: str) -> dict[str, str]:
    """The fields of `TrainSettings` that make a model of this size."""
    if size in PRESETS:
        return {"preset": size}
    path = Path(size).expanduser()
    if path.is_dir():
        return {"from_checkpoint": str(path)}
    if path.is_file():
        return {"model_config": os.path.abspath(path)}
    raise UserError(
        f"a size must be one of {', '.join(PRESETS)}, a JSON file with a model's fields, or the folder of a "
        f"saved model; got {size!r}, which does not exist"
    )


def _slug(name: str) -> str:
    """The name as part of a file name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def _list(name: str, value: Any, kinds: tuple[type, ...]) -> Iterable[Any]:
    items = value if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kinds) or isinstance(item, bool):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{name} must be a list of {expected}, got {item!r}")
    return items


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table of training options, got {value!r}")
    return value


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{file} is not TOML: {error}; see docs/comparing.md for an example") from error
