"""From a plain model's forward to one that opens a residual stream and can hand out what the reads did."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import resolve_hidden_states_indices, selected_hidden_states

from attention_residuals.models.attach import reads_in_order
from attention_residuals.models.mixins import family_of
from attention_residuals.models.model_pass import DepthTrace, Phases, model_pass
from attention_residuals.models.outputs import with_depth_weights

# Per thread: lists that receive the trace of every backbone forward run while they are open.
_LOCAL = threading.local()


@contextmanager
def collect_traces() -> Iterator[list[DepthTrace]]:
    """Records every backbone forward of this thread; yields the list that fills up."""
    outer = getattr(_LOCAL, "traces", None)
    traces: list[DepthTrace] = []
    _LOCAL.traces = traces
    try:
        yield traces
    finally:
        _LOCAL.traces = outer


def _with_depth_weights_argument(base: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` under the name and signature of `base`, plus the argument `output_depth_weights`."""
    functools.update_wrapper(forward, base)
    signature = inspect.signature(base)
    extra = inspect.Parameter("output_depth_weights", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(signature.parameters.values())
    at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters[:at], extra, *parameters[at:]]
    )
    del forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def _setting(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An `output_...` argument, or the config's value where it isn't given."""
    value = kwargs.pop(name, None)
    return getattr(model.config, name, None) if value is None else value


def backbone_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a backbone with reads.

    Beside the plain model's arguments: `output_depth_weights`. `output_hidden_states` gives the mixture that
    each layer's first read made (the counterpart of a layer's input), then the output of the final norm.
    """

    _, *names = inspect.signature(base).parameters

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        want_weights = _setting(self, kwargs, "output_depth_weights")
        _refuse_packing(self, {**dict(zip(names, args, strict=False)), **kwargs})
        if self.depth_plan.config.mode == "standard":
            if want_weights:
                raise ValueError("mode='standard' has no reads, so output_depth_weights can't be given")
            return base(self, *args, **kwargs)
        hidden = _setting(self, kwargs, "output_hidden_states")
        return_dict = _setting(self, kwargs, "return_dict")
        traces = getattr(_LOCAL, "traces", None)
        sinks = [sink for sink in (traces, *self.depth_records) if sink is not None]
        want_hidden = hidden is not None and hidden is not False
        looked_at = want_weights or sinks or want_hidden
        trace = DepthTrace(keep_mixtures=want_hidden, plan=self.depth_plan) if looked_at else None
        reads = functools.partial(reads_in_order, self, family_of(self.config))
        always = self.depth_plan.config.read_schedule == "two_phase"
        with model_pass(trace, Phases(self.read_groups, reads, always)):
            outputs = base(self, *args, output_hidden_states=False, return_dict=True, **kwargs)
        if trace is not None:
            for sink in sinks:
                sink.append(trace)
            outputs = _hand_out(self, outputs, trace, hidden, want_weights)
        return outputs if return_dict is None or return_dict else outputs.to_tuple()

    return _with_depth_weights_argument(base, forward)


def _hand_out(model: Any, outputs: Any, trace: DepthTrace, hidden: Any, want_weights: Any) -> ModelOutput:
    if hidden is not None and hidden is not False:
        first_reads = trace.mixtures[: -1 : family_of(model.config).sublayers_per_layer]
        states = [*first_reads, outputs.last_hidden_state]
        selected = selected_hidden_states(hidden)
        keep = set(range(len(states)))
        if selected is not None:
            keep = resolve_hidden_states_indices(model, selected, len(states))
        outputs["hidden_states"] = tuple(h if i in keep else None for i, h in enumerate(states))
    return with_depth_weights(outputs, tuple(trace.weights)) if want_weights else outputs


def head_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model with a head, with `output_depth_weights` beside the plain model's arguments."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _setting(self, kwargs, "output_depth_weights"):
            return base(self, *args, **kwargs)
        if self.base_model.depth_plan.config.mode == "standard":
            raise ValueError("mode='standard' has no reads, so output_depth_weights can't be given")
        return_dict = _setting(self, kwargs, "return_dict")
        with collect_traces() as traces:
            outputs = base(self, *args, return_dict=True, **kwargs)
        outputs = with_depth_weights(outputs, tuple(traces[-1].weights))
        return outputs if return_dict is None or return_dict else outputs.to_tuple()

    return _with_depth_weights_argument(base, forward)


def _refuse_packing(model: Any, given: dict[str, Any]) -> None:
    """Rows of several documents must say so to every layer; else one document leaks into the next."""
    position_ids = given.get("position_ids")
    alone = given.get("cache") is None and given.get("attention_mask") is None
    if position_ids is None or not alone or torch.compiler.is_compiling():
        return
    if position_ids.ndim == 3:  # rotary positions in space; with a fourth plane the first one counts tokens
        if position_ids.shape[0] != 4:
            return
        position_ids = position_ids[0]
    if not bool((position_ids.diff() < 0).any()):
        return
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        if given.get("cu_seq_lens_q") is None or given.get("seq_idx") is None:
            raise ValueError(
                "position_ids restart inside a row, but Gated DeltaNet layers would carry their state from "
                "one document to the next; put each document in its own row, or pass cu_seq_lens_q (for the "
                "delta rule) and seq_idx (for the convolution) where their CUDA kernels run"
            )
        return
    use_cache = given.get("use_cache")
    if getattr(model.config, "use_cache", False) if use_cache is None else use_cache:
        raise ValueError(
            "position_ids restart inside a row, but with use_cache=True its documents would be read as one; "
            "pass use_cache=False, so that attention keeps them apart"
        )
