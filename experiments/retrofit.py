"""Train a plain Qwen3.5 of about 5 million parameters, convert it, and continue both on new text.

    python -m experiments.retrofit WORK_FOLDER     resumable; writes results/retrofit.json and .png

The text is the source code of Python's standard library: every second file for the plain model, the others
for what follows. From the moment of conversion three arms see the same rows in the same order, for three
seeds: the plain model, 8 blocks, and Full (both at the sum scale, queries zero).
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from benchmarks.timing import origin
from rich.console import Console

import attention_residuals as ar
from attention_residuals.analysis.summary import summarise
from attention_residuals.training.model import make_config, make_model
from attention_residuals.training.prepare import prepare
from attention_residuals.training.run import train
from attention_residuals.training.settings import TrainSettings

COMMAND = "python -m experiments.retrofit WORK_FOLDER"
RESULTS = Path(__file__).parent / "results"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"mode": "standard"},
    "block": {"mode": "block", "num_blocks": 8, "read_scale": "sum"},
    "full": {"mode": "full", "read_scale": "sum"},
}
SEEDS = (0, 1, 2)
PLAIN_STEPS, STEPS, EVERY = 400, 160, 20
SHAPE = {
    "model_type": "qwen3_5_text",
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "intermediate_size": 576,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
COMMON: dict[str, Any] = {
    "context": 128,
    "batch_size": 8,
    "schedule": "constant",
    "warmup": 20,
    "learning_rate": 2e-3,
    "threads": 1,
    "eval_blocks": 48,
    "eval_every": EVERY,
}


def write_text(work: Path) -> tuple[Path, Path]:
    """The standard library's modules, halved: every second file goes to the second text."""
    halves = work / "first.txt", work / "second.txt"
    if not all(half.exists() for half in halves):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for i, half in enumerate(halves):
            text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files[i::2])
            half.with_suffix(".tmp").write_text(text, encoding="utf-8")
            os.replace(half.with_suffix(".tmp"), half)
    return halves


def run_once(settings: TrainSettings) -> Path:
    """Train unless an earlier call has done it."""
    folder = Path(settings.output_dir)
    run = folder / "run.json"
    if not (run.exists() and json.loads(run.read_text())["status"] == "finished"):
        train(settings, overwrite=True, console=Console(file=io.StringIO()))
    return folder


@torch.no_grad()
def loss_at_start(settings: TrainSettings) -> float:
    """Validation loss at the moment of conversion, before the first step."""
    prepared = prepare(settings, Console(file=io.StringIO()))
    model = make_model(make_config(settings, prepared.tokenizer), settings).eval()
    rows = prepared.data.validation.limited(settings.eval_blocks)
    losses = [model(**{k: v[None] for k, v in rows[i].items()}).loss.item() for i in range(len(rows))]
    return statistics.mean(losses)


def losses(folder: Path) -> dict[int, float]:
    """Validation loss in nats per token after so many steps."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


@torch.no_grad()
def reads_of(folder: Path, ids: torch.Tensor) -> dict[str, Any]:
    """Norms of the queries, and how many sources the reads mix, in a saved model."""
    model = ar.Qwen3_5AttnResForCausalLM.from_pretrained(folder).eval()
    with ar.record_depth_weights(model) as record:
        model(ids)
    summary = summarise(record)
    norms = [m.query.norm().item() for m in model.modules() if isinstance(m, ar.DepthRead)]
    several = summary.num_sources > 1
    return {
        "query_norm_mean": round(statistics.mean(norms), 4),
        "query_norm_max": round(max(norms), 4),
        "normalised_entropy_mean": round(float(summary.normalised_entropy[several].mean()), 4),
        "effective_sources_mean": round(float(summary.effective_sources.mean()), 3),
    }


def continue_arm(work: Path, plain: Path, text: Path, arm: str, seed: int) -> dict[str, Any]:
    """One arm from the moment of conversion on: loss curve, and its reads over time."""
    folder = work / f"{arm}-{seed}"
    settings = TrainSettings(
        from_checkpoint=str(plain), data=(str(text),), max_steps=STEPS, seed=seed, output_dir=str(folder),
        save_every=40, keep_checkpoints=100, **ARMS[arm], **COMMON,
    )  # fmt: skip
    first = loss_at_start(settings)
    run_once(settings)
    result: dict[str, Any] = {"eval_loss": {0: first} | losses(folder)}
    if arm != "plain":
        rows = prepare(settings, Console(file=io.StringIO())).data.validation
        ids = torch.stack([rows[i]["input_ids"] for i in range(8)])
        saved = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
        result["reads"] = {int(p.name.split("-")[1]): reads_of(p, ids) for p in saved}
    return result


def gain(results: dict[str, Any], arm: str) -> dict[str, float]:
    """Final loss of an arm minus the plain model's, paired by seed."""
    last = [
        results["arms"][arm][seed]["eval_loss"][STEPS] - results["arms"]["plain"][seed]["eval_loss"][STEPS]
        for seed in SEEDS
    ]
    error = statistics.stdev(last) / len(last) ** 0.5
    return {"mean": round(statistics.mean(last), 4), "standard_error": round(error, 4)}


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for arm, seeds in results["arms"].items():
        steps = sorted(seeds[SEEDS[0]]["eval_loss"])
        curves = [[seeds[seed]["eval_loss"][step] for step in steps] for seed in SEEDS]
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        (line,) = axes[0].plot(steps, mean, label=arm)
        for curve in curves:
            axes[0].plot(steps, curve, color=line.get_color(), alpha=0.25, linewidth=0.8)
        if arm != "plain":
            reads = seeds[SEEDS[0]]["reads"]
            axes[1].plot(
                list(reads), [r["query_norm_mean"] for r in reads.values()], label=f"{arm}: query norm"
            )
            axes[1].plot(
                list(reads),
                [r["normalised_entropy_mean"] for r in reads.values()],
                "--",
                label=f"{arm}: entropy / log N",
            )
    axes[0].set(xlabel="steps after conversion", ylabel="validation loss, nats per token")
    axes[1].set(xlabel="steps after conversion")
    for ax in axes:
        ax.legend()
    figure.savefig(path, dpi=120)


def main(work: Path) -> None:
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    first, second = write_text(work)
    shape = work / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    plain = run_once(
        TrainSettings(
            model_config=str(shape), data=(str(first),), max_steps=PLAIN_STEPS, mode="standard",
            output_dir=str(work / "plain"), **COMMON,
        )
    )  # fmt: skip
    parameters = sum(p.numel() for p in ar.Qwen3_5AttnResForCausalLM.from_pretrained(plain).parameters())
    results: dict[str, Any] = {
        "origin": origin() | {"command": COMMAND},
        "parameters": parameters,
        "plain_steps": PLAIN_STEPS,
        "steps": STEPS,
        "tokens_per_step": COMMON["context"] * COMMON["batch_size"],
        "arms": {arm: {} for arm in ARMS},
    }
    for seed in SEEDS:
        for arm in ARMS:
            results["arms"][arm][seed] = continue_arm(work, plain, second, arm, seed)
            print(arm, seed, results["arms"][arm][seed]["eval_loss"], flush=True)
    results["gain_over_plain"] = {arm: gain(results, arm) for arm in ARMS if arm != "plain"}
    print(results["gain_over_plain"])
    RESULTS.mkdir(exist_ok=True)
    beside = RESULTS / "retrofit.tmp"
    beside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(beside, RESULTS / "retrofit.json")
    draw(results, RESULTS / "retrofit.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
