"""Backend for CUDA: our arguments in the terms of flash-linear-attention's Triton kernel `fused_attnres`.

    ours                          fla-core's
    sources                       residuals          copied where they start between two multiples of 16 bytes
    query, scale, eps             query, scale, rms_eps
    key_weight or None            rms_weight         ones where there is none
    norm_weight                   output_rms_weight  if norm_eps is eps and gain is 1: it has one eps, no gain
    norm_weight otherwise, gain   applied to h here, h being rounded to the sources' dtype: one rounding more

Refused, with the reason: dtypes beyond 32 bits, more than MAX_SOURCES sources, rows wider than MAX_WIDTH,
gradients through the depth weights (the kernel has none) and second derivatives. One source, or no token, is
nothing to attend to and goes to `lean`, whose result is exact there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.depth_attention.lean import depth_attention_lean

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The kernel takes its sources as a table of pointers whose length is a power of two, in backward two tables.
# With 128 sources these fill half of the 4 KiB that a CUDA kernel's parameters have everywhere.
MAX_SOURCES = 128
# A row is one Triton block, up to eight rows a tile, and Triton's largest tile has 2^20 elements.
MAX_WIDTH = 1 << 17
_ALIGNMENT = 16


@functools.cache
def why_not_installed() -> str | None:
    """None where fla-core can be imported, else the reason, which is logged once."""
    try:
        _fused_attnres()
    except ImportError as error:
        reason = f"needs fla-core 0.5.1 or later ({error}): pip install 'attention_residuals[cuda]'"
        logger.warning("attention_residuals uses its PyTorch backend on CUDA, since 'fla' %s", reason)
        return reason
    return None


def why_not(device: torch.device, dtype: torch.dtype, *, width: int = 1, num_sources: int = 1) -> str | None:
    """None where the kernel runs, else the reason."""
    if device.type != "cuda":
        return f"takes CUDA tensors, got them on {device.type}"
    if dtype not in _DTYPES:
        return f"computes in float32, but the sources are {dtype}"
    if num_sources > MAX_SOURCES:
        return f"takes up to {MAX_SOURCES} sources, got {num_sources}"
    if width > MAX_WIDTH:
        return f"takes rows of up to {MAX_WIDTH} elements, got {width}"
    if not torch.cuda.is_available():
        return "needs a GPU, and PyTorch finds none"
    return why_not_installed()


def depth_attention_fla(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    *,
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `depth_attention_reference`, for CUDA tensors of 16 or 32 bits.

    Raises ValueError where `why_not` has a reason, and RuntimeError in the backward pass where a gradient
    arrives at the depth weights, or where a second derivative is asked for.
    """
    first, count = sources[0], len(sources)
    if reason := why_not(first.device, first.dtype, width=first.shape[-1], num_sources=count):
        raise ValueError(f"backend='fla' can't run here: it {reason}; use backend='auto' or 'lean'")
    if count == 1 or first.numel() == 0:
        return depth_attention_lean(
            sources, query, key_weight, norm_weight, eps=eps, scale=scale, norm_eps=norm_eps, gain=gain
        )
    fused_norm = norm_weight is not None and norm_eps == eps and gain == 1
    h, weights = _fused_attnres()(
        query,
        [_aligned(source) for source in sources],
        torch.ones_like(query) if key_weight is None else key_weight,
        output_rms_weight=norm_weight if fused_norm else None,
        rms_eps=eps,
        scale=scale,
        return_weights=True,
    )
    if h.requires_grad:
        h.register_hook(_refuse_second_derivative)
        weights = _WithoutGradient.apply(weights, h)
    return h if fused_norm else _scaled_and_normed(h, gain, norm_weight, norm_eps), weights


@functools.cache
def _fused_attnres() -> Callable[..., tuple[Tensor, Tensor]]:
    from fla.ops.attnres import fused_attnres

    return fused_attnres


def _aligned(source: Tensor) -> Tensor:
    """The source, or a copy where it starts in the middle of 16 bytes: the kernel loads that many at once."""
    if source.data_ptr() % _ALIGNMENT == 0:
        return source
    return source.clone(memory_format=torch.contiguous_format)


def _scaled_and_normed(h: Tensor, gain: float, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    """gain * h, or its RMSNorm, which is that of h with an eps smaller by gain^2."""
    if norm_weight is None:
        return h if gain == 1 else h * gain
    wide = torch.nn.functional.rms_norm(h.float(), h.shape[-1:], norm_weight.float(), norm_eps / gain**2)
    return wide.to(h.dtype)


def _refuse_second_derivative(gradient: Tensor) -> None:
    """A hook on h: autograd records in the backward pass only where create_graph=True asked for it."""
    if torch.is_grad_enabled():
        raise RuntimeError("backend='fla' has no second derivative (create_graph=True); use backend='lean'")


class _WithoutGradient(torch.autograd.Function):
    """Hands the depth weights on, and raises where a gradient comes back, rather than dropping it."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, differentiable: Tensor) -> Tensor:
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "backend='fla' has no gradient of the depth weights: detach them, or use backend='lean'"
        )
