"""What `attnres plan` predicts from its calibration against what whole models take.

Prefill, decode and training step, on one thread, in that thread's own time. The planner never sees a whole
model: it times one layer of each kind, and reads in a stack of norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import attention_residuals as ar
from attention_residuals.models.families import FAMILIES
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import describe
from attention_residuals.planner.prediction import Planner
from attention_residuals.training.presets import PRESETS
from benchmarks.models import move_queries
from benchmarks.timing import alternate, median_ratio, medians, save
from benchmarks.whole_model import decode, prefill, training_step

# name -> preset, fields that replace its own, batch and context
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "tiny": ("tiny", {"vocab_size": 4096}, (8, 128)),
    "small": ("small", {"vocab_size": 4096}, (2, 256)),
    "0.8B, 8 layers": ("0.8B", {"vocab_size": 32768, "num_hidden_layers": 8}, (1, 256)),
}
MODES: dict[str, dict[str, Any]] = {"block": {"mode": "block", "num_blocks": 8}, "full": {"mode": "full"}}
PASSES: dict[str, Callable[[Any, Tensor], Callable[[], None]]] = {
    "prefill": prefill,
    "decode": decode,
    "training step": training_step,
}


def build(preset: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The plain model, and ours in each mode with queries away from zero."""
    fields = {**PRESETS[preset].fields, **fields}
    torch.manual_seed(0)
    models: dict[str, Any] = {"plain": Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()}
    for name, attn_res in MODES.items():
        config = ar.Qwen3_5AttnResConfig(**fields, attn_res=attn_res)
        models[name] = ar.Qwen3_5AttnResForCausalLM(config).eval()
        move_queries(models[name])
    return models


def predict(plain: Any, batch: int, context: int) -> dict[str, dict[str, float]]:
    """Seconds by pass and model, from a calibration."""
    described = describe("benchmark", plain, FAMILIES["qwen3_5_text"])
    planner = Planner(described, Layout(batch=batch, context=context))
    planner.calibrate(clock=time.thread_time)
    found: dict[str, dict[str, float]] = {what: {} for what in PASSES}
    for name, attn_res in MODES.items():
        times = planner.predict(ar.AttnResConfig(**attn_res)).times
        assert times is not None
        for what, estimate in times.items():
            found[what] |= {"plain": estimate.plain, name: estimate.reads}
    return found


def measure(models: dict[str, Any], ids: Tensor, runs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by pass, model and run."""
    found = {}
    for what, make in PASSES.items():
        arms = {name: make(model, ids) for name, model in models.items()}
        rounds = 8 * runs if what == "decode" else runs
        found[what] = alternate(arms, runs=rounds, clock=time.thread_time)
    return found


def compare(name: str, runs: int) -> dict[str, Any]:
    """Predicted and measured milliseconds of one model, and predicted over measured."""
    preset, fields, (batch, context) = MODELS[name]
    models = build(preset, fields)
    predicted = predict(models["plain"], batch, context)
    ids = torch.randint(0, fields["vocab_size"], (batch, context))
    figures: dict[str, Any] = {"batch": [batch, context]}
    for what, times in measure(models, ids, runs).items():
        measured = medians(times)
        figures[what] = {
            "predicted_ms": {arm: round(1e3 * predicted[what][arm], 2) for arm in measured},
            "measured_ms": {arm: round(1e3 * value, 2) for arm, value in measured.items()},
            "predicted_over_measured": {
                arm: round(predicted[what][arm] / value, 3) for arm, value in measured.items()
            },
            "overhead_predicted": {
                arm: round(predicted[what][arm] / predicted[what]["plain"], 4) for arm in MODES
            },
            "overhead_measured": {arm: round(median_ratio(times, arm, "plain"), 4) for arm in MODES},
        }
    return figures


def main(runs: int = 7) -> None:
    torch.set_num_threads(1)
    figures = {}
    for name in MODELS:
        figures[name] = compare(name, runs)
        print(name, figures[name])
    print("written", save("planner", figures))
