"""From finished runs to tables: means with standard errors, and paired differences from the first arm.

Losses are validation losses at the last step, in nats per token. Standard errors are those of a mean over
seeds: the sample's standard deviation over the root of the number of seeds.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_residuals.analysis.training_curve import TrainingCurve, read_training_curve
from attention_residuals.comparison.settings import PlannedRun
from attention_residuals.errors import UserError
from attention_residuals.training.run_folder import RunFolder, write_beside

NO_CURVE = TrainingCurve((), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What one run came to; figures are None where the run isn't finished.

    Attributes:
        name, arm, size, seed, learning_rate: as in `PlannedRun`.
        peak_learning_rate: the rate that it came to, also where none was planned.
        status: "finished", or "failed", "interrupted" or "missing" with a `reason`.
        steps: optimizer steps.
        tokens: tokens trained on.
        loss: validation loss at the last step, in nats per token.
        train_loss: loss of the last step.
        tokens_per_second: median over the steps, without evaluation and saving.
        seconds: tokens over tokens per second: what the steps took.
        parameters, read_parameters: of the model.
        data: fingerprint of tokens, split and row length.
        order: fingerprint of the rows' order.
        commit: of the library, or None.
        curve: losses against steps.
    """

    name: str
    arm: str
    size: str
    seed: int
    learning_rate: float | None
    status: str
    reason: str | None = None
    peak_learning_rate: float | None = None
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    train_loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    parameters: int | None = None
    read_parameters: int | None = None
    data: str | None = None
    order: str | None = None
    commit: str | None = None
    curve: TrainingCurve = dataclasses.field(default=NO_CURVE, repr=False)

    def to_row(self) -> dict[str, Any]:
        """Every figure but the curve, as plain JSON values."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        row.pop("curve")
        return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over seeds.

    Attributes:
        by_seed: the values.
        value: their mean; NaN without values.
        error: its standard error; NaN with fewer than two values.
    """

    by_seed: Mapping[int, float]
    value: float
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateResult:
    """An arm's losses at one planned learning rate.

    Attributes:
        learning_rate: the planned rate; None for the size's own.
        peak: the rate itself; None where it isn't planned and no run is finished.
        loss: over the seeds that are finished.
        missing: the seeds that aren't.
    """

    learning_rate: float | None
    peak: float | None
    loss: Mean
    missing: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What an arm came to at one size.

    Attributes:
        rates: every rate of the sweep, as planned.
        best: the rate with the lowest mean loss, among those that miss the fewest seeds.
        difference: this arm's loss minus the first arm's, seed by seed, each arm at its best rate; None for
            the first arm.
        tokens_per_second: median over the runs at the best rate; NaN without one.
        seconds: mean time of the steps of a run at the best rate; NaN without one.
        parameters: of the model; None without a finished run.
    """

    arm: str
    size: str
    rates: tuple[RateResult, ...]
    best: RateResult
    difference: Mean | None
    tokens_per_second: float
    seconds: float
    parameters: int | None


def read_record(run: PlannedRun, failure: str | None = None) -> RunRecord:
    """A run's record, from its folder.

    Args:
        failure: why it failed just now, if it did.
    """
    folder = RunFolder(run.settings.output_dir)
    same: dict[str, Any] = {
        name: getattr(run, name) for name in ("name", "arm", "size", "seed", "learning_rate")
    }
    if failure is not None or not folder.run_file.is_file():
        status = "missing" if failure is None else "failed"
        reason = failure or "it has not been started"
        return RunRecord(**same, status=status, reason=reason)
    stored = folder.read_run()
    if stored["status"] != "finished":
        reason = "it has not reached its last step"
        return RunRecord(**same, status="interrupted", reason=reason)
    curve = read_training_curve(folder.metrics_file)
    lines = [line for line in folder.read_metrics() if "tokens_per_second" in line]
    speed = statistics.median(line["tokens_per_second"] for line in lines)
    return RunRecord(
        **same,
        status="finished",
        peak_learning_rate=stored["schedule"]["learning_rate"],
        steps=stored["step"],
        tokens=lines[-1]["tokens"],
        loss=stored["eval_loss"],
        train_loss=lines[-1]["loss"],
        tokens_per_second=speed,
        seconds=lines[-1]["tokens"] / speed if speed else None,
        parameters=stored["model"]["parameters"],
        read_parameters=stored["model"]["read_parameters"],
        data=stored["data"]["fingerprint"],
        order=order_fingerprint(stored),
        commit=stored["commit"],
        curve=curve,
    )


def order_fingerprint(stored: Mapping[str, Any]) -> str:
    """SHA-256 of all that the order of a run's rows depends on (`training.data.RunOrder`), from its run.json.

    The data's own fingerprint covers the number of rows.
    """
    schedule = stored["schedule"]
    rows = schedule["batch_size"] * stored["settings"]["gradient_accumulation"] * schedule["processes"]
    facts = [stored["data"]["fingerprint"], stored["seed"], rows, stored["max_steps"]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def check_control(records: Iterable[RunRecord]) -> None:
    """Make sure that the arms of a size and seed differ in nothing but what makes them arms.

    Raises:
        UserError: two of them saw other tokens, in another order, or have other models underneath the reads.
    """
    first: dict[tuple[str, int], RunRecord] = {}
    for record in (record for record in records if record.status == "finished"):
        other = first.setdefault((record.size, record.seed), record)
        for what, mine, others in (
            ("data", record.data, other.data),
            ("data order", record.order, other.order),
            ("number of tokens", record.tokens, other.tokens),
            ("model without reads", _without_reads(record), _without_reads(other)),
        ):
            if mine != others:
                raise UserError(
                    f"the {what} must be the same for every arm of a seed, but {record.name} and "
                    f"{other.name} differ ({mine} and {others}); remove the older run's folder and "
                    "repeat the command"
                )


def _without_reads(record: RunRecord) -> int:
    assert record.parameters is not None and record.read_parameters is not None
    return record.parameters - record.read_parameters


def mean_of(by_seed: Mapping[int, float]) -> Mean:
    """Mean and standard error over seeds."""
    values = list(by_seed.values())
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(by_seed=by_seed, value=statistics.fmean(values) if values else math.nan, error=error)


def summarise_arms(records: Sequence[RunRecord]) -> tuple[ArmResult, ...]:
    """One result per size and arm, in the order of the records; the first arm is the one compared against."""
    results: list[ArmResult] = []
    for size in dict.fromkeys(record.size for record in records):
        first: RateResult | None = None
        for arm in dict.fromkeys(record.arm for record in records):
            mine = [record for record in records if (record.size, record.arm) == (size, arm)]
            result = _summarise_arm(mine, first)
            first = first or result.best
            results.append(result)
    return tuple(results)


def records_at(records: Iterable[RunRecord], result: ArmResult) -> list[RunRecord]:
    """The finished runs of an arm at its best rate."""
    wanted = (result.size, result.arm, result.best.learning_rate, "finished")
    return [r for r in records if (r.size, r.arm, r.learning_rate, r.status) == wanted]


def _summarise_arm(records: Sequence[RunRecord], first: RateResult | None) -> ArmResult:
    rates = tuple(
        _summarise_rate(rate, [record for record in records if record.learning_rate == rate])
        for rate in dict.fromkeys(record.learning_rate for record in records)
    )
    # min keeps the first of equals, and NaN would win or lose at random
    best = min(rates, key=lambda rate: (len(rate.missing), _or_infinite(rate.loss.value)))
    done = [r for r in records if r.status == "finished" and r.learning_rate == best.learning_rate]
    return ArmResult(
        arm=records[0].arm,
        size=records[0].size,
        rates=rates,
        best=best,
        difference=None if first is None else _difference(best.loss.by_seed, first.loss.by_seed),
        tokens_per_second=statistics.median([r.tokens_per_second or math.nan for r in done] or [math.nan]),
        seconds=statistics.fmean([r.seconds or math.nan for r in done] or [math.nan]),
        parameters=done[0].parameters if done else None,
    )


def _summarise_rate(rate: float | None, records: Sequence[RunRecord]) -> RateResult:
    by_seed = {r.seed: r.loss for r in records if r.loss is not None and math.isfinite(r.loss)}
    missing = tuple(r.seed for r in records if r.seed not in by_seed)
    peaks = [r.peak_learning_rate for r in records if r.peak_learning_rate is not None]
    return RateResult(
        learning_rate=rate, peak=peaks[0] if peaks else rate, loss=mean_of(by_seed), missing=missing
    )


def _difference(losses: Mapping[int, float], first: Mapping[int, float]) -> Mean:
    return mean_of({seed: loss - first[seed] for seed, loss in losses.items() if seed in first})


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def write_tables(records: Sequence[RunRecord], folder: Path) -> tuple[Path, Path]:
    """Write results.jsonl and results.csv, one line per run, each whole or not at all."""
    rows = [record.to_row() for record in records]
    lines, sheet = folder / "results.jsonl", folder / "results.csv"
    write_beside(lines, "".join(json.dumps(row) + "\n" for row in rows))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_beside(sheet, buffer.getvalue())
    return lines, sheet
