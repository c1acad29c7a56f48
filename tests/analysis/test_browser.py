"""The report in a real browser: what its script renders, how it fits, and that it needs no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_reads import choosing_model, token_ids

from attention_residuals.analysis.record import DepthRecord, record_forward
from attention_residuals.analysis.report import report_on
from attention_residuals.analysis.token_view import MEASURES
from browser import DARK, HEIGHT, LIGHT, WIDTH, needs_browser, probe, visit

pytestmark = needs_browser
WORDS = ["The", "people", "of", "the", "United", "States", "have", "<every>", "reason", "&", "more"]
TOKENS = [f"{word} " for word in WORDS]

# Runs after the page's own script, and tells the page around it what it finds.
PROBE = """
const found = { width: innerWidth, needed: document.scrollingElement.scrollWidth };
const status = () => byId("status").textContent;
const press = (key) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const cells = () => rows.map((row) => row.map((td) => Number(td.textContent)));
const reached = (group) => group.filter((element) => element.tabIndex === 0).length;
found.start = { status: status(), cells: cells(), tokens: reached(tokens), cell: reached(rows.flat()) };
found.pictures = [...document.images].map((image) => image.complete && image.naturalWidth);
tokens[0].focus();
press("ArrowRight");
press("ArrowDown");
press("End");
press("ArrowLeft");
found.token = { index: Number(document.activeElement.dataset.token), status: status(), cells: cells(),
  pressed: tokens.map((span) => span.getAttribute("aria-pressed")), reached: reached(tokens) };
rows[2][0].focus();
press("End");
press("ArrowUp");
const at = document.activeElement.dataset;
found.cell = { read: Number(at.read), source: Number(at.source), status: status(),
  titles: tokens.map((span) => Number(span.title)), reached: reached(rows.flat()) };
byId("measure").value = "entropy";
byId("measure").dispatchEvent(new Event("change"));
found.measure = { status: status(), titles: tokens.map((span) => Number(span.title)) };
press("Escape");
found.end = { status: status(), cells: cells() };
parent.postMessage(JSON.stringify(found), "*");
"""


# What keys reach in a map with gaps: along a row over them, across rows to the nearest column.
WINDOW_PROBE = """
const press = (key) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const td = document.activeElement;
  return [Number(td.dataset.read), td.cellIndex - 1, byId("status").textContent];
};
rows[6][1].focus();
const found = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "ArrowDown", "ArrowDown"].map(press);
parent.postMessage(JSON.stringify(found), "*");
"""


@pytest.fixture(scope="module")
def record() -> DepthRecord:
    return record_forward(choosing_model("Qwen3_5"), token_ids(1, len(TOKENS)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "loss": {4 - step}}}\n' for step in range(1, 4)))
    model, ids = choosing_model("Qwen3_5"), token_ids(1, len(TOKENS))
    report = report_on(
        model, ids, folder / "report", tokens=TOKENS, name="tiny", training_metrics=metrics, ablate=True
    )
    return report.page


@pytest.fixture(scope="module")
def probed(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8").replace("show();\n</script>", f"show();\n{PROBE}</script>")
    return probe(text, tmp_path_factory.mktemp("probed"))


def token_cells(record: DepthRecord, index: int) -> list[list[float]]:
    """Depth weights of one token, as the map shows them: a row per read."""
    return [weights[:, 0, index].tolist() for weights in record.weights]


def assert_shown(cells: list[list[float]], expected: list[list[float]]) -> None:
    for shown, row in zip(cells, expected, strict=True):
        assert shown == pytest.approx(row, abs=0.0051)


def test_the_page_is_drawn_in_light_and_dark_without_errors_or_requests(page: Path, tmp_path: Path) -> None:
    light, dark = (visit(page, tmp_path / str(scheme), scheme) for scheme in (LIGHT, DARK))
    for seen in (light, dark):
        assert not seen.console and not seen.requests
        assert seen.picture.shape == (HEIGHT, WIDTH, 3)
        assert seen.picture.std() > 0.05 and len(np.unique(seen.picture.reshape(-1, 3), axis=0)) > 100
        assert 'id="controls"><label>' in re.sub(r">\s+<", "><", seen.document)  # no longer hidden
        assert "Map: all tokens (mean). Text: depth weight on" in seen.document
    assert light.picture.mean() > 0.8 and dark.picture.mean() < 0.6  # pictures stay on white
    assert light.picture[0].mean() > 0.9 and dark.picture[0].mean() < 0.2


def test_the_checks_see_errors_and_requests(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://pictures.example/x.png"><script>missing();</script>', encoding="utf-8")
    seen = visit(page, tmp_path / "visit")
    assert seen.requests == ("http://pictures.example/x.png",)
    assert len(seen.console) == 1 and "missing is not defined" in seen.console[0]


def test_nothing_is_wider_than_a_phone(probed: dict[str, Any]) -> None:
    assert probed["width"] == WIDTH and probed["needed"] <= WIDTH
    assert len(probed["pictures"]) == 3 and all(probed["pictures"])


def test_the_map_shows_means_then_the_token_that_keys_reach(
    probed: dict[str, Any], record: DepthRecord
) -> None:
    means = [weights[:, 0].mean(-1).tolist() for weights in record.weights]
    assert_shown(probed["start"]["cells"], means)
    assert (probed["start"]["tokens"], probed["start"]["cell"]) == (1, 1)  # one of each in the order of Tab
    token, last = probed["token"], len(TOKENS) - 1
    assert token["index"] == last - 1 and token["reached"] == 1
    assert token["pressed"] == ["true" if i == last - 1 else "false" for i in range(last + 1)]
    assert f'Map: token {last - 1}, "& "' in token["status"]
    assert_shown(token["cells"], token_cells(record, last - 1))
    assert probed["end"]["status"].startswith("Map: all tokens (mean)")
    assert_shown(probed["end"]["cells"], means)


def test_the_text_shows_the_cell_that_keys_reach_and_the_measure_chosen(
    probed: dict[str, Any], record: DepthRecord
) -> None:
    cell = probed["cell"]
    assert (cell["read"], cell["source"]) == (1, 1) and cell["reached"] == 1
    assert "depth weight on block 1 so far at layer 0 mlp" in cell["status"]
    assert cell["titles"] == pytest.approx(record.weights[1][1, 0].tolist(), abs=0.0006)
    table = record.to_measure_table()
    assert probed["measure"]["titles"] == pytest.approx(table["entropy"][table["read"] == 1], abs=0.0006)
    assert f"Text: {MEASURES['entropy']} at layer 0 mlp" in probed["measure"]["status"]


def test_keys_pass_over_sources_outside_a_window(tmp_path: Path) -> None:
    model, ids = choosing_model(mode="full", window=2), token_ids(1, len(TOKENS))
    page = report_on(model, ids, tmp_path / "report", tokens=TOKENS, name="tiny").page
    text = page.read_text(encoding="utf-8").replace("show();\n</script>", f"show();\n{WINDOW_PROBE}</script>")
    found = probe(text, tmp_path)
    # reads 5 to 8 see the embedding and sublayers 4 and 5, 5 and 6, 6 and 7, 7 and 8
    assert [at[:2] for at in found] == [[6, 0], [6, 5], [5, 5], [6, 5], [7, 6], [8, 7]]
    assert "depth weight on sublayer 7 at final" in found[-1][2]
