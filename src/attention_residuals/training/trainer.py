"""The Hugging Face Trainer, with our data order, optimizer groups, checkpoints, metrics file and Ctrl-C."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from attention_residuals.errors import UserError
from attention_residuals.training.checkpoints import complete_checkpoints, keep_latest, mark_complete
from attention_residuals.training.data import RunOrder, TokenData
from attention_residuals.training.optimizer import make_optimizer, make_scheduler, parameter_groups
from attention_residuals.training.prepare import Schedule
from attention_residuals.training.process_group import largest_over_processes
from attention_residuals.training.progress import ProgressReport
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings


class Interrupts:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class StopWhenAsked(TrainerCallback):
    """Ends training with a checkpoint after the step in which a signal arrived, in whichever process."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        (received,) = largest_over_processes([self.interrupts.received or 0])
        self.interrupts.received = received or None
        if received:
            control.should_save = True
            control.should_training_stop = True


class TimeLimit(TrainerCallback):
    """Ends training, evaluated and saved, after the first step past `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if time.perf_counter() - self.start > self.seconds:
            control.should_evaluate = control.should_save = control.should_training_stop = True


class MetricsFile(TrainerCallback):
    """Writes each step's loss and each evaluation to metrics.jsonl, and stops a run that has diverged."""

    def __init__(self, folder: RunFolder, progress: ProgressReport) -> None:
        self.folder = folder
        self.progress = progress

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        names = [name for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in logs]
        if not state.is_world_process_zero or not names:
            return
        line: dict[str, Any] = {"step": state.global_step, **{name: logs[name] for name in names}}
        if "loss" in logs:
            line["tokens"] = state.global_step * self.progress.tokens_per_step
            line["tokens_per_second"] = round(self.progress.tokens_per_second, 1)
            refuse_divergence(logs["loss"], state.global_step)
        try:
            self.folder.append_metrics(line)
        except OSError as error:
            raise UserError(
                f"{self.folder.metrics_file} cannot be written: {error.strerror}; continue with --resume"
            ) from error


def refuse_divergence(loss: float, step: int) -> None:
    """Stop a run whose loss is no number.

    Raises:
        UserError: it isn't finite.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}: training has diverged; lower --learning-rate or lengthen "
            "--warmup"
        )


class DepthTrainer(Trainer):
    """`Trainer` whose data order is `RunOrder` and whose checkpoints are complete or absent."""

    def __init__(self, *, order: RunOrder, keep: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._folder = Path(kwargs["args"].output_dir)
        self._config = kwargs["model"].config
        self._order = order
        self._keep = keep

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return self._order

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save, mark as complete, and only then remove the oldest.

        Raises:
            UserError: it could not be written (a full disk, say); earlier checkpoints are untouched.
        """
        folder = self._folder / f"checkpoint-{self.state.global_step}"
        # the Trainer switches the cache off for training; a saved model should generate with it
        self._config.use_cache = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                mark_complete(folder)
                keep_latest(self._folder, self._keep)
        except Exception as error:  # OSError, or what safetensors and torch make of it
            shutil.rmtree(folder, ignore_errors=True)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            complete = complete_checkpoints(self._folder)
            remedy = f"{complete[-1].name} is complete; " if complete else ""
            raise UserError(
                f"{folder.name} could not be written: {reason}; {remedy}make room and continue with --resume"
            ) from error
        finally:
            self._config.use_cache = self.args.use_cache


def training_arguments(
    settings: TrainSettings, schedule: Schedule, folder: RunFolder, data: TokenData
) -> Any:
    """The Trainer's arguments for these settings."""
    if "tensorboard" in settings.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder.path / "tensorboard"))
    return TrainingArguments(
        output_dir=str(folder.checkpoints),
        use_cpu=not torch.accelerator.is_available(),  # bf16 is refused unless the CPU is named
        max_steps=schedule.max_steps,
        per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=schedule.batch_size,
        gradient_accumulation_steps=schedule.gradient_accumulation,
        learning_rate=schedule.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        activation_checkpointing=settings.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        seed=settings.seed,
        # every step is logged, so that no window of averaged losses spans a checkpoint
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if data.validation else "no",
        eval_steps=schedule.eval_every,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=schedule.save_every,
        report_to=list(settings.report_to) or "none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
    )


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenData,
    settings: TrainSettings,
    schedule: Schedule,
    folder: RunFolder,
    *,
    progress: ProgressReport,
    interrupts: Interrupts,
    time_limit: float,
) -> DepthTrainer:
    """A trainer that is ready for `train()`."""
    groups = parameter_groups(
        model,
        weight_decay=settings.weight_decay,
        read_lr_factor=settings.read_lr_factor,
        optimizer=settings.optimizer,
    )
    optimizer = make_optimizer(groups, schedule.learning_rate)
    scheduler = make_scheduler(
        optimizer,
        schedule=settings.schedule,
        max_steps=schedule.max_steps,
        warmup=settings.warmup,
        decay=settings.decay,
    )
    trainer = DepthTrainer(
        order=RunOrder(len(data.train), schedule.rows_per_step * schedule.max_steps, settings.seed),
        keep=settings.keep_checkpoints,
        model=model,
        args=training_arguments(settings, schedule, folder, data),
        train_dataset=data.train,
        eval_dataset=data.validation.limited(settings.eval_blocks) if data.validation else None,
        processing_class=tokenizer,
        data_collator=collate,
        optimizers=(optimizer, scheduler),
        callbacks=[progress, MetricsFile(folder, progress), StopWhenAsked(interrupts), TimeLimit(time_limit)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of equal length to a batch: each tensor [T] becomes [B, T]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
