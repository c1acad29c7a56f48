"""The examples are notebooks: their cells are well formed and run in order, here at a small size."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tiny_shapes import LLAMA_TO_TRAIN

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = ("compare", "convert", "from_scratch", "inspect_depth")
TEXT = "\n".join(f"{i}. Blocks close, sums are kept, and block {i + 1} begins." for i in range(60))
SIZE = {"context": 16, "batch_size": 2}


class Cell(NamedTuple):
    is_markdown: bool
    tags: str
    source: str


def cells_of(name: str) -> list[Cell]:
    """The cells of an example in the percent format of jupytext, after its header."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    header, *parts = text.split("\n# %%")
    assert header.startswith("# ---\n# jupyter:\n#   jupytext:\n") and header.rstrip().endswith("\n# ---")
    cells = []
    for part in parts:
        marker, _, source = part.partition("\n")
        cells.append(Cell("[markdown]" in marker, marker.replace("[markdown]", "").strip(), source.strip()))
    return cells


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Parameters of each example for a Llama of ten thousand parameters and a short text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text, shape = tmp_path / "text.txt", tmp_path / "shape.json"
    text.write_text(TEXT, encoding="utf-8")
    shape.write_text(json.dumps(LLAMA_TO_TRAIN), encoding="utf-8")
    one_model = {
        "OUTPUT_DIR": "out",
        "DATA": (str(text),),
        "MODEL": {"model_config": str(shape), "vocab_size": 300},
        "SIZE": SIZE,
        "STEPS": 4,
    }
    train = {**SIZE, "max_steps": 4, "vocab_size": 300, "eval_blocks": 2}
    return {
        "compare": {
            "OUTPUT_DIR": "out",
            "DATA": [str(text)],
            "SIZES": [str(shape)],
            "SEEDS": [0],
            "TRAIN": train,
        },
        "convert": {**one_model, "PLAIN_STEPS": 4},
        "from_scratch": one_model,
        "inspect_depth": {**one_model, "TEXT": "Blocks close, and block 7 begins."},
    }


def run_cells(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Run an example's code cells as a notebook does; gives the names they leave."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells_of(name):
        if not cell.is_markdown:
            exec(compile(cell.source, f"{name}.py", "exec"), names)
        if "parameters" in cell.tags:
            assert set(parameters) <= set(names)
            names.update(parameters)
    return names


def test_every_example_is_known() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_well_formed_and_explained(name: str) -> None:
    cells = cells_of(name)
    assert cells[0].is_markdown and cells[0].source.startswith("# # ")
    for cell in cells:
        assert cell.source
        if cell.is_markdown:
            assert all(line.startswith("#") for line in cell.source.splitlines())
        else:
            compile(cell.source, f"{name}.py", "exec")
            assert len(cell.source.splitlines()) <= 25
    (parameters,) = (cell for cell in cells if cell.tags == 'tags=["parameters"]')
    assert all(isinstance(line, ast.Assign) for line in ast.parse(parameters.source).body)


def test_from_scratch(small: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    names = run_cells("from_scratch", small["from_scratch"])
    out = capsys.readouterr().out
    assert "read 16: embedding, block 1, block 2, block 3, block 4" in out
    assert "after 4 steps" in out and "The people of the United States" in out
    assert names["summary"].num_tokens == names["written"].shape[1]
    assert names["picture"].is_file() and names["result"].report.is_file()


def test_convert(small: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    names = run_cells("convert", small["convert"])
    out = capsys.readouterr().out
    assert names["change"] < 1e-5 and names["text_before"] == names["text_after"]
    assert names["converted"].verification.max_change < 1e-5 and names["same"]
    plain, ours = (line.split()[3] for line in out.splitlines() if ": first loss" in line)
    assert float(plain.strip(",")) == pytest.approx(float(ours.strip(",")), abs=2e-5)
    assert "\nrefused: " in out and not Path("out/never").exists()


@pytest.mark.slow
def test_compare(small: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    names = run_cells("compare", small["compare"])
    baseline, block, full = names["report"].results
    assert block.difference.by_seed[0] == block.best.loss.by_seed[0] - baseline.best.loss.by_seed[0]
    assert f"{full.best.loss.value:.4f}" in capsys.readouterr().out
    assert names["report"].page.is_file() and len(names["report"].pictures) == 4


@pytest.mark.slow
def test_compare_as_a_script(small: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The processes that train import the script again, and must not start runs of their own."""
    lines = (FOLDER / "compare.py").read_text(encoding="utf-8").split("\n# %%")
    at = next(i for i, cell in enumerate(lines) if "parameters" in cell.partition("\n")[0])
    lines[at] += "".join(f"\n{name} = {value!r}" for name, value in small["compare"].items())
    script = tmp_path / "compare.py"
    script.write_text("\n# %%".join(lines), encoding="utf-8")
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=alone, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "failed: none" in done.stdout and done.stdout.count("shape-baseline-seed-0\n") == 1


def test_inspect_depth(small: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    names = run_cells("inspect_depth", small["inspect_depth"])
    out = capsys.readouterr().out
    assert "rank correlation of weight and change of the loss: " in out
    table = names["record"].to_table()
    assert f"{names['path']}: {len(table['weight']):,} rows" in out and names["path"].is_file()
    assert names["joined"].shape[2] == names["written"].shape[1] - 1
    assert Path("out/weight_and_worth.png").is_file() and Path("out/source_ablation.png").is_file()
