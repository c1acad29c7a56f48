"""From the folders of runs under way to a live table, or to plain lines where the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from attention_residuals.comparison.settings import PlannedRun
from attention_residuals.training.run_folder import RunFolder

COLUMNS = ("step", "loss", "validation loss", "tokens/s")


class ProgressTable:
    """One row per run: its state, and the last figures in its metrics.jsonl. A context manager.

    Args:
        runs: the rows, in order.
        console: where to.
    """

    def __init__(self, runs: Sequence[PlannedRun], console: Console) -> None:
        self.console = console
        self._folders = {run.name: RunFolder(run.settings.output_dir) for run in runs}
        self._states: dict[str, str] = {}
        self._figures: dict[str, tuple[str, ...]] = {name: ("",) * len(COLUMNS) for name in self._folders}
        self._live: Live | None = None

    def __enter__(self) -> ProgressTable:
        for name, folder in self._folders.items():
            finished = folder.run_file.is_file() and folder.read_run()["status"] == "finished"
            self._states[name] = "finished" if finished else "waiting"
            self._figures[name] = _last_figures(folder)
        done = sum(state == "finished" for state in self._states.values())
        self.console.print(f"{len(self._states)} runs, {done} of them finished before", highlight=False)
        if self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, name: str, state: str) -> None:
        """Note a run's new state."""
        self._states[name] = state
        self._figures[name] = _last_figures(self._folders[name])
        if self._live is None:
            step, _, loss, _ = self._figures[name]
            figures = f", step {step}, validation loss {loss}" if loss and state != "running" else ""
            self.console.print(f"{name}: {state}{figures}", highlight=False)
        else:
            self.refresh()

    def refresh(self) -> None:
        """Draw the table anew."""
        if self._live is None:
            return
        for name, state in self._states.items():
            if state == "running":
                self._figures[name] = _last_figures(self._folders[name])
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("run", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for name, state in self._states.items():
            table.add_row(name, state, *self._figures[name])
        return table


def _last_figures(folder: RunFolder) -> tuple[str, ...]:
    last: dict[str, Any] = {}
    for line in folder.read_metrics():
        last.update(line)
    formats = {"step": "d", "loss": ".4f", "eval_loss": ".4f", "tokens_per_second": ",.0f"}
    return tuple(format(last[name], kind) if name in last else "" for name, kind in formats.items())
