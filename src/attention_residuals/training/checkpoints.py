"""Checkpoints that are complete or absent: a marker with checksums is written last, and checked first."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from attention_residuals.errors import UserError
from attention_residuals.training.run_folder import write_beside

MARKER = "complete.json"
NAME = re.compile(r"checkpoint-(\d+)")
PIECE = 1 << 20  # bytes per read while hashing


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps a checkpoint folder was saved after."""
    match = NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"a checkpoint folder is called checkpoint-STEP, got {checkpoint.name!r}")
    return int(match[1])


def mark_complete(checkpoint: Path) -> None:
    """Declare a checkpoint complete, once every file of it has reached the disk."""
    files = {}
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file() and file.name != MARKER:
            with file.open("rb") as content:
                os.fsync(content.fileno())
            files[str(file.relative_to(checkpoint))] = _description(file)
    write_beside(checkpoint / MARKER, json.dumps({"files": files}, indent=2) + "\n")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were marked complete, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / MARKER).is_file()), key=step_of)


def remove_incomplete(folder: Path) -> None:
    """Remove what a kill or a full disk left of a checkpoint."""
    for path in folder.glob("checkpoint-*"):
        if not (path / MARKER).is_file():
            shutil.rmtree(path, ignore_errors=True)


def keep_latest(folder: Path, number: int) -> None:
    """Remove all but the `number` latest complete checkpoints; incomplete ones stay."""
    for path in complete_checkpoints(folder)[:-number]:
        # without its marker first, so that a kill in between leaves no checkpoint that looks complete
        (path / MARKER).unlink()
        shutil.rmtree(path)


def latest_checkpoint(folder: Path) -> Path:
    """The latest complete checkpoint, its files checked against the marker.

    Raises:
        UserError: there is none, or it is damaged.
    """
    complete = complete_checkpoints(folder)
    if not complete:
        raise UserError(f"{folder} holds no complete checkpoint; start anew with --overwrite")
    latest = complete[-1]
    if damage := find_damage(latest):
        before = complete[-2].name if len(complete) > 1 else "the start"
        raise UserError(
            f"checkpoint {latest} is damaged: {damage}; delete this folder to resume from {before}"
        )
    return latest


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint that was marked complete, or None."""
    try:
        files = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        return f"{MARKER} cannot be read ({type(error).__name__})"
    for name, expected in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
        if _description(file) != expected:
            return f"the checksum of {name} differs"
    return None


def _description(file: Path) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
