"""The demo's model against transformers' own Qwen3.5 of the same shape: training step and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import attention_residuals as ar
from attention_residuals.cli.demo import demo_settings
from attention_residuals.training.presets import PRESETS
from benchmarks.timing import alternate, median_ratio, medians, save

DEMO = demo_settings(Path("unused"), max_steps=4, threads=None)
MODES: dict[str, dict[str, Any]] = {
    "block": {"mode": "block", "num_blocks": DEMO.num_blocks},
    "block of 8": {"mode": "block", "num_blocks": 8},
    "full": {"mode": "full"},
}


def build() -> dict[str, torch.nn.Module]:
    """The plain model, and ours with the same weights in each mode."""
    fields = {**PRESETS["tiny"].fields, "vocab_size": DEMO.vocab_size}
    torch.manual_seed(0)
    plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    models: dict[str, torch.nn.Module] = {"plain": plain}
    for name, attn_res in MODES.items():
        ours = ar.Qwen3_5AttnResForCausalLM(ar.Qwen3_5AttnResConfig(**fields, attn_res=attn_res))
        ours.load_state_dict(plain.state_dict(), strict=False)
        models[name] = ours
    return models


def check_parity(models: dict[str, torch.nn.Module], ids: torch.Tensor) -> None:
    """With zero queries and the sum scale ours is the plain model. No figure is reported where it isn't."""
    with torch.no_grad():
        expected = models["plain"].eval()(ids, use_cache=False).logits
        for name in MODES:
            reads = [module for module in models[name].modules() if isinstance(module, ar.DepthRead)]
            for read in reads:
                read.read_scale = "sum"
            found = models[name].eval()(ids, use_cache=False).logits
            for read in reads:
                read.read_scale = "mean"
            difference = ((found - expected).abs().max() / expected.abs().max()).item()
            if difference > 1e-5:
                raise SystemExit(
                    f"{name} differs from the plain model by {difference:.3g} of its range; no figures"
                )


def training_step(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def evaluation(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        model(ids, labels=ids, use_cache=False)

    return evaluate


def main(threads: int = 2, runs: int = 21) -> None:
    torch.set_num_threads(threads)
    models = build()
    ids = torch.randint(0, DEMO.vocab_size, (DEMO.batch_size, DEMO.context))
    check_parity(models, ids)
    figures: dict[str, Any] = {"batch": list(ids.shape)}
    for what, make in (("training_step", training_step), ("evaluation", evaluation)):
        times = alternate({name: make(model, ids) for name, model in models.items()}, runs=runs)
        figures[what] = {
            "median_ms": {name: round(1e3 * value, 2) for name, value in medians(times).items()},
            "ratio_to_plain": {name: round(median_ratio(times, name, "plain"), 4) for name in MODES},
        }
        print(what, figures[what])
    print("written", save("small_model", figures))
