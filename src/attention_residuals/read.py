"""DepthRead: one read of the sources, with its learned query and key norm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from attention_residuals.depth_attention import depth_attention
from attention_residuals.depth_attention.dispatch import (
    check_sources,
    check_vector,
    norm_scale,
    refuse_kernels,
)
from attention_residuals.depth_attention.recorded import (
    ReadRecord,
    depth_attention_recorded,
    norm_mixture,
    row_norms,
)
from attention_residuals.depth_attention.two_phase import SharedRead, merge_own_sources
from attention_residuals.depth_attention.variants import depth_attention_variant
from attention_residuals.variant import ReadVariant


class DepthRead(nn.Module):
    """Depth attention with its parameters: makes one sublayer's input (or the final output) from the sources.

    A new read has a zero query, so all its depth weights are equal, and a key weight of ones. Both must
    stay out of weight decay and out of optimizers for matrices (`training.optimizer` keeps them apart).
    A variant may have other parameters, which begin at zero too.

    Args:
        width: D of the sources.
        eps: eps of the key norm.
        read_scale: "mean" or "sum", as in `AttnResConfig`.
        backend: passed to `depth_attention`.
        variant: how the read differs from the paper's.
        num_sources: N, which `weights="scalars"` needs.
        has_partial: whether the last source is an open block's partial sum, which
            `values="normalised_blocks"` leaves as it is.

    Attributes:
        query: parameter [D], zeros at the start (the paper's pseudo-query w_l).
        key_weight: parameter [D], ones at the start (the weight of the RMSNorm over keys).
        query_matrix, source_scores, recency_bias: parameters of variants, zeros at the start;
            `ReadVariant.parameter_shapes` says which a read has. Those it hasn't are None.

    Raises:
        ValueError: the variant doesn't fit the width, or lacks `num_sources`.
    """

    query: nn.Parameter
    key_weight: nn.Parameter
    query_matrix: nn.Parameter | None
    source_scores: nn.Parameter | None
    recency_bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        read_scale: str = "mean",
        backend: str = "auto",
        variant: ReadVariant | None = None,
        num_sources: int | None = None,
        has_partial: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.eps, self.read_scale, self.backend = width, eps, read_scale, backend
        self.variant, self.has_partial = variant or ReadVariant(), has_partial
        self.beyond_kernels = self.variant.beyond_kernels  # once, since it is asked at every read
        shapes = self.variant.parameter_shapes(width, num_sources)
        for name in inspect.get_annotations(DepthRead):
            start = torch.ones if name == "key_weight" else torch.zeros
            made = start(shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if made is None else nn.Parameter(made))

    def reset_parameters(self, init: Any = nn.init) -> None:
        """Back to the start: a key weight of ones, everything else zero; `init` fills the tensors."""
        for name, parameter in self.named_parameters(recurse=False):
            (init.ones_ if name == "key_weight" else init.zeros_)(parameter)

    def weighing_parameters(self) -> list[nn.Parameter]:
        """Those that make depth weights unequal once they aren't zero: all but the key weight."""
        return [p for name, p in self.named_parameters(recurse=False) if name != "key_weight"]

    @overload
    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = ...,
        norm_eps: float = ...,
        norm_offset: float = ...,
        return_weights: Literal[False] = ...,
        shared: SharedRead | None = ...,
        dtype: torch.dtype | None = ...,
        record: ReadRecord | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = ...,
        norm_eps: float = ...,
        norm_offset: float = ...,
        *,
        return_weights: Literal[True],
        shared: SharedRead | None = ...,
        dtype: torch.dtype | None = ...,
        record: ReadRecord | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        return_weights: bool = False,
        shared: SharedRead | None = None,
        dtype: torch.dtype | None = None,
        record: ReadRecord | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mix N sources [..., D] into [..., D]; with `norm_weight` [D] the result is normalised too.

        That norm's scale is `norm_offset` + `norm_weight`, as in `depth_attention`.

        With `shared`, what `attend_to_shared` found for this read, `sources` are the read's other sources
        (there may be none) and `dtype` is that of the sources. A `record` receives the mixture's norms.

        Returns the mixture, or (mixture, depth weights [N, ...]) with `return_weights`; of several heads,
        the mean.
        """
        if record is not None:
            norm = (norm_weight, norm_eps, norm_offset)
            recorded = self._record(record, sources, norm, shared, dtype)
            return recorded if return_weights else recorded[0]
        if self.beyond_kernels is not None:
            if shared is not None:
                raise ValueError(f"two phases compute the paper's read only, not {self.beyond_kernels}")
            refuse_kernels(self.backend, self.beyond_kernels)
            found = self._read_variant(sources, norm_scale(norm_weight, norm_offset), norm_eps)
            return found if return_weights else found[0]
        if shared is not None:
            mixture, weights = merge_own_sources(
                shared,
                sources,
                self.query,
                self.key_weight,
                dtype=dtype or sources[0].dtype,
                eps=self.eps,
                norm_weight=norm_scale(norm_weight, norm_offset),
                norm_eps=norm_eps,
                read_scale=self.read_scale,
                return_weights=return_weights,
            )
            return mixture if weights is None else (mixture, weights)
        return depth_attention(
            sources,
            self.query,
            self.key_weight,
            eps=self.eps,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            read_scale=self.read_scale,
            return_weights=return_weights,  # type: ignore[call-overload]
            backend=self.backend,
        )

    def _record(
        self,
        record: ReadRecord,
        sources: Sequence[Tensor],
        norm: tuple[Tensor | None, float, float],
        shared: SharedRead | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        norm_weight, norm_eps, norm_offset = norm
        if shared is None and self.beyond_kernels is None:
            output, weights, record.norms = depth_attention_recorded(
                sources,
                self.query,
                self.key_weight,
                norm_weight,
                eps=self.eps,
                norm_eps=norm_eps,
                norm_offset=norm_offset,
                read_scale=self.read_scale,
                backend=self.backend,
                memory=record.memory,
            )
            return output, weights
        mixture, weights = DepthRead.forward(self, sources, return_weights=True, shared=shared, dtype=dtype)
        record.norms = row_norms(mixture)
        if norm_weight is None:
            return mixture, weights
        return norm_mixture(mixture, norm_weight, norm_eps, norm_offset, self.backend), weights

    def _read_variant(
        self, sources: Sequence[Tensor], norm_weight: Tensor | None, norm_eps: float
    ) -> tuple[Tensor, Tensor]:
        listed = check_sources(sources)
        if listed[0].shape[-1] != self.width:
            raise ValueError(f"sources must have the read's width {self.width}, got {listed[0].shape[-1]}")
        if norm_weight is not None:
            check_vector("norm_weight", norm_weight, listed[0])
        return depth_attention_variant(
            listed,
            self.variant,
            dict(self.named_parameters(recurse=False)),
            norm_weight,
            eps=self.eps,
            norm_eps=norm_eps,
            gain=float(len(listed)) if self.read_scale == "sum" else 1.0,
            has_partial=self.has_partial,
        )

    def extra_repr(self) -> str:
        changed = "".join(f", {name}={value!r}" for name, value in self.variant.changed_fields().items())
        return (
            f"{self.width}, eps={self.eps}, read_scale={self.read_scale!r}, backend={self.backend!r}{changed}"
        )
