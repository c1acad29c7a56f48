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
from attention_residuals.analysis.token_view import TokenView, measure_options
from attention_residuals.config import AttnResConfig

MAP_CAPTION = (
    "Each row of the map is a read, which mixes the sources in its columns into the input of one "
    "sublayer; a row adds up to 1. Before training every row is uniform. A coloured first column means "
    "that the embedding is kept deep into the model, a coloured diagonal that sublayers listen to their "
    "neighbours, and a coloured cell far from both is a skip."
)
WINDOW_CAPTION = (
    "A read sees the embedding and the last {window} of its other sources; an empty place is a source "
    "outside this window."
)
HEADS_CAPTION = (
    "Every read has {heads} heads with depth weights of their own. Shown is the mean over heads; entropy, "
    "effective sources and locality are those of this mean."
)
ACTIVATION_CAPTION = (
    "With activation={activation} a row need not add up to 1, so entropy and effective sources say little."
)

READS_COLUMNS = (
    "read",
    "sources",
    "top source",
    "its weight",
    "entropy (nats)",
    "entropy / log N",
    "effective sources",
    "locality",
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
    view: TokenView,
    pictures: Sequence[Picture],
    *,
    title: str,
    config: AttnResConfig,
    facts: Mapping[str, str],
    footer: str,
) -> str:
    """The whole page; every string is escaped here, so callers pass plain text."""
    template = Template(
        resources.files("attention_residuals.analysis").joinpath("report.html").read_text("utf-8")
    )
    is_whole = view.num_shown == summary.num_tokens
    note = "" if is_whole else f"The first {view.num_shown:,} of {summary.num_tokens:,} tokens."
    return template.substitute(
        title=escape(title),
        facts="\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()),
        map_caption=escape(map_caption(config)),
        measures=measure_options(),
        tokens=view.text,
        tokens_note=note,
        map_table=view.map_table,
        figures="\n".join(_figure(picture) for picture in pictures),
        reads_table=_reads_table(summary),
        data=view.data,
        footer=escape(footer),
    )


def map_caption(config: AttnResConfig) -> str:
    """How to read the depth map of such a model."""
    sentences = [MAP_CAPTION]
    if config.window is not None:
        sentences.append(WINDOW_CAPTION.format(window=config.window))
    if config.heads > 1:
        sentences.append(HEADS_CAPTION.format(heads=config.heads))
    if config.activation != "softmax":
        sentences.append(ACTIVATION_CAPTION.format(activation=config.activation))
    return " ".join(sentences)


def _figure(picture: Picture) -> str:
    return (
        f"<section>\n<h2>{escape(picture.heading)}</h2>\n<figure>\n"
        f"{framed(picture.path, picture.heading, picture.alt)}\n"
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>\n</section>"
    )


def framed(path: Path, name: str, alt: str) -> str:
    """A PNG file inside a page, in a frame of that name which the keyboard reaches."""
    png = path.read_bytes()
    width = int.from_bytes(png[16:20], "big")  # from the PNG header
    # no smaller than this, since labels could not be read then: the picture scrolls in its frame instead
    least = 3 * width // 4
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<div class="picture" tabindex="0" role="region" aria-label="{escape(name)}">'
        f'<img style="min-width: {least}px" src="data:image/png;base64,{data}" alt="{escape(alt)}"></div>'
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
            summary.locality[read],
            summary.embedding_weight[read],
            summary.input_norm[read],
            output,
        )
        cells = [f"<td>{summary.num_sources[read]}</td>", f'<td class="name">{escape(source)}</td>']
        cells += [f"<td>{_number(value)}</td>" for value in numbers]
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    caption = f"Means over {summary.num_tokens} tokens, one row per read."
    return _table(caption, READS_COLUMNS, rows)


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
