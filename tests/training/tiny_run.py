"""A model of 30 thousand parameters and a short text: settings that train in a second."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from attention_residuals.training.settings import TrainSettings

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SENTENCES = (
    "The residual stream carries every output of every layer.",
    "A read looks back in depth and takes what it needs.",
    "Blocks close, sums are kept, and the next block begins.",
    "Nothing is lost, since all sources add up to the stream.",
)
TEXT = "\n".join(f"{number}. {SENTENCES[number % 4]}" for number in range(60))


def write_inputs(folder: Path) -> tuple[Path, Path]:
    """A text file and a file with the model's shape in `folder`."""
    text, shape = folder / "text.txt", folder / "shape.json"
    text.write_text(TEXT, encoding="utf-8")
    shape.write_text(json.dumps(SHAPE), encoding="utf-8")
    return text, shape


def tiny_settings(folder: Path, name: str = "run", **changes: Any) -> TrainSettings:
    """Settings of a run in `folder / name` on the inputs of `write_inputs`."""
    text, shape = write_inputs(folder)
    fields: dict[str, Any] = {
        "model_config": str(shape),
        "mode": "block",
        "num_blocks": 2,
        "data": (str(text),),
        "vocab_size": 300,
        "cache_dir": str(folder / "cache"),
        "context": 16,
        "batch_size": 2,
        "max_steps": 6,
        "eval_every": 3,
        "eval_blocks": 2,
        "save_every": 2,
        "output_dir": str(folder / name),
    }
    return TrainSettings(**{**fields, **changes})


def quiet() -> Console:
    """A console that keeps what it is told."""
    return Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    """What a console of `quiet` was told."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def losses(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without the one figure that depends on the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name != "tokens_per_second"}
        for line in lines
    ]


def arguments(settings: TrainSettings) -> list[str]:
    """The command line that gives these settings."""
    options = []
    for name, value in settings.to_dict().items():
        if value == getattr(TrainSettings(), name) or (isinstance(value, list) and not value):
            continue
        if name != "preset":
            option = "--" + name.replace("_", "-")
            options += [
                word for item in (value if isinstance(value, list) else [value]) for word in (option, item)
            ]
    return [str(word) for word in options]


def start(*command: str, code: str | None = None) -> subprocess.Popen[str]:
    """`attnres COMMAND` in a process of its own; `code` runs in it first."""
    program = "from attention_residuals.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", f"{code or ''}\n{program}", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
