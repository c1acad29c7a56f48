"""From benchmarks/results/*.json to the README's tables, with their origin."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS

README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- benchmarks: written by make bench -->", "<!-- benchmarks end -->"


def render() -> str:
    """The section's text, from the results that are there."""
    parts = [
        make(json.loads(path.read_text(encoding="utf-8")))
        for name, make in (
            ("whole_model", _whole_model),
            ("small_model", _small_model),
            ("operator", _operator),
        )
        if (path := RESULTS / f"{name}.json").exists()
    ]
    return "\n\n".join(parts)


def update() -> None:
    """Write the section into the README, between its two markers."""
    text = README.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    README.write_text(pattern.sub(lambda _: f"{_BEGIN}\n{render()}\n{_END}", text), encoding="utf-8")


def section() -> str:
    """What stands between the README's markers now."""
    return README.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0].strip()


def _origin(results: dict[str, Any]) -> str:
    o = results["origin"]
    threads = f"{o['threads']} thread" + ("s" if o["threads"] > 1 else "")
    return (
        f"`{o['command']}`, commit {o['commit']}, {o['date']}, {o['machine']}, {threads}, "
        f"torch {o['torch']}; medians of alternating runs."
    )


def _whole_model(results: dict[str, Any]) -> str:
    rows = [
        f"The {results['shape']} shape (24 layers, width 1024) with random weights against transformers' "
        f"own Qwen3.5 in the same process: a prefill of {results['prompt']} tokens, decoding, and a training "
        "step of 8 layers:",
        "",
        "| | plain Qwen3.5 | 8 blocks | Full |",
        "|---|---|---|---|",
    ]
    for name, figures in results.items():
        if isinstance(figures, dict) and "ratio_to_plain" in figures:
            ratio = figures["ratio_to_plain"]
            plain = figures["median_ms"]["plain"]
            rows.append(f"| {name} | {plain:.0f} ms | {ratio['block']:.3f} x | {ratio['full']:.3f} x |")
        elif isinstance(figures, dict) and "peak_mib" in figures:
            plain, block, full = (figures["peak_mib"][arm] for arm in ("plain", "block", "full"))
            rows.append(f"| {name} | {plain:.0f} MiB | {block - plain:+.0f} MiB | {full - plain:+.0f} MiB |")
    return "\n".join([*rows, "", _origin(results)])


def _small_model(results: dict[str, Any]) -> str:
    step, evaluation = results["training_step"], results["evaluation"]
    plain = [table["median_ms"]["plain"] for table in (step, evaluation)]
    rows = [
        "The demo's model against transformers' own Qwen3.5 of the same shape "
        f"({results['batch'][0]} rows of {results['batch'][1]} tokens):",
        "",
        "| | training step | evaluation |",
        "|---|---|---|",
        f"| plain Qwen3.5 | {plain[0]:.0f} ms | {plain[1]:.0f} ms |",
    ]
    names = {"block": "4 blocks (the demo)", "block of 8": "8 blocks", "full": "Full"}
    for name, ratio in step["ratio_to_plain"].items():
        rows.append(f"| {names[name]} | {ratio:.3f} x | {evaluation['ratio_to_plain'][name]:.3f} x |")
    return "\n".join([*rows, "", _origin(results)])


def _operator(results: dict[str, Any]) -> str:
    forward, both = results["forward_ms"], results["forward_backward_ms"]
    size = f"{results['sources']} sources, {results['tokens']} tokens of width {results['width']}"
    rows = [
        f"One read of {size}, float32:",
        "",
        "| | forward | forward + backward |",
        "|---|---|---|",
    ]
    names = {
        "article": "the article's function, eager",
        "article compiled": "torch.compile of it",
        "lean": 'backend="lean"',
        "cpu": 'backend="cpu"',
    }
    rows += [f"| {names[arm]} | {forward[arm]:.1f} ms | {both[arm]:.1f} ms |" for arm in names]
    rows.append(f"| reading the sources once (`torch.sum`) | {forward['sum (read once)']:.1f} ms | |")
    rows.append(f"| copying them | {forward['clone (copy)']:.1f} ms | |")
    return "\n".join([*rows, "", _origin(results)])
