"""From a run's metrics.jsonl to the two series of its loss curve."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from attention_residuals.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainingCurve:
    """Losses in nats per token against optimizer steps, as (step, loss) pairs in the order of steps.

    After a resume the same step may have been logged twice; the later record counts.
    """

    train: tuple[tuple[int, float], ...]
    evaluation: tuple[tuple[int, float], ...]


def read_training_curve(metrics: Path) -> TrainingCurve:
    """Read the records that hold `step` and `loss` or `eval_loss`; other records and keys are passed over.

    The last line may be cut short, since a run can be killed while it writes.

    Raises:
        UserError: the file is missing, or a line before the last is not a JSON object.
    """
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"training metrics {metrics} cannot be read: {error.strerror}") from error
    train: dict[int, float] = {}
    evaluation: dict[int, float] = {}
    for number, line in enumerate(lines, start=1):
        record = _parse(line, metrics, number, is_last=number == len(lines))
        if not isinstance(record.get("step"), int):
            continue
        for key, series in (("loss", train), ("eval_loss", evaluation)):
            if isinstance(record.get(key), (int, float)):
                series[record["step"]] = float(record[key])
    return TrainingCurve(tuple(sorted(train.items())), tuple(sorted(evaluation.items())))


def last_finite(series: tuple[tuple[int, float], ...]) -> tuple[int, float] | None:
    """The last (step, loss) whose loss is a finite number; None if there is none."""
    return next((point for point in reversed(series) if math.isfinite(point[1])), None)


def _parse(line: str, metrics: Path, number: int, *, is_last: bool) -> dict[str, Any]:
    if not line.strip():
        return {}
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if is_last:
            return {}
        raise UserError(f"line {number} of {metrics} is not JSON ({error.msg}); mend or remove it") from error
    if not isinstance(record, dict):
        raise UserError(f"line {number} of {metrics} is not a JSON object; mend or remove it")
    return record
