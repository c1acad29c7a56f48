"""Loss curves from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_residuals.analysis.training_curve import last_finite, read_training_curve
from attention_residuals.errors import UserError


def test_reads_losses_by_step_and_passes_over_the_rest(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "loss": 3.0, "lr": 0.1}\n{"step": 2, "eval_loss": 2.5}\n\n{"step": 2, "loss": 2.0}\n'
        '{"event": "end"}\n{"step": 2, "loss": 1.9}\n{"step": 3, "lo'
    )
    curve = read_training_curve(metrics)
    assert curve.train == ((1, 3.0), (2, 1.9))
    assert curve.evaluation == ((2, 2.5),)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "lo\n{"step": 2, "loss": 2.0}\n')
    with pytest.raises(UserError, match="line 1 of"):
        read_training_curve(metrics)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        read_training_curve(tmp_path / "nowhere.jsonl")


def test_last_finite_passes_over_what_is_no_number() -> None:
    assert last_finite(((1, 2.0), (2, float("nan")))) == (1, 2.0)
    assert last_finite(()) is None
