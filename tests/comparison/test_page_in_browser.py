"""The comparison's page in a real browser: how it fits, what the keyboard reaches, and no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_scaling import runs

from attention_residuals.analysis.plots import save_picture
from attention_residuals.comparison import page, plots
from attention_residuals.comparison.results import RunRecord, summarise_arms
from attention_residuals.comparison.scaling import fit_scaling
from browser import DARK, HEIGHT, LIGHT, WIDTH, needs_browser, probe, visit

pytestmark = needs_browser
REASON = "training has diverged at step 3: the loss is not a finite number, so try a smaller learning rate"

# What scrolls is focused one after the other, then scrolled to its end.
PROBE = """
const found = { width: innerWidth, needed: document.scrollingElement.scrollWidth };
found.pictures = [...document.images].map((image) => image.complete && image.naturalWidth);
found.shown = [...document.images].map((image) => image.getBoundingClientRect().width);
const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
const wide = [...document.querySelectorAll("*")].filter((element) =>
  element.scrollWidth > element.clientWidth && scrolls(element));
found.scrolled = wide.map((element) => {
  element.focus({ focusVisible: true });
  element.scrollLeft = element.scrollWidth;
  return { name: element.getAttribute("aria-label"), focused: document.activeElement === element,
    outline: getComputedStyle(element).outlineStyle, moved: element.scrollLeft };
});
const frame = document.querySelector("main > .scroll:last-child");
const name = frame.querySelector("tbody th").getBoundingClientRect();
found.first = name.left - frame.getBoundingClientRect().left;
found.reason = [...document.querySelectorAll("td.text")].map((cell) => cell.getBoundingClientRect().width);
found.free = frame.clientWidth - name.width;
parent.postMessage(JSON.stringify(found), "*");
"""


def failed_run() -> RunRecord:
    return RunRecord(
        name="a-quite-long-arm-name-lr-0.004-seed-1", arm="full", size="a", seed=2, learning_rate=None,
        status="failed", reason=REASON,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two arms at four sizes, three tables and a picture, with one run that failed."""
    records = runs({"baseline": (2.0, 0.06), "full": (1.9, 0.06)}, noise=0.01)
    results = summarise_arms(records)
    scaling = fit_scaling(results, records)
    path = save_picture(plots.draw_scaling(scaling), tmp_path_factory.mktemp("pictures") / "scaling.png")
    smallest = [result for result in results if result.size == "a"]
    sections = [
        page.heading("a"),
        page.loss_table(smallest),
        page.difference_table(smallest),
        page.sweep_table(smallest),
        page.scaling_table(scaling),
        page.picture(path, "Loss against compute", "Lines are power laws."),
    ]
    title = "Comparison of baseline, a-name-that-is-longer-than-a-phone-is-wide-and-has-no-blank"
    return page.render_page(title, ["A note."], sections, [*records, failed_run()], "Made up.")


@pytest.fixture(scope="module")
def probed(written: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script finds that the page itself would not let run."""
    policy = "style-src 'unsafe-inline'"
    assert policy in written and "<script" not in written
    text = written.replace(policy, f"{policy}; script-src 'unsafe-inline'")
    return probe(
        text.replace("</body>", f"<script>{PROBE}</script></body>"), tmp_path_factory.mktemp("probed")
    )


def test_it_is_drawn_in_light_and_dark_without_errors_or_requests(written: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(written, encoding="utf-8")
    light, dark = (visit(path, tmp_path / str(scheme), scheme) for scheme in (LIGHT, DARK))
    for seen in (light, dark):
        assert not seen.console and not seen.requests
        assert seen.picture.shape == (HEIGHT, WIDTH, 3)
        assert len(np.unique(seen.picture.reshape(-1, 3), axis=0)) > 100
    assert light.picture.mean() > 0.8 and dark.picture.mean() < 0.5  # the picture stays on white
    assert light.picture[0].mean() > 0.9 and dark.picture[0].mean() < 0.2
    assert light.picture[-1].mean() > 0.9 and dark.picture[-1].mean() < 0.2


def test_nothing_is_wider_than_a_phone(probed: dict[str, Any]) -> None:
    assert probed["width"] == WIDTH and probed["needed"] <= WIDTH
    assert all(probed["pictures"]) and len(probed["pictures"]) == 1
    assert min(probed["shown"]) > WIDTH  # labels stay readable: the picture scrolls in its frame


def test_what_scrolls_is_reached_by_keyboard_shows_it_and_has_a_name(
    written: str, probed: dict[str, Any]
) -> None:
    names = [scrolled["name"] for scrolled in probed["scrolled"]]
    assert {"Final losses", "Loss against compute", "Every run"} <= set(names) == set(filter(None, names))
    assert len(names) == len(set(names))
    for scrolled in probed["scrolled"]:
        assert scrolled["focused"] and scrolled["outline"] == "solid" and scrolled["moved"] > 0
    regions = re.findall(r'<div class="(?:scroll|picture)"(.*?)>', written)
    assert len(regions) == 6 and all('tabindex="0" role="region"' in region for region in regions)


def test_a_row_keeps_its_name_in_sight_and_a_reason_fits_beside_it(probed: dict[str, Any]) -> None:
    assert 0 <= probed["first"] <= 2  # after scrolling to the end
    assert max(probed["reason"]) <= probed["free"]
