"""`attnres compare`: train arms that differ in nothing but their residual stream, over seeds and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attention_residuals.cli.assignments import parse_assignments
from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.comparison.results import ArmResult
    from attention_residuals.comparison.settings import ComparisonSettings


def compare(
    settings: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="TOML file; flags stand in the place of what it says."),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Such as baseline,block:8,sublayers:4,full; differences are from the first."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1,2 (default: 0).")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            "--preset",
            help="Presets, JSON files with a model's fields, or folders of saved models (default: tiny).",
        ),
    ] = None,
    learning_rates: Annotated[
        str | None, typer.Option(help="Peak rates that every arm tries (default: the size's own).")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="As in attnres train; may be repeated.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run.")] = None,
    context: Annotated[int | None, typer.Option(help="Row length in tokens.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per forward pass.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another option of attnres train, such as warmup=0.1; may be repeated.",
        ),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder of runs and results (default: comparison).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs that train at a time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each run (default: PyTorch's choice / jobs).")
    ] = None,
    verbose: VerboseFlag = False,
) -> None:
    """Compare arms over seeds and sizes on the same tokens; after a stop, the same command goes on."""
    given: dict[str, Any] = {
        "arms": _split(arms),
        "seeds": _numbers("seeds", seeds, int),
        "sizes": _split(sizes),
        "learning_rates": _numbers("learning-rates", learning_rates, float),
        "output_dir": output_dir,
    }
    train = {"data": data, "max_steps": max_steps, "context": context, "batch_size": batch_size}
    set_verbosity(verbose=verbose)
    from attention_residuals.comparison.settings import read_settings

    given["train"] = {**parse_assignments("--set", option or [], "warmup=0.1"), **_given(train)}
    _run(read_settings(settings, _given(given)), jobs, threads)


def _run(settings: ComparisonSettings, jobs: int, threads: int | None) -> None:
    plan = settings.plan()  # before the slow imports, so that mistakes are told at once
    from rich.console import Console

    from attention_residuals.comparison.report import write_report
    from attention_residuals.comparison.run import run_plan

    console = Console()
    outcome = run_plan(plan, jobs=jobs, threads=threads, console=console)
    if outcome.signal is not None:
        print("stopped; what is trained so far is kept: the same command goes on from there")
        raise typer.Exit(128 + outcome.signal)
    report = write_report(plan, Path(settings.output_dir), failures=outcome.failures)
    for size in dict.fromkeys(result.size for result in report.results):
        console.print(_table(size, [result for result in report.results if result.size == size]))
    for path in (*report.tables, *report.pictures, report.page):
        print(path)
    if outcome.failures:
        name, reason = next(iter(outcome.failures.items()))
        raise UserError(
            f"{len(outcome.failures)} of {len(plan)} runs failed, {name} first: {reason}; logs are in "
            f"{Path(settings.output_dir) / 'logs'}, and the same command tries them again"
        )


def _table(size: str, results: Sequence[ArmResult]) -> Any:
    from rich.table import Table

    from attention_residuals.comparison.page import number, rate_label

    table = Table(title=f"{size}: validation loss, mean over seeds ± standard error", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in ("learning rate", "loss", "minus first arm", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        loss, difference = result.best.loss, result.difference
        table.add_row(
            result.arm,
            rate_label(result.best),
            f"{number(loss.value)} ± {number(loss.error)}",
            "" if difference is None else f"{number(difference.value, '+.4f')} ± {number(difference.error)}",
            number(result.tokens_per_second, ",.0f"),
        )
    return table


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [])}


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str | None, kind: type) -> list[Any] | None:
    try:
        return None if text is None else [kind(part) for part in _split(text) or []]
    except ValueError as error:
        example = "0,1,2" if kind is int else "1e-3,2e-3"
        raise UserError(
            f"--{name} must be numbers with commas between, such as {example}; got {text!r}"
        ) from error
