"""From a model and a text to a folder with pictures and one self-contained report.html."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from attention_residuals.analysis import plots
from attention_residuals.analysis.load_model import encode, load_model, token_texts
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.report_page import Picture, render_page
from attention_residuals.analysis.summary import DepthSummary, summarise
from attention_residuals.analysis.tables import write_parquet
from attention_residuals.analysis.token_view import render_tokens
from attention_residuals.analysis.training_curve import TrainingCurve, read_training_curve
from attention_residuals.config import AttnResConfig
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from attention_residuals.analysis.ablation import SourceAblation
    from attention_residuals.analysis.over_training import DepthHistory
    from attention_residuals.analysis.record import DepthRecord


NORMS_CAPTION = (
    "Entropy on the dashed line means that a read averages its sources; below it, the read has learned to "
    "choose. In a standard Transformer the norms grow with depth; the shading shows where a block starts, "
    "and with it a new sum."
)
ABLATION_CAPTION = (
    "Left, how heavily a read weighs each source; right, how much the loss changes when this read has to do "
    "without it (its softmax is over the others then). Weight is not importance: what is heavy on the left "
    "may be worth nothing on the right."
)
HISTORY_CAPTION = (
    "The same text through every checkpoint of the run. Reads start out uniform: entropy / log N at 1, "
    "locality at one half; what moves away from there has learned to choose."
)
# those that say which function a read is; others are shown where they differ from the paper's read
SHOWN_SETTINGS = ("mode", "num_blocks", "sublayers_per_block", "read_scale", "window")
TRAINING_CAPTION = "Loss against the step; the numbers in the legend are the last ones of the run."


@dataclasses.dataclass(frozen=True)
class WrittenReport:
    """What `report_on` wrote: the page, pictures and tables beside it, and the means in them."""

    page: Path
    pictures: tuple[Path, ...]
    tables: tuple[Path, ...]
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
        tokens=token_texts(loaded, input_ids),
        name=model_dir.resolve().name,
        training_metrics=training_metrics,
    )
    return report.page


def report_on(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    out_dir: Path,
    *,
    tokens: Sequence[str],
    name: str,
    training_metrics: Path | None = None,
    history: DepthHistory | None = None,
    ablate: bool = False,
    tables: bool = False,
) -> WrittenReport:
    """Run a loaded model over token ids [B, T] and write pictures and report.html into `out_dir`.

    Args:
        tokens: the T texts of the first row; the page shows its depth weights token by token.
        name: what the page calls the model.
        training_metrics: a metrics.jsonl, drawn as the loss curve.
        history: how the reads changed over training, drawn as well.
        ablate: whether to measure and draw what each source is worth: a forward for every cell of the map.
        tables: whether to write the numbers of every token as Parquet too.

    Raises:
        UserError: the model keeps the standard residual stream; metrics or folder cannot be used; pyarrow is
            missing.
    """
    record = record_forward(model, input_ids)
    summary = summarise(record)
    curve = None if training_metrics is None else read_training_curve(training_metrics)
    ablation = _ablation(model, input_ids) if ablate else None
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        depth_map = plots.save_picture(plots.draw_depth_map(summary), out_dir / "depth_map.png")
        pictures = _draw(summary, curve, ablation, history, out_dir)
        written = _write_tables(record, input_ids, ablation, history, out_dir) if tables else ()
        page = render_page(
            summary,
            render_tokens(record, summary, tokens),
            pictures,
            title=f"Attention over depth in {name}",
            config=record.plan.config,
            facts=_facts(model, record.plan.config, summary),
            footer=f"Written by attention_residuals {version('attention_residuals')}.",
        )
        path = _write_text(page, out_dir / "report.html")
    except OSError as error:
        raise UserError(f"the report cannot be written into {out_dir}: {error.strerror or error}") from error
    return WrittenReport(path, (depth_map, *(picture.path for picture in pictures)), written, summary)


def _ablation(model: PreTrainedModel, input_ids: torch.Tensor) -> SourceAblation:
    if input_ids.shape[1] < 2:
        raise UserError("without a second token there is no loss to compare; give a longer text")
    from attention_residuals.analysis.ablation import ablate_sources

    return ablate_sources(model, input_ids)


def _draw(
    summary: DepthSummary,
    curve: TrainingCurve | None,
    ablation: SourceAblation | None,
    history: DepthHistory | None,
    out_dir: Path,
) -> list[Picture]:
    """The pictures of the page; the depth map itself is a table there."""
    drawn = [
        (
            "entropy_and_norms",
            plots.draw_entropy_and_norms(summary),
            "Entropy and norms",
            "Two line charts over depth: entropy of the depth weights, and input and output norms; "
            "the table below holds their numbers.",
            NORMS_CAPTION,
        )
    ]
    if ablation is not None:
        alt = (
            "Two heat maps of reads by sources: depth weights, and the change of the loss without the source."
        )
        figure = plots.draw_source_ablation(summary, ablation)
        drawn.append(("source_ablation", figure, "What each source is worth", alt, ABLATION_CAPTION))
    if history is not None:
        alt = "Heat maps of reads by steps: entropy, effective sources, locality and weight on the embedding."
        figure = plots.draw_over_training(history)
        drawn.append(("over_training", figure, "Reads over training", alt, HISTORY_CAPTION))
    if curve is not None:
        alt = "Line chart of train and evaluation loss against the step."
        drawn.append(("training", plots.draw_training_curve(curve), "Training", alt, TRAINING_CAPTION))
    return [
        Picture(plots.save_picture(figure, out_dir / f"{name}.png"), heading, alt, caption)
        for name, figure, heading, alt, caption in drawn
    ]


def _write_tables(
    record: DepthRecord,
    input_ids: torch.Tensor,
    ablation: SourceAblation | None,
    history: DepthHistory | None,
    out_dir: Path,
) -> tuple[Path, ...]:
    ids = input_ids.tolist()
    found = {"depth_weights": record.to_table(ids), "token_measures": record.to_measure_table(ids)}
    if ablation is not None:
        found["source_ablation"] = ablation.to_table()
    if history is not None:
        found["over_training"] = history.to_table()
    return tuple(write_parquet(table, out_dir / f"{name}.parquet") for name, table in found.items())


def _facts(model: PreTrainedModel, settings: AttnResConfig, summary: DepthSummary) -> dict[str, str]:
    config = model.config.get_text_config()
    shown = {name: getattr(settings, name) for name in SHOWN_SETTINGS} | settings.changed_fields()
    return {
        "architecture": str(model.config.model_type),
        "attention residuals": ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None),
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
