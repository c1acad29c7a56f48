"""What looking costs: a forward that is recorded against one that isn't, on one thread, in its own time.

Arms: `off` and `off again`, two equal forwards, whose ratio is the noise of the measurement; `recorded`,
within `record_depth_weights`. Once as the allocator comes, and once with all memory kept in the process: what
is recorded lies between temporaries, and glibc may then give back and fetch more pages in a forward.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import attention_residuals as ar
from attention_residuals.training.presets import PRESETS
from benchmarks.models import move_queries
from benchmarks.timing import alternate, median_ratio, medians, save

# name -> preset, fields that replace its own, batch and context
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "tiny": ("tiny", {"vocab_size": 4096}, (8, 128)),
    "small": ("small", {"vocab_size": 4096}, (2, 256)),
    "0.8B, 6 layers": ("0.8B", {"vocab_size": 4096, "num_hidden_layers": 6}, (1, 256)),
}
MODES: dict[str, dict[str, Any]] = {"block": {"mode": "block", "num_blocks": 8}, "full": {"mode": "full"}}


def model_of(preset: str, fields: dict[str, Any], mode: dict[str, Any]) -> torch.nn.Module:
    """A model with queries away from zero."""
    torch.manual_seed(0)
    config = ar.Qwen3_5AttnResConfig(**{**PRESETS[preset].fields, **fields}, attn_res=mode)
    model = ar.Qwen3_5AttnResForCausalLM(config).eval()
    move_queries(model)
    return model


def forward(
    model: torch.nn.Module, ids: Tensor, looking: Callable[[Any], AbstractContextManager[Any]]
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        with looking(model):
            model(ids, use_cache=False, logits_to_keep=1)

    return run


def keep_memory() -> None:
    """From here on, malloc gives nothing back to the system. glibc only."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    for parameter, value in ((trim_threshold, 2**31 - 1), (top_pad, 2**26), (mmap_threshold, 2**30)):
        ctypes.CDLL(None).mallopt(parameter, value)


def measure(runs: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, (preset, fields, shape) in MODELS.items():
        for mode, attn_res in MODES.items():
            model = model_of(preset, fields, attn_res)
            ids = torch.randint(0, 4096, shape)
            arms = {
                "off": forward(model, ids, nullcontext),
                "off again": forward(model, ids, nullcontext),
                "recorded": forward(model, ids, ar.record_depth_weights),
            }
            rounds = runs * (5 if name == "tiny" else 1)  # short forwards spread more
            times = alternate(arms, runs=rounds, clock=time.thread_time)
            figures[f"{name}, {mode}"] = {
                "batch": list(shape),
                "median_ms": {arm: round(1e3 * value, 2) for arm, value in medians(times).items()},
                "ratio_to_off": {arm: round(median_ratio(times, arm, "off"), 4) for arm in list(arms)[1:]},
            }
            print(f"{name}, {mode}", figures[f"{name}, {mode}"])
    return figures


def main(runs: int = 11) -> None:
    torch.set_num_threads(1)
    figures = {"default_allocator": measure(runs)}
    keep_memory()
    figures["memory_kept"] = measure(runs)
    print("written", save("looking", figures))
