"""From a prediction to tables on the terminal; what is counted, timed and assumed is told apart."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from attention_residuals.planner.calibration import Calibration
from attention_residuals.planner.prediction import Prediction
from attention_residuals.planner.recommend import Recommendation
from attention_residuals.training.summary import describe_plan, format_bytes

SHOWN_RANKS = 8  # a longer pipeline shows its first ranks and its last


def print_prediction(console: Console, found: Prediction, calibration: Calibration | None) -> None:
    """Print the tables of one prediction."""
    console.print(_overview(found))
    console.print(_memory_table(found))
    if found.times is None:
        console.print("times: not predicted; leave out --no-calibrate to time parts of the model here")
        return
    assert calibration is not None
    console.print(_time_table(found))
    console.print(
        f"timed: the parts of the plain model and reads on {calibration.device}, {calibration.threads} "
        f"thread{'s' if calibration.threads > 1 else ''}, {calibration.batch} x {calibration.context} tokens "
        f"({calibration.flops_per_second / 1e9:.3g} GFLOP/s in layers; copies "
        f"{calibration.copy_bandwidth / 1e9:.3g} GB/s)"
    )
    assumed = [f"hops at {found.layout.bandwidth:g} GB/s, nothing beside them"] if found.hops else []
    assumed += ["tensor parallelism divides evenly"] if found.layout.tensor_parallel > 1 else []
    if assumed:
        console.print(f"assumed: every rank is like this machine; {'; '.join(assumed)}")


def print_recommendation(console: Console, advice: Recommendation | None, memory_limit: float | None) -> None:
    """Print what to take, or that nothing fits."""
    if advice is None:
        assert memory_limit is not None  # everything fits without one
        console.print(
            f"recommended: none; even one block needs more than {memory_limit / 1e9:g} GB on the fullest "
            "rank. Take more ranks, fewer rows, or --gradient-checkpointing"
        )
        return
    split = "" if len(advice.split) == 1 else f", layers per stage {_listed(advice.split)}"
    console.print(
        f"recommended: {advice.num_blocks} block{'s' if advice.num_blocks > 1 else ''}{split}: "
        f"{advice.reason}",
        soft_wrap=True,
    )


def _overview(found: Prediction) -> Table:
    layout, share = found.layout, found.read_parameters / found.parameters
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("model", f"{found.model}: {found.parameters:,} parameters")
    table.add_row("depth plan", describe_plan(found.depth))
    table.add_row("parameters added", f"{found.read_parameters:,} ({share:.4%})")
    table.add_row(
        "layout",
        f"P {layout.pipeline_ranks} x V {layout.virtual_stages}, TP {layout.tensor_parallel}, "
        f"DP {layout.data_parallel}{' with FSDP' if layout.fsdp else ''}; "
        f"{layout.num_microbatches} x {layout.batch} rows of {layout.context:,} tokens "
        f"a step and replica; {layout.dtype}",
    )
    if len(found.split) > 1:
        table.add_row("layers per stage", _listed(found.split))
    table.add_row(
        "memory traffic",
        f"{found.traffic.per_sublayer:.2f} D a token and sublayer read by read, "
        f"{found.traffic.two_phase_per_sublayer:.2f} D in two phases",
    )
    chunk = min(layout.prefill_chunk or layout.context, layout.context)
    table.add_row("prefill", f"{format_bytes(found.prefill_blocks)} of sources for {chunk:,} tokens a row")
    if found.hops:
        tensors = [hop.tensors for hop in found.hops]
        largest = format_bytes(max(hop.bytes for hop in found.hops))
        table.add_row(
            "hops",
            f"{min(tensors)} to {max(tensors)} tensors, the largest {largest}; "
            f"{format_bytes(found.hop_bytes_per_step)} a step and replica forward and backward (plain: "
            f"{format_bytes(found.plain_hop_bytes_per_step)})",
        )
    return table


def _memory_table(found: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, title="memory of a training step", title_justify="left")
    table.add_column("rank", justify="right")
    for column in ("weights and states", "activations", "of which blocks", "total", "plain model"):
        table.add_column(column, justify="right")
    ranks = len(found.memory)
    shown = range(ranks) if ranks <= SHOWN_RANKS else (*range(SHOWN_RANKS - 1), ranks - 1)
    for rank in shown:
        now, plain = found.memory[rank], found.plain_memory[rank]
        table.add_row(
            str(rank),
            format_bytes(now.weights + now.gradients + now.optimizer),
            format_bytes(now.activations + now.recomputed),
            format_bytes(now.blocks),
            format_bytes(now.total),
            format_bytes(plain.total),
        )
    return table


def _time_table(found: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, title="estimated time", title_justify="left")
    table.add_column("")
    for column in ("plain model", "with reads", "overhead"):
        table.add_column(column, justify="right")
    for what, estimate in (found.times or {}).items():
        table.add_row(
            what, _seconds(estimate.plain), _seconds(estimate.reads), f"{100 * estimate.overhead:+.1f}%"
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _listed(numbers: tuple[int, ...]) -> str:
    if len(numbers) <= 2 * SHOWN_RANKS:
        return ", ".join(map(str, numbers))
    return ", ".join(map(str, numbers[:SHOWN_RANKS])) + f" ... {numbers[-1]}"
