"""From a DepthRecord to tidy tables: named columns of equal length, as NumPy arrays or a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attention_residuals.analysis import token_measures
from attention_residuals.analysis.source_columns import shown_source_names, source_columns
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.analysis.record import DepthRecord

Table = dict[str, npt.NDArray[Any]]


class MissingPyarrow(UserError, ImportError):
    """pyarrow is an optional dependency, and only Parquet needs it."""


def weight_table(record: DepthRecord, tokens: Sequence[Sequence[Any]] | None = None) -> Table:
    """One row per read, source and token.

    Args:
        tokens: B rows of T token ids or strings, which become the column `token`.

    Returns:
        `read`, `read_name`, `source` (its column in the depth map: 0 the embedding, k block k),
        `source_name`, `row` (of the batch), `position` (of the token, from 0), `token` if given, `weight`
        (float32).

    Raises:
        ValueError: the record is empty, or `tokens` are not [B, T].
    """
    parts = []
    for read, weights_NBT in enumerate(record.weights):
        weights = weights_NBT.numpy()
        num_sources = len(weights)
        place = _places(weights.shape[1:], tokens)
        parts.append(
            {
                "read": np.full(weights.size, read, np.int32),
                "read_name": np.full(weights.size, record.read_names[read]),
                "source": np.repeat(np.array(source_columns(record.plan, read), np.int32), weights[0].size),
                "source_name": np.repeat(shown_source_names(record.plan, read), weights[0].size),
                **{name: np.tile(column, num_sources) for name, column in place.items()},
                "weight": weights.reshape(-1),
            }
        )
    return _joined(parts)


def measure_table(record: DepthRecord, tokens: Sequence[Sequence[Any]] | None = None) -> Table:
    """One row per read and token.

    Args:
        tokens: as in `weight_table`.

    Returns:
        `read`, `read_name`, `row`, `position`, `token` if given, and in float64 `entropy` (nats),
        `effective_sources`, `locality`, `embedding_weight` (all of `token_measures`), `input_norm` (L2 norm
        of the mixture the read makes), `output_norm` (of the sublayer's output; NaN for the final read).

    Raises:
        ValueError: the record is empty, or `tokens` are not [B, T].
    """
    parts = []
    input_norms, output_norms = record.input_norms, record.output_norms
    for read, weights in enumerate(record.weights):
        weights_NX = weights.flatten(1).double().numpy()
        count = weights_NX.shape[1]
        output = output_norms[read] if read < len(output_norms) else None
        parts.append(
            {
                "read": np.full(count, read, np.int32),
                "read_name": np.full(count, record.read_names[read]),
                **_places(weights.shape[1:], tokens),
                "entropy": token_measures.entropy(weights_NX),
                "effective_sources": token_measures.effective_sources(weights_NX),
                "locality": token_measures.locality(weights_NX),
                "embedding_weight": token_measures.embedding_weight(weights_NX),
                "input_norm": input_norms[read].flatten().double().numpy(),
                "output_norm": np.full(count, np.nan)
                if output is None
                else output.flatten().double().numpy(),
            }
        )
    return _joined(parts)


def write_parquet(table: Table, path: Path) -> Path:
    """Write a table beside `path` and rename it, so that a reader never sees half a file.

    Raises:
        MissingPyarrow: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPyarrow(
            "Parquet needs pyarrow, which is not installed; pip install 'attention_residuals[train]', "
            "or use the table's NumPy arrays"
        ) from error
    beside = path.with_name(f".{path.name}.part")
    parquet.write_table(pyarrow.table(dict(table)), beside)
    os.replace(beside, path)
    return path


def _places(shape: Sequence[int], tokens: Sequence[Sequence[Any]] | None) -> Table:
    num_rows, num_positions = shape
    place: Table = {
        "row": np.repeat(np.arange(num_rows, dtype=np.int32), num_positions),
        "position": np.tile(np.arange(num_positions, dtype=np.int32), num_rows),
    }
    if tokens is None:
        return place
    token_BT = np.asarray(tokens)
    if token_BT.shape != (num_rows, num_positions):
        raise ValueError(
            f"tokens must have the record's shape [{num_rows}, {num_positions}], got {list(token_BT.shape)}; "
            "a generation records all tokens but the last new one"
        )
    return {**place, "token": token_BT.reshape(-1)}


def _joined(parts: Sequence[Table]) -> Table:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
