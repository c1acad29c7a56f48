"""`attnres plan`: what it prints, what it writes, and mistakes."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from attention_residuals.planner import calibration, read_timing
from tiny_shapes import LLAMA_TO_TRAIN

PAGE = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(calibration, "PHASE_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "LEAST_RUNS", 2)
    monkeypatch.setattr(calibration, "MEMORY_ELEMENTS", 1 << 10)
    monkeypatch.setattr(calibration, "FORWARD_FLOPS", 1e8)
    monkeypatch.setattr(read_timing, "RUNS", 2)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({**LLAMA_TO_TRAIN, "vocab_size": 67, "num_hidden_layers": 8}))
    return path


def test_everything_is_printed(attnres: Callable, llama: Path) -> None:
    status, out, err = attnres("plan", llama, "--context", 64, "--pp", 2, "--num-blocks", 4)
    assert (status, err) == (0, "")
    for words in ("parameters added", "depth plan", "memory traffic", "hops", "layers per stage", "prefill"):
        assert words in out
    for words in ("estimated time", "decode", "training step", "overhead", "timed:", "assumed:"):
        assert words in out
    assert "recommended: " in out


def test_without_a_calibration_nothing_is_timed(attnres: Callable, llama: Path) -> None:
    status, out, _ = attnres("plan", llama, "--context", 64, "--no-calibrate")
    assert status == 0 and "times: not predicted" in out and "estimated time" not in out


def test_json_holds_the_figures(attnres: Callable, llama: Path) -> None:
    options = ("--context", 64, "--pp", 2, "--mode", "full", "--no-calibrate", "--json", "--sweep")
    status, out, _ = attnres("plan", llama, *options)
    found = json.loads(out)
    assert status == 0
    assert found["read_parameters"] == 16 * 2 * 16
    assert found["depth"]["attn_res"]["mode"] == "full"
    assert len(found["memory"]) == 2 and found["memory"][0]["total"] > 0
    assert found["times"] is None and found["calibration"] is None
    assert found["recommendation"]["num_blocks"] == 8
    assert found["sweep"][0]["pipeline_ranks"] == 1


def test_a_sweep_is_drawn_and_written(attnres: Callable, llama: Path, tmp_path: Path) -> None:
    picture, table = tmp_path / "sweep.png", tmp_path / "sweep.csv"
    options = ("--context", 64, "--sweep", "--plot", picture, "--csv", table)
    status, out, _ = attnres("plan", llama, *options)
    assert status == 0 and str(picture) in out.replace("\n", "")
    assert picture.stat().st_size > 10_000
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert {int(row["pipeline_ranks"]) for row in rows} == {2**i for i in range(13)}
    assert all(row["overhead"] for row in rows)


def test_a_saved_model_keeps_its_reads(attnres: Callable, saved_model: Path) -> None:
    saved = AutoConfig.from_pretrained(saved_model)
    status, out, _ = attnres("plan", saved_model, "--context", 64, "--no-calibrate", "--json")
    assert status == 0 and json.loads(out)["depth"]["attn_res"] == saved.attn_res


def test_presets_are_planned(attnres: Callable) -> None:
    status, out, _ = attnres("plan", "27B", "--context", 64, "--no-calibrate", "--json", "--pp", 8, "--tp", 4)
    found = json.loads(out)
    assert status == 0 and found["parameters"] > 25e9 and sum(found["split"]) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nowhere",), "MODEL must be one of tiny, small"),
        (("tiny", "--pp", "9"), "take fewer"),
        (("tiny", "--pp", "0"), "pipeline_ranks must be at least 1"),
        (("tiny", "--dtype", "int8"), "dtype must be one of"),
        (("tiny", "--plot", "x.png"), "needs --sweep"),
        (("tiny", "--memory-limit", "-1"), "--memory-limit must be above 0"),
        (("tiny", "--mode", "full", "--num-blocks", "3"), "num_blocks belongs to mode='block'"),
        (("tiny", "--device", "nothing"), "device 'nothing' cannot be used"),
    ],
)
def test_mistakes(attnres: Callable, options: tuple[str, ...], message: str) -> None:
    status, out, err = attnres("plan", *options, "--no-calibrate")
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_file_that_is_no_configuration(attnres: Callable, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "holds no configuration" in attnres("plan", path)[2]
    path.write_text('{"model_type": "vit"}')
    assert "no causal language model" in attnres("plan", path)[2]


def test_what_does_not_fit_is_told(attnres: Callable, llama: Path) -> None:
    options = ("--context", 64, "--no-calibrate", "--memory-limit", 1e-6)
    status, out, _ = attnres("plan", llama, *options)
    assert status == 0 and "recommended: none" in out


def test_the_documented_commands_and_example_run(
    attnres: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (attnres plan .*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        status, _, err = attnres(*shlex.split(command)[1:])
        assert (status, err) == (0, ""), command
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(example, "docs/planning.md", "exec"), {})
