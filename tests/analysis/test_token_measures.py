"""Measures of depth weights whose answers are known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attention_residuals.analysis import token_measures

WEIGHTS_NT = np.array(
    [[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 0.25, 0.5], [0.0, 0.0, 0.25, 0.0], [0.0, 1.0, 0.25, 0.0]]
)


def test_entropy_and_effective_sources() -> None:
    np.testing.assert_allclose(token_measures.entropy(WEIGHTS_NT), [0, 0, math.log(4), math.log(2)])
    np.testing.assert_allclose(token_measures.effective_sources(WEIGHTS_NT), [1, 1, 4, 2])


def test_locality_goes_from_the_embedding_to_the_newest_source() -> None:
    np.testing.assert_allclose(token_measures.locality(WEIGHTS_NT), [0, 1, 0.5, 1 / 6])


def test_a_read_with_one_source_has_no_locality() -> None:
    assert np.isnan(token_measures.locality(np.ones((1, 3)))).tolist() == [True] * 3
    assert token_measures.effective_sources(np.ones((1, 3))).tolist() == [1.0] * 3


def test_embedding_weight_is_the_first_sources() -> None:
    assert token_measures.embedding_weight(WEIGHTS_NT).tolist() == [1.0, 0.0, 0.25, 0.5]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_any_axes_of_tokens(shape: tuple[int, ...]) -> None:
    weights = np.full((4, *shape), 0.25)
    for measure in (token_measures.entropy, token_measures.effective_sources, token_measures.locality):
        assert measure(weights).shape == shape
