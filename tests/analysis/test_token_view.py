"""The live part of the page: every number of the record arrives there, and the keyboard reaches it."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch
from page_reader import read
from records import make_record

from attention_residuals.analysis import token_view
from attention_residuals.analysis.summary import summarise
from attention_residuals.analysis.tables import measure_table

TOKENS = ["def", " <b>", "\n", " ", "é"]


@pytest.fixture
def record():
    return make_record(8, num_blocks=4, tokens=5, batch=2)


def numbers(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_weights_and_measures_of_every_token_of_the_first_row(record) -> None:
    data = json.loads(token_view.render_tokens(record, summarise(record), TOKENS).data)
    assert data["tokens"] == 5 and data["reads"] == record.read_names
    assert data["sources"][3] == ["embedding", "block 1", "block 2 so far"]
    expected = torch.cat([weights[:, 0].flatten() for weights in record.weights]).numpy()
    np.testing.assert_allclose(numbers(data["weights"], "<u2") / 65535, expected, atol=1e-5)
    table = measure_table(record)
    for name, text in data["measures"].items():
        found = numbers(text, "<f4").reshape(9, 5)
        for read_number in range(9):
            at = (table["read"] == read_number) & (table["row"] == 0)
            np.testing.assert_allclose(found[read_number], table[name][at], rtol=1e-6)


def test_each_token_and_cell_can_be_reached_and_says_what_it_is(record) -> None:
    view = token_view.render_tokens(record, summarise(record), TOKENS)
    tokens = [attributes for tag, attributes in read(view.text).tags if tag == "span"]
    assert [token["aria-label"] for token in tokens] == [
        "token 0: def",
        "token 1: <b>",
        "token 2: line break",
        "token 3: blank",
        "token 4: é",
    ]
    assert [token["tabindex"] for token in tokens] == ["0", "-1", "-1", "-1", "-1"]
    cells = [attributes for tag, attributes in read(view.map_table).tags if tag == "td"]
    summary = summarise(record)
    assert len(cells) == summary.num_sources.sum()
    assert [cell["aria-label"] for cell in cells if cell["tabindex"] == "0"] == [
        f"final on {summary.top_source(8)[0]}: {summary.top_source(8)[1]:.3f}"
    ]
    for cell in cells:
        mean = summary.depth_map[int(cell["data-read"]), int(cell["data-source"])]
        assert float(cell["data-mean"]) == pytest.approx(mean, abs=1e-4)
        assert float(cell["style"].removeprefix("--heat:")) == pytest.approx(mean**0.5, abs=1e-3)


def test_markup_and_data_cannot_be_broken_by_what_tokens_or_names_say(record) -> None:
    record.read_names[0] = "</script><script>alert(1)</script>"
    view = token_view.render_tokens(record, summarise(record), ["</script>", "<i>", '"', "'", "&"])
    assert "</script>" not in view.data and json.loads(view.data)["reads"] == record.read_names
    for markup in (view.text, view.map_table):
        assert not re.search(r"<(script|i)\b", markup)
        read(markup)


def test_sources_outside_a_window_are_empty_places() -> None:
    record = make_record(6, mode="full", window=2, tokens=5, batch=2)
    summary = summarise(record)
    view = token_view.render_tokens(record, summary, TOKENS)
    data = json.loads(view.data)
    assert data["sources"][5] == ["embedding", "sublayer 4", "sublayer 5"]
    levels = numbers(data["weights"], "<u2") * data["step"] + data["low"]
    expected = torch.cat([weights[:, 0].flatten() for weights in record.weights]).numpy()
    np.testing.assert_allclose(levels, expected, atol=1e-5)
    body = view.map_table.split("<tbody>")[1]
    rows = [read(f"{row}</tr>").tags for row in body.split("</tr>")[:-1]]
    cells = [attributes for tag, attributes in rows[5] if tag == "td"]
    assert [cell.get("data-source") for cell in cells] == ["0", None, None, None, "1", "2"]
    for column in (0, 4, 5):
        mean = summary.depth_map[5, column]
        assert float(cells[column]["data-mean"]) == pytest.approx(mean, abs=1e-4)


def test_weights_outside_0_to_1_are_kept(record) -> None:
    record.weights[3] = record.weights[3] * 3 - 1
    view = token_view.render_tokens(record, summarise(record), TOKENS)
    data = json.loads(view.data)
    levels = numbers(data["weights"], "<u2") * data["step"] + data["low"]
    expected = torch.cat([weights[:, 0].flatten() for weights in record.weights]).numpy()
    assert expected.min() < 0 and expected.max() > 1
    np.testing.assert_allclose(levels, expected, atol=5e-5)


def test_long_texts_are_shown_from_their_start(record, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(record)
    monkeypatch.setattr(token_view, "MOST_WEIGHTS", 3 * int(summary.num_sources.sum()) + 1)
    view = token_view.render_tokens(record, summary, TOKENS)
    assert view.num_shown == 3 and json.loads(view.data)["tokens"] == 3 and view.text.count("data-token") == 3


def test_large_maps_leave_the_numbers_to_the_labels() -> None:
    record = make_record(40, mode="full", tokens=5, batch=1)
    table = read(token_view.render_tokens(record, summarise(record), TOKENS).map_table)
    assert table.tags[0][1]["class"] == "map small"
    assert not [text for text in table.cells if re.fullmatch(r"\d\.\d\d", text)]


def test_another_number_of_tokens_is_refused(record) -> None:
    with pytest.raises(ValueError, match="tokens must be the 5 that were recorded, got 1"):
        token_view.render_tokens(record, summarise(record), ["a"])
