"""From a model and tokens to what each source of each read is worth: how the loss changes without it.

A read without a source runs over the others, and its softmax is over them: alpha_i / (1 - alpha_j). Leaving
the others' weights as they are would give (1 - alpha_j) times that mixture, and the norm after the read takes
the factor out again, so the two differ by the norm's eps only. A source that a read weighs heavily may still
be worth nothing, and the other way round: weight is not importance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_residuals.analysis.record import backbone_with_reads, read_names
from attention_residuals.analysis.source_columns import column_names, source_columns
from attention_residuals.analysis.tables import Table
from attention_residuals.analysis.token_measures import Floats
from attention_residuals.models.attach import reads_in_order
from attention_residuals.models.mixins import family_of
from attention_residuals.read import DepthRead


@dataclasses.dataclass(frozen=True)
class SourceAblation:
    """What a model loses without one source at one read. Rows and columns are those of `DepthSummary`.

    Attributes:
        read_names: R names.
        source_names: C names.
        loss: the model's loss, in nats per token.
        loss_change: [R, C] float64, loss without the source minus `loss`; NaN where a read has no such
            source, has no other one, or was left out.
    """

    read_names: tuple[str, ...]
    source_names: tuple[str, ...]
    loss: float
    loss_change: Floats

    def to_table(self) -> Table:
        """One row per read and source measured: columns as in `weight_table`, and `loss_change`."""
        read, source = np.nonzero(~np.isnan(self.loss_change))
        return {
            "read": read.astype(np.int32),
            "read_name": np.array(self.read_names)[read],
            "source": source.astype(np.int32),
            "source_name": np.array(self.source_names)[source],
            "loss_change": self.loss_change[read, source],
        }


@contextmanager
def without_source(model: Any, read: int, source: int) -> Iterator[None]:
    """Inside this context, read number `read` of `model` runs without its source number `source`.

    Every read then runs over all its sources at once, whatever the `read_schedule`. Recorded depth weights of
    the source are 0. Of a variant, the source's own learned score goes with it; without the newest source,
    the next newest has the recency bias and asks the query.

    Args:
        model: one of our models, with or without a head.
        read: from 0 to L; L is the final read.
        source: its column in the depth map: 0 the embedding, k block k, finished or so far. Under a window
            only columns in it.

    Raises:
        TypeError: the model has no reads.
        ValueError: it is in standard mode.
        IndexError: there is no such read or source, or it is the read's only one.
    """
    backbone = backbone_with_reads(model)
    plan = backbone.depth_plan
    if not 0 <= read < plan.num_reads:
        raise IndexError(f"read must be from 0 to {plan.num_reads - 1} (the final read), got {read}")
    columns = source_columns(plan, read)
    if source not in columns:
        raise IndexError(f"source must be {_choices(columns)} at read {read}, got {source}")
    module = reads_in_order(backbone, family_of(backbone.config))[read]
    if module is None or len(columns) == 1:
        raise IndexError(f"read {read} has one source only, and can't do without it; take a later read")
    place = columns.index(source)

    def leave_out(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        sources, *others = args
        return ((*sources[:place], *sources[place + 1 :]), *others), kwargs

    def put_back_weight(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output
        mixture, weights = output
        zero = torch.zeros_like(weights[:1])
        return mixture, torch.cat([weights[:place], zero, weights[place:]])

    groups, backbone.read_groups = backbone.read_groups, ()  # no first phase over the source that is left out
    hooks = [
        module.register_forward_pre_hook(leave_out, with_kwargs=True),
        module.register_forward_hook(put_back_weight),
    ]
    try:
        with _without_what_is_its_own(module, place, len(columns)):
            yield
    finally:
        backbone.read_groups = groups
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def ablate_sources(
    model: Any,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    reads: Iterable[int] | None = None,
    **model_inputs: Any,
) -> SourceAblation:
    """Measure the change of the loss for every source of every read, one forward each.

    The number of forwards is the number of cells of the depth map: about R * C / 2. The model runs in eval
    mode; each module is put back into the mode it was in.

    Args:
        model: one of our models with a language model head.
        input_ids: token ids [B, T].
        labels: [B, T], shifted by the model as in training, -100 where no loss counts; `input_ids` if None.
        reads: only these reads, from 0 to L.
        model_inputs: what else the model's forward takes, such as `attention_mask`.

    Raises:
        TypeError: the model has no reads.
        ValueError: it is in standard mode, or its loss is not a finite number.
        IndexError: there is no such read.
    """
    backbone = backbone_with_reads(model)
    plan = backbone.depth_plan
    inputs = {"use_cache": False, **model_inputs}
    targets = input_ids if labels is None else labels

    def loss() -> float:
        return float(model(input_ids=input_ids, labels=targets, **inputs).loss)

    columns = column_names(plan)
    loss_change = np.full((plan.num_reads, len(columns)), np.nan)
    with _eval_mode(model):
        start = loss()
        if not np.isfinite(start):
            raise ValueError(
                f"the model's loss must be a finite number, got {start}; give at least two tokens a row, and "
                "labels that are not all -100"
            )
        for read in range(plan.num_reads) if reads is None else reads:
            choices = source_columns(plan, read)
            for source in choices if len(choices) > 1 else ():
                with without_source(model, read, source):
                    loss_change[read, source] = loss() - start
    return SourceAblation(tuple(read_names(backbone)), columns, start, loss_change)


def _choices(columns: tuple[int, ...]) -> str:
    """Columns in words: the embedding's, then those of a window without a gap."""
    first, last = columns[min(1, len(columns) - 1)], columns[-1]
    return f"from 0 to {last}" if first <= 1 else f"0 or from {first} to {last}, which the read sees,"


@contextmanager
def _without_what_is_its_own(module: DepthRead, place: int, num_sources: int) -> Iterator[None]:
    """Take from a read what it keeps of one source: a learned score, and that the last one is partial."""
    scores, has_partial = module.source_scores, module.has_partial
    if scores is not None:  # in the dictionary, since a slice of a parameter is none
        module._parameters["source_scores"] = torch.cat([scores[:place], scores[place + 1 :]])  # type: ignore[assignment]
    module.has_partial = has_partial and place < num_sources - 1
    try:
        yield
    finally:
        module._parameters["source_scores"] = scores
        module.has_partial = has_partial


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
