"""From a model's forwards to a DepthRecord: depth weights per read and token, source names, norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_residuals.analysis.tables import Table, measure_table, weight_table, write_parquet
from attention_residuals.errors import UserError
from attention_residuals.models.mixins import AttnResBackbone, family_of
from attention_residuals.models.model_pass import DepthTrace
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead


class DepthRecord:
    """What the reads of a model did in the forwards run under `record_depth_weights`.

    Forwards of one batch size are joined along the tokens, so a generation reads as prompt plus new tokens
    (all but the last new one, which no forward reads). Rows are those of the forwards: padding counts as
    tokens, and beams that change places do so from one token to the next. Tensors are detached, float32, on
    the CPU.

    Attributes:
        source_names: per read, the names of its sources.
        read_names: per read, e.g. "layer 0 attention", "layer 0 mlp", ..., "final".
        forwards: one trace per forward, without mixtures.
    """

    def __init__(self, plan: DepthPlan, read_names: list[str]) -> None:
        self.plan = plan
        self.read_names = read_names
        self.source_names = [plan.source_names(read) for read in range(plan.num_reads)]
        self.forwards: list[DepthTrace] = []

    def append(self, trace: DepthTrace) -> None:
        """Take the weights and norms of one forward's trace."""
        kept = DepthTrace()
        kept.weights = [w.detach().float().cpu() for w in trace.weights]
        kept.input_norms = [n.cpu() for n in trace.input_norms]
        kept.output_norms = [n.cpu() for n in trace.output_norms]
        self.forwards.append(kept)

    @property
    def weights(self) -> list[Tensor]:
        """Per read, depth weights [N, B, T]."""
        return self._joined("weights")

    @property
    def input_norms(self) -> list[Tensor]:
        """Per read, L2 norm of the mixture it made [B, T]."""
        return self._joined("input_norms")

    @property
    def output_norms(self) -> list[Tensor]:
        """Per sublayer, L2 norm of its output [B, T]."""
        return self._joined("output_norms")

    def to_table(self, tokens: Sequence[Sequence[Any]] | None = None) -> Table:
        """One row per read, source and token, as named NumPy columns; see `tables.weight_table`."""
        return weight_table(self, tokens)

    def to_measure_table(self, tokens: Sequence[Sequence[Any]] | None = None) -> Table:
        """One row per read and token, with entropy, locality, norms ...; see `tables.measure_table`."""
        return measure_table(self, tokens)

    def write_parquet(self, path: str | Path, tokens: Sequence[Sequence[Any]] | None = None) -> Path:
        """Write `to_table(tokens)` as a Parquet file; needs pyarrow.

        Raises:
            MissingPyarrow: pyarrow is not installed.
        """
        return write_parquet(self.to_table(tokens), Path(path))

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
    backbone = backbone_with_reads(model)
    record = DepthRecord(backbone.depth_plan, read_names(backbone))
    backbone.depth_records.append(record)
    try:
        yield record
    finally:
        backbone.depth_records.remove(record)


def record_forward(model: Any, input_ids: Tensor) -> DepthRecord:
    """One forward over [B, T] token ids, without gradients or cache, recorded.

    Raises:
        UserError: the model has no depth weights, being a plain one or in standard mode.
    """
    with ExitStack() as stack, torch.no_grad():
        try:
            record = stack.enter_context(record_depth_weights(model))
        except (TypeError, ValueError) as error:
            raise UserError(f"there are no depth weights to look at: {error}") from error
        # the logits are not looked at: one position spares a [T, vocabulary] tensor
        model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    return record


def backbone_with_reads(model: Any) -> Any:
    """The part of one of our models that holds the layers and their reads.

    Raises:
        TypeError: the model has no depth plan.
        ValueError: the model is in standard mode and has no reads, or is a pipeline stage.
    """
    backbone: Any = next((m for m in model.modules() if isinstance(m, AttnResBackbone)), model)
    plan = getattr(backbone, "depth_plan", None)
    if plan is None:
        raise TypeError(f"{type(model).__name__} has no attention residuals; nothing to record")
    if plan.config.mode == "standard":
        raise ValueError(
            "the model is in mode='standard' and has no reads; train or convert it with another mode"
        )
    held, whole = sum(isinstance(m, DepthRead) for m in backbone.modules()), plan.num_reads - 1
    if held != whole:  # the first read, of the embedding alone, is no module
        raise ValueError(
            f"the model must have all its {whole} reads to look at them, got a pipeline stage with {held}; "
            "load the whole model from the run's folder or a checkpoint"
        )
    return backbone


def read_names(backbone: Any) -> list[str]:
    """A name per read: the layer's number and its sublayer, then "final"."""
    family = family_of(backbone.config)
    names = []
    for i, layer in enumerate(family.layers_of(backbone)):
        mixer = next((name for attribute, name in family.mixer_names if hasattr(layer, attribute)), "mixer")
        names += [f"layer {i} {mixer}", f"layer {i} mlp"][: family.sublayers_per_layer]
    return [*names, "final"]
