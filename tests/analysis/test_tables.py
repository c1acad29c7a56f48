"""Tidy tables: every number of the record is found under its names again, in memory and in Parquet."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from records import make_record
from tiny_reads import choosing_model, token_ids

import attention_residuals as ar
from attention_residuals.analysis.tables import MissingPyarrow, measure_table, weight_table, write_parquet


def test_each_weight_stands_beside_its_names() -> None:
    record = make_record(6, num_blocks=3, tokens=4, batch=2)
    table = weight_table(record)
    assert {len(column) for column in table.values()} == {sum(w.numel() for w in record.weights)}
    for read, source, row, position in ((0, 0, 1, 3), (3, 1, 0, 2), (3, 2, 1, 0), (6, 3, 1, 1)):
        at = (
            (table["read"] == read)
            & (table["source"] == source)
            & (table["row"] == row)
            & (table["position"] == position)
        )
        assert at.sum() == 1
        assert table["weight"][at] == record.weights[read][source, row, position].numpy()
        assert table["read_name"][at] == record.read_names[read]
    assert "token" not in table


def test_partial_sums_are_named_as_their_block_so_far() -> None:
    table = weight_table(make_record(4, num_blocks=2, tokens=1, batch=1))
    named = list(zip(table["read"].tolist(), table["source_name"].tolist(), strict=True))
    assert [name for read, name in named if read == 3] == ["embedding", "block 1", "block 2 so far"]
    assert [name for read, name in named if read == 4] == ["embedding", "block 1", "block 2"]


def test_under_a_window_sources_keep_their_columns_number() -> None:
    table = weight_table(make_record(6, mode="full", window=2, tokens=1, batch=1))
    at = table["read"] == 5
    assert table["source"][at].tolist() == [0, 4, 5]
    assert table["source_name"][at].tolist() == ["embedding", "sublayer 4", "sublayer 5"]


def test_measures_and_tokens() -> None:
    record = make_record(4, num_blocks=2, tokens=3, batch=2)
    tokens = [["a", "b", "c"], ["d", "e", "f"]]
    table = measure_table(record, tokens)
    assert {len(column) for column in table.values()} == {5 * 6}
    at = (table["read"] == 3) & (table["token"] == "f")
    assert (table["row"][at].item(), table["position"][at].item()) == (1, 2)
    weights = record.weights[3][:, 1, 2].double()
    entropy = -(weights * weights.log()).sum()
    assert table["entropy"][at].item() == pytest.approx(entropy.item())
    assert table["effective_sources"][at].item() == pytest.approx(entropy.exp().item())
    assert table["locality"][at].item() == pytest.approx((weights[1] / 2 + weights[2]).item())
    assert table["embedding_weight"][at].item() == pytest.approx(weights[0].item())
    assert (table["input_norm"][at].item(), table["output_norm"][at].item()) == (4.0, 5.0)
    assert np.isnan(table["output_norm"][table["read"] == 4]).all()


def test_tokens_of_another_shape_are_refused() -> None:
    record = make_record(4, num_blocks=2, tokens=3, batch=2)
    with pytest.raises(ValueError, match=r"tokens must have the record's shape \[2, 3\], got \[1, 3\]"):
        weight_table(record, [["a", "b", "c"]])


def test_a_models_record_in_parquet_reads_back_the_same(tmp_path: Path) -> None:
    from pyarrow import parquet

    model, ids = choosing_model(), token_ids()
    with ar.record_depth_weights(model) as record, torch.no_grad():
        model(ids)
    table = record.to_table(ids.tolist())
    path = record.write_parquet(tmp_path / "weights.parquet", ids.tolist())
    stored = parquet.read_table(path)
    assert stored.column_names == list(table)
    for name, column in table.items():
        assert stored[name].to_pylist() == column.tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.parquet"]
    sums = np.zeros((9, 2, 9))
    np.add.at(sums, (table["read"], table["row"], table["position"]), table["weight"])
    np.testing.assert_allclose(sums, 1.0, rtol=1e-5)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPyarrow, match=r"attention_residuals\[train\]"):
        write_parquet({"a": np.arange(2)}, tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())
