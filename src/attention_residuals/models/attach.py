"""From an unmodified Hugging Face decoder to Attention Residuals, by swapping classes.

A pre-norm layer computes x = x + f(norm1(x)); x = x + g(norm2(x)). It is given the open block's partial sum
as x (zeros where a block has just closed), and its pre-norms become reads: they mix the finished blocks and
the x they receive, then norm. The layer's own code then is Attention Residuals, with its masks, caches
and kernels. A block that closes inside a layer is the x that norm2 receives; what remains after the layer
is its output minus that x. A layer may also have one sublayer and one pre-norm. The final norm becomes the
final read.

    stream -> (partial, *blocks) -> layer -> (tail, *closed mid-layer) -> stream

No module is wrapped, so every untouched weight keeps its name. Blocks travel through the layer's call, which
may be checkpointed, as separate tensor arguments. The only state outside is one immutable stream per model
forward; it lives in a thread-local, is read before and replaced after each layer, and goes with the forward.

Under the two-phase schedule the first layer of a group of reads runs their phase 1 before its own call. What
it found waits beside the stream, and enters each layer as further tensors, in place of the shared blocks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attention_residuals.config import AttnResConfig
from attention_residuals.depth_attention.recorded import ReadRecord, norm_mixture, row_norms
from attention_residuals.depth_attention.two_phase import SharedRead
from attention_residuals.models.families import Family
from attention_residuals.models.model_pass import LOCAL, DepthTrace, LayerMemory, own_tokens
from attention_residuals.plan import DepthPlan, in_window
from attention_residuals.read import DepthRead
from attention_residuals.stream import ResidualStream


class _Frame:
    """One layer forward: the blocks its reads see beside the shared ones, and what they received and made."""

    def __init__(
        self, blocks: tuple[Tensor, ...], shared: tuple[Tensor, ...], trace: DepthTrace | None
    ) -> None:
        self.blocks, self.trace = blocks, trace
        size = len(SharedRead._fields)
        self.shared = [SharedRead(*shared[i : i + size]) for i in range(0, len(shared), size)]
        self.received: list[Tensor] = []


class AttnResNorm(nn.Module):
    """Mixin of a norm that reads before it norms; `read` is None for the very first read."""

    read: DepthRead | None
    sees_partial: bool
    window: int | None
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
        return self.mix_and_norm(sources, frame.trace, shared, x.dtype)

    def mix_and_norm(
        self,
        sources: tuple[Tensor, ...],
        trace: DepthTrace | None,
        shared: SharedRead | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Read N sources [B, T, D], then norm; a `trace` receives the depth weights and the mixture's norms.

        With `shared`, what phase 1 found for this read, `sources` are the others.
        """
        norm = super().forward
        sources = in_window(sources, self.window)
        two_phase: dict[str, Any] = {} if shared is None else {"shared": shared, "dtype": dtype}
        memory = None if trace is None else next(trace.memory, None)
        if self.read is None:
            (mixture,) = sources  # the embedding alone: returned unchanged
            if trace is not None:
                ones = torch.ones(1, *mixture.shape[:-1], device=mixture.device)
                trace.add_read(ones, row_norms(mixture), mixture)
            return norm(mixture)
        norm_of = self.attn_res_family.norm_weight
        weight, offset, norm_eps = (None, 0.0, 0.0) if norm_of is None else norm_of(self)
        # a mixture that is kept has to be made, so that its norm can't be part of the read
        fused = None if trace is not None and trace.keep_mixtures else weight
        given = {"norm_weight": fused, "norm_offset": offset, "norm_eps": norm_eps, **two_phase}
        if trace is None:
            found = self.read(sources, **given)
        else:
            record = ReadRecord(memory)
            found, weights = self.read(sources, return_weights=True, record=record, **given)
            trace.add_read(weights, record.norms, found)
        if weight is None:
            return norm(found)
        return (
            found if fused is not None else norm_mixture(found, weight, norm_eps, offset, self.read.backend)
        )

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
        shared = next(iter(current.take_shared(1)), None)
        sources = current.stream.sources
        if shared is not None:
            sources = sources[current.num_shared :]
        if current.trace is not None and (memory := current.trace.memory_like(x)):
            current.trace.memory = iter(memory.reads[-1:])
        return self.mix_and_norm(sources, current.trace, shared, x.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_final_norm_class, _plain_class(self)), self.__dict__


