"""From a record and its tokens to the live part of the page: the text, the depth map, the numbers of both.

The markup as it stands shows the means. The numbers of every token ride along as base64; the page's script,
at the end of report.html, puts them into map and text when somebody points at a token or a cell.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attention_residuals.analysis.source_columns import shown_source_names, source_columns
from attention_residuals.analysis.summary import DepthSummary
from attention_residuals.analysis.tables import measure_table

if TYPE_CHECKING:
    from attention_residuals.analysis.record import DepthRecord

MOST_WEIGHTS = 2_000_000  # two bytes each; longer texts are shown from their start
MOST_NUMBERS = 400  # cells of a map that have room for their number
WEIGHT_LEVELS = 65535
# column of `measure_table` -> what the page calls it
MEASURES = {
    "effective_sources": "effective sources",
    "entropy": "entropy (nats)",
    "locality": "locality (1: newest source, 0: embedding)",
    "input_norm": "norm before: of the mixture a read makes",
    "output_norm": "norm after: of what the sublayer writes",
}


class TokenView(NamedTuple):
    """Markup of the text and of the map, the data for the script, and how many tokens these show."""

    text: str
    map_table: str
    data: str
    num_shown: int


def render_tokens(record: DepthRecord, summary: DepthSummary, tokens: Sequence[str]) -> TokenView:
    """The first row of the batch, token by token; `tokens` are its T texts.

    Raises:
        ValueError: `tokens` are not as many as were recorded.
    """
    num_tokens = record.weights[0].shape[2]
    if len(tokens) != num_tokens:
        raise ValueError(f"tokens must be the {num_tokens} that were recorded, got {len(tokens)}")
    num_shown = min(num_tokens, max(1, MOST_WEIGHTS // int(summary.num_sources.sum())))
    return TokenView(
        text="".join(_token(i, text) for i, text in enumerate(tokens[:num_shown])),
        map_table=_map_table(record, summary),
        data=_data(record, summary, num_shown),
        num_shown=num_shown,
    )


def measure_options() -> str:
    """The choices of what colours the text."""
    return "".join(f'<option value="{key}">{escape(name)}</option>' for key, name in MEASURES.items())


def _token(index: int, text: str) -> str:
    spoken = text.strip() or {"\n": "line break", "": "empty"}.get(text, "blank")
    shown = escape(text).replace("\n", "↵\n") or "∅"
    # Tab reaches the first one, and arrow keys move on from there
    return (
        f'<span class="token" role="button" tabindex="{-1 if index else 0}" data-token="{index}" '
        f'aria-label="token {index}: {escape(spoken)}">{shown}</span>'
    )


def _map_table(record: DepthRecord, summary: DepthSummary) -> str:
    columns = [source_columns(record.plan, read) for read in range(len(summary.read_names))]
    has_numbers = sum(seen[-1] + 1 for seen in columns) <= MOST_NUMBERS
    last = len(columns) - 1
    first_reached = (
        last,
        int(np.nanargmax(summary.depth_map[last])),
    )  # by Tab; arrow keys move on from there
    rows = []
    for read, name in enumerate(summary.read_names):
        cells: list[str] = []
        sources = shown_source_names(record.plan, read)
        for place, (column, source) in enumerate(zip(columns[read], sources, strict=True)):
            weight = summary.depth_map[read, column]
            cells += ["<td></td>"] * (column - len(cells))  # outside the window
            marked = "cell partial" if summary.is_partial[read, column] else "cell"
            cells.append(
                f'<td class="{marked}" tabindex="{-(first_reached != (read, column))}" data-read="{read}" '
                f'data-source="{place}" data-mean="{weight:.4f}" style="--heat:{_heat(weight):.3f}" '
                f'aria-label="{escape(name)} on {escape(source)}: {weight:.3f}">'
                f"{f'{weight:.2f}' if has_numbers else ''}</td>"
            )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in summary.source_names)
    kind = "map" if has_numbers else "map small"
    return (
        f'<table class="{kind}" id="map" role="grid" aria-label="Depth weights, reads by sources">\n'
        f'<thead><tr><th scope="col">read</th>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody>\n</table>"
    )


def _data(record: DepthRecord, summary: DepthSummary, num_shown: int) -> str:
    weights = np.concatenate([weights[:, 0, :num_shown].flatten().numpy() for weights in record.weights])
    # with activation="linear" weights may lie outside 0 to 1
    low, top = min(0.0, float(weights.min())), max(1.0, float(weights.max()))
    step = (top - low) / WEIGHT_LEVELS
    levels = np.rint((weights - low) / step).astype("<u2")
    table = measure_table(record)
    shape = (len(summary.read_names), *record.weights[0].shape[1:])
    data: dict[str, Any] = {
        "reads": summary.read_names,
        "sources": [shown_source_names(record.plan, read) for read in range(len(summary.read_names))],
        "tokens": num_shown,
        "weights": _base64(levels),
        "low": low,
        "step": step,
        "measures": {
            key: _base64(table[key].reshape(shape)[:, 0, :num_shown].astype("<f4")) for key in MEASURES
        },
    }
    # inside a script element only "</" could end it early
    return json.dumps(data).replace("</", "<\\/")


def _heat(weight: float) -> float:
    """How strongly a cell is coloured."""
    return math.sqrt(min(max(weight, 0.0), 1.0))


def _base64(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")
