"""From a model and a text to a folder with pictures and one self-contained report.html."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from attention_residuals.analysis import plots
from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.analysis.report_page import Picture, render_page
from attention_residuals.analysis.summary import DepthSummary, summarise
from attention_residuals.analysis.training_curve import TrainingCurve, read_training_curve
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from attention_residuals.analysis.record import DepthRecord

MAP_CAPTION = (
    "Each row is a read, which mixes the sources on its left into the input of one sublayer; a row adds up "
    "to 1. Before training every row is uniform. A bright first column means that the embedding is kept deep "
    "into the model, a bright diagonal that sublayers listen to their neighbours, and a bright cell far from "
    "both is a skip."
)
NORMS_CAPTION = (
    "Entropy on the dashed line means that a read averages its sources; below it, the read has learned to "
    "choose. In a standard Transformer the norms grow with depth; the shading shows where a block starts, "
    "and with it a new sum."
)
TRAINING_CAPTION = "Loss against the step; the numbers in the legend are the last ones of the run."


@dataclasses.dataclass(frozen=True)
class WrittenReport:
    """What `report_on` wrote: the page, the pictures beside it, and the numbers in them."""

    page: Path
    pictures: tuple[Path, ...]
    summary: DepthSummary


def write_report(
    model_dir: Path, out_dir: Path, *, prompt: str, training_metrics: Path | None = None
) -> Path:
    """Load the model in `model_dir`, run it over the prompt and write the report; returns the page's path.

    Raises:
        UserError: the model cannot be loaded or keeps the standard residual stream, the prompt is empty, or
            the metrics or the output folder cannot be used.
    """
    loaded = load_model(model_dir)
    input_ids = encode(loaded, prompt)
    report = report_on(
        loaded.model,
        input_ids,
        out_dir,
        text=prompt,
        name=model_dir.resolve().name,
        training_metrics=training_metrics,
    )
    return report.page


def report_on(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    out_dir: Path,
    *,
    text: str,
    name: str,
    training_metrics: Path | None = None,
) -> WrittenReport:
    """Run a loaded model over token ids [B, T] and write pictures and report.html into `out_dir`.

    Args:
        text: what the tokens say, shown on the page.
        name: what the page calls the model.
        training_metrics: a metrics.jsonl, drawn as the loss curve.

    Raises:
        UserError: the model keeps the standard residual stream, or metrics or folder cannot be used.
    """
    summary = summarise(record_forward(model, input_ids))
    curve = None if training_metrics is None else read_training_curve(training_metrics)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        pictures = _draw(summary, curve, out_dir)
        page = render_page(
            summary,
            pictures,
            title=f"Attention over depth in {name}",
            facts=_facts(model, summary),
            text=text,
            footer=f"Written by attention_residuals {version('attention_residuals')}.",
        )
        path = _write_text(page, out_dir / "report.html")
    except OSError as error:
        raise UserError(f"the report cannot be written into {out_dir}: {error.strerror or error}") from error
    return WrittenReport(path, tuple(picture.path for picture in pictures), summary)


def record_forward(model: PreTrainedModel, input_ids: torch.Tensor) -> DepthRecord:
    """One forward over [B, T] token ids, without gradients or cache, recorded.

    Raises:
        UserError: the model has no depth weights, being a plain one or in standard mode.
    """
    import torch

    from attention_residuals.analysis.record import record_depth_weights

    with contextlib.ExitStack() as stack, torch.no_grad():
        try:
            record = stack.enter_context(record_depth_weights(model))
        except (TypeError, ValueError) as error:
            raise UserError(f"there are no depth weights to look at: {error}") from error
        # the logits are not looked at: one position spares a [T, vocabulary] tensor
        model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    return record


def _draw(summary: DepthSummary, curve: TrainingCurve | None, out_dir: Path) -> list[Picture]:
    pictures = [
        Picture(
            plots.save_picture(plots.draw_depth_map(summary), out_dir / "depth_map.png"),
            "Depth map",
            f"Heat map of {len(summary.read_names)} reads by {len(summary.source_names)} sources; "
            "the tables below hold its numbers.",
            MAP_CAPTION,
        ),
        Picture(
            plots.save_picture(plots.draw_entropy_and_norms(summary), out_dir / "entropy_and_norms.png"),
            "Entropy and norms",
            "Two line charts over depth: entropy of the depth weights, and input and output norms; "
            "the first table below holds their numbers.",
            NORMS_CAPTION,
        ),
    ]
    if curve is not None:
        path = plots.save_picture(plots.draw_training_curve(curve), out_dir / "training.png")
        alt = "Line chart of train and evaluation loss against the step."
        pictures.append(Picture(path, "Training", alt, TRAINING_CAPTION))
    return pictures


def _facts(model: PreTrainedModel, summary: DepthSummary) -> dict[str, str]:
    config = model.config.get_text_config()
    settings = {key: value for key, value in dict(config.attn_res).items() if value is not None}
    return {
        "architecture": str(model.config.model_type),
        "attention residuals": ", ".join(f"{key} {value}" for key, value in settings.items()),
        "decoder layers": f"{config.num_hidden_layers}, {len(summary.output_norm)} sublayers",
        "width": str(config.hidden_size),
        "parameters": f"{model.num_parameters():,}",
        "tokens read": f"{summary.num_tokens:,}",
    }


def _write_text(text: str, path: Path) -> Path:
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
    return path
