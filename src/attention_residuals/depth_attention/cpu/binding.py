"""Binding of the compiled CPU kernel: tensors in, pointers to `_kernel`, tensors out.

The kernel takes a list of sources without stacking them, reads each from memory once in either direction, and
keeps r, t, q and alpha (2N + 1 and N numbers a token) beside the sources themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_residuals.depth_attention.formulas import Settings
from attention_residuals.depth_attention.lean import gradients_as_a_graph

logger = logging.getLogger(__name__)

try:
    from attention_residuals.depth_attention.cpu import _kernel  # type: ignore[attr-defined]

    _IMPORT_ERROR = None
except ImportError as error:  # not compiled at installation, or for another machine
    _kernel = None
    _IMPORT_ERROR = str(error)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _load() -> str | None:
    """None where the kernel is loaded, else the reason, logged once. Runs it on PyTorch's threads."""
    if _kernel is None:
        reason = f"is not compiled ({_IMPORT_ERROR}): reinstall where a C++ compiler is at hand"
        logger.warning("attention_residuals uses its PyTorch backend, since its CPU kernel %s", reason)
        return reason
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    _kernel.share_threads(str(library.resolve()))
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # PyTorch 2.10 and later
    if table is not None:
        _kernel.connect(Tensor, nn.Parameter, torch.empty_like, Tensor.is_neg, table)
    return None


# At import rather than at the first call, which may be inside torch.compile.
_NOT_LOADED = _load()


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """None where the kernel runs, else the reason."""
    if device.type != "cpu":
        return f"takes CPU tensors, got them on {device.type}"
    if dtype not in _DTYPES:
        return f"computes in float32, but the sources are {dtype}"
    return _NOT_LOADED


def read_plain_tensors(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    norm_offset: float,
    read_scale: str,
    weights: Tensor | None = None,
    norms: Tensor | None = None,
) -> Tensor | None:
    """h [..., D] where every tensor is plain, contiguous and fits the others, else None. No gradients.

    `weights` [N, ...] and `norms` [...], contiguous float32 of the sources' shape, receive the depth weights
    and the L2 norm of the mixture before its output norm.

    The checks run in the kernel's own code, so that a read of one token costs a few microseconds.
    """
    if _kernel is None:
        return None
    threads = torch.get_num_threads()
    return _kernel.read(
        sources,
        query,
        key_weight,
        norm_weight,
        eps,
        scale,
        norm_eps,
        norm_offset,
        read_scale == "sum",
        threads,
        _address(weights),
        _address(norms),
    )


def write_difference_norms(after: Tensor, before: Tensor, norms: Tensor) -> bool:
    """Whether both [..., D] are plain and alike; `norms` [...] then holds the L2 norm of after - before."""
    if _kernel is None:
        return False
    return _kernel.difference_norms(after, before, norms.data_ptr(), torch.get_num_threads())


