"""Processes of a gloo group on this machine, forked from a server that has imported torch once."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["attention_residuals.pipeline"])
HANGS_AFTER = 60  # seconds that a process waits for another


def run_in_processes(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, seconds: float = 400
) -> list[Any]:
    """What `function(rank, *args)` returns in each of `world` processes.

    Raises:
        AssertionError: one raised or hung; with its traceback.
    """
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(
            target=_run, args=(results, folder / "rendezvous", rank, world, function, args), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        found = dict(results.get(timeout=deadline - time.monotonic()) for _ in range(world))
    finally:
        for process in processes:
            process.join(timeout=max(0.0, min(10.0, deadline - time.monotonic())))
            process.kill()
            process.join()
    failures = [result for result in found.values() if isinstance(result, _Failure)]
    assert not failures, "\n".join(failure.text for failure in failures)
    return [found[rank] for rank in range(world)]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(
    results: Any, rendezvous: Path, rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(rendezvous), world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=HANGS_AFTER),
        )
        results.put((rank, function(rank, *args)))
    except BaseException:
        results.put((rank, _Failure(f"rank {rank}: {traceback.format_exc()}")))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
