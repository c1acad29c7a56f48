"""From a finished run to what happens over its depth: inputs, outputs and gradients, on validation rows."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from attention_residuals.analysis.load_model import load_model
from attention_residuals.analysis.record import read_names, record_depth_weights
from attention_residuals.analysis.summary import DepthSummary, summarise
from attention_residuals.analysis.token_measures import Floats
from attention_residuals.depth_attention.recorded import row_norms
from attention_residuals.models.mixins import AttnResBackbone, family_of
from attention_residuals.read import DepthRead
from attention_residuals.training.prepare import prepare
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings

MEASURED_ROWS = 4  # validation rows in the one forward and backward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthMeasures:
    """One model over its depth: L sublayers in `layers` layers, float64.

    Attributes:
        sublayer_names: L names.
        input_norm: [L] mean L2 norm per token of what a sublayer's norm receives: the read's mixture, or the
            residual stream in standard mode.
        output_norm: [L] mean L2 norm per token of what the sublayer writes.
        gradient_norm: [layers] L2 norm of the loss's gradient over a layer's weights, reads left out.
        summary: the depth weights; None in standard mode.
    """

    sublayer_names: tuple[str, ...]
    input_norm: Floats
    output_norm: Floats
    gradient_norm: Floats
    summary: DepthSummary | None


def validation_rows(folder: Path) -> Tensor:
    """Token ids [B, T] of the first validation rows of a run; the same for every arm of its seed.

    Raises:
        UserError: the run's data has changed or can't be read.
    """
    run = RunFolder(folder)
    stored = run.read_run()
    settings = TrainSettings.from_dict(stored["settings"])
    silent = Console(file=io.StringIO())
    rows = prepare(settings, silent, folder=run, started=stored).data.validation
    assert rows is not None, "a comparison keeps validation text"
    return torch.stack([rows[i]["input_ids"] for i in range(min(MEASURED_ROWS, len(rows)))])


def measure_depth(folder: Path, input_ids: Tensor) -> DepthMeasures:
    """One forward and backward pass of the model in `folder` over token ids [B, T].

    Raises:
        UserError: the model can't be loaded.
    """
    model = load_model(folder, dtype="float32").model
    model.config.use_cache = False
    input_ids = input_ids.to(model.device)
    backbone: Any = next(module for module in model.modules() if isinstance(module, AttnResBackbone))
    layers = family_of(backbone.config).layers_of(backbone)
    if backbone.depth_plan.config.mode == "standard":
        with _standard_norms(backbone) as norms:
            model(input_ids=input_ids, labels=input_ids).loss.backward()
        inputs, outputs, summary = np.array(norms[0]), np.array(norms[1]), None
    else:
        with record_depth_weights(model) as record:
            model(input_ids=input_ids, labels=input_ids).loss.backward()
        summary = summarise(record)
        inputs, outputs = _means(record.input_norms)[:-1], _means(record.output_norms)
    return DepthMeasures(
        sublayer_names=tuple(read_names(backbone)[:-1]),
        input_norm=inputs,
        output_norm=outputs,
        gradient_norm=np.array([_gradient_norm(layer) for layer in layers]),
        summary=summary,
    )


def average(measures: Sequence[DepthMeasures]) -> DepthMeasures:
    """The mean of one arm's models over its seeds; the depth weights are those of the first."""
    means = {
        name: np.mean([getattr(m, name) for m in measures], axis=0)
        for name in ("input_norm", "output_norm", "gradient_norm")
    }
    return dataclasses.replace(measures[0], **means)


@contextlib.contextmanager
def _standard_norms(backbone: Any) -> Iterator[tuple[list[float], list[float]]]:
    """Collect input and output norm per sublayer of one forward of a model without reads.

    A pre-norm receives the residual stream, so two neighbours differ by what the sublayer between them wrote.
    """
    family = family_of(backbone.config)
    inputs: list[float] = []
    outputs: list[float] = []
    states: list[Tensor] = []

    def receive(module: Any, args: tuple[Tensor, ...]) -> None:
        states.append(args[0].detach())

    def leave(module: Any, args: Any, output: Tensor) -> None:
        states.append(output.detach())
        inputs.extend(float(row_norms(state).double().mean()) for state in states[:-1])
        outputs.extend(float(row_norms(b - a).double().mean()) for a, b in itertools.pairwise(states))
        states.clear()

    handles = []
    for layer in family.layers_of(backbone):
        handles += [norm.register_forward_pre_hook(receive) for norm in family.pre_norms_of(layer)]
        handles.append(layer.register_forward_hook(leave))
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _means(norms: Sequence[Tensor]) -> Floats:
    """Mean over batch and tokens of each read's or sublayer's norms [B, T]."""
    return np.array([float(norm.double().mean()) for norm in norms])


def _gradient_norm(layer: Any) -> float:
    of_reads = {p for module in layer.modules() if isinstance(module, DepthRead) for p in module.parameters()}
    gradients = [p.grad for p in layer.parameters() if p.grad is not None and p not in of_reads]
    return float(torch.sqrt(sum((g.double().square().sum() for g in gradients), torch.zeros(()).double())))