def depth_attention_cpu(
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
    """Same arguments and results as `depth_attention_reference`, for CPU tensors of 16 or 32 bits."""
    settings = (eps, scale, norm_eps, gain)
    h, alpha, _ = _attend(settings, query, key_weight, norm_weight, sources, want_norms=False)
    return h, alpha


def depth_attention_cpu_recorded(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    *,
    eps: float,
    scale: float,
    norm_eps: float,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`depth_attention_cpu`, and L2 norms [...] of the mixture before its output norm, without gradient."""
    settings = (eps, scale, norm_eps, gain)
    return _attend(settings, query, key_weight, norm_weight, sources, want_norms=True)


def _attend(
    settings: tuple[float, ...],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    sources: Sequence[Tensor],
    *,
    want_norms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (query, key_weight, norm_weight, *sources)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        h, alpha, norms, _ = _DepthAttention.apply(settings, want_norms, *inputs)
    else:
        h, alpha, norms, _ = run_forward(
            settings, query, key_weight, norm_weight, sources, save=False, want_norms=want_norms
        )
    return h, alpha, norms


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        settings: tuple[float, ...],
        want_norms: bool,
        query: Tensor,
        key_weight: Tensor | None,
        norm_weight: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return run_forward(
            settings, query, key_weight, norm_weight, sources, save=True, want_norms=want_norms
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[0]
        _, alpha, norms, saved = output
        ctx.mark_non_differentiable(norms, saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(alpha, saved, *inputs[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        alpha, saved, *inputs = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * (2 + len(inputs))
        if torch.is_grad_enabled():
            vectors = (inputs[0], inputs[1], inputs[2])
            found = gradients_as_a_graph(Settings(*ctx.settings), vectors, inputs[3:], grads[0], grads[1])
        else:
            found = run_backward(
                ctx.settings, ctx.needs_input_grad[2:], grads, alpha, saved, inputs[:3], inputs[3:]
            )
        return (None, None, *found)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as rows [tokens, D] that are contiguous each; a copy only where no view is."""
    # Resolved first, since a lazily negated view has other bits than values.
    rows = tensor.resolve_neg().reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _listed(sources: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Sources that stay alive during the call, their addresses, and their row strides in elements."""
    addresses = []
    for source in sources:
        if not source.is_contiguous() or source.is_neg():
            break
        addresses.append(source.data_ptr())
    else:
        return list(sources), addresses, [sources[0].shape[-1]] * len(sources)
    rows = [_rows(source) for source in sources]
    return rows, [row.data_ptr() for row in rows], [row.stride(0) for row in rows]


def _float_vector(vector: Tensor | None) -> Tensor | None:
    if vector is None or (vector.dtype is torch.float32 and vector.is_contiguous() and not vector.is_neg()):
        return vector
    return vector.resolve_neg().float().contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def run_forward(
    settings: tuple[float, ...],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    sources: Sequence[Tensor],
    *,
    save: bool,
    want_norms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h or y [..., D], alpha [N, ...], L2 norms of h [...], and r, t, q [2N + 1, tokens].

    The last two are empty unless `want_norms` and `save`.
    """
    first, count = sources[0], len(sources)
    width = first.shape[-1]
    tokens = first.numel() // width
    kept, addresses, strides = _listed(sources)
    w, g, n = _float_vector(query), _float_vector(key_weight), _float_vector(norm_weight)
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    alpha = torch.empty((count, *first.shape[:-1]))
    norms = torch.empty(first.shape[:-1] if want_norms else (0,))
    saved = torch.empty((2 * count + 1, tokens) if save else (0,))
    _kernel.forward(
        _DTYPES[first.dtype], addresses, strides, tokens, width, _address(w), _address(g), _address(n),
        out.data_ptr(), alpha.data_ptr(), saved.data_ptr() if save else 0,
        norms.data_ptr() if want_norms else 0, *settings, torch.get_num_threads(),
    )  # fmt: skip
    del kept
    return out, alpha, norms, saved


def run_backward(
    settings: tuple[float, ...],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
    alpha: Tensor,
    saved: Tensor,
    vectors: Sequence[Tensor | None],
    sources: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key weight, norm weight and every source, each in its own dtype."""
    first = sources[0]
    width = first.shape[-1]
    tokens = first.numel() // width
    _, addresses, strides = kept = _listed(sources)
    w, g, n = (_float_vector(vector) for vector in vectors)
    d_out = None if grads[0] is None else grads[0].resolve_neg().to(first.dtype).contiguous()
    d_alpha = None if grads[1] is None else grads[1].resolve_neg().float().contiguous()
    d_sources = [torch.empty(first.shape, dtype=first.dtype) if need else None for need in needs[3:]]
    d_vectors = [
        torch.empty(width) if need and v is not None else None
        for need, v in zip(needs, vectors, strict=False)
    ]
    _kernel.backward(
        _DTYPES[first.dtype], addresses, strides, tokens, width, _address(w), _address(g), _address(n),
        _address(d_out), _address(d_alpha), alpha.data_ptr(), saved.data_ptr(),
        [_address(d) for d in d_sources], *map(_address, d_vectors),
        settings[1], settings[3], torch.get_num_threads(),
    )  # fmt: skip
    del kept
    typed = (
        None if d is None or v is None else d.to(v.dtype) for d, v in zip(d_vectors, vectors, strict=True)
    )
    return (*typed, *d_sources)
