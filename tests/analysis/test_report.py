"""Reports of models whose reads are not the paper's: what is drawn, written and said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from page_reader import read
from pyarrow import parquet
from tiny_reads import choosing_model

from attention_residuals.analysis.report import WrittenReport, report_on


def write(folder: Path, **attn_res: object) -> WrittenReport:
    model, ids = choosing_model(**attn_res), torch.arange(1, 6)[None]
    return report_on(model, ids, folder, tokens=list("abcde"), name="model", ablate=True, tables=True)


@pytest.mark.parametrize(
    "blocks", [{"mode": "full", "window": 2}, {"mode": "block", "sublayers_per_block": 3, "window": 1}]
)
def test_reads_with_a_window(tmp_path: Path, blocks: dict[str, object]) -> None:
    report = write(tmp_path, **blocks)
    assert report.summary.num_sources.max() == 1 + blocks["window"] < len(report.summary.source_names)
    page = report.page.read_text(encoding="utf-8")
    assert (
        f"the last {blocks['window']} of its other sources" in page and f"window {blocks['window']}" in page
    )
    assert [path.name for path in report.pictures] == [
        "depth_map.png",
        "entropy_and_norms.png",
        "source_ablation.png",
    ]
    weights = parquet.read_table(tmp_path / "depth_weights.parquet").to_pydict()
    found = np.full(report.summary.depth_map.shape, np.nan)
    for number, source in set(zip(weights["read"], weights["source"], strict=True)):
        at = [
            weight
            for r, s, weight in zip(weights["read"], weights["source"], weights["weight"], strict=True)
            if (r, s) == (number, source)
        ]
        found[number, source] = np.mean(at)
    np.testing.assert_allclose(found, report.summary.depth_map, rtol=1e-6)
    worth = parquet.read_table(tmp_path / "source_ablation.parquet").to_pydict()
    choosing = report.summary.num_sources > 1
    assert sorted(zip(worth["read"], worth["source"], strict=True)) == [
        (number, source) for number, source in np.argwhere(~np.isnan(found)).tolist() if choosing[number]
    ]


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ({"heads": 2}, "Every read has 2 heads"),
        ({"activation": "linear"}, "With activation=linear a row need not add up to 1"),
    ],
)
def test_what_variants_change_is_said(tmp_path: Path, variant: dict[str, object], said: str) -> None:
    page = write(tmp_path, mode="full", **variant).page.read_text(encoding="utf-8")
    assert said in page
    read(page)
