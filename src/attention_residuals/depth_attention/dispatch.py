"""From a call of `depth_attention` to a backend: validates the sources, then runs what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from attention_residuals.depth_attention.cpu.binding import depth_attention_cpu, read_plain_tensors, why_not
from attention_residuals.depth_attention.cpu.compiled import depth_attention_cpu_compiled
from attention_residuals.depth_attention.fla import depth_attention_fla
from attention_residuals.depth_attention.fla import why_not as why_not_fla
from attention_residuals.depth_attention.lean import depth_attention_lean
from attention_residuals.depth_attention.reference import depth_attention_reference
from attention_residuals.variant import ReadVariant

# In order of preference for backend="auto".
BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cpu": depth_attention_cpu,
    "fla": depth_attention_fla,
    "lean": depth_attention_lean,
    "reference": depth_attention_reference,
}
_PLAIN = {Tensor, nn.Parameter}
_ONLY_THE_PAPERS = "computes the paper's read only, not {}"
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def available_backends(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: ReadVariant | None = None,
) -> dict[str, str | None]:
    """Which backends run on this device and dtype: name -> None, or the reason why one cannot.

    "auto" takes the first that can, in this order. Reads of another `variant` than the paper's run in plain
    PyTorch, with its memory, under the names of "lean" and "reference" alike.
    """
    device = torch.device(device)  # raises RuntimeError for a device that does not exist
    reason = None if dtype in FLOAT_DTYPES else f"sources must be floating point, got {dtype}"
    beyond = None if variant is None else variant.beyond_kernels
    kernels = reason or (None if beyond is None else _ONLY_THE_PAPERS.format(beyond))
    return {
        "cpu": kernels or why_not(device, dtype),
        "fla": kernels or why_not_fla(device, dtype),
        "lean": reason,
        "reference": reason,
    }


def _refuse_unknown(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {backend!r}")


def refuse_kernels(backend: str, beyond: str) -> None:
    """Raise ValueError for a backend that is unknown, or can't do what `ReadVariant.beyond_kernels` says."""
    _refuse_unknown(backend)
    if backend in ("cpu", "fla"):
        reason = _ONLY_THE_PAPERS.format(beyond)
        raise ValueError(f"backend={backend!r} {reason}; use backend='auto' or 'lean'")


