"""From the runs of a comparison to its folder's tables, pictures and report.html."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from attention_residuals.analysis import plots as depth_plots
from attention_residuals.comparison import page, plots
from attention_residuals.comparison.depth import DepthMeasures, average, measure_depth, validation_rows
from attention_residuals.comparison.results import (
    ArmResult,
    RunRecord,
    check_control,
    read_record,
    records_at,
    summarise_arms,
    write_tables,
)
from attention_residuals.comparison.scaling import ScalingResult, fit_scaling
from attention_residuals.comparison.settings import PlannedRun
from attention_residuals.training.run_folder import write_beside

LOSSES_CAPTION = (
    "Lines are means over seeds, bands reach from the lowest to the highest seed. Each arm at its best rate; "
    "training losses are averaged over the steps just before."
)
SWEEP_CAPTION = "Means over seeds with standard errors."
DEPTH_CAPTION = (
    "One forward and backward pass of each final model over the same validation rows, averaged over seeds. "
    "Logarithmic scale. A sublayer receives the residual stream in standard mode, else the mixture that its "
    "read makes; the gradient is that of the loss with respect to all weights of a layer but its reads'."
)
SCALING_CAPTION = "Large marks are means over seeds, small ones single runs, lines the power laws."
MAP_CAPTION = "Mean depth weight, reads as rows and sources as columns; the first seed's model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """What a comparison came to, and the files that say so."""

    results: tuple[ArmResult, ...]
    page: Path
    tables: tuple[Path, Path]
    pictures: tuple[Path, ...]
    scaling: tuple[ScalingResult, ...]


def write_report(
    runs: Sequence[PlannedRun], folder: Path, *, failures: Mapping[str, str] | None = None
) -> ComparisonReport:
    """Write results.jsonl, results.csv, pictures and report.html into `folder`; unfinished runs are told.

    Args:
        failures: name of a run that failed just now -> why.

    Raises:
        UserError: arms of a seed differ in data, order, tokens or model, or a finished model can't be read.
    """
    failures = failures or {}
    records = [read_record(run, failures.get(run.name)) for run in runs]
    check_control(records)
    tables = write_tables(records, folder)
    results = summarise_arms(records)
    folders = {run.name: Path(run.settings.output_dir) for run in runs}
    sections: list[str] = []
    pictures: list[Path] = []
    for size in dict.fromkeys(result.size for result in results):
        mine = [result for result in results if result.size == size]
        sections += [page.heading(size), page.loss_table(mine)]
        if len(mine) > 1:
            sections.append(page.difference_table(mine))
        if any(len(result.rates) > 1 for result in mine):
            sections.append(page.sweep_table(mine))
        done = {result.arm: records_at(records, result) for result in mine}
        done = {arm: found for arm, found in done.items() if found}
        for path, title, caption in _draw_size(size, mine, done, folders, folder):
            pictures.append(path)
            sections.append(page.picture(path, title, caption))
    scaling = fit_scaling(results, records)
    if scaling:
        path = depth_plots.save_picture(plots.draw_scaling(scaling), folder / "scaling.png")
        pictures.append(path)
        sections += [page.heading("Over sizes"), page.scaling_table(scaling)]
        sections.append(page.picture(path, "Loss against compute", SCALING_CAPTION))
    names = ", ".join(dict.fromkeys(record.arm for record in records))
    footer = f"Written by attention_residuals {version('attention_residuals')}."
    content = page.render_page(f"Comparison of {names}", _notes(records), sections, records, footer)
    write_beside(folder / "report.html", content)
    return ComparisonReport(
        results=results, page=folder / "report.html", tables=tables, pictures=tuple(pictures), scaling=scaling
    )


def _draw_size(
    size: str,
    results: Sequence[ArmResult],
    done: Mapping[str, Sequence[RunRecord]],
    folders: Mapping[str, Path],
    out: Path,
) -> Iterator[tuple[Path, str, str]]:
    """The pictures of one size, as they are drawn: file, title, caption."""
    if not done:
        return
    curves = {arm: [record.curve for record in records] for arm, records in done.items()}
    save = depth_plots.save_picture
    yield save(plots.draw_losses(curves, size), out / f"losses-{size}.png"), "Losses", LOSSES_CAPTION
    if any(len(result.rates) > 1 for result in results):
        sweep = plots.draw_sweep(results, size)
        yield save(sweep, out / f"sweep-{size}.png"), "Learning rates", SWEEP_CAPTION
    measures = _measure(done, folders)
    depth = plots.draw_depth(measures, size)
    yield save(depth, out / f"depth-{size}.png"), "Over depth", DEPTH_CAPTION
    for arm, found in measures.items():
        if found.summary is not None:
            file = out / f"depth-map-{done[arm][0].name}.png"
            yield save(depth_plots.draw_depth_map(found.summary), file), f"Depth map of {arm}", MAP_CAPTION


def _measure(
    done: Mapping[str, Sequence[RunRecord]], folders: Mapping[str, Path]
) -> dict[str, DepthMeasures]:
    """Each arm's final models over the same rows: those that the first run of the seed validates on."""
    rows: dict[int, Tensor] = {}
    measures = {}
    for arm, records in done.items():
        found = []
        for record in records:
            if record.seed not in rows:
                rows[record.seed] = validation_rows(folders[record.name])
            found.append(measure_depth(folders[record.name], rows[record.seed]))
        measures[arm] = average(found)
    return measures


def _notes(records: Sequence[RunRecord]) -> list[str]:
    finished = [record for record in records if record.status == "finished"]
    notes = [
        f"{len(finished)} of {len(records)} runs are finished. All arms of a seed saw the same tokens in the "
        "same order: the fingerprints in results.jsonl are equal."
    ]
    if len({record.commit for record in finished}) > 1:
        notes.append("The runs were made by different commits of the library; see run.json in their folders.")
    return notes
