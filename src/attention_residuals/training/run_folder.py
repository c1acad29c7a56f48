"""A run's folder: what is in it, when it may be written, and how its files appear whole or not at all.

run/
  config.json, model.safetensors, tokenizer files   the trained model, once training has ended
  run.json        settings, versions, seed, data, result
  metrics.jsonl   one line per step or evaluation
  checkpoints/    everything needed to resume
  report/         pictures and report.html
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attention_residuals.errors import UserError


def write_beside(path: Path, content: str) -> None:
    """Write a text file whole: beside its place, to disk, then renamed into it."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
    ) as file:
        beside = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    beside.chmod(0o644)  # temporary files are private; a run is as readable as any other
    beside.replace(path)


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report"

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds something, before anything is written.

        Raises:
            UserError: the folder holds a run and `overwrite` is false, or holds something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--output-dir {self.path} is a file; give another folder")
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if not self.run_file.is_file():
            raise UserError(f"--output-dir {self.path} holds files that are not a run; give another folder")
        if not overwrite:
            raise UserError(
                f"--output-dir {self.path} already holds a run; add --resume to continue it, --overwrite to "
                "replace it, or give another folder"
            )

    def create(self, content: Callable[[Path], None]) -> None:
        """Fill the folder by `content(folder)` beside its place and rename it in, in place of an old run.

        Raises:
            UserError: the place cannot be written to.
        """
        place = self.path.absolute()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f".{place.name}-new-", dir=place.parent))
        except OSError as error:
            raise UserError(f"--output-dir {self.path} cannot be written: {error.strerror}") from error
        try:
            content(beside)
            beside.chmod(0o755)
            old = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent))
            if place.exists():
                place.rename(old / "run")
            try:
                beside.rename(place)
            except OSError:
                if (old / "run").exists():
                    (old / "run").rename(place)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def read_run(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            UserError: there is no run here, or its file is damaged.
        """
        if not self.run_file.is_file():
            raise UserError(f"--output-dir {self.path} holds no run to resume; leave --resume out")
        try:
            return json.loads(self.run_file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{self.run_file} is damaged: {error}; start a new run") from error

    def update_run(self, **fields: Any) -> None:
        """Change fields of run.json."""
        self.write_run({**self.read_run(), **fields})

    def write_run(self, fields: dict[str, Any]) -> None:
        """Write run.json."""
        write_beside(self.run_file, json.dumps(fields, indent=2) + "\n")

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl, at once visible to readers."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
        if not self.metrics_file.is_file():
            return []
        return list(_whole_lines(self.metrics_file.read_text(encoding="utf-8")))

    def last_eval_loss(self) -> float | None:
        """The last validation loss in metrics.jsonl, also of an earlier start; None where there is none."""
        losses = [line["eval_loss"] for line in self.read_metrics() if "eval_loss" in line]
        return losses[-1] if losses else None

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will make again."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        write_beside(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))

    def publish(self, save: Callable[[Path], None]) -> None:
        """Put a saved model at the top: `save(folder)` writes beside, then each file is renamed in."""
        with self._beside() as beside:
            save(beside)
            for file in sorted(beside.iterdir()):
                file.chmod(0o644)
                file.replace(self.path / file.name)

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        beside = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=self.path))
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        for leftover in self.path.glob(".incomplete-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.path.glob(".run.json-*"):
            leftover.unlink(missing_ok=True)


def _whole_lines(content: str) -> Iterator[dict[str, Any]]:
    for line in content.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
