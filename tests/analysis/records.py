"""Hand-made records: the shape of a DepthRecord, with weights and norms chosen by the test."""

from __future__ import annotations

import dataclasses

import torch

from attention_residuals.config import AttnResConfig
from attention_residuals.plan import DepthPlan


@dataclasses.dataclass
class HandMadeRecord:
    plan: DepthPlan
    weights: list[torch.Tensor]
    read_names: list[str]
    input_norms: list[torch.Tensor]
    output_norms: list[torch.Tensor]


def sublayer_names(num_sublayers: int) -> list[str]:
    """Names as a Qwen3.5 gives them: three delta nets, then one attention."""
    mixers = ("delta net", "delta net", "delta net", "attention")
    return [f"layer {i // 2} {'mlp' if i % 2 else mixers[i // 2 % 4]}" for i in range(num_sublayers)]


def make_record(num_sublayers: int, *, tokens: int = 3, batch: int = 2, **config: object) -> HandMadeRecord:
    """Random weights in the layout of `DepthPlan`; norms count up, so that means are known."""
    plan = DepthPlan(num_sublayers, AttnResConfig(**config))
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.softmax(torch.randn(plan.num_sources(read), batch, tokens, generator=generator), dim=0)
        for read in range(plan.num_reads)
    ]
    return HandMadeRecord(
        plan=plan,
        weights=weights,
        read_names=[*sublayer_names(num_sublayers), "final"],
        input_norms=[torch.full((batch, tokens), 1.0 + read) for read in range(plan.num_reads)],
        output_norms=[torch.full((batch, tokens), 2.0 + read) for read in range(num_sublayers)],
    )
