"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import importlib
import sys

from benchmarks import readme_table

BENCHMARKS = (
    "small_model",
    "operator",
    "whole_model",
    "read_schedule",
    "looking",
    "long_prompts",
    "planner",
    "pipeline",
)


if __name__ == "__main__":
    names = sys.argv[1:] or list(BENCHMARKS)
    for unknown in set(names) - set(BENCHMARKS):
        sys.exit(f"no benchmark called {unknown!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main()
    readme_table.update()
