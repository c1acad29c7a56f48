"""Hugging Face's own model tests: what passes for transformers' Qwen3.5 text model passes for ours."""

from __future__ import annotations

import re
import subprocess
import sys
import unittest
from pathlib import Path

import mixin_source
import pytest
from run_model_mixins import FAILED, PASSED, SKIPPED, Outcomes, worse_than_stock

PROGRAM = Path(__file__).with_name("run_model_mixins.py")

REPRESENTATIVE = (
    "test_all_tensors_are_parameter_or_buffer",
    "test_attention_outputs",
    "test_batching_equivalence",
    "test_can_capture_specific_layers_hidden_states",
    "test_can_init_all_missing_weights",
    "test_config",
    "test_hidden_states_output",
    "test_model_outputs_equivalence",
    "test_resize_tokens_embeddings",
    "test_retain_grad_hidden_states_attentions",
    "test_save_load",
    "test_tied_weights_keys",
    "test_tp_plan_matches_params",
    "test_training_gradient_checkpointing",
)


def run_program(*arguments: str) -> str:
    # In a process of its own: the mixins patch transformers as they go.
    command = [sys.executable, str(PROGRAM), *arguments]
    program = subprocess.run(command, capture_output=True, text=True, check=False)
    print(program.stdout)
    assert program.returncode == 0, program.stdout + program.stderr
    return program.stdout


def passed_by(variant: str, output: str) -> int:
    return int(re.search(rf"^{variant}: (\d+) passed", output, re.MULTILINE)[1])


def test_representative_mixin_tests_pass_for_every_variant():
    output = run_program("--only", *REPRESENTATIVE)
    assert passed_by("stock", output) >= len(REPRESENTATIVE)


@pytest.mark.slow
def test_whatever_passes_for_transformers_own_model_passes_for_ours():
    output = run_program()
    assert passed_by("stock", output) >= 100
    assert passed_by("trained block", output) >= passed_by("stock", output)


def test_a_download_that_fails_says_what_was_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(mixin_source, "CACHE", tmp_path)
    with pytest.raises(
        RuntimeError, match=r"source distribution of transformers==0\.0\.0.*could not download"
    ):
        mixin_source.fetch("0.0.0")
    assert not list(tmp_path.iterdir())


def test_worse_is_a_skip_for_a_pass_and_a_failure_for_a_skip():
    stock = {"a": (PASSED, ""), "b": (SKIPPED, "why"), "c": (FAILED, "why"), "d": (PASSED, "")}
    as_good = {"a": (PASSED, ""), "b": (PASSED, ""), "c": (FAILED, ""), "d": (PASSED, "")}
    worse = {"a": (SKIPPED, ""), "b": (FAILED, ""), "c": (FAILED, "")}
    results = {"stock": stock, "as good": as_good, "worse": worse}
    assert worse_than_stock(results) == [("a", "worse"), ("b", "worse"), ("d", "worse")]


class _Subtests(unittest.TestCase):
    __test__ = False  # run by the test below only

    def test_passes(self):
        with self.subTest("only"):
            pass

    def test_fails_in_one(self):
        with self.subTest("first"):
            self.fail("wrong")
        with self.subTest("second"):
            pass

    def test_skips_one(self):
        with self.subTest("first"):
            self.skipTest("no need")
        with self.subTest("second"):
            pass


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("test_passes", PASSED), ("test_fails_in_one", FAILED), ("test_skips_one", SKIPPED)],
)
def test_the_worst_subtest_counts(name, outcome):
    result = Outcomes()
    _Subtests(name).run(result)
    assert result.by_test[name][0] == outcome
