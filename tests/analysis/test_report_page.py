"""The page: whole, escaped, and in need of nothing beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from page_reader import read
from records import make_record

from attention_residuals.analysis import plots
from attention_residuals.analysis.report_page import Picture, render_page
from attention_residuals.analysis.summary import summarise
from attention_residuals.analysis.token_view import MEASURES, render_tokens


@pytest.fixture
def page(tmp_path: Path) -> str:
    record = make_record(8, num_blocks=4)
    summary = summarise(record)
    path = plots.save_picture(plots.draw_entropy_and_norms(summary), tmp_path / "entropy_and_norms.png")
    return render_page(
        summary,
        render_tokens(record, summary, ["<script>alert('x')</script>", " $title", "\n"]),
        [Picture(path, "Entropy <and> norms", 'a "chart"', "caption & more")],
        title="<b>run</b>",
        config=record.plan.config,
        facts={"width": "64", "a<b": "c&d"},
        footer="made by hand",
    )


def test_page_parses_and_holds_picture_and_numbers(page: str) -> None:
    reader = read(page)
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 1
    assert images[0]["src"].startswith("data:image/png;base64,iVBOR") and images[0]["alt"] == 'a "chart"'
    summary = summarise(make_record(8, num_blocks=4))
    assert f"{summary.entropy[5]:.3f}" in reader.cells and f"{summary.locality[5]:.3f}" in reader.cells
    assert f"{summary.depth_map[8, 4]:.2f}" in reader.cells
    assert reader.cells.count("layer 3 attention") == 2  # a row in the map and one in the table
    assert {"header", "main", "footer", "figure", "figcaption", "table", "caption"} <= {
        t for t, _ in reader.tags
    }


def test_page_needs_nothing_beside_it_and_may_load_nothing(page: str) -> None:
    for _, attributes in read(page).tags:
        for name in ("src", "href", "srcset", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"https?://|@import|url\(|\bimport\(|fetch\(", page)
    (policy,) = (a["content"] for _, a in read(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_the_script_finds_every_element_it_asks_for(page: str) -> None:
    script = page[page.rindex("<script>") :]
    asked = set(re.findall(r'byId\("(\w+)"\)', script))
    tags = read(page).tags
    assert len(asked) >= 7 and asked <= {attributes.get("id") for _, attributes in tags}
    options = [attributes["value"] for tag, attributes in tags if tag == "option"]
    assert options == ["weight", *MEASURES]
    (start,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert set(json.loads(start)["measures"]) == set(MEASURES)


def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(page: str) -> None:
    regions = [attributes for _, attributes in read(page).tags if attributes.get("role") == "region"]
    assert len(regions) == 2
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    assert ":focus" in page and "outline: 3px solid" in page


def test_page_fits_phones_and_dark_rooms(page: str) -> None:
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and '<html lang="en">' in page


def test_text_is_escaped(page: str) -> None:
    assert "&lt;b&gt;run&lt;/b&gt;" in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;</span>" in page and " $title</span>" in page
    assert "<dt>a&lt;b</dt><dd>c&amp;d</dd>" in page and "Entropy &lt;and&gt;" in page


def test_a_text_that_is_not_shown_to_its_end_says_so() -> None:
    record = make_record(4, num_blocks=2, batch=1, tokens=4)
    summary = summarise(record)
    view = render_tokens(record, summary, list("abcd"))
    plain = {"title": "t", "config": record.plan.config, "facts": {}, "footer": ""}
    shown = render_page(summary, view._replace(num_shown=2), [], **plain)
    assert "The first 2 of 4 tokens." in shown
    assert "The first" not in render_page(summary, view, [], **plain)
