"""What `attnres plan` predicts for a training step over two pipeline ranks against what two processes take.

The planner times one layer of each kind, and reads, in one process and on one thread; the ranks are gloo
processes of one thread each, so two free cores are needed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import attention_residuals as ar
from attention_residuals.models.families import FAMILIES
from attention_residuals.pipeline import Pipeline, plan_stages
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import describe
from attention_residuals.planner.prediction import Planner
from attention_residuals.training.presets import PRESETS
from benchmarks.models import move_queries
from benchmarks.timing import alternate, median_ratio, medians, save

RANKS, MICROBATCHES = 2, 4
VOCABULARY = 4096
# name -> preset, rows of a microbatch and tokens of a row
MODELS: dict[str, tuple[str, tuple[int, int]]] = {"tiny": ("tiny", (8, 128)), "small": ("small", (2, 256))}
MODES: dict[str, dict[str, Any]] = {
    "standard": {"mode": "standard"},
    "block": {"mode": "block", "num_blocks": 8},
    "full": {"mode": "full"},
}
# stages per rank -> schedule
SCHEDULES = {1: "1f1b", 2: "interleaved_1f1b"}


def fields_of(preset: str) -> dict[str, Any]:
    return {**PRESETS[preset].fields, "vocab_size": VOCABULARY}


def predict(name: str, virtual: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step and the split of the layers, by mode."""
    preset, (batch, context) = MODELS[name]
    plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields_of(preset)))
    layout = Layout(
        pipeline_ranks=RANKS,
        virtual_stages=virtual,
        batch=batch,
        context=context,
        microbatches=MICROBATCHES,
        bandwidth=1.0,
    )
    planner = Planner(describe(name, plain, FAMILIES["qwen3_5_text"]), layout)
    planner.calibrate(clock=time.thread_time)
    found = {}
    for mode in ("block", "full"):
        prediction = planner.predict(ar.AttnResConfig(**MODES[mode]))
        assert prediction.times is not None
        step = prediction.times["training step"]
        found["standard"] = {"seconds": step.plain, "split": prediction.split}
        found[mode] = {"seconds": step.reads, "split": prediction.split}
    return found


def step(pipeline: Pipeline, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        pipeline.step(ids, ids)
        for parameter in pipeline.parameters():
            parameter.grad = None
        dist.barrier()

    return run


def measure(rank: int, name: str, virtual: int, splits: dict[str, Any], runs: int, folder: str) -> None:
    """One rank's steps in alternation; the last rank leaves its seconds in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    preset, (batch, context) = MODELS[name]
    arms = {}
    for mode, attn_res in MODES.items():
        torch.manual_seed(0)
        config = ar.Qwen3_5AttnResConfig(**fields_of(preset), attn_res=attn_res)
        model = ar.Qwen3_5AttnResForCausalLM(config)
        move_queries(model)
        plan = plan_stages(model, RANKS, virtual_stages=virtual, layers=splits[mode])
        pipeline = Pipeline(model, plan, schedule=SCHEDULES[virtual], num_microbatches=MICROBATCHES)
        arms[mode] = step(pipeline, torch.randint(0, VOCABULARY, (batch * MICROBATCHES, context)))
    times = alternate(arms, runs=runs)
    torch.save(times, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def compare(name: str, virtual: int, runs: int) -> dict[str, Any]:
    """Predicted and measured milliseconds of a step, and predicted over measured."""
    predicted = predict(name, virtual)
    splits = {mode: found["split"] for mode, found in predicted.items()}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            measure, (name, virtual, splits, runs, folder), nprocs=RANKS, start_method="spawn"
        )
        times = torch.load(Path(folder) / f"{RANKS - 1}.pt")
    measured = medians(times)
    return {
        "split": {mode: list(split) for mode, split in splits.items()},
        "predicted_ms": {mode: round(1e3 * found["seconds"], 1) for mode, found in predicted.items()},
        "measured_ms": {mode: round(1e3 * seconds, 1) for mode, seconds in measured.items()},
        "predicted_over_measured": {
            mode: round(found["seconds"] / measured[mode], 3) for mode, found in predicted.items()
        },
        "overhead_measured": {mode: round(median_ratio(times, mode, "standard"), 4) for mode in splits},
    }


def main(runs: int = 7) -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"ranks": RANKS, "microbatches": MICROBATCHES}
    for name in MODELS:
        for virtual in SCHEDULES:
            what = f"{name}, {virtual} stage{'s' * (virtual > 1)} a rank"
            figures[what] = compare(name, virtual, runs)
            print(what, figures[what], flush=True)
    print("written", save("pipeline", figures))
