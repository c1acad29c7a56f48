"""The example in docs/pipeline.md runs, as torchrun would start it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_in_processes

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def example() -> str:
    found = re.search(
        r"```python\n(# pipeline_example\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return found.group(1)


def run_example(rank: int, world: int, port: int, folder: Path) -> str:
    dist.destroy_process_group()  # the example makes its own
    variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    output = folder / f"{rank}.txt"
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        exec(compile(example(), "pipeline_example.py", "exec"), {})
        sys.stdout.flush()
    return output.read_text()


def check(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\d+\.\d+)", output)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert "rank 0 has" in output
    assert "rank 1 has" in output


def test_the_example(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check("".join(run_in_processes(run_example, 2, tmp_path, 2, port, tmp_path)))


@pytest.mark.slow
def test_the_example_under_torchrun(tmp_path):
    (tmp_path / "pipeline_example.py").write_text(example(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(tmp_path / "pipeline_example.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)
