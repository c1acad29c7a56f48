"""The paper's comparisons at the scale of one small machine, from text to tables.

    python -m experiments.reproduce [--work FOLDER] [--jobs N]     or: make reproduce, in the checkout

Each file in `reproduction/` is a comparison that `attnres compare FILE` runs too; here they share their runs.
After a stop the same command goes on. Writes results/reproduction.json, the tables of every run and the
pictures beside it, and the tables of docs/reproduction.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import origin
from rich.console import Console

from attention_residuals.comparison.page import number
from attention_residuals.comparison.report import ComparisonReport, write_report
from attention_residuals.comparison.results import ArmResult, Mean
from attention_residuals.comparison.run import run_plan
from attention_residuals.comparison.settings import PlannedRun, read_settings
from attention_residuals.training.run_folder import write_beside

HERE = Path(__file__).parent
FILES = HERE / "reproduction"
RESULTS = HERE / "results"
DOCUMENT = HERE.parent / "docs" / "reproduction.md"
PARTS = ("main", "scaling", "block_size", "ablations", "rates")
BEGIN, END = "<!-- {part}: written by make reproduce -->", "<!-- {part} end -->"
# two-sided 95% quantile of Student's t for n - 1 degrees of freedom, by number of seeds n
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
# validation loss minus the baseline's at 436M parameters (arXiv 2603.15031); None where it has none
PAPER: dict[str, float | None] = {
    "Block, 8 blocks (S=2)": -0.020,
    "Block, S=2": -0.020,
    "Full": -0.029,
    "rescaled residual": None,
    "Block, S=4": -0.020,
    "Block, S=8": -0.018,
    "Block, S=16": -0.013,
    "input-dependent query": -0.035,
    "input-dependent query, rate / 50": -0.035,
    "sigmoid": -0.025,
    "no key norm": -0.023,
    "input-independent weights": -0.017,
    "sliding window 8": -0.002,
    "DenseFormer": 0.001,
    "Block S=4, 16 heads": -0.014,
    "Block S=4, no key norm": -0.016,
}


def main(arguments: Sequence[str]) -> None:
    """Run what isn't finished and write what is known."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reproduce")
    parser.add_argument("--work", type=Path, default=Path("build/reproduction"), help="folder of the runs")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each"
    )
    parser.add_argument("--report", action="store_true", help="train nothing, report what is finished")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    given = parser.parse_args(arguments)
    plans = {part: plan_of(part, given.work) for part in given.parts}
    console = Console()
    everything = {run.name: run for plan in plans.values() for run in plan}
    failures: Mapping[str, str] = {}
    if not given.report:
        outcome = run_plan(list(everything.values()), jobs=given.jobs, threads=1, console=console)
        if outcome.signal is not None:
            sys.exit("stopped; the same command goes on from there")
        failures = outcome.failures
    stored = RESULTS / "reproduction.json"
    figures: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    for part, plan in plans.items():
        folder = given.work / part
        folder.mkdir(exist_ok=True)
        report = write_report(plan, folder, failures=failures)
        made = {**origin(), "command": "make reproduce", "threads": 1}
        figures[part] = {"origin": made, **figures_of(report)}
        keep(part, report)
        write_tables(part, report)
    write_beside(stored, json.dumps(figures, indent=2) + "\n")
    if failures:
        sys.exit(f"failed: {failures}")


def plan_of(part: str, work: Path) -> tuple[PlannedRun, ...]:
    """The runs of a part; parts that ask for the same run share it."""
    settings = read_settings(FILES / f"{part}.toml", {"output_dir": str(work)})
    return settings.plan()


def figures_of(report: ComparisonReport) -> dict[str, Any]:
    """Means, paired differences with 95% intervals, and power laws, as plain JSON values."""
    found: dict[str, Any] = {}
    for result in report.results:
        entry: dict[str, Any] = {"loss": dataclasses.asdict(result.best.loss)}
        if result.difference is not None:
            entry["minus_first_arm"] = dataclasses.asdict(result.difference)
            entry["interval"] = interval(result.difference)
        found.setdefault(result.size, {})[result.arm] = entry
    laws = {law.arm: dataclasses.asdict(law) for law in report.scaling}
    return {"sizes": found, **({"scaling": laws} if laws else {})}


def interval(difference: Mean) -> tuple[float, float] | None:
    """95% interval of a paired difference (Student's t over seeds)."""
    quantile = T95.get(len(difference.by_seed))
    if quantile is None:
        return None
    return difference.value - quantile * difference.error, difference.value + quantile * difference.error


def keep(part: str, report: ComparisonReport) -> None:
    """Copy what is worth committing; run folders and depth maps stay where they are."""
    out = RESULTS / "reproduction" / part
    out.mkdir(parents=True, exist_ok=True)
    for path in (*report.tables, *report.pictures):
        if not path.name.startswith("depth-map") or (path.name.endswith("seed-0.png") and part == "main"):
            shutil.copyfile(path, out / path.name)


def write_tables(part: str, report: ComparisonReport) -> None:
    """Put a part's tables between its marks in the document."""
    lines: list[str] = []
    for size in dict.fromkeys(result.size for result in report.results):
        mine = [result for result in report.results if result.size == size]
        swept = any(len(result.rates) > 1 for result in mine)
        lines += [f"{size}:", "", *(rate_table(mine) if swept else arm_table(mine)), ""]
    if report.scaling:
        lines += [*scaling_table(report), ""]
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = BEGIN.format(part=part), END.format(part=part)
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    write_beside(DOCUMENT, f"{before}{begin}\n{os.linesep.join(lines)}{end}{after}")


def arm_table(results: Sequence[ArmResult]) -> list[str]:
    """Markdown rows of one size; the first arm is the baseline."""
    rows = [
        "| arm | validation loss | minus baseline, paired | 95% interval | seeds | paper (436M) |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        loss, difference = result.best.loss, result.difference
        cells = ["", ""]
        if difference is not None:
            found = interval(difference)
            span = "" if found is None else f"{found[0]:+.4f} to {found[1]:+.4f}"
            cells = [f"{number(difference.value, '+.4f')} ± {number(difference.error)}", span]
        paper = PAPER.get(result.arm)
        rows.append(
            f"| {result.arm} | {number(loss.value)} ± {number(loss.error)} | {cells[0]} | {cells[1]} | "
            f"{len(loss.by_seed)} | {'' if paper is None else f'{paper:+.3f}'} |"
        )
    return rows


def rate_table(results: Sequence[ArmResult]) -> list[str]:
    """Markdown rows of a sweep: each arm's loss at each learning rate, a dash where a run is missing."""
    rates = [rate.learning_rate for rate in results[0].rates]
    rows = [f"| arm | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (1 + len(rates)) + "|"]
    for result in results:
        losses = ("–" if rate.missing else f"{rate.loss.value:.4f}" for rate in result.rates)
        rows.append(f"| {result.arm} | {' | '.join(losses)} |")
    return rows


def scaling_table(report: ComparisonReport) -> list[str]:
    """Markdown rows of the power laws."""
    rows = ["| arm | A | b | compute multiplier | 95% interval |", "|---|---|---|---|---|"]
    for law in report.scaling:
        low, high = law.interval or (None, None)
        multiplier = "" if law.multiplier is None else f"{law.multiplier:.2f}"
        span = "" if low is None else f"{low:.2f} to {high:.2f}"
        rows.append(
            f"| {law.arm} | {law.law.coefficient:.3f} | {law.law.exponent:.4f} | {multiplier} | {span} |"
        )
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
