"""A training loop for layouts in which no process holds the whole model.

transformers' Trainer has no pipeline, and shards whole models only. This loop keeps its meaning: the same
rows in the same order, the same callbacks, the same numbers in metrics.jsonl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from attention_residuals.models.auto import causal_lm_class
from attention_residuals.training.checkpoints import step_of
from attention_residuals.training.data import RunOrder, TokenBlocks
from attention_residuals.training.gradients import clip_gradients
from attention_residuals.training.layout import Layout
from attention_residuals.training.model_share import (
    Batch,
    ModelShare,
    WholeModel,
    group_names,
    groups_of_share,
    sum_over_ranks,
)
from attention_residuals.training.optimizer import make_optimizer, make_scheduler, parameter_groups
from attention_residuals.training.prepare import Prepared
from attention_residuals.training.process_group import is_main_process, largest_over_processes
from attention_residuals.training.progress import ProgressReport
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.shard_checkpoints import load_shards, save_shards, save_whole_model
from attention_residuals.training.sharding import make_mesh, projection_styles
from attention_residuals.training.staged_model import StagedModel, stages_of_layout
from attention_residuals.training.trainer import (
    Interrupts,
    MetricsFile,
    StopWhenAsked,
    TimeLimit,
    collate,
    refuse_divergence,
    training_arguments,
)

IGNORED = -100  # label of a token that doesn't count, as in transformers


def check_layout(layout: Layout, prepared: Prepared) -> None:
    """Refuse a layout that this run can't have, before any weight takes memory.

    Raises:
        UserError: settings, model or batch don't go with it.
    """
    layout.check_settings(prepared.settings)
    layout.check_model(prepared.config)
    layout.check_batch(prepared.schedule.batch_size)
    if layout.tensor_parallel > 1:
        projection_styles(prepared.config)
    if layout.pipeline > 1:
        with torch.device("meta"):
            stages_of_layout(causal_lm_class(prepared.config)(prepared.config), layout)


class ParallelTrainer:
    """Trains a model over the ranks of a layout; every rank makes one and calls the same methods.

    Args:
        model: the whole model, equal on every rank; this rank's share is made of it.
        prepared: data, schedule and settings of the run.
        folder: the run's folder, which every rank can reach.
        layout: how the ranks share the work.
        progress: shows the steps; on the main process only.
        interrupts: signals that this process has received; one to any process stops all after the step.
        time_limit: seconds after which training ends early.

    Attributes:
        state: the step that was reached, as the Trainer has it.
    """

    def __init__(
        self,
        model: Any,
        prepared: Prepared,
        folder: RunFolder,
        layout: Layout,
        *,
        progress: ProgressReport,
        interrupts: Interrupts,
        time_limit: float,
    ) -> None:
        settings, schedule = prepared.settings, prepared.schedule
        self._prepared, self._folder = prepared, folder
        self._mesh = make_mesh(layout)
        groups = group_names(
            parameter_groups(
                model,
                weight_decay=settings.weight_decay,
                read_lr_factor=settings.read_lr_factor,
                optimizer=settings.optimizer,
            )
        )
        if settings.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        make_share = StagedModel if layout.pipeline > 1 else WholeModel
        self._share: ModelShare = make_share(model, layout, self._mesh, bf16=settings.bf16)
        self._optimizer = make_optimizer(groups_of_share(groups, self._share), schedule.learning_rate)
        self._scheduler = make_scheduler(
            self._optimizer,
            schedule=settings.schedule,
            max_steps=schedule.max_steps,
            warmup=settings.warmup,
            decay=settings.decay,
        )
        self._args = training_arguments(settings, schedule, folder, prepared.data)
        self.state = TrainerState(
            max_steps=schedule.max_steps,
            logging_steps=1,
            eval_steps=schedule.eval_every,
            save_steps=schedule.save_every,
            is_local_process_zero=is_main_process(),
            is_world_process_zero=is_main_process(),
        )
        self._control = TrainerControl()
        callbacks = [DefaultFlowCallback(), StopWhenAsked(interrupts), TimeLimit(time_limit)]
        if is_main_process():
            reporters = [reporter() for reporter in get_reporting_integration_callbacks(self._args.report_to)]
            callbacks += [*reporters, progress, MetricsFile(folder, progress)]
        self._handler = CallbackHandler(
            callbacks, self._share.modules[0], prepared.tokenizer, self._optimizer, self._scheduler
        )

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Run the steps that are left, with evaluations and checkpoints.

        Raises:
            UserError: the loss isn't finite, or a checkpoint can't be read or written.
        """
        if resume_from_checkpoint is not None:
            self._load(Path(resume_from_checkpoint))
        self._share.train()
        self._call("on_train_begin")
        rows = self._rows_left()
        for _ in range(self.state.global_step, self.state.max_steps):
            self._step(rows)
            if self._control.should_training_stop:
                break
        self._call("on_train_end")

    def save_whole_model(self, folder: Path) -> None:
        """Write the last checkpoint's model as a Hugging Face folder; the main process calls this, alone."""
        save_whole_model(self._checkpoint(), self._prepared.config, folder)

    def _load(self, checkpoint: Path) -> None:
        load_shards(checkpoint, self._share, self._optimizer)
        self.state.global_step = step_of(checkpoint)
        for _ in range(self.state.global_step):
            self._scheduler.step()

    def _rows_left(self) -> Any:
        """The numbers of the rows that all ranks together have yet to see, in order."""
        schedule = self._prepared.schedule
        rows = schedule.rows_per_step
        order = iter(
            RunOrder(len(self._prepared.data.train), rows * schedule.max_steps, self._prepared.settings.seed)
        )
        for _ in range(self.state.global_step * rows):
            next(order)
        return order

    def _step(self, rows: Any) -> None:
        """One optimizer step, then what is due after it."""
        self._call("on_step_begin")
        self._seed_dropout()
        settings = self._prepared.settings
        loss = self._share.add_gradients(self._batches(rows))
        parameters = list(self._share.parameters().values())
        norm = self._share.gradient_norm()
        if settings.max_grad_norm > 0:
            clip_gradients(parameters, norm, settings.max_grad_norm)
        self._optimizer.step()
        rate = self._scheduler.get_last_lr()[0]
        self._scheduler.step()
        self._optimizer.zero_grad()
        self.state.global_step += 1
        self._call("on_step_end")
        self._agree_on_what_is_due()
        mean = self._mean_over_ranks(loss)
        refuse_divergence(mean, self.state.global_step)
        self._log({"loss": mean, "grad_norm": norm, "learning_rate": rate})
        if self._control.should_evaluate:
            self._log({"eval_loss": self._evaluate()})
        if self._control.should_save:
            self._save()

    def _batches(self, rows: Any) -> list[Batch]:
        """This rank's part of the next step's rows; the Trainer would share them in the same way."""
        schedule = self._prepared.schedule
        taken = [next(rows) for _ in range(schedule.rows_per_step)]
        size, ranks = schedule.batch_size, schedule.processes
        first = size * self._mesh.get_local_rank("data")
        data = self._prepared.data.train
        return [
            collate([data[i] for i in taken[start : start + size]])
            for start in range(first, len(taken), size * ranks)
        ]

    def _seed_dropout(self) -> None:
        """Random numbers that depend on seed, step and place alone; the same on tensor-parallel ranks."""
        axes = [self._mesh.get_local_rank(axis) for axis in ("pipeline", "data")]
        key = (self._prepared.settings.seed, self.state.global_step, *axes)
        torch.manual_seed(hash(key))

    def _agree_on_what_is_due(self) -> None:
        """What is due in one process, whose clock has run out, say, is due in all."""
        control = self._control
        flags = (control.should_evaluate, control.should_save, control.should_training_stop)
        evaluate, save, stop = map(bool, largest_over_processes([int(flag) for flag in flags]))
        control.should_evaluate, control.should_save, control.should_training_stop = evaluate, save, stop

    def _mean_over_ranks(self, loss: Tensor) -> float:
        weight = self._share.losses_seen()
        total, ranks = sum_over_ranks([float(loss) * weight, weight], self._share.device)
        return total / ranks

    def _evaluate(self) -> float:
        """The mean loss over the validation rows; each rank takes part in equally many forward passes."""
        schedule, settings = self._prepared.schedule, self._prepared.settings
        validation = self._prepared.data.validation
        assert validation is not None, "evaluation was asked for without validation rows"
        data = validation.limited(settings.eval_blocks)
        size, ranks = schedule.batch_size, schedule.processes
        total = count = 0.0
        for start in range(0, len(data), size * ranks):
            first = start + size * self._mesh.get_local_rank("data")
            real = max(0, min(size, len(data) - first))
            loss = self._share.evaluate(_padded(data, first, size))
            if real:
                weight = real * self._share.losses_seen()
                total, count = total + weight * float(loss), count + weight
        total, count = sum_over_ranks([total, count], self._share.device)
        return total / count

    def _checkpoint(self) -> Path:
        return self._folder.checkpoints / f"checkpoint-{self.state.global_step}"

    def _save(self) -> None:
        save_shards(
            self._checkpoint(), self._share, self._optimizer, self._prepared.settings.keep_checkpoints
        )
        self._call("on_save")

    def _log(self, logs: dict[str, Any]) -> None:
        self._control = self._handler.on_log(self._args, self.state, self._control, logs)

    def _call(self, event: str) -> None:
        self._control = getattr(self._handler, event)(self._args, self.state, self._control)


def _padded(data: TokenBlocks, first: int, size: int) -> Batch:
    """Rows `first` to `first + size` of the data; where it ends, rows without labels fill the batch."""
    empty = {**data[0], "labels": torch.full_like(data[0]["labels"], IGNORED)}
    return collate([data[i] if i < len(data) else empty for i in range(first, first + size)])
