"""Summaries of records whose answers are known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from records import HandMadeRecord, make_record

from attention_residuals.analysis.summary import summarise
from attention_residuals.config import AttnResConfig
from attention_residuals.plan import DepthPlan


def two_blocks_of_two() -> HandMadeRecord:
    """Four sublayers, two tokens; the second read's tokens choose opposite sources."""
    halves = torch.tensor([0.5, 0.5])[:, None, None].expand(2, 1, 2)
    return HandMadeRecord(
        plan=DepthPlan(4, AttnResConfig(sublayers_per_block=2)),
        weights=[
            torch.ones(1, 1, 2),
            torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]),
            halves,
            torch.tensor([0.25, 0.25, 0.5])[:, None, None].expand(3, 1, 2),
            torch.full((3, 1, 2), 1 / 3),
        ],
        read_names=["layer 0 delta net", "layer 0 mlp", "layer 1 delta net", "layer 1 mlp", "final"],
        input_norms=[torch.tensor([[1.0, 3.0]])] * 5,
        output_norms=[torch.tensor([[2.0, 4.0]])] * 4,
    )


def test_depth_map_puts_partial_sums_in_their_blocks_column() -> None:
    summary = summarise(two_blocks_of_two())
    nan = math.nan
    expected = [[1, nan, nan], [0.5, 0.5, nan], [0.5, 0.5, nan], [0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(summary.depth_map, expected, rtol=1e-6)
    assert summary.source_names == ("embedding", "block 1", "block 2")
    assert np.argwhere(summary.is_partial).tolist() == [[1, 1], [3, 2]]
    assert summary.num_sources.tolist() == [1, 2, 2, 3, 3]
    assert summary.num_tokens == 2


def test_entropy_is_the_mean_of_the_tokens_entropies_not_the_entropy_of_the_mean() -> None:
    summary = summarise(two_blocks_of_two())
    of_quarters = 0.25 * math.log(4) * 2 + 0.5 * math.log(2)
    np.testing.assert_allclose(summary.entropy, [0, 0, math.log(2), of_quarters, math.log(3)], atol=1e-6)
    np.testing.assert_allclose(
        summary.normalised_entropy, [math.nan, 0, 1, of_quarters / math.log(3), 1], atol=1e-6
    )
    np.testing.assert_allclose(summary.effective_sources, [1, 1, 2, math.exp(of_quarters), 3], rtol=1e-6)


def test_locality_is_the_mean_over_tokens() -> None:
    summary = summarise(two_blocks_of_two())
    np.testing.assert_allclose(summary.locality, [math.nan, 0.5, 0.5, 0.625, 0.5], rtol=1e-6)


def test_norms_and_embedding_weight() -> None:
    summary = summarise(two_blocks_of_two())
    assert summary.input_norm.tolist() == [2.0] * 5
    assert summary.output_norm.tolist() == [3.0] * 4
    np.testing.assert_allclose(summary.embedding_weight, [1, 0.5, 0.5, 0.25, 1 / 3], rtol=1e-6)


def test_top_source_says_when_the_block_is_still_open() -> None:
    summary = summarise(two_blocks_of_two())
    assert summary.top_source(0) == ("embedding", 1.0)
    assert summary.top_source(3) == ("block 2 so far", 0.5)


@pytest.mark.parametrize(
    "config", [{"num_blocks": 4}, {"sublayers_per_block": 3}, {"mode": "full"}, {"num_blocks": 1}]
)
def test_map_is_lower_triangular_and_rows_sum_to_one(config: dict[str, object]) -> None:
    summary = summarise(make_record(16, **config))
    np.testing.assert_allclose(np.nansum(summary.depth_map, axis=1), 1.0, rtol=1e-6)
    seen = ~np.isnan(summary.depth_map)
    assert (np.diff(seen.astype(int), axis=1) <= 0).all()  # a row has no hole
    assert (np.diff(seen.sum(axis=1)) >= 0).all()
    assert (summary.normalised_entropy[1:] <= 1 + 1e-9).all()


def test_means_are_over_batch_and_tokens() -> None:
    assert summarise(make_record(4, tokens=5, batch=3, num_blocks=2)).num_tokens == 15


def test_bfloat16_weights_are_summed_up_in_float64() -> None:
    record = make_record(4, num_blocks=2)
    record.weights = [weights.bfloat16() for weights in record.weights]
    assert summarise(record).depth_map.dtype == np.float64


def test_an_empty_record_is_refused() -> None:
    record = make_record(4, tokens=0, num_blocks=2)
    with pytest.raises(ValueError, match="holds no tokens"):
        summarise(record)
    record.weights = []
    with pytest.raises(ValueError, match="record_depth_weights"):
        summarise(record)


def test_weights_of_another_plan_are_refused() -> None:
    record = make_record(4, num_blocks=2)
    record.weights[2] = record.weights[2][:1]
    with pytest.raises(ValueError, match=r"read 2 must have one row of weights for each of its 2 .* got 1"):
        summarise(record)


def test_sources_outside_a_window_are_absent_and_do_not_count() -> None:
    record = two_blocks_of_two()
    record.plan = DepthPlan(4, AttnResConfig(sublayers_per_block=2, window=1))
    uneven = torch.tensor([0.25, 0.75])[:, None, None].expand(2, 1, 2)
    record.weights[3:] = [uneven, uneven]
    summary = summarise(record)
    nan = math.nan
    expected = [[1, nan, nan], [0.5, 0.5, nan], [0.5, 0.5, nan], [0.25, nan, 0.75], [0.25, nan, 0.75]]
    np.testing.assert_allclose(summary.depth_map, expected, rtol=1e-6)
    assert summary.source_names == ("embedding", "block 1", "block 2")
    assert np.argwhere(summary.is_partial).tolist() == [[1, 1], [3, 2]]
    assert summary.num_sources.tolist() == [1, 2, 2, 2, 2]
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    np.testing.assert_allclose(summary.normalised_entropy[3:], entropy / math.log(2), rtol=1e-6)
    np.testing.assert_allclose(summary.locality[3:], 0.75, rtol=1e-6)
    assert summary.top_source(3) == ("block 2 so far", 0.75)
    assert summary.top_source(4) == ("block 2", 0.75)
