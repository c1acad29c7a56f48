from __future__ import annotations

from pathlib import Path

import pytest

from attention_residuals.errors import UserError
from attention_residuals.training.checkpoints import (
    MARKER,
    complete_checkpoints,
    keep_latest,
    latest_checkpoint,
    mark_complete,
    remove_incomplete,
    step_of,
)


def make(folder: Path, step: int, *, complete: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights" * 100)
    (checkpoint / "optimizer.pt").write_bytes(b"state" * 100)
    if complete:
        mark_complete(checkpoint)
    return checkpoint


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        make(tmp_path, step)
    make(tmp_path, 200, complete=False)
    (tmp_path / "checkpoint-x").mkdir()
    assert latest_checkpoint(tmp_path).name == "checkpoint-100"
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [5, 10, 100]


def test_only_old_complete_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        make(tmp_path, step)
    make(tmp_path, 200, complete=False)
    keep_latest(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-100", "checkpoint-200"}
    remove_incomplete(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-100"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"state"), "optimizer.pt has 5 bytes, not 500"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"weighty" * 100),
            "checksum of model.safetensors differs",
        ),
        (lambda folder: (folder / MARKER).write_text("{"), "complete.json cannot be read"),
    ],
)
def test_damage_is_told_and_nothing_is_removed(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path, 1)
    damage(make(tmp_path, 2))
    with pytest.raises(UserError, match=f"checkpoint-2 is damaged: .*{message}.* resume from checkpoint-1"):
        latest_checkpoint(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is called checkpoint-STEP"):
        step_of(tmp_path)
