"""attnres compare, and the page about it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny_shapes import LLAMA_TO_TRAIN

PAGE = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(encoding="utf-8")


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    Path("text.txt").write_text("one two three four five six\n" * 40, encoding="utf-8")
    Path("shape.json").write_text(json.dumps(LLAMA_TO_TRAIN), encoding="utf-8")
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    Path("comparison.toml").write_text(settings, encoding="utf-8")
    return tmp_path


def test_flags(attnres, inputs):
    """One arm and seed, since a second run would only take longer."""
    command = "compare --arms full --sizes shape.json --data text.txt --max-steps 2 --set batch_size=2"
    status, out, err = attnres(*command.split(), "--output-dir", "out", "--set", "vocab-size=300")
    assert (status, err) == (0, "")
    run = json.loads(Path("out/runs/shape-full-seed-0/run.json").read_text(encoding="utf-8"))
    assert run["command"] == "compare" and run["threads"] == 1
    settings = run["settings"]
    assert (settings["mode"], settings["batch_size"], settings["vocab_size"]) == ("full", 2, 300)
    assert f"{run['eval_loss']:.4f} ± –" in out
    assert out.splitlines()[-1] == "out/report.html" and Path("out/report.html").is_file()
    assert attnres(*command.split(), "--output-dir", "out", "--set", "vocab-size=301") == (
        2,
        "",
        "attnres: the run in out/runs/shape-full-seed-0 was made with vocab_size 300, now it is 301; "
        "give the old settings, or another --output-dir\n",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "nothing to compare; give --arms or a file"),
        ("missing.toml", "missing.toml cannot be read"),
        ("comparison.toml --arms blocks", "an arm must be baseline, full, block:8"),
        (
            "comparison.toml --seeds one",
            "--seeds must be numbers with commas between, such as 0,1,2; got 'one'",
        ),
        ("comparison.toml --learning-rates fast", "such as 1e-3,2e-3; got 'fast'"),
        ("comparison.toml --preset huge", "got 'huge', which does not exist"),
        ("comparison.toml --set warmup", "--set needs NAME=VALUE, such as warmup=0.1; got 'warmup'"),
        ("comparison.toml --set colour=red", "attnres train has no option 'colour'"),
        ("comparison.toml --max-steps 0", "--max-steps must be at least 1, got 0"),
        ("comparison.toml --jobs 0", "--jobs"),
        ("comparison.toml --output-dir text.txt", "text.txt"),
    ],
)
def test_mistakes_are_one_line_and_status_2(attnres, inputs, options, words):
    before = sorted(path.name for path in inputs.iterdir())
    status, out, err = attnres("compare", *options.split())
    assert status == 2 and err.startswith("attnres: ") and err.count("\n") == 1
    assert words in err and "Traceback" not in out + err
    assert sorted(path.name for path in inputs.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runs_stop_with_a_checkpoint_when_the_comparison_ends(inputs, number):
    """After SIGKILL the comparison can't ask them to."""
    command = (
        "compare --arms baseline --sizes shape.json --data text.txt --max-steps 100000 --set vocab_size=300"
    )
    program = "from attention_residuals.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command.split(), "--threads", "1"], stdout=subprocess.PIPE, text=True
    )
    run = Path("comparison/runs/shape-baseline-seed-0")
    wait_for(lambda: (run / "metrics.jsonl").is_file())
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    wait_for(lambda: json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "interrupted")
    assert len(list((run / "checkpoints").iterdir())) == 1
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number and "the same command goes on from there" in out


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_the_page_is_run(attnres, inputs):
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) == 3
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "attnres"
        status, out, err = attnres(*arguments)
        assert (status, err) == (0, ""), command
    assert "8 runs, 4 of them finished before" in out
    lines = Path("sweep/results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["finished"] * 8
    assert len(list(Path("out/runs").iterdir())) == 6
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example, "docs/comparing.md", "exec"), {"__name__": "__main__"})
    files = set(re.findall(r"`([\w.-]+-)(?:SIZE|RUN)\.png`", PAGE))
    assert files == {"losses-", "sweep-", "depth-", "depth-map-"}
    for start in files:
        assert list(Path("sweep").glob(f"{start}*.png")), start