class AttnResLayer(nn.Module):
    """Mixin of a layer between two states of the residual stream.

    Attributes:
        argument_names: what the plain layer's positional arguments after the first are called.
        num_sublayers: how many sublayers it has, one or two.
        closes_inside: whether a block closes after the first of two sublayers.
        closes_after: whether a block closes after the last one.
    """

    argument_names: tuple[str, ...]
    num_sublayers: int
    closes_inside: bool
    closes_after: bool

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Inside a model forward: takes the stream, runs the layer, puts the new stream back.

        Outside one (a pipeline stage): `layer(x, *blocks, **kwargs)` is `forward`.
        """
        current = getattr(LOCAL, "model_pass", None)
        if current is None:
            return super().__call__(hidden_states, *args, **kwargs)
        if args:  # positional ones are the blocks from here on
            kwargs.update(zip(self.argument_names[: len(args)], args, strict=True))
        stream = ResidualStream.start(own_tokens(hidden_states)) if current.stream is None else current.stream
        x = torch.zeros_like(stream.blocks[0]) if stream.partial is None else stream.partial
        first_read = self.num_sublayers * current.layers_run
        if current.trace is not None:
            kwargs["attn_res_record"] = "mixtures" if current.trace.keep_mixtures else "norms"
            if memory := current.trace.memory_like(x):
                kwargs["attn_res_memory"] = memory.of(first_read, self.num_sublayers)
        unshared, shared = stream.blocks, ()
        checkpointed = self.training and getattr(self, "gradient_checkpointing", False)
        current.begin_group(first_read, stream, checkpointed)
        if found := current.take_shared(self.num_sublayers):
            unshared = stream.blocks[current.num_shared :]
            shared = tuple(itertools.chain(*found))
            kwargs["attn_res_shared"] = len(shared)
        tail, *rest = super().__call__(x, *unshared, *shared, **kwargs)
        closed = (*stream.blocks, rest.pop(0)) if self.closes_inside else stream.blocks
        current.stream = (
            ResidualStream((*closed, tail)) if self.closes_after else ResidualStream(closed, tail)
        )
        current.layers_run += 1
        if current.trace is not None:
            current.trace.take(rest, self.num_sublayers)
        return tail

    def forward(
        self,
        hidden_states: Tensor,
        *blocks: Tensor,
        attn_res_record: Literal["norms", "mixtures"] | None = None,
        attn_res_memory: LayerMemory | None = None,
        attn_res_shared: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """One layer: x [B, T, D] (the open block's partial sum, or zeros) and the finished blocks.

        The last `attn_res_shared` tensors are the fields of each read's `SharedRead`; the blocks that these
        cover are then left out. What is recorded lies in `attn_res_memory`, where it is given and fits.

        Returns:
            The open block's sum after the layer; the block that closed between its sublayers, if one did;
            when recording, the tensors of the layer's `DepthTrace`, with or without mixtures.

        Raises:
            TypeError: the plain layer returns something else than one tensor.
        """
        outer = getattr(LOCAL, "frame", None)
        first_shared = len(blocks) - attn_res_shared
        trace = None if attn_res_record is None else DepthTrace(keep_mixtures=attn_res_record == "mixtures")
        if trace is not None and attn_res_memory is not None:
            trace.memory = iter(attn_res_memory.reads)
        LOCAL.frame = frame = _Frame(blocks[:first_shared], blocks[first_shared:], trace)
        try:
            output = super().forward(hidden_states, **kwargs)
        finally:
            LOCAL.frame = outer
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(self).__name__} must return one tensor, got {type(output).__name__}; attention "
                "residuals need an architecture whose layers return hidden states only"
            )
        output = output.to(hidden_states.dtype)  # Mamba adds in float32; the sources of a read have one dtype
        closed = (frame.received[1],) if self.closes_inside else ()
        tail = output - frame.received[1] if self.closes_inside else output
        if trace is None:
            return (tail, *closed)
        states = (hidden_states, *frame.received[1:], output)
        memory = (None,) * self.num_sublayers if attn_res_memory is None else attn_res_memory.output_norms
        for (before, after), norms in zip(itertools.pairwise(states), memory, strict=True):
            trace.add_output(before, after, norms)
        return (tail, *closed, *trace.tensors())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_layer_class, _plain_class(self)), self.__dict__


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
    made = _subclass(AttnResLayer, plain, plain.__name__)
    _, _, *names = inspect.signature(plain.forward).parameters  # after self and the hidden states
    made.argument_names = tuple(names)  # type: ignore[attr-defined]
    return made


def _plain_class(module: Any) -> type[nn.Module]:
    return module.attn_res_plain_class


def _rebuild(make_class: Any, plain: type[nn.Module]) -> nn.Module:
    """For pickle and deepcopy: an empty instance of a class that exists only in this process."""
    swapped = make_class(plain)
    return swapped.__new__(swapped)


def attach(backbone: nn.Module, config: AttnResConfig, family: Family) -> DepthPlan:
    """Put reads into a decoder, in place, according to `config`; standard mode leaves every module as it is.

    Args:
        backbone: the model that holds layers and final norm, e.g. `Qwen3_5TextModel`; its config says the
            width.
        config: mode, blocks, window, and what a read computes.
        family: where this architecture keeps its parts.

    Returns:
        The plan: which sources each read sees.

    Raises:
        ValueError: the backbone has reads already, or a layer reads the residual stream elsewhere too;
            the variant of the reads doesn't fit the width.
        AttributeError: a part that the family's row names is missing.
    """
    layers = family.layers_of(backbone)
    count = family.sublayers_per_layer
    plan = DepthPlan(count * len(layers), config)
    if any(isinstance(layer, AttnResLayer) for layer in layers):
        raise ValueError("the model has attention residuals already; attach them to a plain one")
    if config.mode == "standard":
        return plan
    _refuse_other_readers(layers, family)
    for i, layer in enumerate(layers):
        first, last = count * i, count * (i + 1) - 1
        for sublayer, norm in enumerate(family.pre_norms_of(layer), first):
            _swap_norm(norm, _norm_class, sublayer, plan, family, backbone)
            # A second norm always receives what the first sublayer wrote: a partial sum, or a whole block.
            norm.sees_partial = plan.has_partial(sublayer) or sublayer > first
        layer.num_sublayers = count
        layer.closes_inside = last > first and plan.closes_block(first)
        layer.closes_after = plan.closes_block(last)
        layer.__class__ = _layer_class(layer.__class__)
    final = family.final_norm_of(backbone)
    _swap_norm(final, _final_norm_class, plan.num_sublayers, plan, family, backbone)
    final.num_layers = len(layers)
    return plan


def _refuse_other_readers(layers: Any, family: Family) -> None:
    for layer in layers:
        for name in family.reads_elsewhere:
            if hasattr(layer, name):
                raise ValueError(
                    f"{type(layer).__name__} must read the residual stream at {', '.join(family.pre_norms)} "
                    f"only, but it has {name!r}; use a model that is configured without it"
                )


def reads_in_order(backbone: nn.Module, family: Family) -> list[DepthRead | None]:
    """The reads of a backbone that `attach` has changed, the final one last; None for the very first."""
    norms = [norm for layer in family.layers_of(backbone) for norm in family.pre_norms_of(layer)]
    return [norm.read for norm in (*norms, family.final_norm_of(backbone))]


def _swap_norm(norm: Any, make_class: Any, read: int, plan: DepthPlan, family: Family, backbone: Any) -> None:
    like = next(itertools.chain(norm.parameters(), backbone.parameters()))  # a norm may have no parameters
    norm.attn_res_family = family
    norm.sees_partial = plan.has_partial(read)
    norm.window = plan.config.window
    norm.read = None
    if plan.num_sources(read) > 1:
        norm.read = DepthRead(
            backbone.config.hidden_size,
            eps=plan.config.eps,
            read_scale=plan.config.read_scale,
            variant=plan.config.variant,
            num_sources=plan.num_sources(read),
            has_partial=plan.has_partial(read),
            device=like.device,
            dtype=like.dtype,
        )
    norm.__class__ = make_class(type(norm))
