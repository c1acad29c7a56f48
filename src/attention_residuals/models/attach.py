"""From an unmodified Hugging Face decoder to Attention Residuals, by swapping classes.

A pre-norm layer computes x = x + f(norm1(x)); x = x + g(norm2(x)). It is given the open block's partial sum
as x (zeros where a block has just closed), and its two pre-norms become reads: they mix the finished blocks
and the x they receive, then norm. The layer's own code then is Attention Residuals, with its masks, caches
and kernels. A block that closes inside a layer is the x that norm2 receives; what remains after the layer
is its output minus that x. The final norm becomes the final read.

    stream -> (partial, *blocks) -> layer -> (tail, *closed mid-layer) -> stream

No module is wrapped, so every untouched weight keeps its name. Blocks travel through the layer's call, which
may be checkpointed, as separate tensor arguments. The only state outside is one immutable stream per model
forward; it lives in a thread-local, is read before and replaced after each layer, and goes with the forward.

Under the two-phase schedule the first layer of a group of reads runs their phase 1 before its own call. What
it found waits beside the stream, and enters each layer as further tensors, in place of the shared blocks.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from attention_residuals.config import AttnResConfig
from attention_residuals.depth_attention.two_phase import SharedRead
from attention_residuals.models.families import Family
from attention_residuals.models.model_pass import LOCAL, DepthTrace
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.schedule import SUBLAYERS_PER_LAYER
from attention_residuals.stream import ResidualStream


class _Frame:
    """One layer forward: the blocks its reads see beside the shared ones, and what they received and made."""

    def __init__(self, blocks: tuple[Tensor, ...], shared: tuple[Tensor, ...], record: bool) -> None:
        self.blocks, self.record = blocks, record
        size = len(SharedRead._fields)
        self.shared = [SharedRead(*shared[i : i + size]) for i in range(0, len(shared), size)]
        self.received: list[Tensor] = []
        self.made: list[Tensor] = []


class AttnResNorm(nn.Module):
    """Mixin of a norm that reads before it norms; `read` is None for the very first read."""

    read: DepthRead | None
    sees_partial: bool
    attn_res_family: Family
    # transformers replaces the forward of modules that carry a kernel's name; a read must not be bypassed.
    kernel_layer_name = "AttnResNorm"

    def forward(self, x: Tensor) -> Tensor:
        frame = getattr(LOCAL, "frame", None)
        if frame is None:
            raise RuntimeError(
                "a norm with a depth read was called outside its decoder layer; call the layer or the model"
            )
        shared = frame.shared[len(frame.received)] if frame.shared else None
        frame.received.append(x)
        sources = (*frame.blocks, x) if self.sees_partial else frame.blocks
        return self.mix_and_norm(sources, frame.made if frame.record else None, shared, x.dtype)

    def mix_and_norm(
        self,
        sources: tuple[Tensor, ...],
        made: list[Tensor] | None,
        shared: SharedRead | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Read N sources [B, T, D], then norm; with `made`, depth weights and mixture are appended to it.

        With `shared`, what phase 1 found for this read, `sources` are the others.
        """
        norm = super().forward
        two_phase: dict[str, Any] = {} if shared is None else {"shared": shared, "dtype": dtype}
        if self.read is None:
            (mixture,) = sources  # the embedding alone: returned unchanged
            if made is not None:
                made += [torch.ones(1, *mixture.shape[:-1], device=mixture.device), mixture]
            return norm(mixture)
        if made is not None:
            mixture, weights = self.read(sources, return_weights=True, **two_phase)
            made += [weights, mixture]
            return norm(mixture)
        if self.attn_res_family.norm_weight is None:
            return norm(self.read(sources, **two_phase))
        weight, eps = self.attn_res_family.norm_weight(self)
        return self.read(sources, norm_weight=weight, norm_eps=eps, **two_phase)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_norm_class, _plain_class(self)), self.__dict__


