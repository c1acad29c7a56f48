"""The processes of a run as one group: joined with a time-out, and a clear error where one is lost."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from attention_residuals.errors import UserError

Answer = TypeVar("Answer")

# what gloo and the store say of a process that is gone or silent; torch raises them as RuntimeError
LOST = (
    "closed by peer",
    "reset by peer",
    "timed out",
    "timeout",
    "broken pipe",
    "connection refused",
    "gloo",
)


@contextmanager
def process_group(timeout: int) -> Iterator[None]:
    """Join the processes that torchrun (or whoever set RANK, WORLD_SIZE and MASTER_ADDR) has started.

    One process alone forms a group too, so that its code needs no other branch. Inside another call of this
    function nothing happens.

    Args:
        timeout: seconds that a process waits for another, at the start and in every exchange.

    Raises:
        UserError: a process didn't come, ended, or went silent for longer than `timeout`.
    """
    if dist.is_initialized():
        yield
        return
    with clear_errors(timeout):
        _join(timeout)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def clear_errors(timeout: int) -> Iterator[None]:
    """Turn what the transport raises about a lost process into one sentence with the remedy."""
    try:
        yield
    except UserError:
        raise
    except (dist.DistError, RuntimeError) as error:
        reason = lost_process(error)
        if reason is None:
            raise
        rank = os.environ.get("RANK", "0")
        raise UserError(
            f"process {rank} has lost another one ({reason}): it ended, or was silent for --timeout "
            f"{timeout} seconds; the latest complete checkpoint is untouched, so give the same command with "
            "--resume"
        ) from error


def lost_process(error: BaseException) -> str | None:
    """What the transport says of another process, in a sentence; None for any other error."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    message = re.sub(r"^\[[^\]]*\] ", "", first_line).split(". ")[0]  # without the place in gloo's source
    if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in LOST):
        return message
    return None


def _join(timeout: int) -> None:
    limit = datetime.timedelta(seconds=timeout)
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_backend(), timeout=limit)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def is_main_process() -> bool:
    """Whether this process writes the run's files (one does, under torchrun)."""
    return int(os.environ.get("RANK", "0")) == 0


def leave_together() -> None:
    """Wait until every process has done what it does with the others, so that none looks lost by leaving."""
    if dist.is_initialized():
        dist.barrier()


def largest_over_processes(values: Sequence[int]) -> list[int]:
    """Each number's largest value in any process; the numbers themselves without a group."""
    if not dist.is_initialized():
        return list(values)
    largest = torch.tensor(values)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def on_main(function: Callable[[], Answer]) -> Answer:
    """Call `function` in the main process alone; every process gets its answer, or its UserError.

    Without a group, a plain call.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if is_main_process():
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]
