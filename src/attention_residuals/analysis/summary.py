"""From a DepthRecord, one weight per token, to the numbers that tables and plots show, one per read.

Shapes: R reads (L sublayers and the final read), C source columns, N_r sources of read r, B batch, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attention_residuals.analysis.source_columns import column_names, source_columns
from attention_residuals.analysis.token_measures import Floats, entropy, locality

if TYPE_CHECKING:
    import torch

    from attention_residuals.analysis.record import DepthRecord

Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class DepthSummary:
    """Means over every recorded token, float64 except where said.

    Column c of the depth map is source c: the embedding first, then the blocks (in full mode the sublayers)
    in order. The partial sum of the open block k stands in the column of block k, which it is so far, and
    `is_partial` marks it; this makes the map lower triangular. Under a window it is a band beside the first
    column, and N is the number of sources in the window, the embedding counted.

    Attributes:
        read_names: R names.
        source_names: C names.
        num_tokens: how many tokens the means are over, B * T.
        depth_map: [R, C] mean depth weight; NaN where the read has no such source.
        is_partial: [R, C] bool, true where the source is the open block's partial sum.
        entropy: [R] mean entropy of the depth weights, in nats: 0 for one source, log N when uniform.
        normalised_entropy: [R] entropy / log N, from 0 to 1; NaN for a read with one source.
        effective_sources: [R] mean of exp(entropy): how many sources a token really mixes, from 1 to N.
        locality: [R] how near the weighed sources are, from 0 (embedding) to 1 (newest) in even steps over
            the read's own N; NaN for one source.
        input_norm: [R] mean L2 norm of the mixture h that the read makes.
        output_norm: [L] mean L2 norm of the sublayer's output.
    """

    read_names: tuple[str, ...]
    source_names: tuple[str, ...]
    num_tokens: int
    depth_map: Floats
    is_partial: Flags
    entropy: Floats
    normalised_entropy: Floats
    effective_sources: Floats
    locality: Floats
    input_norm: Floats
    output_norm: Floats

    @property
    def num_sources(self) -> npt.NDArray[np.int64]:
        """[R] int64: N of each read."""
        return np.sum(~np.isnan(self.depth_map), axis=1, dtype=np.int64)

    @property
    def embedding_weight(self) -> Floats:
        """[R] mean weight kept on the embedding, which every read sees as its first source."""
        return self.depth_map[:, 0]

    def top_source(self, read: int) -> tuple[str, float]:
        """Name and mean weight of the read's heaviest source; a partial sum is named "block 2 so far"."""
        column = int(np.nanargmax(self.depth_map[read]))
        name = self.source_names[column]
        name = f"{name} so far" if self.is_partial[read, column] else name
        return name, float(self.depth_map[read, column])


def summarise(record: DepthRecord) -> DepthSummary:
    """Sum up a record over its tokens.

    Raises:
        ValueError: the record is empty, or a read has more or fewer weights than its plan has sources.
    """
    if not record.weights or record.weights[-1].numel() == 0:
        raise ValueError("the record holds no tokens; run the model inside record_depth_weights first")
    source_names = column_names(record.plan)
    depth_map = np.full((len(record.weights), len(source_names)), np.nan)
    is_partial = np.zeros(depth_map.shape, dtype=np.bool_)
    entropies, localities = [], []
    for read, weights in enumerate(record.weights):
        weights_NP, columns = _per_token(weights), source_columns(record.plan, read)
        if len(weights_NP) != len(columns):
            raise ValueError(
                f"read {read} must have one row of weights for each of its {len(columns)} sources, got "
                f"{len(weights_NP)}; record the model that the plan is of"
            )
        depth_map[read, columns] = weights_NP.mean(axis=1)
        is_partial[read, columns[-1]] = record.plan.has_partial(read)
        entropies.append(entropy(weights_NP))
        localities.append(locality(weights_NP).mean())
    mean_entropy = np.array([values.mean() for values in entropies])
    log_N = np.log(np.sum(~np.isnan(depth_map), axis=1))
    return DepthSummary(
        read_names=tuple(record.read_names),
        source_names=source_names,
        num_tokens=record.weights[-1][0].numel(),
        depth_map=depth_map,
        is_partial=is_partial,
        entropy=mean_entropy,
        normalised_entropy=np.divide(mean_entropy, log_N, out=np.full_like(log_N, np.nan), where=log_N > 0),
        effective_sources=np.array([np.exp(values).mean() for values in entropies]),
        locality=np.array(localities),
        input_norm=np.array([_mean(norm) for norm in record.input_norms]),
        output_norm=np.array([_mean(norm) for norm in record.output_norms]),
    )


def _per_token(weights: torch.Tensor) -> Floats:
    """[N, B, T] in any dtype to [N, tokens] in float64."""
    return weights.detach().double().cpu().flatten(1).numpy()


def _mean(norm: torch.Tensor) -> float:
    return float(norm.detach().double().mean())
