"""What `attnres inspect` measures on request: sources taken away, change over training, tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from attention_residuals.analysis.ablation import ablate_sources
from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.training.checkpoints import mark_complete


@pytest.fixture
def run(model_dir: Path, saved_model: Path) -> Path:
    """The model folder with two checkpoints, as a run leaves it."""
    for step in (5, 10):
        checkpoint = model_dir / "checkpoints" / f"checkpoint-{step}"
        shutil.copytree(saved_model, checkpoint)
        mark_complete(checkpoint)
    return model_dir


def test_all_of_it_is_drawn_written_and_shown(attnres: Callable, run: Path) -> None:
    status, out, err = attnres(
        "inspect", run, "--prompt", "import os", "--ablate", "--over-training", "--parquet"
    )
    assert (status, err) == (0, "")
    names = ["depth_map", "entropy_and_norms", "source_ablation", "over_training"]
    tables = ["depth_weights", "token_measures", "source_ablation", "over_training"]
    expected = [f"{name}.png" for name in names] + [f"{name}.parquet" for name in tables] + ["report.html"]
    assert [Path(line).name for line in out.splitlines()[-9:]] == expected
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted(expected)
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3 and "What each source is worth" in page


def test_the_tables_hold_what_the_library_gives(attnres: Callable, run: Path) -> None:
    attnres("inspect", run, "--prompt", "import os", "--ablate", "--over-training", "--parquet")
    loaded = load_model(run, device="cpu")
    ids = encode(loaded, "import os")
    weights = parquet.read_table(run / "report" / "depth_weights.parquet").to_pydict()
    assert weights["token"][:9] == ids[0].tolist() and len(weights["weight"]) == 9 * (
        1 + 2 + 2 + 3 + 3 + 4 + 4 + 5 + 5
    )
    ablation = parquet.read_table(run / "report" / "source_ablation.parquet").to_pydict()
    expected = ablate_sources(loaded.model, ids).to_table()
    np.testing.assert_allclose(ablation["loss_change"], expected["loss_change"], atol=1e-6)
    history = parquet.read_table(run / "report" / "over_training.parquet").to_pydict()
    assert history["step"] == [5] * 9 + [10] * 9


def test_over_training_without_checkpoints_is_refused(attnres: Callable, model_dir: Path) -> None:
    status, out, err = attnres("inspect", model_dir, "--prompt", "a", "--over-training")
    assert (status, out) == (2, "") and "no complete checkpoint" in err and err.count("\n") == 1


def test_one_token_has_no_loss_to_compare(attnres: Callable, model_dir: Path) -> None:
    status, out, err = attnres("inspect", model_dir, "--prompt", "a", "--ablate")
    assert (status, out) == (2, "") and "longer text" in err


def test_without_pyarrow_the_extra_is_named(
    attnres: Callable, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, err = attnres("inspect", model_dir, "--prompt", "abc", "--parquet")
    assert status == 2 and "attention_residuals[train]" in err
