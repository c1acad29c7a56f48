from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attention_residuals.cli.demo import (
    FEWEST_STEPS,
    STEPS,
    affordable_steps,
    fastest_threads,
)
from attention_residuals.cli.main import main


def demo(*args: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *map(str, args)])
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_demo_ends_with_loss_sample_and_report_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "demo"
    for _ in range(2):
        assert demo("--output-dir", folder, "--max-steps", 2) == 0
        out = capsys.readouterr().out
        assert "sample:\nThe people of the United States" in out
        assert "validation loss: " in out
        assert f"report: {folder}/report/report.html" in out
        assert (folder / "report" / "report.html").is_file()


def test_demo_replaces_nothing_but_a_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": "train"}))
    assert demo("--output-dir", tmp_path) == 2
    assert "holds a run that is no demo; give another folder" in capsys.readouterr().err
    (tmp_path / "run.json").rename(tmp_path / "notes.txt")
    assert demo("--output-dir", tmp_path) == 2
    assert "holds files that are not a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_slow_machine_takes_fewer_steps() -> None:
    assert affordable_steps(0.1) == STEPS
    assert affordable_steps(0.5) == 400
    assert affordable_steps(60.0) == FEWEST_STEPS


def test_threads_are_tried_and_put_back() -> None:
    before = torch.get_num_threads()
    assert 1 <= fastest_threads() <= before
    assert torch.get_num_threads() == before
