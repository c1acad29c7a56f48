from __future__ import annotations

import json
from pathlib import Path

import pytest

from attention_residuals.errors import UserError
from attention_residuals.training.run_folder import RunFolder, write_beside


def write_run(place: Path) -> None:
    RunFolder(place).write_run({"status": "running"})


def test_create_and_replace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.create(write_run)
    (folder.path / "old").write_text("x")
    folder.create(write_run)
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]
    assert [path.name for path in folder.path.parent.iterdir()] == ["run"], "nothing is left beside"


def test_a_failed_replacement_keeps_the_old_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(write_run)

    def fail(place: Path) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        folder.create(fail)
    assert folder.read_run() == {"status": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_which_folders_are_free(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.check_free(overwrite=False)
    folder.path.mkdir()
    folder.check_free(overwrite=False)
    write_run(folder.path)
    with pytest.raises(UserError, match=r"already holds a run; add --resume .* --overwrite"):
        folder.check_free(overwrite=False)
    folder.check_free(overwrite=True)
    folder.run_file.rename(folder.path / "thesis.tex")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds files that are not a run; give another folder"):
            folder.check_free(overwrite=overwrite)
    with pytest.raises(UserError, match="is a file; give another folder"):
        RunFolder(folder.path / "thesis.tex").check_free(overwrite=True)


def test_metrics_forget_later_steps_and_half_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "loss": 1.0 / step})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    folder.forget_metrics_after(2)
    assert [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()] == [1, 2]


def test_writing_fails_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_beside(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_beside(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_damaged_and_missing_run_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="holds no run to resume; leave --resume out"):
        folder.read_run()
    folder.run_file.write_text("{")
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        folder.read_run()


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_run(tmp_path)
    (tmp_path / ".incomplete-1").mkdir()
    (tmp_path / ".run.json-1").write_text("{")
    folder.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
