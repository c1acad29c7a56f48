"""Runs Hugging Face's own model tests on transformers' Qwen3.5 text model and on ours, and prints the list.

    python tests/huggingface/run_model_mixins.py [--only WORD ...]

The tests come from the source distribution of the installed transformers (`mixin_source`). One row a test:
its outcome for transformers' model ("stock") and for ours in every variant (`mixin_cases`).

Exit status 0: ours does at least as well as stock in every test. 1: a test that passes for stock is skipped
or fails for ours, or one that is skipped for stock fails for ours. 2: nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from mixin_cases import MIXINS, build_cases
from mixin_source import MISSING, fetch, load

PASSED, SKIPPED, FAILED = "passed", "skipped", "FAILED"
WORSE = {PASSED: 0, SKIPPED: 1, FAILED: 2}

Outcome = tuple[str, str]  # one of the three words, and the reason if it isn't "passed"


class Outcomes(unittest.TestResult):
    """The outcome of each test; where a test has subtests, the worst of them counts."""

    def __init__(self) -> None:
        super().__init__()
        self.by_test: dict[str, Outcome] = {}

    def _note(self, test: Any, outcome: str, reason: str = "") -> None:
        name = getattr(test, "test_case", test)._testMethodName
        if name not in self.by_test or WORSE[outcome] > WORSE[self.by_test[name][0]]:
            self.by_test[name] = (outcome, reason)

    def addSuccess(self, test: Any) -> None:
        self._note(test, PASSED)

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, SKIPPED, reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, FAILED, self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(subtest, err)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The tests log and warn by the hundred; what matters is in their outcomes."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        os.close(kept[0])
        os.close(kept[1])


def run_case(case: type[unittest.TestCase], words: list[str]) -> dict[str, Outcome]:
    """Run the tests whose names contain one of `words` (all, without words)."""
    names = unittest.TestLoader().getTestCaseNames(case)
    result = Outcomes()
    with silence():
        unittest.TestSuite(
            case(name) for name in names if not words or any(word in name for word in words)
        ).run(result)
    return result.by_test


def worse_than_stock(results: dict[str, dict[str, Outcome]]) -> list[tuple[str, str]]:
    """(test, variant) wherever ours does less well than stock; what stock fails asks nothing of ours."""
    stock = results["stock"]
    return [
        (test, variant)
        for test, (expected, _) in stock.items()
        for variant, outcomes in results.items()
        if expected != FAILED and WORSE[outcomes.get(test, (FAILED, ""))[0]] > WORSE[expected]
    ]


def print_list(results: dict[str, dict[str, Outcome]]) -> None:
    tests = sorted(set().union(*results.values()))
    width = max(map(len, tests))
    print("\n" + " ".join(["test".ljust(width), *(name.ljust(13) for name in results)]).rstrip())
    for test in tests:
        outcomes = [by_test.get(test, (FAILED, "did not run")) for by_test in results.values()]
        reason = outcomes[0][1].strip().splitlines()[-1][:90] if outcomes[0][1] else ""
        print(" ".join([test.ljust(width), *(outcome.ljust(13) for outcome, _ in outcomes), reason]).rstrip())
    print()
    for name, by_test in results.items():
        counts = Counter(outcome for outcome, _ in by_test.values())
        print(f"{name}: {counts[PASSED]} passed, {counts[SKIPPED]} skipped, {counts[FAILED]} failed")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Hugging Face's model tests: transformers' Qwen3.5 beside ours"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="tests whose names contain a WORD"
    )
    words = parser.parse_args(arguments).only
    torch.set_num_threads(1)
    try:
        stood_in = load(fetch())
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"transformers {transformers.__version__}: {', '.join(MIXINS.values())}, ConfigTester")
    for module in stood_in:
        print(
            f"not in the source distribution, replaced by a stand-in: {module} ({', '.join(MISSING[module])})"
        )
    results = {}
    for name, case in build_cases(stood_in).items():
        start = time.perf_counter()
        results[name] = run_case(case, words)
        print(f"{name}: {len(results[name])} tests in {time.perf_counter() - start:.0f} s", flush=True)
    if not results["stock"]:
        print(f"no test's name contains {' or '.join(words)}", file=sys.stderr)
        return 2
    print_list(results)
    worse = worse_than_stock(results)
    for test, variant in worse:
        outcome, reason = results[variant].get(test, (FAILED, "did not run"))
        print(f"\n{test}, {variant}: {outcome}, for stock {results['stock'][test][0]}\n{reason}")
    print(f"\n{len(worse)} outcomes of ours are worse than stock's")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
