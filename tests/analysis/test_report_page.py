"""The page: whole, escaped, and in need of nothing beside it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from records import make_record

from attention_residuals.analysis import plots
from attention_residuals.analysis.report_page import Picture, render_page
from attention_residuals.analysis.summary import summarise

VOID = {"meta", "img", "br", "link"}


class Reader(HTMLParser):
    """Checks that tags close in order, and gathers attributes and the text of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture
def page(tmp_path: Path) -> str:
    summary = summarise(make_record(8, num_blocks=4))
    path = plots.save_picture(plots.draw_depth_map(summary), tmp_path / "depth_map.png")
    return render_page(
        summary,
        [Picture(path, "Depth <map>", 'a "map"', "caption & more")],
        title="<b>run</b>",
        facts={"width": "64", "a<b": "c&d"},
        text="<script>alert('x')</script> $title",
        footer="made by hand",
    )


def test_page_parses_and_holds_picture_and_numbers(page: str) -> None:
    reader = read(page)
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 1
    assert images[0]["src"].startswith("data:image/png;base64,iVBOR") and images[0]["alt"] == 'a "map"'
    summary = summarise(make_record(8, num_blocks=4))
    assert f"{summary.entropy[5]:.3f}" in reader.cells
    assert f"{summary.depth_map[8, 4]:.4f}" in reader.cells
    assert reader.cells.count("layer 3 attention") == 2  # a row in each table
    assert {"header", "main", "footer", "figure", "figcaption", "table", "caption"} <= {
        t for t, _ in reader.tags
    }


def test_page_needs_nothing_beside_it(page: str) -> None:
    for _, attributes in read(page).tags:
        for name in ("src", "href", "srcset", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"https?://|@import|url\(|<script", page)


def test_page_fits_phones_and_dark_rooms(page: str) -> None:
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and '<html lang="en">' in page


def test_text_is_escaped(page: str) -> None:
    assert (
        "&lt;b&gt;run&lt;/b&gt;" in page
        and "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; $title" in page
    )
    assert "<dt>a&lt;b</dt><dd>c&amp;d</dd>" in page and "Depth &lt;map&gt;" in page


def test_long_texts_are_cut_and_say_so() -> None:
    summary = summarise(make_record(4, num_blocks=2))
    page = render_page(summary, [], title="t", facts={}, text="a" * 9000, footer="")
    assert "(9000 characters in all)" in page and "a" * 4001 not in page
