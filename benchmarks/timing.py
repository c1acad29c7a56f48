"""From functions to comparable times: alternating runs in one process, medians, and where they come from."""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# What a benchmark itself writes doesn't make a commit another one.
_RESULT_PATHS = (":!results", ":!../README.md")


def alternate(
    arms: dict[str, Callable[[], Any]],
    *,
    runs: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time each arm in turn, `runs` times over; seconds per arm and run. The order flips every round.

    `clock=time.thread_time` counts this thread's own time, where one thread works and others share the cores.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(warmup + runs):
        for name in list(arms)[:: 1 if i % 2 else -1]:
            start = clock()
            arms[name]()
            elapsed = clock() - start
            if i >= warmup:
                times[name].append(elapsed)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def median_ratio(times: dict[str, list[float]], arm: str, against: str) -> float:
    """Median over the rounds of arm / against: drift of the machine cancels within a round."""
    return statistics.median(a / b for a, b in zip(times[arm], times[against], strict=True))


def quartiles(times: dict[str, list[float]], arm: str, against: str) -> list[float]:
    """The first and third quartile over the rounds of arm / against: how far to trust the median."""
    ratios = [a / b for a, b in zip(times[arm], times[against], strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4)
    return [round(first, 4), round(third, 4)]


def peak_bytes(function: Callable[[], Any]) -> int:
    """How far the process's memory rises above what it holds before, while `function` runs. Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from what is resident
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def origin() -> dict[str, Any]:
    """Command, commit, machine and date of a result."""
    import torch
    import transformers

    return {
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--porcelain", "--", "..", *_RESULT_PATHS) else ""),
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json, beside and renamed."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps({"origin": origin(), **figures}, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
