"""Settings to everything a run needs: tokenizer, token blocks, configuration, schedule. Writes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from attention_residuals.errors import UserError
from attention_residuals.models.auto import causal_lm_class
from attention_residuals.training.data import TokenData, make_token_data
from attention_residuals.training.documents import Documents
from attention_residuals.training.layout import fit_rows
from attention_residuals.training.model import make_config, make_trainable
from attention_residuals.training.optimizer import parameter_groups
from attention_residuals.training.presets import PRESETS
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings
from attention_residuals.training.summary import (
    describe_adapters,
    memory_estimate,
    model_facts,
    print_summary,
)
from attention_residuals.training.tokenizer import make_tokenizer

DEFAULT_STEPS = 1000
PARTS = 10  # evaluations and checkpoints in a run, where no interval is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The run's length and intervals, settled once the data is known.

    Attributes:
        max_steps: optimizer steps.
        batch_size: rows per device and forward pass.
        learning_rate: peak rate of the groups whose factor is 1.
        eval_every, save_every: intervals in steps.
        gradient_accumulation: forward passes per step.
        processes: data-parallel ranks, which have rows of their own.
    """

    max_steps: int
    batch_size: int
    learning_rate: float
    eval_every: int
    save_every: int
    gradient_accumulation: int = 1
    processes: int = 1

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation * self.processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that can fail without anything being written."""

    settings: TrainSettings
    tokenizer: PreTrainedTokenizerBase
    data: TokenData
    config: PreTrainedConfig
    schedule: Schedule
    facts: dict[str, int]


def prepare(
    settings: TrainSettings,
    console: Console,
    *,
    folder: RunFolder | None = None,
    started: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> Prepared:
    """Read the data, settle tokenizer, configuration and schedule, and print the summary. Writes nothing.

    Args:
        folder, started: a run to continue and its run.json: its tokenizer, configuration and intervals
            are kept, and the data must be what it was. Its steps keep their rows on any number of processes.
        processes: data-parallel ranks.
    """
    preset = PRESETS[
        settings.preset or "small"
    ]  # a model without preset takes the small one's training defaults
    documents = Documents(settings.data, settings.text_field)
    name = settings.tokenizer or settings.from_checkpoint or preset.tokenizer
    if folder is not None:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder.path)
    else:
        cache_dir = Path(settings.cache_dir) if settings.cache_dir else None
        tokenizer = make_tokenizer(name, documents, vocab_size=settings.vocab_size, cache_dir=cache_dir)
    data = make_token_data(
        documents,
        tokenizer,
        context=settings.context,
        default_context=preset.context,
        validation_fraction=settings.validation_fraction,
        seed=settings.seed,
        name=documents.name,
    )
    if started is not None and started["data"]["fingerprint"] != data.fingerprint:
        raise UserError(
            f"the data is not what the run started with ({documents.name}); restore it, or start a new run"
        )
    config = AutoConfig.from_pretrained(folder.path) if folder else make_config(settings, tokenizer)
    schedule = _schedule(settings, data, preset.batch_size, preset.learning_rate, started, processes)
    facts = _announce(settings, config, data, schedule, console)
    return Prepared(
        settings=settings, tokenizer=tokenizer, data=data, config=config, schedule=schedule, facts=facts
    )


def _schedule(
    settings: TrainSettings,
    data: TokenData,
    batch_size: int,
    learning_rate: float,
    started: Mapping[str, Any] | None,
    processes: int,
) -> Schedule:
    batch_size, accumulation = settings.batch_size or batch_size, settings.gradient_accumulation
    if started is not None and started["schedule"]["processes"] != processes:
        rows_before = batch_size * accumulation * started["schedule"]["processes"]
        batch_size, accumulation = fit_rows(rows_before, batch_size, processes)
    rows_per_step = batch_size * accumulation * processes
    if settings.epochs is not None:
        max_steps = max(1, math.ceil(settings.epochs * len(data.train) / rows_per_step))
    else:
        max_steps = settings.max_steps or DEFAULT_STEPS
    part = math.ceil((started["max_steps_at_start"] if started else max_steps) / PARTS)
    return Schedule(
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=settings.learning_rate or learning_rate,
        eval_every=settings.eval_every or part,
        save_every=settings.save_every or part,
        gradient_accumulation=accumulation,
        processes=processes,
    )


def _announce(
    settings: TrainSettings,
    config: PreTrainedConfig,
    data: TokenData,
    schedule: Schedule,
    console: Console,
) -> dict[str, int]:
    """Print the summary, before any weight takes memory; returns the model's parameter counts."""
    try:
        with torch.device("meta"):
            shape = causal_lm_class(config)(config)
    except ValueError as error:  # such as heads that don't divide the width
        raise UserError(f"the model cannot be built: {error}") from error
    facts = model_facts(shape)
    with torch.device("meta"):
        shape = make_trainable(shape, settings)
    groups = parameter_groups(
        shape,
        weight_decay=settings.weight_decay,
        read_lr_factor=settings.read_lr_factor,
        optimizer=settings.optimizer,
    )
    facts["trained_parameters"] = sum(group.num_elements for group in groups)
    rows = schedule.rows_per_step
    print_summary(
        console,
        name=settings.preset or settings.from_checkpoint or settings.model_config or "model",
        config=config,
        facts=facts,
        groups=groups,
        data=data,
        adapters=describe_adapters(shape) if settings.lora else None,
        memory=memory_estimate(
            config,
            groups,
            rows=schedule.batch_size,
            context=data.train.context,
            gradient_checkpointing=settings.gradient_checkpointing,
            chunked_loss=settings.chunked_loss,
            frozen=sum(p.numel() for p in shape.parameters() if not p.requires_grad),
        ),
        schedule=f"{schedule.max_steps:,} x {rows * data.train.context:,} tokens (steps of {rows} x "
        f"{data.train.context}), "
        f"{settings.schedule}, peak learning rate {schedule.learning_rate:g}",
    )
    for note in data.notes:
        console.print(note, highlight=False)
    return facts
