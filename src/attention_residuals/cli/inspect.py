"""`attnres inspect`: where each read of a model looks in depth, as a table, pictures and a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.analysis.summary import DepthSummary


def inspect(
    model: Annotated[Path, typer.Argument(help="Model folder, such as the output of attnres train.")],
    prompt: Annotated[str | None, typer.Option(help="Text that the model reads.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text file that the model reads instead.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Read at most this many tokens.")] = 512,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where pictures and report.html go.  [default: MODEL/report]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    verbose: VerboseFlag = False,
) -> None:
    """Show where each read looks in depth, and write pictures and a report."""
    text = read_text(prompt, data, max_tokens)
    if verbose:
        set_verbosity(verbose=True)
    # first, since it raises at once where matplotlib is missing
    from attention_residuals.analysis.load_model import encode, load_model
    from attention_residuals.analysis.report import report_on

    loaded = load_model(model, device=device, dtype=dtype)
    input_ids = encode(loaded, text, max_tokens=max_tokens)
    metrics = model / "metrics.jsonl"
    report = report_on(
        loaded.model,
        input_ids,
        output_dir or model / "report",
        text=str(loaded.tokenizer.decode(input_ids[0])),
        name=model.resolve().name,
        training_metrics=metrics if metrics.is_file() else None,
    )
    _print_table(report.summary)
    for path in (*report.pictures, report.page):
        print(path)


def read_text(prompt: str | None, data: Path | None, max_tokens: int) -> str:
    """The prompt, or the beginning of the file that surely holds `max_tokens`.

    Raises:
        UserError: both or neither are given, or the file is missing, empty or not text.
    """
    if (prompt is None) == (data is None):
        given = "neither" if prompt is None else "both"
        raise UserError(f"give exactly one of --prompt and --data, got {given}; try --prompt 'Once upon'")
    if data is None:
        assert prompt is not None
        return prompt
    try:
        with data.open(encoding="utf-8") as file:
            # a token is seldom longer than this, and a long file need not be tokenised to its end
            text = file.read(64 * max_tokens)
    except OSError as error:
        raise UserError(f"data file {data} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data file {data} is not UTF-8 text: {error.reason}; give a text file") from error
    if not text.strip():
        raise UserError(f"data file {data} holds no text; give one that does")
    return text


def _print_table(summary: DepthSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"depth weights, mean over {summary.num_tokens} tokens", title_justify="left")
    table.add_column("read", no_wrap=True)
    table.add_column("top source", no_wrap=True)
    for name in ("weight", "entropy", "of log N"):
        table.add_column(name, justify="right", no_wrap=True)
    for read, name in enumerate(summary.read_names):
        source, weight = summary.top_source(read)
        share = summary.normalised_entropy[read]
        shown = "–" if math.isnan(share) else f"{share:.0%}"
        table.add_row(name, source, f"{weight:.3f}", f"{summary.entropy[read]:.3f}", shown)
    Console().print(table)
