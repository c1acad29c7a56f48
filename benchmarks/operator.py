"""The operator against the article's function, torch.compile of it, and plain reading and copying of memory.

Everything in one run, alternating, medians. Sizes: T tokens x D width, N sources.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attention_residuals as ar
from benchmarks.timing import alternate, medians, save

# Baselines come from the tests, so that what is timed is what parity is checked against.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "depth_attention"))
from oracles import block_attn_res

T, D, N = 2048, 1024, 9


def inputs(tokens: int, width: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, width).to(dtype).requires_grad_() for _ in range(count)]


def arms(sources: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Forward functions with the same query and key weight."""
    width = sources[0].shape[-1]
    proj, norm = nn.Linear(width, 1, bias=False), nn.RMSNorm(width, eps=1e-6)
    nn.init.normal_(proj.weight, std=width**-0.5)
    query, key_weight = proj.weight[0], norm.weight
    compiled = torch.compile(block_attn_res)
    return {
        "article": lambda: block_attn_res(sources[:-1], sources[-1], proj, norm)[0],
        "article compiled": lambda: compiled(sources[:-1], sources[-1], proj, norm)[0],
        "lean": lambda: ar.depth_attention(sources, query, key_weight, backend="lean"),
        "cpu": lambda: ar.depth_attention(sources, query, key_weight, backend="cpu"),
    }


def check_parity(functions: dict[str, Callable[[], Tensor]], tolerance: float) -> None:
    expected = functions["article"]()
    for name, function in functions.items():
        difference = (function() - expected).abs().max().item()
        if not difference <= tolerance:
            raise SystemExit(f"{name} differs from the article's function by {difference:.3g}; no figures")


def forward_backward(function: Callable[[], Tensor], sources: list[Tensor]) -> Callable[[], None]:
    gradient = torch.ones_like(sources[0])

    def run() -> None:
        for source in sources:
            source.grad = None
        function().backward(gradient)

    return run


def compare(runs: int) -> dict[str, Any]:
    """Forward, and forward with backward, at the reference size in float32."""
    sources = inputs(T, D, N)
    functions = arms(sources)
    check_parity(functions, 1e-4)
    memory = {
        "sum (read once)": lambda: [source.sum() for source in sources],
        "clone (copy)": lambda: [source.clone() for source in sources],
    }
    with torch.no_grad():
        forward = medians(alternate({**functions, **memory}, runs=runs, warmup=10))
    both = medians(
        alternate(
            {name: forward_backward(f, sources) for name, f in functions.items()},
            runs=max(7, runs // 2),
            warmup=5,
        )
    )
    return {"forward_ms": _milliseconds(forward), "forward_backward_ms": _milliseconds(both)}


def dtypes(runs: int) -> dict[str, float]:
    """The kernel's forward in each dtype it takes."""
    named = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
    query = torch.randn(D)
    every = {name: inputs(T, D, N, dtype) for name, dtype in named.items()}
    with torch.no_grad():
        times = alternate(
            {
                name: lambda s=sources: ar.depth_attention(s, query, backend="cpu")
                for name, sources in every.items()
            },
            runs=runs,
        )
    return _milliseconds(medians(times))


def sharpness(runs: int) -> dict[str, float]:
    """The forward where all sources weigh the same, and where all but one weigh next to nothing."""
    sources = inputs(T, D, N)
    queries = {"flat": torch.zeros(D), "sharp": torch.randn(D)}
    with torch.no_grad():
        reads = {name: lambda q=q: ar.depth_attention(sources, q) for name, q in queries.items()}
        return _milliseconds(medians(alternate(reads, runs=runs)))


def sweep(runs: int) -> dict[str, float]:
    """Nanoseconds per KiB read or written, over widths and numbers of sources, at equal bytes: no cliffs.

    Results stay below 32 MiB, so that malloc reuses their memory: this is about the kernel, not mapping.
    """
    figures = {}
    with torch.no_grad():
        for width in (256, 512, 1000, 1536, 2560, 4096, 7168):
            for count in (2, 5, 9, 17, 33, 65, 130):
                tokens = max(1, T * D * N // (2 * width * count))
                sources, query = inputs(tokens, width, count), torch.randn(width)
                read = {"cpu": lambda s=sources, q=query: ar.depth_attention(s, q)}
                times = alternate(read, runs=runs, warmup=10)
                kib = tokens * width * (count + 1) * 4 / 1024
                figures[f"D {width}, N {count}"] = round(medians(times)["cpu"] * 1e9 / kib, 2)
    return figures


def one_token() -> float:
    """Microseconds of one call at T = 1 without gradients, Python included: the best of many repetitions."""
    sources, query, key_weight = inputs(1, D, N), torch.randn(D), torch.ones(D)
    with torch.no_grad():
        times = timeit.repeat(lambda: ar.depth_attention(sources, query, key_weight), number=1000, repeat=25)
    return round(min(times) * 1e3, 2)


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


def main(threads: int = 2, runs: int = 15) -> None:
    torch.set_num_threads(threads)
    figures: dict[str, Any] = {"tokens": T, "width": D, "sources": N, **compare(runs)}
    forward, both = figures["forward_ms"], figures["forward_backward_ms"]
    figures["forward_of_sum"] = round(forward["cpu"] / forward["sum (read once)"], 2)
    figures["times_faster"] = {
        f"{what} than {arm}": round(table[arm] / table["cpu"], 1)
        for what, table in (("forward", forward), ("forward+backward", both))
        for arm in ("article", "article compiled", "lean")
    }
    figures["forward_by_dtype_ms"] = dtypes(runs)
    figures["forward_by_sharpness_ms"] = sharpness(runs)
    figures["one_token_us"] = one_token()
    figures["sweep_ns_per_kib"] = sweep(max(7, runs // 2))
    worst, best = max(figures["sweep_ns_per_kib"].values()), min(figures["sweep_ns_per_kib"].values())
    figures["sweep_worst_to_best"] = round(worst / best, 2)
    for name, value in figures.items():
        print(name, value)
    print("written", save("operator", figures))
