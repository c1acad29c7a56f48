from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import TEXT, arguments, losses, tiny_settings, write_inputs
from transformers import AutoModelForCausalLM

from attention_residuals.cli.main import main


def attnres(*args: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


def test_the_command_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT[:800])
    command = "train --preset tiny --mode block --num-blocks 4 --data text.txt --max-steps 6 --output-dir run"
    assert attnres(*command.split()) == 0
    out = capsys.readouterr().out
    assert "context shortened from 128 to" in out
    assert "step 6/6" in out and "report: run/report/report.html" in out
    model = AutoModelForCausalLM.from_pretrained("run")
    assert model.config.attn_res["num_blocks"] == 4
    assert (tmp_path / "run" / "report" / "report.html").is_file()


def test_reads_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = tiny_settings(tmp_path, max_steps=2)
    variant = ["--variant", "activation=sigmoid", "--variant", "window=2"]
    assert attnres("train", *arguments(settings), *variant) == 0
    run = Path(settings.output_dir)
    stored = json.loads((run / "run.json").read_text())["settings"]
    assert stored["variant"] == {"activation": "sigmoid", "window": 2}
    config = AutoModelForCausalLM.from_pretrained(run).config
    assert (config.attn_res["activation"], config.attn_res["window"]) == ("sigmoid", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--preset tiny --data missing.txt --max-steps 1",
            "--data missing.txt does not exist; check the path",
        ),
        ("--data empty.txt", "holds no text"),
        ("--data text.txt --context 100000", "--context 100000 is longer than the data allows"),
        ("--data text.txt --max-steps 0", "--max-steps must be at least 1, got 0"),
        ("--data text.txt --colour red", "No such option: --colour"),
        (
            "--data text.txt --max-steps many",
            "Invalid value for '--max-steps': Input should be a valid integer",
        ),
        ("--data text.txt --variant sigmoid", "--variant needs NAME=VALUE, such as activation=sigmoid"),
        ("--data text.txt --variant mode=full", "mode has an option of its own; give it there"),
        ("--data text.txt --variant heads=3", "heads must divide the width, got heads=3 and 128"),
        ("--resume", "holds no run to resume"),
        ("--resume --overwrite", "give --resume (continues the run) or --overwrite (replaces it), not both"),
        ("--model-config bad.json --data text.txt", "bad.json is not a JSON file"),
        ("--model-config odd.json --data text.txt", "the model's configuration does not hold"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("bad.json").write_text("{")
    Path("odd.json").write_text('{"hidden_size": "wide"}')
    assert attnres("train", *options.split(), "--output-dir", "r2") == 2
    out, errors = capsys.readouterr()
    assert message in errors
    assert errors.count("\n") == 1 and errors.startswith("attnres: ")
    assert "Traceback" not in out + errors
    assert not Path("r2").exists()


def test_resume_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)
    command = ["train", *arguments(tiny_settings(tmp_path, max_steps=3))]
    assert attnres(*command) == 0
    assert attnres(*command) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert attnres(*command, "--resume") == 2
    assert "has finished its 3 steps" in capsys.readouterr().err
    assert attnres("train", "--resume", "--output-dir", tmp_path / "run", "--seed", 5) == 2
    assert "a resumed run keeps its settings: seed is 0, got 5" in capsys.readouterr().err
    assert attnres("train", "--resume", "--output-dir", tmp_path / "run", "--max-steps", 5) == 0
    assert losses(tmp_path / "run")[-1]["step"] == 5
    assert attnres(*command, "--overwrite") == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["step"] == 3
