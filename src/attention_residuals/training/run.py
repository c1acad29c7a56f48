"""Settings to a finished run: prepares everything, writes the folder, trains, publishes the model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import math
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel

from attention_residuals.errors import UserError
from attention_residuals.models.auto import causal_lm_class
from attention_residuals.training.checkpoints import (
    complete_checkpoints,
    latest_checkpoint,
    remove_incomplete,
    step_of,
)
from attention_residuals.training.chunked_loss import use_chunked_loss
from attention_residuals.training.layout import Layout
from attention_residuals.training.model import make_model, make_trainable
from attention_residuals.training.parallel_trainer import ParallelTrainer, check_layout
from attention_residuals.training.prepare import Prepared, prepare
from attention_residuals.training.process_group import is_main_process, leave_together, on_main, process_group
from attention_residuals.training.progress import ProgressReport
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings
from attention_residuals.training.trainer import DepthTrainer, Interrupts, make_trainer

PACKAGES = ("attention_residuals", "torch", "transformers", "accelerate", "tokenizers", "datasets")
PROMPT_TOKENS = 64  # of the text that the report looks into


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to.

    Attributes:
        folder: the run folder; a model folder once training has ended.
        step: optimizer steps done.
        eval_loss: the last validation loss in nats per token, or None.
        signal: the signal that ended training early, or None.
        report: the page with the pictures, or None.
    """

    folder: Path
    step: int
    eval_loss: float | None
    signal: int | None
    report: Path | None


def train(
    settings: TrainSettings,
    *,
    overwrite: bool = False,
    command: str = "train",
    console: Console | None = None,
    time_limit: float = math.inf,
    layout: Layout | None = None,
) -> RunResult:
    """Start a new run.

    Args:
        time_limit: seconds of training after which it ends early, evaluated and saved like a finished run.
        overwrite: replace a run that the output folder holds.
        command: what started the run, for run.json.
        console: where the summary and the progress go; the main process's only, where it isn't given.
        layout: how the processes that torchrun started share the work; None for data parallelism.

    Raises:
        UserError: something the user can mend; nothing has been written if it was found before training.
    """
    console = console or Console(quiet=not is_main_process())
    layout = layout or Layout.of_torchrun()
    sharded = None if layout.plain else layout  # all others are the Trainer's
    folder = RunFolder(settings.output_dir)
    with _processes(layout, sharded):
        on_main(lambda: folder.check_free(overwrite=overwrite))
        set_threads(settings)
        prepared = prepare(settings, console, processes=layout.data_ranks)
        if sharded:
            check_layout(sharded, prepared)
        model = _to_train(make_model(prepared.config, settings), settings)
        on_main(
            lambda: folder.create(lambda place: _write_start(RunFolder(place), prepared, command, sharded))
        )
        return _fit(prepared, model, folder, None, console, time_limit, sharded)


def resume(
    output_dir: str,
    given: Mapping[str, Any] | None = None,
    *,
    console: Console | None = None,
    layout: Layout | None = None,
) -> RunResult:
    """Continue the run in `output_dir` from its latest complete checkpoint, or from the start if it has none.

    Args:
        given: settings of the resuming command; they must agree with the run's, but may add steps.
        layout: how the processes share the work from here on; a run with sharded checkpoints may change it.

    Raises:
        UserError: there is no run, its latest checkpoint is damaged, its data has changed, or its
            checkpoints can't be read under this layout.
    """
    console = console or Console(quiet=not is_main_process())
    layout = layout or Layout.of_torchrun()
    folder = RunFolder(output_dir)
    run = folder.read_run()
    sharded = layout if run.get("layout") else None
    if sharded is None and not layout.plain:
        raise UserError(
            f"the run in {output_dir} was started without --fsdp, --tensor-parallel or --pipeline, so its "
            f"checkpoints can't be read under {layout.describe()}; leave these out, or start anew with --from"
        )
    with _processes(layout, sharded):
        return _resume(folder, run, given or {}, console, layout, sharded)


def _resume(
    folder: RunFolder,
    run: dict[str, Any],
    given: Mapping[str, Any],
    console: Console,
    layout: Layout,
    sharded: Layout | None,
) -> RunResult:
    output_dir = str(folder.path)
    settings = TrainSettings.from_dict(run["settings"]).updated_for_resume(given)
    settings = dataclasses.replace(settings, output_dir=output_dir)
    checkpoint = on_main(lambda: _latest(folder))
    step = step_of(checkpoint) if checkpoint else 0
    # Killed after its last checkpoint but before its model was published, a run has that left to do.
    if run["status"] == "finished" and step >= (settings.max_steps or run["max_steps"]):
        raise UserError(f"the run in {output_dir} has finished its {step} steps; raise --max-steps to go on")
    set_threads(settings)
    prepared = prepare(settings, console, folder=folder, started=run, processes=layout.data_ranks)
    if sharded:
        check_layout(sharded, prepared)
    complete = checkpoint is not None and settings.lora is None  # with adapters it holds these alone
    model = _empty(prepared.config) if complete else make_model(prepared.config, settings)
    model = _to_train(model, settings)

    def continue_folder() -> None:
        folder.clean()
        remove_incomplete(folder.checkpoints)
        folder.forget_metrics_after(step)
        folder.update_run(
            settings=settings.to_dict(),
            status="running",
            max_steps=prepared.schedule.max_steps,
            layout=sharded.to_dict() if sharded else None,
        )

    on_main(continue_folder)
    console.print(f"continuing {output_dir} after step {step}", highlight=False)
    return _fit(prepared, model, folder, checkpoint, console, math.inf, sharded)