class AttnResFinalNorm(AttnResNorm):
    """Mixin of the final norm: reads every source of the model forward under way."""

    num_layers: int

    def forward(self, x: Tensor) -> Tensor:
        current = getattr(LOCAL, "model_pass", None)
        if current is None or current.stream is None:
            raise RuntimeError("the final read was called outside a model forward; call the model instead")
        if current.layers_run != self.num_layers:
            raise RuntimeError(
                f"the final read needs all {self.num_layers} layers, but {current.layers_run} ran: early "
                "exit, and pipeline parallelism of hidden states only, don't work with attention residuals"
            )
        made: list[Tensor] | None = None if current.trace is None else []
        shared = next(iter(current.take_shared(1)), None)
        sources = current.stream.sources
        if shared is not None:
            sources = sources[current.num_shared :]
        out = self.mix_and_norm(sources, made, shared, x.dtype)
        if made is not None:
            _keep(current.trace, made, [])
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_final_norm_class, _plain_class(self)), self.__dict__


class AttnResLayer(nn.Module):
    """Mixin of a decoder layer between two states of the residual stream."""

    closes_after_mixer: bool
    closes_after_mlp: bool

    def __call__(self, hidden_states: Tensor, *blocks: Tensor, **kwargs: Any) -> Any:
        """Inside a model forward: takes the stream, runs the layer, puts the new stream back.

        Outside one (a pipeline stage): `layer(x, *blocks, **kwargs)` is `forward`.
        """
        current = getattr(LOCAL, "model_pass", None)
        if current is None:
            return super().__call__(hidden_states, *blocks, **kwargs)
        if blocks:
            raise TypeError("inside a model forward a layer takes its sources from the residual stream")
        stream = ResidualStream.start(hidden_states) if current.stream is None else current.stream
        x = torch.zeros_like(stream.blocks[0]) if stream.partial is None else stream.partial
        if current.trace is not None:
            kwargs["attn_res_record"] = True
        unshared, shared = stream.blocks, ()
        current.begin_group(stream, self.training and getattr(self, "gradient_checkpointing", False))
        if two_reads := current.take_shared(SUBLAYERS_PER_LAYER):
            unshared = stream.blocks[current.num_shared :]
            shared = tuple(itertools.chain(*two_reads))
            kwargs["attn_res_shared"] = len(shared)
        tail, *rest = super().__call__(x, *unshared, *shared, **kwargs)
        closed = (*stream.blocks, rest.pop(0)) if self.closes_after_mixer else stream.blocks
        current.stream = (
            ResidualStream((*closed, tail)) if self.closes_after_mlp else ResidualStream(closed, tail)
        )
        current.layers_run += 1
        if current.trace is not None:
            _keep(current.trace, rest[:4], rest[4:])
        return tail

    def forward(
        self,
        hidden_states: Tensor,
        *blocks: Tensor,
        attn_res_record: bool = False,
        attn_res_shared: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """One layer: x [B, T, D] (the open block's partial sum, or zeros) and the finished blocks.

        The last `attn_res_shared` tensors are the fields of both reads' `SharedRead`; the blocks that these
        cover are then left out.

        Returns:
            The open block's sum after the layer; the block that closed after the token mixer, if one did;
            when recording, weights and mixture of both reads and both output norms.
        """
        outer = getattr(LOCAL, "frame", None)
        first_shared = len(blocks) - attn_res_shared
        LOCAL.frame = frame = _Frame(blocks[:first_shared], blocks[first_shared:], attn_res_record)
        try:
            output = super().forward(hidden_states, **kwargs)
        finally:
            LOCAL.frame = outer
        middle = frame.received[1]
        closed = (middle,) if self.closes_after_mixer else ()
        tail = output - middle if self.closes_after_mixer else output
        if not attn_res_record:
            return (tail, *closed)
        norms = [_row_norms(middle - hidden_states), _row_norms(output - middle)]
        return (tail, *closed, *frame.made, *norms)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_layer_class, _plain_class(self)), self.__dict__


