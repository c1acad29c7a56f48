"""Memory of a long prompt's prefill per rank: whole, sharded along the sequence, and in chunks as well.

The paper's example is 128K tokens of 8 blocks over 8 ranks in chunks of 16K; here the same eighths of a
prompt that fits a small machine. Ranks are forked gloo processes. Linux only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attention_residuals as ar
from attention_residuals.sharded_prefill import sharded_prefill
from benchmarks.models import move_queries
from benchmarks.timing import peak_bytes, save

TOKENS, WIDTH = 4096, 512
FIELDS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "num_hidden_layers": 16,
    "intermediate_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# eight blocks of two layers, and the embedding
READS = {"mode": "block", "num_blocks": 8, "read_schedule": "per_read"}
# (ranks, chunk)
ARMS = ((1, TOKENS), (2, TOKENS), (4, TOKENS), (8, TOKENS), (1, TOKENS // 8), (8, TOKENS // 8))
TOLERANCE = 1e-4
MIB = 2**20


def build() -> nn.Module:
    """A Qwen3.5 with random weights, queries away from zero, in float32."""
    torch.manual_seed(0)
    model = ar.Qwen3_5AttnResForCausalLM(ar.Qwen3_5AttnResConfig(**FIELDS, attn_res=READS))
    move_queries(model)
    return model.eval()


def watch_sources(model: nn.Module) -> list[int]:
    """A list whose one number is the most bytes that the sources of one read have held on to.

    A source that views a larger tensor counts as that tensor.
    """
    most = [0]

    def count(_module: nn.Module, args: tuple[Any, ...]) -> None:
        storages = (source.untyped_storage() for source in args[0])
        most[0] = max(most[0], sum({s.data_ptr(): s.nbytes() for s in storages}.values()))

    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            module.register_forward_pre_hook(count)
    return most


def measure(rank: int, ranks: int, chunk: int, folder: str) -> None:
    """One rank's prefill; leaves logits, bytes of its sources and of its process in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = build()
    most = watch_sources(model)
    ids = torch.randint(0, FIELDS["vocab_size"], (1, TOKENS))
    logits: list[Tensor] = []
    with torch.no_grad():
        sharded_prefill(model, ids[:, :64], chunk=64)  # what the first call alone allocates
        most[0] = 0
        process = peak_bytes(lambda: logits.append(sharded_prefill(model, ids, chunk=chunk)[0]))
    torch.save((logits[0], most[0], process), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(ranks: int, chunk: int) -> list[tuple[Tensor, int, int]]:
    """What `measure` found on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            measure, (ranks, chunk, folder), nprocs=ranks, start_method="fork"
        )
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def main() -> None:
    figures: dict[str, Any] = {"tokens": TOKENS, "width": WIDTH, "dtype": "float32", "sources": 9}
    expected: Tensor | None = None
    for ranks, chunk in ARMS:
        found = run(ranks, chunk)
        expected = found[0][0] if expected is None else expected
        difference = max(((x - expected).abs().max() / expected.abs().max()).item() for x, _, _ in found)
        what = f"{ranks} ranks, chunks of {chunk}"
        if not difference <= TOLERANCE:
            raise SystemExit(f"{what}: the logits differ by {difference:.3g} of the range; no figures")
        figures[what] = {
            "sources_mib": round(max(sources for _, sources, _ in found) / MIB, 3),
            "formula_mib": round(figures["sources"] * chunk * WIDTH * 4 / ranks / MIB, 3),
            "process_mib": round(max(process for _, _, process in found) / MIB, 1),
            "logits_differ_by": float(f"{difference:.2g}"),
        }
        print(what, figures[what], flush=True)
    print("written", save("long_prompts", figures))
