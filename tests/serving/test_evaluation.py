"""lm-evaluation-harness in a process of its own finds the numbers that the model's log-likelihoods give."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from documented import DEADLINE, command, environment
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(__file__).parent / "tasks"


def log_likelihoods(folder: Path) -> list[list[float]]:
    """Per question, the log-likelihood of each choice after it, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def of_choice(question: str, choice: str) -> float:
        ids = tokenizer(f"{question} {choice}", return_tensors="pt").input_ids
        start = len(tokenizer(question).input_ids)
        with torch.no_grad():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        return log_p.gather(-1, ids[0, 1:, None])[start - 1 :].sum().item()

    return [[of_choice(row["question"], choice) for choice in row["choices"]] for row in questions()]


def questions() -> list[dict]:
    lines = (TASKS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["run", "exported"])
def test_scores_are_those_of_the_log_likelihoods(workplace, folder):
    shutil.copytree(TASKS, workplace / "tasks", dirs_exist_ok=True)
    done = subprocess.run(
        command("lm_eval", folder),
        cwd=workplace,
        env=environment(workplace),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (workplace / "scores" / folder).glob("results_*.json")
    scores = json.loads(path.read_text(encoding="utf-8"))["results"]
    found, answers = log_likelihoods(workplace / "run"), [row["answer"] for row in questions()]
    right = [choices.index(max(choices)) == answer for choices, answer in zip(found, answers, strict=True)]
    assert 0 < sum(right) < len(right)
    assert scores["chooses"]["acc,none"] == sum(right) / len(right)
    mean = sum(choices[answer] for choices, answer in zip(found, answers, strict=True)) / len(found)
    assert math.log(scores["continues"]["perplexity,none"]) == pytest.approx(-mean, rel=1e-5)  # 4e-7 measured
