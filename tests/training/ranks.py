"""Several processes as torchrun starts them, but without its agent, which would end them when one dies.

They are forked from a server that has imported torch, so that a start takes little time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["attention_residuals.training.run", "attention_residuals.cli.main"])

PATIENCE = 600.0  # seconds; a hang is told by this, a busy machine isn't


def start_ranks(
    function: Callable[..., None], ranks: int, folder: Path, *args: Any, processes: int | None = None
) -> list[BaseProcess]:
    """Start `function(*args)` in each rank; what they print goes to `folder / "rank-N.txt"`.

    Args:
        processes: what they are told of how many there are, where it isn't so.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[BaseProcess] = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes or ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        process = CONTEXT.Process(
            target=_run, args=(variables, folder / f"rank-{rank}.txt", function, args), daemon=True
        )
        process.start()
        started.append(process)
    return started


def wait_for(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """The exit codes; processes that are still running after `seconds` are killed and give None."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def run_ranks(function: Callable[..., None], ranks: int, folder: Path, *args: Any) -> None:
    """Run `function(*args)` in each rank to its end; what a failing rank printed becomes the error's text."""
    codes = wait_for(start_ranks(function, ranks, folder, *args), PATIENCE)
    printed = "\n".join(f"rank {r}: {(folder / f'rank-{r}.txt').read_text()}" for r in range(ranks))
    assert codes == [0] * ranks, f"exit codes {codes}\n{printed}"


def attnres(*words: object) -> None:
    """`attnres WORDS` in this process; its exit status becomes the process's."""
    from attention_residuals.cli.main import main

    main([str(word) for word in words])


def _run(variables: dict[str, str], output: Path, function: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    import torch

    torch.set_num_threads(1)
    function(*args)
