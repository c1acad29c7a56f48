"""`attnres inspect`: where each read of a model looks in depth, as a table, pictures and a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError
from attention_residuals.training.documents import Documents

if TYPE_CHECKING:
    from attention_residuals.analysis.summary import DepthSummary


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, as attnres train writes it.")],
    prompt: Annotated[str | None, typer.Option(help="Text that the model reads.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text, JSON lines or Parquet file or folder to read instead.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field of JSON lines and Parquet rows that holds the text.")
    ] = "text",
    max_tokens: Annotated[int, typer.Option(min=1, help="Read at most this many tokens.")] = 512,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where pictures and report.html go. (default: MODEL/report)")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Measure what each source is worth: a forward for each cell of the map."
        ),
    ] = False,
    over_training: Annotated[
        bool, typer.Option("--over-training", help="Follow the reads through the run's checkpoints.")
    ] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write the numbers of every token as Parquet too.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    verbose: VerboseFlag = False,
) -> None:
    """Show where each read looks in depth, and write pictures and a report."""
    text = read_text(prompt, data, text_field, max_tokens)
    if verbose:
        set_verbosity(verbose=True)
    # first, since it raises at once where matplotlib is missing
    from attention_residuals.analysis.load_model import encode, load_model, token_texts
    from attention_residuals.analysis.report import report_on

    loaded = load_model(model, device=device, dtype=dtype)
    input_ids = encode(loaded, text, max_tokens=max_tokens)
    history = None
    if over_training:
        from attention_residuals.analysis.over_training import depth_over_training

        history = depth_over_training(model, text, max_tokens=max_tokens, device=device, dtype=dtype)
    metrics = model / "metrics.jsonl"
    report = report_on(
        loaded.model,
        input_ids,
        output_dir or model / "report",
        tokens=token_texts(loaded, input_ids),
        name=model.resolve().name,
        training_metrics=metrics if metrics.is_file() else None,
        history=history,
        ablate=ablate,
        tables=parquet,
    )
    _print_table(report.summary)
    for path in (*report.pictures, *report.tables, report.page):
        print(path)


def read_text(prompt: str | None, data: Path | None, text_field: str, max_tokens: int) -> str:
    """The prompt, or as many of the first documents of `data` as surely hold `max_tokens`.

    Raises:
        UserError: both or neither are given, or the data is missing, empty or of an unknown kind.
    """
    if (prompt is None) == (data is None):
        given = "neither" if prompt is None else "both"
        raise UserError(f"give exactly one of --prompt and --data, got {given}; try --prompt 'Once upon'")
    if data is None:
        assert prompt is not None
        return prompt
    if not data.exists():  # asked first, since training takes other names for data sets to download
        raise UserError(f"--data {data} does not exist; check the path")
    # a token is seldom longer than this, and a long text need not be tokenised to its end
    enough = 64 * max_tokens
    texts: list[str] = []
    for document in Documents([str(data)], text_field):
        texts.append(document[:enough])
        enough -= len(texts[-1])
        if enough <= 0:
            break
    if not texts:
        raise UserError(f"--data {data} holds no text; give a file that does")
    return "\n\n".join(texts)


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