@overload
def depth_attention(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = ...,
    *,
    eps: float = ...,
    scale: float = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float = ...,
    norm_offset: float = ...,
    read_scale: str = ...,
    return_weights: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def depth_attention(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = ...,
    *,
    eps: float = ...,
    scale: float = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float = ...,
    norm_offset: float = ...,
    read_scale: str = ...,
    return_weights: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def depth_attention(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    read_scale: str = "mean",
    return_weights: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over depth: one learned query weighs N sources, token by token.

        alpha = softmax_i(scale * <query, RMSNorm(v_i) * key_weight>),   h = sum_i alpha_i v_i
    (arXiv 2603.15031, section 3). Computed in float32, or float64 for float64 sources; one downcast at the
    end. Tokens never mix. With N = 1 the source itself is returned.

    Args:
        sources: N >= 1 tensors [..., D] of one shape, dtype and device; or one packed tensor [N, ..., D].
        query: [D]; may be wider than the sources (float32 beside bfloat16), as may the other vectors.
        key_weight: [D], the key norm's weight; None means ones.
        eps: added to the mean square inside the key norm's root.
        scale: multiplies the scores.
        norm_weight: [D]; if given, RMSNorm(h) * norm_weight is returned (the sublayer's pre-norm, fused).
        norm_eps: eps of that norm.
        norm_offset: added to norm_weight, in float32: 1.0 for norms whose scale is 1 + weight, as in Qwen3.5.
        read_scale: "mean" as above; "sum" multiplies h by N, so that a zero query gives the plain sum.
        return_weights: also return alpha [N, ...] in float32 (float64 for float64), differentiable.
        backend: "auto", or a name from `available_backends`. An explicit one never falls back.

    Returns:
        h [..., D] in the sources' dtype, or (h, alpha).

    Raises:
        ValueError: no sources; shapes, devices or widths that differ; an unknown or unavailable backend.
        TypeError: something that is not a floating-point tensor; sources of different dtypes.
    """
    if read_scale not in ("mean", "sum"):
        raise ValueError(f"read_scale must be 'mean' or 'sum', got {read_scale!r}")
    if not return_weights and backend in ("auto", "cpu") and is_plain_inference():
        h = read_plain_tensors(
            sources, query, key_weight, norm_weight, eps, scale, norm_eps, norm_offset, read_scale
        )
        if h is not None:
            return h
    listed = checked(sources, query, key_weight, norm_weight)
    norm_weight = norm_scale(norm_weight, norm_offset)
    run = choose(backend, listed, return_weights)
    gain = float(len(listed)) if read_scale == "sum" else 1.0
    h, weights = run(
        listed, query, key_weight, norm_weight, eps=eps, scale=scale, norm_eps=norm_eps, gain=gain
    )
    return (h, weights) if return_weights else h


def checked(
    sources: Sequence[Tensor] | Tensor, query: Tensor, key_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """The sources as a tuple, once they, the query and the weights are known to fit each other."""
    listed = check_sources(sources)
    for name, vector in (("query", query), ("key_weight", key_weight), ("norm_weight", norm_weight)):
        if vector is not None:
            check_vector(name, vector, listed[0])
    if query is None:
        raise TypeError("query must be a tensor [D], got None")
    return listed


def norm_scale(norm_weight: Tensor | None, norm_offset: float) -> Tensor | None:
    """norm_offset + norm_weight [D], in float32 at least; the weight itself where nothing is added."""
    if norm_weight is None or norm_offset == 0:
        return norm_weight
    return norm_offset + norm_weight.to(torch.promote_types(norm_weight.dtype, torch.float32))


def is_plain_inference() -> bool:
    """Whether nobody records or transforms this call, so that the result is all there is to make."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and untraced() is None


def untraced() -> str | None:
    """None in plain eager mode, else who would not see what a kernel does with memory."""
    if torch._C._get_tracing_state() is not None:
        return "isn't seen by torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "isn't seen by torch.func transforms"
    return None


def choose(
    backend: str, listed: tuple[Tensor, ...], return_weights: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    first = listed[0]
    _refuse_unknown(backend)
    if backend == "auto":
        if first.is_cpu:
            backend = "lean" if _why_not_cpu(listed) else "cpu"
        else:
            backend = "lean" if _why_not_fla(listed, return_weights) else "fla"
    elif backend == "cpu" and (reason := _why_not_cpu(listed)):
        raise ValueError(f"backend='cpu' can't run here: it {reason}; use backend='auto' or 'lean'")
    if backend == "cpu" and torch.compiler.is_compiling():
        return depth_attention_cpu_compiled
    return BACKENDS[backend]


def _why_not_fla(listed: tuple[Tensor, ...], return_weights: bool) -> str | None:
    """Why "auto" leaves this call to `lean`; an explicit backend="fla" gives its own reasons."""
    first = listed[0]
    if first.device.type != "cuda" or torch.compiler.is_compiling() or type(first) is not Tensor:
        return "takes plain CUDA tensors, in eager mode"
    if return_weights and torch.is_grad_enabled():
        return "has no gradient through the depth weights"
    return why_not_fla(first.device, first.dtype, width=first.shape[-1], num_sources=len(listed))


def _why_not_cpu(listed: tuple[Tensor, ...]) -> str | None:
    """Why the compiled kernel can't take this call: it reads memory, so it needs plain tensors."""
    first = listed[0]
    if reason := why_not(first.device, first.dtype):
        return reason
    if torch.compiler.is_compiling():  # the compiler sees a custom op
        return None
    if subclasses := {type(source) for source in listed} - _PLAIN:
        return f"takes plain tensors, got {', '.join(kind.__name__ for kind in subclasses)}"
    return untraced()


def check_sources(sources: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    if isinstance(sources, Tensor):
        if sources.dim() < 2:
            raise ValueError(
                f"packed sources must have at least two axes [N, ..., D], got shape {tuple(sources.shape)}"
            )
        listed = sources.unbind(0)
    elif isinstance(sources, Sequence):
        listed = tuple(sources)
    else:
        raise TypeError(
            f"sources must be a sequence of tensors or one packed tensor, got {type(sources).__name__}"
        )
    if not listed:
        raise ValueError("sources must hold at least one tensor, got none; the embedding is the first source")
    first = listed[0]
    if not _alike(listed):
        _refuse_the_odd_one(listed)
    if first.dim() < 1 or first.shape[-1] < 1:
        raise ValueError(f"sources must have a last axis of width D >= 1, got shape {tuple(first.shape)}")
    if first.dtype not in FLOAT_DTYPES:
        raise TypeError(f"sources must be float16, bfloat16, float32 or float64, got {first.dtype}")
    return listed


def _alike(listed: tuple[Tensor, ...]) -> bool:
    """Whether all are tensors of one shape, dtype and device; quick, since it runs at every read."""
    try:
        shape, dtype, on_cpu = listed[0].shape, listed[0].dtype, listed[0].is_cpu
        for source in listed:
            if source.shape != shape or source.dtype is not dtype or source.is_cpu is not on_cpu:
                return False
    except AttributeError:
        return False
    return on_cpu or len({source.device for source in listed}) == 1


def _refuse_the_odd_one(listed: tuple[Tensor, ...]) -> None:
    first = listed[0]
    for i, source in enumerate(listed):
        if not isinstance(source, Tensor):
            raise TypeError(f"sources[{i}] must be a tensor [..., D], got {type(source).__name__}")
        if source.shape != first.shape:
            raise ValueError(
                f"sources must have one shape; sources[0] has {tuple(first.shape)} and sources[{i}] has "
                f"{tuple(source.shape)}; expand it first if broadcasting is meant"
            )
        if source.dtype != first.dtype:
            raise TypeError(
                f"sources must have one dtype; sources[0] is {first.dtype} and sources[{i}] is "
                f"{source.dtype}; cast one of them"
            )
        if source.device != first.device:
            raise ValueError(
                f"sources must be on one device; sources[0] is on {first.device} and sources[{i}] on "
                f"{source.device}; move one of them"
            )


def check_vector(name: str, vector: Tensor, first: Tensor) -> None:
    if not isinstance(vector, Tensor):
        raise TypeError(f"{name} must be a tensor [D], got {type(vector).__name__}")
    if vector.shape != first.shape[-1:]:
        raise ValueError(
            f"{name} must have shape [{first.shape[-1]}], the sources' width, got {tuple(vector.shape)}"
        )
    if vector.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be floating point, got {vector.dtype}")
    if vector.device != first.device:
        raise ValueError(
            f"{name} must be on the sources' device {first.device}, got {vector.device}; move it"
        )
