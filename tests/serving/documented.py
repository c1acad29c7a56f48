"""What docs/serving.md shows, and programs started as it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
DEADLINE = 180  # seconds; a server is ready after about 7, an evaluation after about 15


def blocks(language: str) -> list[str]:
    """The page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def python_block(word: str) -> str:
    """The one Python block that has a word."""
    (block,) = (block for block in blocks("python") if word in block)
    return block


def command(program: str, folder: str) -> list[str]:
    """The page's one command line of a program on a model folder, its program from this environment."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    (line,) = (line for line in lines if f"{program} " in line and re.search(rf"[ =]{folder}\b", line))
    first, *rest = shlex.split(line)
    return [str(Path(sys.executable).with_name(first)), *rest]


def environment(folder: Path) -> dict[str, str]:
    """Offline, on one thread, with caches of its own."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}


@contextmanager
def server(arguments: list[str], folder: Path) -> Iterator[str]:
    """A server process in `folder`, on a port that the system chooses; gives its address once it listens."""
    log = folder / "server.log"
    port = arguments.index("--port") + 1
    arguments = [*arguments[:port], "0", *arguments[port + 1 :], "--host", "127.0.0.1"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments, cwd=folder, env=environment(folder), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"running on (http://\S+)", log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        time.sleep(0.1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    raise AssertionError(f"no server after {DEADLINE} s, or it ended with {process.poll()}:\n{tail}")
