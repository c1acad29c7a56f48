"""What docs/distributed.md and examples/cluster show is run, or, where it needs a cluster, checked."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TEXT
from transformers import AutoModelForCausalLM

from attention_residuals.cli.train import train
from attention_residuals.models.auto import config_class
from attention_residuals.training.layout import Layout
from attention_residuals.training.presets import PRESETS

ROOT = Path(__file__).parent.parent.parent
DOCS = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
CLUSTER = ROOT / "examples" / "cluster"
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL) for line in block.splitlines()
]


def environment(folder: Path) -> dict[str, str]:
    """That of a shell in which this Python's programs come first."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def run(command: list[str], folder: Path, **variables: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"


def last_step(run_folder: Path) -> int:
    return int(json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])


@pytest.mark.slow
def test_the_commands_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    assert len(COMMANDS) == 3
    for command, step in zip(COMMANDS, (4, 6, 8), strict=True):
        run(shlex.split(command), tmp_path)
        assert last_step(tmp_path / "run") == step
        AutoModelForCausalLM.from_pretrained(tmp_path / "run")


@pytest.mark.slow
def test_the_script_for_one_machine_starts_and_continues(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    script = ["bash", str(CLUSTER / "torchrun.sh"), "--data", "text.txt", "--tensor-parallel", "2"]
    config = {**PRESETS["tiny"].fields, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "shape.json").write_text(json.dumps(config))
    script += ["--model-config", "shape.json"]
    for steps in (2, 3):
        run([*script, "--max-steps", str(steps)], tmp_path, PROCESSES="2")
        assert last_step(tmp_path / "run") == steps


def test_the_cluster_example_is_a_layout_of_its_model() -> None:
    script = (CLUSTER / "train.slurm").read_text(encoding="utf-8")
    for file in CLUSTER.iterdir():
        subprocess.run(["bash", "-n", str(file)], check=True)
    nodes, gpus = (
        int(re.search(rf"#SBATCH --{name}=(\d+)", script)[1]) for name in ("nodes", "gpus-per-node")
    )  # type: ignore[index]
    words = shlex.split(script.split("attnres train")[1].replace("\\\n", " "))
    given = {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}
    known = {"--" + name.replace("_", "-") for name in inspect.signature(train).parameters}
    assert set(given) <= known
    layout = Layout(
        processes=nodes * gpus,
        pipeline=int(given["--pipeline"]),
        tensor_parallel=int(given["--tensor-parallel"]),
        microbatches=int(given["--microbatches"]),
    )
    layout.check_model(config_class("qwen3_5_text")(**PRESETS[given["--preset"]].fields))
    layout.check_batch(int(given["--batch-size"]))
    assert f"{layout.data_ranks} data-parallel ranks" in script