def _processes(layout: Layout, sharded: Layout | None) -> contextlib.AbstractContextManager[None]:
    """The scope in which this process is one of a group; one that works alone needs none."""
    alone = layout.processes == 1 and sharded is None
    return contextlib.nullcontext() if alone else process_group(layout.timeout)


def _latest(folder: RunFolder) -> Path | None:
    return latest_checkpoint(folder.checkpoints) if complete_checkpoints(folder.checkpoints) else None


def _write_start(folder: RunFolder, prepared: Prepared, command: str, sharded: Layout | None) -> None:
    prepared.config.save_pretrained(folder.path)
    prepared.tokenizer.save_pretrained(folder.path)
    folder.checkpoints.mkdir()
    folder.write_run(
        {
            "command": command,
            "status": "running",
            "started": _now(),
            "settings": prepared.settings.to_dict(),
            "max_steps": prepared.schedule.max_steps,
            "max_steps_at_start": prepared.schedule.max_steps,
            "schedule": dataclasses.asdict(prepared.schedule),
            "layout": sharded.to_dict() if sharded else None,
            "seed": prepared.settings.seed,
            "model": prepared.facts,
            "data": {
                "documents": prepared.data.num_documents,
                "tokens": prepared.data.num_tokens,
                "context": prepared.data.train.context,
                "fingerprint": prepared.data.fingerprint,
            },
            "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "commit": _commit(),
            "threads": torch.get_num_threads(),
        }
    )


def _fit(
    prepared: Prepared,
    model: Any,
    folder: RunFolder,
    checkpoint: Path | None,
    console: Console,
    time_limit: float,
    sharded: Layout | None,
) -> RunResult:
    """Train from the start or from `checkpoint`, then publish the model and write the report."""
    settings, schedule = prepared.settings, prepared.schedule
    progress = ProgressReport(console, schedule.rows_per_step * prepared.data.train.context)
    start = time.perf_counter()
    with Interrupts() as interrupts:
        watched: dict[str, Any] = {"progress": progress, "interrupts": interrupts, "time_limit": time_limit}
        trainer: DepthTrainer | ParallelTrainer
        if sharded:
            trainer = ParallelTrainer(model, prepared, folder, sharded, **watched)
        else:
            trainer = make_trainer(
                model, prepared.tokenizer, prepared.data, settings, schedule, folder, **watched
            )
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            leave_together()
        finally:
            progress.close()
        model.config.use_cache = True
        if is_main_process():
            folder.publish(_saver(trainer, model, settings))
    step = trainer.state.global_step
    stopped = interrupts.received if step < schedule.max_steps else None
    eval_loss = folder.last_eval_loss()  # a run that was killed before this point has nothing to evaluate
    if is_main_process():
        folder.update_run(
            status="interrupted" if stopped else "finished",
            ended=_now(),
            seconds=round(time.perf_counter() - start, 1),
            step=step,
            eval_loss=eval_loss,
        )
    if stopped:
        name = signal.Signals(stopped).name
        console.print(
            f"{name} after step {step}: checkpoint saved; continue with "
            f"attnres train --resume --output-dir {folder.path}",
            highlight=False,
        )
    report = None if stopped or not is_main_process() else _report(prepared, folder, console)
    return RunResult(folder=folder.path, step=step, eval_loss=eval_loss, signal=stopped, report=report)


def _saver(
    trainer: DepthTrainer | ParallelTrainer, model: Any, settings: TrainSettings
) -> Callable[[Path], None]:
    """What writes the trained model into a folder."""
    if isinstance(trainer, ParallelTrainer):
        return trainer.save_whole_model
    merged: PreTrainedModel = model if settings.lora is None else model.merge_and_unload()
    return merged.save_pretrained


def _report(prepared: Prepared, folder: RunFolder, console: Console) -> Path | None:
    """Write the pictures; without them a run is still a run, so what stands in their way is told."""
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no report, because matplotlib is not installed", highlight=False)
        return None
    if prepared.config.attn_res["mode"] == "standard":
        return None
    from attention_residuals.analysis.report import write_report

    rows = prepared.data.validation or prepared.data.train
    prompt = str(prepared.tokenizer.decode(rows[0]["input_ids"][:PROMPT_TOKENS], skip_special_tokens=True))
    return write_report(folder.path, folder.report, prompt=prompt, training_metrics=folder.metrics_file)


def _empty(config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose weights the checkpoint is about to replace."""
    return causal_lm_class(config)(config)


def _to_train(model: PreTrainedModel, settings: TrainSettings) -> Any:
    """The model as the Trainer gets it: with the loss, the frozen parts and the adapters of `settings`."""
    if settings.chunked_loss:
        try:
            use_chunked_loss(model)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--chunked-loss can't be used: {error}") from error
    return make_trainable(model, settings)


def set_threads(settings: TrainSettings) -> None:
    """Give PyTorch the CPU threads that were asked for; None leaves its own choice."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the library's checkout, or None where it was installed from a package."""
    here = Path(__file__)
    # installed files may lie inside somebody else's checkout, so git must know this very file
    for command in (["git", "ls-files", "--error-unmatch", here.name], ["git", "rev-parse", "HEAD"]):
        try:
            answer = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=False)
        except OSError:
            return None
        if answer.returncode != 0:
            return None
    return answer.stdout.strip()
