"""Depth attention with a hand-written backward that keeps the sources and per-token scalars only.

The equation and its derivative stand in `formulas`. Saved for backward: the sources themselves, the three
vectors, and alpha, r, t, q (N or 1 numbers a token); h is recomputed where the output norm needs it. Tokens
are worked through in chunks that fit in the cache, so that the sources are read from memory once in each
direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.depth_attention.formulas import (
    Rows,
    Scalars,
    Settings,
    gradients,
    read,
    source_gradients,
)

# Elements of one source in a chunk. On a CPU 64 Ki float32 are 256 KiB, so a few sources share a 2 MiB cache;
# elsewhere a chunk only bounds the temporary memory.
CHUNK_ELEMENTS = 1 << 16
ACCELERATOR_CHUNK_ELEMENTS = 1 << 24
# Elements of all sources up to which they are stacked: fewer calls, and the copy stays in the cache.
STACK_ELEMENTS = 1 << 17

_Vectors = tuple[Tensor, Tensor | None, Tensor | None]  # query, key weight, norm weight: each [D]


def depth_attention_lean(
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
    """Same arguments and results as `depth_attention_reference`; any device and dtype.

    A second derivative differentiates the formulas with plain autograd, so it is right, at its memory.
    """
    settings, vectors = Settings(eps, scale, norm_eps, gain), (query, key_weight, norm_weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*vectors, *sources)):
        h, alpha, *_ = _DepthAttention.apply(*settings, *vectors, *sources)
    else:
        with torch.no_grad():
            h, (alpha, *_) = _forward(settings, vectors, sources)
    # Out here, since a view that leaves an autograd.Function can't be modified in place by the caller.
    return h.reshape(sources[0].shape), alpha.reshape(len(sources), *sources[0].shape[:-1])


class _DepthAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        eps: float,
        scale: float,
        norm_eps: float,
        gain: float,
        query: Tensor,
        key_weight: Tensor | None,
        norm_weight: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        settings = Settings(eps, scale, norm_eps, gain)
        h, scalars = _forward(settings, (query, key_weight, norm_weight), sources)
        return h, *scalars

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[:4]
        _, *scalars = output
        ctx.mark_non_differentiable(*scalars[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*scalars, *inputs[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        scalars, vectors, sources = Scalars(*saved[:4]), saved[4:7], saved[7:]
        if grads[0] is None and grads[1] is None:
            return (None,) * (7 + len(sources))
        settings = Settings(*ctx.settings)
        if recorded():  # to autograd the saved scalars are constants; these know where they come from
            _, scalars = _forward(settings, vectors, sources)
        found = _backward(settings, vectors, sources, scalars, grads[0], grads[1])
        return (None, None, None, None, *found)


def gradients_as_a_graph(
    settings: Settings,
    vectors: _Vectors,
    sources: Sequence[Tensor],
    d_output: Tensor | None,
    d_alpha: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the vectors and sources that autograd can differentiate again, for a backend that can't.

    The formulas themselves are recorded. Differentiating a forward instead would count a source twice where
    another source depends on it, as a partial sum depends on the embedding.
    """
    _, scalars = _forward(settings, vectors, sources)
    count, width = len(sources), sources[0].shape[-1]
    d_output = None if d_output is None else d_output.reshape(-1, width)
    d_alpha = None if d_alpha is None else d_alpha.reshape(count, -1)
    return _backward(settings, vectors, sources, scalars, d_output, d_alpha)


def _forward(settings: Settings, vectors: _Vectors, sources: Sequence[Tensor]) -> tuple[Tensor, Scalars]:
    """h or y [tokens, D], and alpha, r, t [N, tokens], q [tokens]."""
    first = sources[0]
    u, n, dtype = _in_compute_dtype(vectors, first)
    parts: list[Scalars] = []

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks(sources, dtype):
            h, scalars = read(settings, rows, u, n)
            parts.append(scalars)
            yield chunk, [h.to(first.dtype)]

    with no_autocast(first.device):
        (h,) = joined(pieces(), first)
    if len(parts) == 1:
        return h, parts[0]
    return h, Scalars(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def _backward(
    settings: Settings,
    vectors: _Vectors,
    sources: Sequence[Tensor],
    scalars: Scalars,
    d_output: Tensor | None,
    d_alpha: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key weight, norm weight and every source, each in its own dtype."""
    first, (query, key_weight, norm_weight) = sources[0], vectors
    u, n, dtype = _in_compute_dtype(vectors, first)
    dy = first.new_zeros(()).expand(scalars.r.shape[1], len(u)) if d_output is None else d_output
    parts: list[tuple[Tensor, Tensor | None]] = []

    def pieces() -> Iterator[tuple[slice, Iterable[Tensor]]]:
        for chunk, rows in chunks(sources, dtype):
            here = Scalars(*(x[..., chunk] for x in scalars))
            dp = None if d_alpha is None else d_alpha[:, chunk]
            factors, du, dn = gradients(settings, rows, u, n, here, dy[chunk].to(dtype), dp)
            parts.append((du, dn))
            yield chunk, (d.to(first.dtype) for d in source_gradients(rows, u, factors))

    with no_autocast(first.device):
        d_sources = joined(pieces(), first)
    du = torch.stack([du for du, _ in parts]).sum(0)
    dn = None if n is None else torch.stack([dn for _, dn in parts if dn is not None]).sum(0)
    return (
        (du if key_weight is None else du * key_weight.to(dtype)).to(query.dtype),
        None if key_weight is None else (du * query.to(dtype)).to(key_weight.dtype),
        None if norm_weight is None or dn is None else dn.to(norm_weight.dtype),
        *(d.reshape(first.shape) for d in d_sources),
    )


def chunks(sources: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[slice, Rows]]:
    """Ranges of tokens and their rows in the compute dtype; one range where autograd or a compiler looks."""
    first = sources[0]
    elements, width = first.numel(), first.shape[-1]
    flat = [source.reshape(-1, width) for source in sources]
    everything = slice(0, elements // width)
    if torch.compiler.is_compiling():
        yield everything, [rows.to(dtype) for rows in flat]
    elif torch.is_grad_enabled() or elements * len(sources) <= STACK_ELEMENTS:
        yield everything, torch.stack(flat).to(dtype)
    else:
        limit = CHUNK_ELEMENTS if first.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
        step = max(1, limit // width)
        for start in range(0, everything.stop, step):
            chunk = slice(start, min(start + step, everything.stop))
            yield chunk, [rows[chunk].to(dtype) for rows in flat]


def joined(pieces: Iterable[tuple[slice, Iterable[Tensor]]], first: Tensor) -> list[Tensor]:
    """The pieces [c, D] of every result put together again [tokens, D].

    A single range is handed on without a buffer, since writing into one can't be recorded by autograd.
    """
    width = first.shape[-1]
    tokens = first.numel() // width
    joined: list[Tensor] = []
    for chunk, results in pieces:
        if chunk == slice(0, tokens):
            return list(results)
        for i, part in enumerate(results):
            if i == len(joined):
                joined.append(part.new_empty(tokens, width))
            joined[i][chunk] = part
    return joined


def recorded() -> bool:
    """Whether autograd records the formulas: inside a backward with create_graph=True."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keeps the products in float32 where the caller is inside torch.autocast."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _in_compute_dtype(vectors: _Vectors, first: Tensor) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """u = w * g and n, and the dtype of all arithmetic: float32, or float64 for float64 sources."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    query, key_weight, norm_weight = vectors
    u = query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
    return u, None if norm_weight is None else norm_weight.to(dtype), dtype