def _row_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().float(), dim=-1)


def _keep(trace: DepthTrace, made: list[Tensor], output_norms: list[Tensor]) -> None:
    trace.weights += made[0::2]
    trace.mixtures += made[1::2]
    trace.output_norms += output_norms


def _subclass(mixin: type, plain: type[nn.Module], name: str) -> type[nn.Module]:
    return type(name, (mixin, plain), {"__module__": __name__, "attn_res_plain_class": plain})


@functools.cache
def _norm_class(plain: Any) -> type[nn.Module]:
    return _subclass(AttnResNorm, plain, f"AttnRes{plain.__name__}")


@functools.cache
def _final_norm_class(plain: Any) -> type[nn.Module]:
    return _subclass(AttnResFinalNorm, plain, f"AttnResFinal{plain.__name__}")


@functools.cache
def _layer_class(plain: Any) -> type[nn.Module]:
    # Keeps the plain class's name: device maps, FSDP policies and quantizers find layers by it.
    return _subclass(AttnResLayer, plain, plain.__name__)


def _plain_class(module: Any) -> type[nn.Module]:
    return module.attn_res_plain_class


def _rebuild(make_class: Any, plain: type[nn.Module]) -> nn.Module:
    """For pickle and deepcopy: an empty instance of a class that exists only in this process."""
    swapped = make_class(plain)
    return swapped.__new__(swapped)


def attach(backbone: nn.Module, config: AttnResConfig, family: Family) -> DepthPlan:
    """Put reads into a decoder, in place, according to `config`; standard mode leaves every module as it is.

    Args:
        backbone: the model that holds layers and final norm, e.g. `Qwen3_5TextModel`.
        config: mode, blocks, read scale and eps.
        family: where this architecture keeps its parts.

    Returns:
        The plan: which sources each read sees.

    Raises:
        ValueError: the backbone has reads already.
        AttributeError: a part that the family's row names is missing.
    """
    layers: Any = getattr(backbone, family.layers)
    plan = DepthPlan(2 * len(layers), config)
    if any(isinstance(layer, AttnResLayer) for layer in layers):
        raise ValueError("the model has attention residuals already; attach them to a plain one")
    if config.mode == "standard":
        return plan
    for i, layer in enumerate(layers):
        for sublayer, name in zip((2 * i, 2 * i + 1), family.pre_norms, strict=True):
            _swap_norm(getattr(layer, name), _norm_class, sublayer, plan, family)
        # The second norm always receives what the token mixer wrote: a partial sum or a block just closed.
        getattr(layer, family.pre_norms[1]).sees_partial = True
        layer.closes_after_mixer, layer.closes_after_mlp = map(plan.closes_block, (2 * i, 2 * i + 1))
        layer.__class__ = _layer_class(layer.__class__)
    final = getattr(backbone, family.final_norm)
    _swap_norm(final, _final_norm_class, plan.num_sublayers, plan, family)
    final.num_layers = len(layers)
    return plan


def reads_in_order(backbone: nn.Module, family: Family) -> list[DepthRead | None]:
    """The reads of a backbone that `attach` has changed, the final one last; None for the very first."""
    layers: Any = getattr(backbone, family.layers)
    norms = [getattr(layer, name) for layer in layers for name in family.pre_norms]
    return [norm.read for norm in (*norms, getattr(backbone, family.final_norm))]


def _swap_norm(norm: Any, make_class: Any, read: int, plan: DepthPlan, family: Family) -> None:
    weight = next(norm.parameters())
    norm.attn_res_family = family
    norm.sees_partial = plan.has_partial(read)
    norm.read = None
    if plan.num_sources(read) > 1:
        norm.read = DepthRead(
            weight.shape[-1],
            eps=plan.config.eps,
            read_scale=plan.config.read_scale,
            device=weight.device,
            dtype=weight.dtype,
        )
    norm.__class__ = make_class(type(norm))
