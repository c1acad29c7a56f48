"""Steps to a live progress bar, or to plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LINE_EVERY = 10.0  # seconds between plain lines
WINDOW = 20  # steps over which the speed is averaged


class ProgressReport(TrainerCallback):
    """Shows step, loss, tokens per second and time left.

    Args:
        console: where to; a bar if it is a terminal, else a line every few seconds.
        tokens_per_step: tokens of one optimizer step, over all devices.
    """

    def __init__(self, console: Console, tokens_per_step: int) -> None:
        self.console = console
        self.tokens_per_step = tokens_per_step
        self.loss = float("nan")
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._step_start = self._start = self._last_line = 0.0
        self._first_step = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @property
    def tokens_per_second(self) -> float:
        """Speed over the last steps, without evaluation and saving."""
        total = sum(self._durations)
        return self.tokens_per_step * len(self._durations) / total if total else 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = self._last_line = time.perf_counter()
        self._first_step = state.global_step
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "train", total=state.max_steps, completed=state.global_step, status=""
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._durations.append(time.perf_counter() - self._step_start)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            loss = logs["eval_loss"]
            self._line(f"step {state.global_step}/{state.max_steps}  validation loss {loss:.4f}")
        if "loss" in logs:
            self.loss = logs["loss"]
            self._show(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal's last line; harmless when called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, state: TrainerState) -> None:
        status = (
            f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"{_duration(self._seconds_left(state))} left"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step, status=status)
            return
        now = time.perf_counter()
        if now - self._last_line >= LINE_EVERY or state.global_step in (
            self._first_step + 1,
            state.max_steps,
        ):
            self._last_line = now
            self._line(f"step {state.global_step}/{state.max_steps}  {status}")

    def _line(self, text: str) -> None:
        if self._bar is None:
            self.console.print(text, highlight=False)
        else:
            self._bar.console.print(text, highlight=False)

    def _seconds_left(self, state: TrainerState) -> float:
        done = state.global_step - self._first_step
        per_step = (time.perf_counter() - self._start) / max(done, 1)
        return per_step * (state.max_steps - state.global_step)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
