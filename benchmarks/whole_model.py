"""The 0.8B shape with random weights against transformers' own Qwen3.5: prefill, decode, training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import attention_residuals as ar
from attention_residuals.training.presets import PRESETS
from benchmarks.timing import alternate, median_ratio, medians, peak_bytes, quartiles, save

PROMPT = 512
PREFILL_SECONDS = 20.0  # for the rounds of one run
MODES: dict[str, dict[str, Any]] = {
    "block": {"mode": "block", "num_blocks": 8, "read_scale": "sum"},
    "full": {"mode": "full", "read_scale": "sum"},
}


def build(layers: int, dtype: torch.dtype, vocabulary: int) -> dict[str, Any]:
    """The plain model and ours with the same weights. Ours shares the plain model's parameters."""
    fields = {**PRESETS["0.8B"].fields, "num_hidden_layers": layers, "vocab_size": vocabulary}
    torch.manual_seed(0)
    plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).to(dtype)
    models = {"plain": plain}
    for name, attn_res in MODES.items():
        with torch.device("meta"):
            ours = ar.Qwen3_5AttnResForCausalLM(ar.Qwen3_5AttnResConfig(**fields, attn_res=attn_res))
        ours = ours.to(dtype)
        ours.load_state_dict(plain.state_dict(), strict=False, assign=True)
        for module in ours.modules():
            if isinstance(module, ar.DepthRead):
                module.query = torch.nn.Parameter(torch.zeros(module.width, dtype=dtype))
                module.key_weight = torch.nn.Parameter(torch.ones(module.width, dtype=dtype))
        ours.model.rotary_emb = plain.model.rotary_emb
        ours.tie_weights()
        models[name] = ours
    return models


def check_parity(models: dict[str, Any], ids: torch.Tensor, tolerance: float) -> None:
    """Zero queries at the sum scale: ours is the plain model. No figure is reported where it isn't."""
    with torch.no_grad():
        logits = {name: model(ids, logits_to_keep=1).logits.float() for name, model in models.items()}
    for name in MODES:
        difference = ((logits[name] - logits["plain"]).abs().max() / logits["plain"].abs().max()).item()
        if not difference <= tolerance:
            raise SystemExit(
                f"{name} differs from the plain model by {difference:.3g} of its range; no figures"
            )


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    return run


def decode(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """One single-token step after a short prompt; short, so that a disturbance is one of many rounds."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :16], cache=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def run() -> None:
        model(ids[:, :1], cache=cache, use_cache=True)

    return run


def training_step(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        model.eval()

    return run


def main(threads: int = 2, runs: int = 2) -> None:
    """`runs` are the rounds of the slowest pass; what is shorter or spreads more gets more rounds."""
    torch.set_num_threads(threads)
    figures: dict[str, Any] = {"shape": "0.8B", "prompt": PROMPT, "vocabulary": 32768}
    torch.manual_seed(0)
    ids = torch.randint(0, 32768, (1, PROMPT))
    # bfloat16 has 3 digits, and 24 layers of random weights amplify the last one.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        models = {name: model.eval() for name, model in build(24, dtype, 32768).items()}
        check_parity(models, ids[:, :64], tolerance)
        for what, make in (("prefill", prefill), ("decode", decode)):
            arms = {name: make(m, ids) for name, m in models.items()}
            rounds = runs * 25 if what == "decode" else _rounds(arms["plain"], runs)
            times = alternate(arms, runs=rounds, warmup=1)
            figures[f"{what} {dtype}".replace("torch.", "")] = _summary(times)
        figures[f"prefill memory {dtype}".replace("torch.", "")] = _memory(models, ids)
        del models
    models = {name: model.eval() for name, model in build(8, torch.float32, 32768).items()}
    steps = {name: training_step(m, ids) for name, m in models.items()}
    figures["training step of 8 layers, float32"] = _summary(alternate(steps, runs=2 * runs, warmup=1))
    for name, value in figures.items():
        print(name, value)
    print("written", save("whole_model", figures))


def _rounds(once: Callable[[], None], runs: int) -> int:
    """How often a prefill is repeated: `runs`, and more where it is fast, as bfloat16 on some processors."""
    once()
    started = time.perf_counter()
    once()
    return runs * max(1, min(6, round(PREFILL_SECONDS / (time.perf_counter() - started))))


def _memory(models: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """Peak of a prefill beyond the weights; what ours needs more is counted in tensors [T, D]."""
    peaks = {
        name: statistics.median(peak_bytes(prefill(m, ids)) for _ in range(2)) for name, m in models.items()
    }
    one = ids.numel() * models["plain"].config.hidden_size * models["plain"].dtype.itemsize
    plans = {name: models[name].model.depth_plan for name in MODES}
    return {
        "peak_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
        "sources_more": {name: round((peaks[name] - peaks["plain"]) / one, 2) for name in MODES},
        "sources_allowed": {name: plan.num_sources(plan.num_reads - 1) for name, plan in plans.items()},
    }


def _summary(times: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "median_ms": {name: round(1e3 * value, 2) for name, value in medians(times).items()},
        "ratio_to_plain": {name: round(median_ratio(times, name, "plain"), 4) for name in MODES},
        "ratio_quartiles": {name: quartiles(times, name, "plain") for name in MODES},
        "rounds": len(times["plain"]),
    }
