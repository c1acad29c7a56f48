"""From a summary and its pictures to one HTML page that needs nothing beside it and no network."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from attention_residuals.analysis.summary import DepthSummary

LONGEST_TEXT = 4000  # characters of the read text that the page shows

READS_COLUMNS = (
    "read",
    "sources",
    "top source",
    "its weight",
    "entropy (nats)",
    "entropy / log N",
    "effective sources",
    "weight on embedding",
    "input norm",
    "output norm",
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG with its heading, what it shows for those who cannot see it, and how to read it."""

    path: Path
    heading: str
    alt: str
    caption: str


def render_page(
    summary: DepthSummary,
    pictures: Sequence[Picture],
    *,
    title: str,
    facts: Mapping[str, str],
    text: str,
    footer: str,
) -> str:
    """The whole page; every string is escaped here, so callers pass plain text."""
    template = Template(
        resources.files("attention_residuals.analysis").joinpath("report.html").read_text("utf-8")
    )
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text)} characters in all)"
    return template.substitute(
        title=escape(title),
        facts="\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()),
        text=escape(shown),
        figures="\n".join(_figure(picture) for picture in pictures),
        reads_table=_reads_table(summary),
        map_table=_map_table(summary),
        footer=escape(footer),
    )


def _figure(picture: Picture) -> str:
    png = picture.path.read_bytes()
    width = int.from_bytes(png[16:20], "big")  # from the PNG header
    # a wide picture keeps its size and scrolls, since shrunk labels could not be read
    fits = ' class="fits"' if width <= 1000 else ""
    data = base64.b64encode(png).decode("ascii")
    return (
        f"<section>\n<h2>{escape(picture.heading)}</h2>\n<figure>\n"
        f'<div class="picture">'
        f'<img{fits} src="data:image/png;base64,{data}" alt="{escape(picture.alt)}"></div>\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>\n</section>"
    )


def _reads_table(summary: DepthSummary) -> str:
    rows = []
    for read, name in enumerate(summary.read_names):
        source, weight = summary.top_source(read)
        output = summary.output_norm[read] if read < len(summary.output_norm) else math.nan
        numbers = (
            weight,
            summary.entropy[read],
            summary.normalised_entropy[read],
            summary.effective_sources[read],
            summary.embedding_weight[read],
            summary.input_norm[read],
            output,
        )
        cells = [f"<td>{summary.num_sources[read]}</td>", f'<td class="name">{escape(source)}</td>']
        cells += [f"<td>{_number(value)}</td>" for value in numbers]
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    caption = f"Means over {summary.num_tokens} tokens, one row per read."
    return _table(caption, READS_COLUMNS, rows)


def _map_table(summary: DepthSummary) -> str:
    rows = []
    for read, name in enumerate(summary.read_names):
        cells = []
        for column, weight in enumerate(summary.depth_map[read]):
            mark = ' class="partial"' if summary.is_partial[read, column] else ""
            cells.append(f"<td{mark}>{'' if math.isnan(weight) else f'{weight:.4f}'}</td>")
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    caption = "Underlined: the partial sum of the block that is still open."
    return _table(caption, ("read", *summary.source_names), rows)


def _table(caption: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    return (
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>"
    )


def _number(value: float) -> str:
    """Three decimals, or three digits for large numbers; a dash where there is no such number."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"
