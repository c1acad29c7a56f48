"""read_schedule "per_read" against "two_phase": a group of reads alone, whole forwards and training steps.

Per-read runs with the backend that "auto" chooses here (the compiled kernel where there is one) and with
`lean`, which is PyTorch, as two-phase is. On one thread, in that thread's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attention_residuals as ar
from attention_residuals.depth_attention.two_phase import attend_to_shared, merge_own_sources
from attention_residuals.training.presets import PRESETS
from benchmarks.timing import alternate, median_ratio, medians, save

# name -> preset, fields that replace its own, batch and context
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "tiny": ("tiny", {"vocab_size": 4096}, (8, 128)),
    "small": ("small", {"vocab_size": 4096}, (4, 256)),
    "0.8B, 6 layers": ("0.8B", {"vocab_size": 4096, "num_hidden_layers": 6}, (1, 256)),
}
MODES: dict[str, dict[str, Any]] = {"block": {"mode": "block", "num_blocks": 8}, "full": {"mode": "full"}}
ARMS = ("per_read", "per_read, lean", "two_phase")
# (reads, shared sources) of a group at 1024 tokens of width 1024
GROUPS = ((2, 8), (6, 8), (16, 8), (8, 32))
TOLERANCE = 1e-4


def models(preset: str, fields: dict[str, Any], mode: dict[str, Any]) -> dict[str, torch.nn.Module]:
    """One model per arm, with equal weights and queries away from zero."""
    found: dict[str, torch.nn.Module] = {}
    for arm in ARMS:
        schedule, _, backend = arm.partition(", ")
        config = ar.Qwen3_5AttnResConfig(
            **{**PRESETS[preset].fields, **fields}, attn_res={**mode, "read_schedule": schedule}
        )
        torch.manual_seed(0)
        model = ar.Qwen3_5AttnResForCausalLM(config)
        for read in (module for module in model.modules() if isinstance(module, ar.DepthRead)):
            torch.nn.init.normal_(read.query, std=read.width**-0.5)
            read.backend = backend or "auto"
        found[arm] = model
    return found


def forward(model: torch.nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    @torch.no_grad()
    def run() -> Tensor:
        return model.eval()(ids, use_cache=False).logits

    return run


def training_step(model: torch.nn.Module, ids: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return run


def group_reads(
    arm: str, count: int, num_shared: int, tokens: int = 1024, width: int = 1024
) -> Callable[[], Any]:
    """Forward and backward of one group; every read but the first has a partial sum as well."""
    torch.manual_seed(0)
    blocks = [torch.randn(tokens, width, requires_grad=True) for _ in range(num_shared)]
    partials = [torch.randn(tokens, width, requires_grad=True) for _ in range(count - 1)]
    queries = [(torch.randn(width) / width**0.5).requires_grad_() for _ in range(count)]
    leaves, backend = [*blocks, *partials, *queries], arm.partition(", ")[2] or "auto"

    def run() -> list[Tensor]:
        own = [[], *([partial] for partial in partials)]
        if arm == "two_phase":
            shared = attend_to_shared(blocks, queries, [None] * count)
            rest = zip(shared, own, queries, strict=True)
            return [merge_own_sources(s, p, q, dtype=torch.float32)[0] for s, p, q in rest]
        return [
            ar.depth_attention([*blocks, *p], q, backend=backend) for p, q in zip(own, queries, strict=True)
        ]

    def both() -> Any:
        return torch.autograd.grad(sum(h.sum() for h in run()), leaves)

    return both


def check_parity(results: dict[str, Tensor], what: str) -> None:
    expected = results["per_read, lean"]
    for arm, found in results.items():
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        if not difference <= TOLERANCE:
            raise SystemExit(f"{what}: {arm} differs by {difference:.3g} of the range; no figures")


def compare(arms: dict[str, Callable[[], Any]], runs: int) -> dict[str, Any]:
    times = alternate(arms, runs=runs, warmup=1, clock=time.thread_time)
    return {
        "median_ms": {name: round(1e3 * value, 2) for name, value in medians(times).items()},
        "two_phase_over": {
            name: round(median_ratio(times, "two_phase", name), 3) for name in arms if name != "two_phase"
        },
    }


def main(runs: int = 5) -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for count, num_shared in GROUPS:
        what = f"{count} reads of {num_shared} shared sources"
        arms = {arm: group_reads(arm, count, num_shared) for arm in ARMS}
        check_parity({arm: run()[0] for arm, run in arms.items()}, what)
        figures[what] = compare(arms, runs)
        print(what, figures[what], flush=True)
    for name, (preset, fields, size) in MODELS.items():
        ids = torch.randint(0, 4096, size)
        for mode, attn_res in MODES.items():
            found = models(preset, fields, attn_res)
            check_parity({arm: forward(model, ids)() for arm, model in found.items()}, name)
            for step in (forward, training_step):
                what = f"{name}, {mode}, {step.__name__}"
                figures[what] = compare({arm: step(model, ids) for arm, model in found.items()}, runs)
                print(what, figures[what], flush=True)
    print("written", save("read_schedule", figures))
