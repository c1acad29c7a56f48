"""From a model's forwards to a DepthRecord: depth weights per read and token, source names, norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attention_residuals.models.mixins import AttnResBackbone, family_of
from attention_residuals.models.model_pass import DepthTrace
from attention_residuals.plan import DepthPlan


class DepthRecord:
    """What the reads of a model did in the forwards run under `record_depth_weights`.

    Forwards of one batch size are joined along the tokens, so a generation reads as prompt plus new tokens.
    Tensors are detached, float32, on the CPU.

    Attributes:
        source_names: per read, the names of its sources.
        read_names: per read, e.g. "layer 0 attention", "layer 0 mlp", ..., "final".
        forwards: the raw traces, one per forward.
    """

    def __init__(self, plan: DepthPlan, read_names: list[str]) -> None:
        self.plan = plan
        self.read_names = read_names
        self.source_names = [plan.source_names(read) for read in range(plan.num_reads)]
        self.forwards: list[DepthTrace] = []

    def append(self, trace: DepthTrace) -> None:
        """Take one forward's trace, reduced to what is kept: weights and norms, no mixtures."""
        kept = DepthTrace()
        kept.weights = [w.detach().float().cpu() for w in trace.weights]
        kept.mixtures = [torch.linalg.vector_norm(h.detach().float(), dim=-1).cpu() for h in trace.mixtures]
        kept.output_norms = [n.detach().cpu() for n in trace.output_norms]
        self.forwards.append(kept)

    @property
    def weights(self) -> list[Tensor]:
        """Per read, depth weights [N, B, T]."""
        return self._joined("weights")

    @property
    def input_norms(self) -> list[Tensor]:
        """Per read, L2 norm of the mixture it made [B, T]."""
        return self._joined("mixtures")

    @property
    def output_norms(self) -> list[Tensor]:
        """Per sublayer, L2 norm of its output [B, T]."""
        return self._joined("output_norms")

    def _joined(self, field: str) -> list[Tensor]:
        if not self.forwards:
            raise ValueError("the record is empty: run the model inside record_depth_weights(model)")
        batches = {trace.weights[0].shape[1] for trace in self.forwards}
        if len(batches) > 1:
            raise ValueError(
                f"forwards of batch sizes {sorted(batches)} can't be joined; take each from `forwards`"
            )
        return [
            torch.cat(parts, -1) for parts in zip(*(getattr(t, field) for t in self.forwards), strict=True)
        ]


@contextmanager
def record_depth_weights(model: Any) -> Iterator[DepthRecord]:
    """Collect depth weights and norms of every forward of `model` inside the context.

    Args:
        model: one of our models, with or without a head.

    Yields:
        The record, which fills up with each forward.

    Raises:
        TypeError: the model has no depth plan.
        ValueError: the model is in standard mode and has no reads.
    """
    backbone = next((m for m in model.modules() if isinstance(m, AttnResBackbone)), model)
    plan = getattr(backbone, "depth_plan", None)
    if plan is None:
        raise TypeError(f"{type(model).__name__} has no attention residuals; nothing to record")
    if plan.config.mode == "standard":
        raise ValueError(
            "the model is in mode='standard' and has no reads; train or convert it with another mode"
        )
    record = DepthRecord(plan, read_names(backbone))
    backbone.depth_records.append(record)
    try:
        yield record
    finally:
        backbone.depth_records.remove(record)


def read_names(backbone: Any) -> list[str]:
    """A name per read: the layer's number and its sublayer, then "final"."""
    family = family_of(backbone.config)
    names = []
    for i, layer in enumerate(getattr(backbone, family.layers)):
        mixer = next((name for attribute, name in family.mixer_names if hasattr(layer, attribute)), "mixer")
        names += [f"layer {i} {mixer}", f"layer {i} mlp"]
    return [*names, "final"]
