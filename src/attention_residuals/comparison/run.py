"""From a plan to finished runs: several processes at once, resumed where a run was interrupted.

Each run is what `attnres train` does, in a process of its own, made by a server that has imported PyTorch
once. A process takes its run's log as a lock and looks at the run's folder only then, so that a run is never
trained twice at the same time, not even by two comparisons in one folder. It stops by itself, with a
checkpoint, when the comparison dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention_residuals.comparison.progress import ProgressTable
from attention_residuals.comparison.settings import PlannedRun
from attention_residuals.errors import UserError
from attention_residuals.training.run import resume, train
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings
from attention_residuals.training.trainer import Interrupts

REFRESH = 0.5  # seconds between two looks at the runs
COMMAND = "compare"  # what started a run, in its run.json
# settings that change neither what a run computes nor what it is compared by
IRRELEVANT = ("output_dir", "threads", "cache_dir", "keep_checkpoints", "report_to", "save_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How running a plan ended.

    Attributes:
        failures: name of a run that failed -> why.
        signal: the signal that ended it early, or None.
    """

    failures: dict[str, str]
    signal: int | None


def run_plan(runs: Sequence[PlannedRun], *, jobs: int, threads: int | None, console: Console) -> Outcome:
    """Train what isn't finished; a run that fails, such as by diverging, doesn't stop the others.

    Args:
        jobs: runs that train at a time.
        threads: CPU threads of each; None shares PyTorch's choice among the jobs.
        console: a live table if it is a terminal, else a line per run that starts or ends.

    Raises:
        UserError: a run in the folder was made with other settings, one couldn't even start, or this process
            is one of several under torchrun.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a comparison starts processes of its own; run attnres compare without torchrun")
    waiting = deque(run for run in runs if not is_finished(run))
    threads = threads or max(1, torch.get_num_threads() // jobs)
    active: dict[str, Any] = {}
    failures: dict[str, str] = {}
    planned = {run.name: run for run in runs}
    with Interrupts() as interrupts, ProgressTable(runs, console) as table:
        try:
            while (waiting or active) and interrupts.received is None:
                while waiting and len(active) < jobs:
                    run = waiting.popleft()
                    active[run.name] = _start(run, threads)
                    table.show(run.name, "running")
                wait([process.sentinel for process in active.values()], timeout=REFRESH)
                for name in [name for name, process in active.items() if process.exitcode is not None]:
                    if reason := _failure(active.pop(name), planned[name]):
                        failures[name] = reason
                    table.show(name, "failed" if reason else "finished")
                table.refresh()
            if interrupts.received is not None:
                _stop(active, table)
        finally:
            for process in active.values():
                process.kill()
                process.join()
    return Outcome(failures=failures, signal=interrupts.received)


def is_finished(run: PlannedRun) -> bool:
    """Whether the run's folder holds its finished model.

    Raises:
        UserError: the folder holds a run with other settings.
    """
    folder = RunFolder(run.settings.output_dir)
    if not folder.run_file.is_file():
        return False
    stored = folder.read_run()
    before, now = TrainSettings.from_dict(stored["settings"]).to_dict(), run.settings.to_dict()
    changed = [name for name in now if name not in IRRELEVANT and before[name] != now[name]]
    if changed:
        name = changed[0]
        raise UserError(
            f"the run in {folder.path} was made with {name} {before[name]!r}, now it is {now[name]!r}; give "
            "the old settings, or another --output-dir"
        )
    return stored["status"] == "finished"


def log_file(run: PlannedRun) -> Path:
    """Where what the run prints goes."""
    folder = Path(run.settings.output_dir)
    return folder.parent.parent / "logs" / f"{folder.name}.log"


def _start(run: PlannedRun, threads: int) -> Any:
    # A forked process can't use a CUDA device that was looked at before the fork.
    context: Any = multiprocessing.get_context("spawn" if torch.accelerator.is_available() else "forkserver")
    if context.get_start_method() == "forkserver":
        pictures = ["attention_residuals.analysis.report"] if importlib.util.find_spec("matplotlib") else []
        context.set_forkserver_preload([__name__, *pictures])
    log = log_file(run)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {log.parent.parent} cannot be written: {error.strerror}") from error
    settings = dataclasses.replace(run.settings, threads=threads)
    process: Any = context.Process(
        target=_work, args=(settings.to_dict(), str(log), os.getcwd()), name=run.name, daemon=True
    )
    process.start()
    return process


def _work(fields: dict[str, Any], log: str, directory: str) -> None:
    """One run, in a process of its own; what it prints goes to `log`."""
    os.setsid()  # Ctrl-C goes to the comparison, which then asks its processes to stop
    os.chdir(directory)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads are counted out
    with open(log, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
        sys.stdout = sys.stderr = file
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        try:
            status = _train_or_continue(TrainSettings.from_dict(fields), Console(file=file, width=120))
        except UserError as error:
            print(error)
            status = 2
        except Exception:
            traceback.print_exc()
            status = 1
    sys.exit(status)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _train_or_continue(settings: TrainSettings, console: Console) -> int:
    """The exit status of `attnres train`, or of `attnres train --resume` where the folder holds the run."""
    folder = RunFolder(settings.output_dir)
    if not folder.run_file.is_file():
        result = train(settings, command=COMMAND, console=console)
    else:
        stored = folder.read_run()
        if stored["status"] == "finished":
            return 0
        result = resume(settings.output_dir, {"threads": settings.threads}, console=console)
    return 0 if result.signal is None else 128 + result.signal


def _failure(process: Any, run: PlannedRun) -> str | None:
    """Why the process failed, or None.

    Raises:
        UserError: it failed before its first step, as every other run would.
    """
    process.join()
    if process.exitcode == 0:
        return None
    if process.exitcode < 0:
        reason = f"killed by {signal.Signals(-process.exitcode).name}"
    else:
        lines = log_file(run).read_text(encoding="utf-8", errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"exit status {process.exitcode}")
    if not RunFolder(run.settings.output_dir).run_file.is_file():
        raise UserError(f"run {run.name} could not start: {reason} (log: {log_file(run)})")
    return reason


def _stop(active: dict[str, Any], table: ProgressTable) -> None:
    """Ask every process for a checkpoint and its end; a second Ctrl-C leaves here, and they are killed."""
    for process in active.values():
        # one that has ended by itself needs no asking
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    for name, process in active.items():
        table.show(name, "stopping")
        process.join()
        table.show(name, "finished" if process.exitcode == 0 else "interrupted")
    active.clear()
