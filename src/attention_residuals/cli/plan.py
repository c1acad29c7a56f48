"""`attnres plan`: what a model with a block setting and a layout costs, before any run."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attention_residuals.cli.assignments import parse_assignments
from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.config import AttnResConfig
    from attention_residuals.planner.layout import Layout
    from attention_residuals.planner.plain_model import PlainModel
    from attention_residuals.planner.prediction import Planner

READS, LAYOUT, OUTPUT = "Reads", "Layout", "Output"
GIGABYTE = 1e9


def _option(panel: str, help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="tiny, small, 0.8B, 2B, 4B, 9B, 27B, a JSON file of configuration fields or a model folder.",
        ),
    ],
    mode: Annotated[
        str | None, _option(READS, "full, block or standard. (default: the model's own, or block)")
    ] = None,
    num_blocks: Annotated[
        int | None, _option(READS, "Blocks the sublayers are divided into. (default: 8)")
    ] = None,
    sublayers_per_block: Annotated[
        int | None, _option(READS, "Block length in sublayers, instead of --num-blocks.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        _option(
            READS,
            "How reads differ from the paper's, such as activation=sigmoid; may be repeated.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    pipeline_ranks: Annotated[int, _option(LAYOUT, "P, ranks that share the layers.", "--pp")] = 1,
    virtual_stages: Annotated[int, _option(LAYOUT, "V, stages of layers on each of them.", "--virtual")] = 1,
    tensor_parallel: Annotated[
        int, _option(LAYOUT, "Ranks that share matrices and, along the sequence, the stream.", "--tp")
    ] = 1,
    data_parallel: Annotated[int, _option(LAYOUT, "Replicas.", "--dp")] = 1,
    fsdp: Annotated[
        bool, _option(LAYOUT, "Replicas share weights, gradients and optimizer states.", "--fsdp")
    ] = False,
    batch_size: Annotated[int, _option(LAYOUT, "Rows of a microbatch.")] = 1,
    context: Annotated[int, _option(LAYOUT, "Tokens of a row.")] = 2048,
    microbatches: Annotated[
        int | None, _option(LAYOUT, "Of a step. (default: 2 P with a pipeline, else 1)")
    ] = None,
    dtype: Annotated[
        str, _option(LAYOUT, "float32, bfloat16, float16 or float64: weights, states, activations.")
    ] = "float32",
    gradient_checkpointing: Annotated[
        bool, _option(LAYOUT, "Layers run again in backward.", "--gradient-checkpointing")
    ] = False,
    cache: Annotated[
        bool, _option(LAYOUT, "Whether a rank keeps block sums from one of its stages to the next.")
    ] = True,
    prefill_chunk: Annotated[int | None, _option(LAYOUT, "Tokens that a prefill works on at once.")] = None,
    bandwidth: Annotated[float, _option(LAYOUT, "GB/s between neighbouring ranks, one direction.")] = 50.0,
    memory_limit: Annotated[
        float | None, _option(LAYOUT, "GB (1e9 bytes) a rank has, for the recommendation.")
    ] = None,
    calibrate: Annotated[
        bool, _option(OUTPUT, "Time parts of the model here for a few seconds, to estimate times.")
    ] = True,
    device: Annotated[str, _option(OUTPUT, "What to plan and time on: cpu, cuda, cuda:1 or auto.")] = "cpu",
    sweep: Annotated[
        bool, _option(OUTPUT, "Simulate 1 to 4096 pipeline ranks and 2 to 32 blocks as well.", "--sweep")
    ] = False,
    plot: Annotated[
        Path | None, _option(OUTPUT, "Draw the sweep here: a PNG, SVG or PDF file; needs --sweep.")
    ] = None,
    table: Annotated[
        Path | None, _option(OUTPUT, "Write the sweep here as CSV; needs --sweep.", "--csv")
    ] = None,
    as_json: Annotated[bool, _option(OUTPUT, "Print everything as JSON instead.", "--json")] = False,
    verbose: VerboseFlag = False,
) -> None:
    """Say what a model with reads will cost: parameters, memory, traffic and time, before any run."""
    set_verbosity(verbose=verbose)
    if not sweep and (plot or table):
        raise UserError(f"--{'plot' if plot else 'csv'} shows the sweep, so it needs --sweep; add it")
    if plot is not None:
        from attention_residuals.planner import plots  # noqa: F401  raises at once without matplotlib
    given = {"mode": mode, "num_blocks": num_blocks, "sublayers_per_block": sublayers_per_block}
    given = {name: value for name, value in given.items() if value is not None}
    given |= parse_assignments("--variant", variant or [], "activation=sigmoid")
    limit = None if memory_limit is None else memory_limit * GIGABYTE
    if limit is not None and limit <= 0:
        raise UserError(f"--memory-limit must be above 0 GB, got {memory_limit}")
    try:
        layout = make_layout(
            pipeline_ranks=pipeline_ranks,
            virtual_stages=virtual_stages,
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
            fsdp=fsdp,
            batch=batch_size,
            context=context,
            microbatches=microbatches,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            cache=cache,
            prefill_chunk=prefill_chunk,
            bandwidth=bandwidth,
        )
        planned = load_planned(model)
        settings = settings_of(planned, given)
        planner = make_planner(planned, layout, settings, device=device, timed=calibrate)
        _report(planner, settings, limit, as_json=as_json, sweep=sweep, plot=plot, table=table)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def make_layout(**fields: Any) -> Layout:
    from attention_residuals.planner.layout import Layout

    return Layout(**fields)


def load_planned(model: str) -> PlainModel:
    from attention_residuals.planner.plain_model import plain_model

    return plain_model(model)


def settings_of(planned: PlainModel, given: dict[str, Any]) -> AttnResConfig:
    """The reads that the options ask for, or else those that the model was saved with, or 8 blocks."""
    from attention_residuals.config import AttnResConfig

    if not given and planned.attn_res is not None:
        return planned.attn_res
    return AttnResConfig.from_dict(given)


def make_planner(
    planned: PlainModel, layout: Layout, settings: AttnResConfig, *, device: str, timed: bool
) -> Planner:
    from attention_residuals.analysis.load_model import choose_device
    from attention_residuals.planner.prediction import Planner

    planner = Planner(planned, layout, device=str(choose_device(device)))
    if timed:
        planner.calibrate(settings)
    return planner


def _report(
    planner: Planner,
    settings: AttnResConfig,
    memory_limit: float | None,
    *,
    as_json: bool,
    sweep: bool,
    plot: Path | None,
    table: Path | None,
) -> None:
    from rich.console import Console

    from attention_residuals.planner.recommend import recommend
    from attention_residuals.planner.sweep import layer_seconds, simulate
    from attention_residuals.planner.table import print_prediction, print_recommendation

    found = planner.predict(settings)
    advice = recommend(planner, settings, memory_limit=memory_limit)
    points = []
    if sweep:
        points = simulate(
            planner.layout,
            num_layers=planner.model.num_layers,
            width=planner.model.width,
            sublayers_per_layer=planner.model.family.sublayers_per_layer,
            seconds=None if planner.times is None else layer_seconds(planner.times),
        )
    rows = [dataclasses.asdict(point) for point in points]
    if as_json:
        calibration = planner.calibration
        everything = {
            **found.to_dict(),
            "calibration": None if calibration is None else dataclasses.asdict(calibration),
            "recommendation": None if advice is None else dataclasses.asdict(advice),
            **({"sweep": rows} if sweep else {}),
        }
        print(json.dumps(everything, indent=2))
    else:
        console = Console()
        print_prediction(console, found, planner.calibration)
        print_recommendation(console, advice, memory_limit)
    if table is not None:
        _write_table(table, rows)
    if plot is not None:
        _draw(plot, points, found.model)
    if not as_json:
        for path in (table, plot):
            if path is not None:
                print(path)


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UserError(f"--csv {path} can't be written: {error.strerror}") from error


def _draw(path: Path, points: list[Any], title: str) -> None:
    from attention_residuals.planner.plots import draw_sweep

    try:
        draw_sweep(points, title).savefig(path)
    except (OSError, ValueError) as error:  # a folder that is missing, or an ending that is no picture
        raise UserError(f"--plot {path} can't be drawn: {error}") from error
