"""Comparisons of a Llama of ten thousand parameters on a short text, whose runs take a second."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from attention_residuals.comparison.settings import ComparisonSettings, read_settings
from tiny_shapes import LLAMA_TO_TRAIN

TEXT = "\n".join(f"{i}. Blocks close, sums are kept, and block {i + 1} begins." for i in range(60))


def tiny_settings(folder: Path, *, train: dict[str, Any] | None = None, **changes: Any) -> ComparisonSettings:
    """Two arms, one seed, four steps; everything lies in `folder`."""
    text, shape = folder / "text.txt", folder / "shape.json"
    text.write_text(TEXT, encoding="utf-8")
    shape.write_text(json.dumps(LLAMA_TO_TRAIN), encoding="utf-8")
    fields = {
        "data": [str(text)],
        "vocab_size": 300,
        "cache_dir": str(folder / "cache"),
        "context": 16,
        "batch_size": 2,
        "max_steps": 4,
        "eval_every": 2,
        "eval_blocks": 2,
        **(train or {}),
    }
    given = {"arms": ["baseline", "block:2"], "sizes": [str(shape)], "output_dir": str(folder / "out")}
    return read_settings(None, {**given, **changes, "train": fields})


def quiet() -> Console:
    """A console that keeps what it is told."""
    return Console(file=io.StringIO(), width=200)


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, training or validation loss) of a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line.get("loss", line.get("eval_loss"))) for line in lines]
