"""DepthRead: one read of the sources, with its learned query and key norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from attention_residuals.depth_attention import depth_attention
from attention_residuals.depth_attention.two_phase import SharedRead, merge_own_sources


class DepthRead(nn.Module):
    """Depth attention with its parameters: makes one sublayer's input (or the final output) from the sources.

    A new read has a zero query, so all its depth weights are equal, and a key weight of ones. Both must
    stay out of weight decay and out of optimizers for matrices (`training.optimizer` keeps them apart).

    Args:
        width: D of the sources.
        eps: eps of the key norm.
        read_scale: "mean" or "sum", as in `AttnResConfig`.
        backend: passed to `depth_attention`.

    Attributes:
        query: parameter [D], zeros at the start (the paper's pseudo-query w_l).
        key_weight: parameter [D], ones at the start (the weight of the RMSNorm over keys).
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        read_scale: str = "mean",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.eps, self.read_scale, self.backend = width, eps, read_scale, backend
        self.query = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Back to the start: zero query, key weight of ones."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_weight)

    @overload
    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = ...,
        norm_eps: float = ...,
        return_weights: Literal[False] = ...,
        shared: SharedRead | None = ...,
        dtype: torch.dtype | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = ...,
        norm_eps: float = ...,
        *,
        return_weights: Literal[True],
        shared: SharedRead | None = ...,
        dtype: torch.dtype | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        sources: Sequence[Tensor],
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        return_weights: bool = False,
        shared: SharedRead | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mix N sources [..., D] into [..., D]; with `norm_weight` [D] the result is normalised too.

        With `shared`, what `attend_to_shared` found for this read, `sources` are the read's other sources
        (there may be none) and `dtype` is that of the sources.

        Returns the mixture, or (mixture, depth weights [N, ...]) with `return_weights`.
        """
        if shared is not None:
            mixture, weights = merge_own_sources(
                shared,
                sources,
                self.query,
                self.key_weight,
                dtype=dtype or sources[0].dtype,
                eps=self.eps,
                norm_weight=norm_weight,
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
            read_scale=self.read_scale,
            return_weights=return_weights,  # type: ignore[call-overload]
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, read_scale={self.read_scale!r}, backend={self.backend!r}"
