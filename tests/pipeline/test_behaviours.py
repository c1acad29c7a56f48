"""Evaluation, memory, exceptions, tied weights, clipping, checkpoints and bfloat16, over two processes."""

from __future__ import annotations

import pytest
from behaviours import BEHAVIOURS, run_behaviours
from processes import run_in_processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_in_processes(run_behaviours, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", [behaviour.__name__ for behaviour in BEHAVIOURS])
def test_behaviour(found, name):
    failures = [
        f"rank {rank}: {tracebacks[name]}" for rank, tracebacks in enumerate(found) if tracebacks[name]
    ]
    assert not failures, "\n".join(failures)
