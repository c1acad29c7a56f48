"""From a model of unknown architecture to where it keeps layers, pre-norms and final norm; by structure.

Names prove nothing, so each part is found by what it receives. The backbone runs once with layers that hand
on what they get: its layers are those that pass one tensor along, its final norm takes the last one. A copy
of each kind of layer then runs on random numbers. In x = x + f(norm1(x)); x = x + g(norm2(x)) with the norms'
outputs held fixed, a shift of x must arrive unchanged at norm2 and at the layer's output; whatever reads x
elsewhere, as parallel and post-norm blocks do, breaks that. Weights don't matter, so a model on the meta
device will do.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_residuals.models.families import Family

TOKENS = 5
# Rounding steps that additions in another order may cost.
ROUNDINGS = 8


class _Call(NamedTuple):
    """One call of a module: what it received and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def received(self, tensor: Tensor) -> bool:
        return any(value is tensor for value in (*self.args, *self.kwargs.values()))


def recognise(model: PreTrainedModel) -> Family:
    """Where a pre-norm decoder without a row in `FAMILIES` keeps its parts.

    Args:
        model: a plain model of transformers over token ids, with or without a head; its weights are not used
            and may be on any device. It is left as it was.

    Returns:
        The paths in the model's backbone, and no `norm_weight`: each norm computes itself after its read.

    Raises:
        TypeError: not a model of transformers.
        ValueError: the structure is not that of a pre-norm decoder, or can't be shown to be; with the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"only models of transformers can be recognised, got {type(model).__name__}")
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise _refusal(model, "it is not a decoder over token ids")
    if model.config.get_text_config() is not model.config:
        raise _refusal(model, "it has several parts; take its language model alone")
    backbone: Any = model.base_model
    if backbone is model and model.get_output_embeddings() is not None:
        raise _refusal(model, "its backbone is not where base_model_prefix says")
    # Nothing here depends on a default device around the call, nor changes the caller's random numbers.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _by_structure(model, backbone)


def _by_structure(model: Any, backbone: Any) -> Family:
    path, calls, beside = _trace(model, backbone)
    found: dict[Any, tuple[str, ...]] = {}
    for layer, call in zip(backbone.get_submodule(path), calls, strict=True):
        if (kind := _kind(layer)) not in found:
            try:
                found[kind] = _pre_norms(layer, call)
            except ValueError as error:
                raise _refusal(model, str(error)) from error
            except Exception as error:  # unknown code on random numbers may fail in any way
                raise _refusal(model, f"{type(layer).__name__} can't be run by itself ({error})") from error
    if len(names := set(found.values())) > 1:
        raise _refusal(model, f"its layers differ in their pre-norms: {sorted(names)}")
    final_norm = _final_norm(model, backbone, beside, calls)
    return Family(layers=path, pre_norms=names.pop(), final_norm=final_norm, norm_weight=None)


def _refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} can't be recognised as a pre-norm decoder: {reason}. Attention residuals "
        "need layers that compute x = x + f(norm1(x)); x = x + g(norm2(x))"
    )


class _HandOn(nn.Module):
    """In a layer's place: a new tensor equal to its first argument, so that its way can be followed."""

    def __init__(self, layer: nn.Module, order: list[nn.Module], calls: list[_Call]) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, order=order, calls=calls)  # none of them a part of the copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.order.append(self.layer)
        self.calls.append(_Call(args, kwargs, args[0].clone()))
        return self.calls[-1].output


def _trace(model: Any, backbone: Any) -> tuple[str, list[_Call], dict[str, _Call]]:
    """Run a copy of the backbone with layers that only hand on.

    Returns:
        Path of the layers, their calls, and the calls of all modules beside them.
    """
    lists = {name: m for name, m in backbone.named_modules() if isinstance(m, nn.ModuleList)}
    lists = {name: m for name, m in lists.items() if not any(name.startswith(f"{outer}.") for outer in lists)}
    order: list[nn.Module] = []
    calls: list[_Call] = []
    embedding = backbone.get_input_embeddings()
    memo: dict[int, Any] = {id(embedding): nn.Embedding(TOKENS + 1, embedding.embedding_dim)}
    memo |= {id(layer): _HandOn(layer, order, calls) for found in lists.values() for layer in found}
    try:
        shell = _random_copy(backbone, memo)
        with torch.no_grad(), _recording(dict(shell.named_modules())) as others:
            shell(torch.arange(1, TOKENS + 1)[None], use_cache=False)
    except Exception as error:  # a forward of unknown code, with layers exchanged, may fail in any way
        raise _refusal(model, f"its forward fails on layers that return one tensor ({error})") from error
    path = next((path for path, layers in lists.items() if order and order == list(layers)), None)
    if path is None:
        raise _refusal(model, "it has no list of layers that run once each, in order")
    for call, following in itertools.pairwise(calls):
        if not following.args or following.args[0] is not call.output:
            raise _refusal(model, "a layer does not receive what the layer before it returned")
    beside = {name: call for name, call in others.items() if not name.startswith(f"{path}.")}
    return path, calls, beside


@contextmanager
def _recording(modules: dict[str, nn.Module]) -> Iterator[dict[str, _Call]]:
    """Collects one call of each module that runs; None for one that runs more than once."""
    calls: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = None if name in calls else _Call(args, kwargs, output)

        return record

    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for name in [name for name, call in calls.items() if call is None]:
            del calls[name]


def _kind(layer: nn.Module) -> Any:
    """Equal for layers of the same modules and switches, which have their norms at the same places."""
    switches = {name: value for name, value in vars(layer).items() if isinstance(value, (bool, str))}
    switches.pop("training")
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return type(layer), modules, tuple(sorted(switches.items()))


class _Probe:
    """A random copy of a layer, run by itself on a random x: what each module received and returned."""

    def __init__(self, layer: nn.Module, call: _Call) -> None:
        self.layer = _random_copy(layer)
        self.args, self.kwargs = call.args[1:], call.kwargs
        self.x, self.shift = (torch.randn(call.args[0].shape) for _ in range(2))
        self.output, self.calls = self._run(self.x, ())

    def _run(self, x: Tensor, fixed: Iterable[str]) -> tuple[Any, dict[str, _Call]]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for name in fixed:
                output = self.calls[name].output
                norm = self.layer.get_submodule(name)
                stack.callback(norm.register_forward_hook(lambda *_, output=output: output).remove)
            calls = stack.enter_context(_recording(dict(self.layer.named_modules())))
            return self.layer(x, *self.args, **self.kwargs), calls

    def norms(self) -> list[str]:
        """Names of all norms over the width of x, in the order in which they ran."""
        return [n for n, call in self.calls.items() if _is_norm(self.layer.get_submodule(n), call, self.x)]

    def moving_with_x(self, norms: Iterable[str], fixed: Iterable[str]) -> list[str]:
        """Those of `norms` whose input moves exactly as x does while the outputs of `fixed` stay."""
        calls = self._run(self.x + self.shift, fixed)[1]
        inputs = {name: (self.calls[name].args[0], calls[name].args[0]) for name in norms}
        return [name for name, (before, after) in inputs.items() if self._moved(before, after, self.x)]

    def output_moves_with_x(self, fixed: Iterable[str]) -> bool:
        """Whether the output moves exactly as x does while the outputs of `fixed` stay."""
        scale = self.x.abs() + sum(self.calls[name].args[0].abs() for name in fixed)
        return self._moved(self.output, self._run(self.x + self.shift, fixed)[0], scale)

    def _moved(self, before: Tensor, after: Tensor, scale: Tensor) -> bool:
        """Up to rounding of numbers of this scale."""
        tolerance = torch.finfo(scale.dtype).eps * (scale.abs() + before.abs() + self.shift.abs())
        return bool(((after - before - self.shift).abs() <= ROUNDINGS * tolerance).all())

    def readers(self, norm: str) -> list[str]:
        """Names of the layer's own children that receive the norm's output."""
        output = self.calls[norm].output
        return [
            n for n, _ in self.layer.named_children() if n in self.calls and self.calls[n].received(output)
        ]


def _pre_norms(layer: nn.Module, call: _Call) -> tuple[str, ...]:
    """Paths of a layer's pre-norms, in the order in which they run.

    Raises:
        ValueError: it has none, or reads its input elsewhere too; the message is the reason.
    """
    name = type(layer).__name__
    probe = _Probe(layer, call)
    if not isinstance(probe.output, Tensor) or probe.output.shape != probe.x.shape:
        raise ValueError(f"{name} returns something else than hidden states")
    norms = probe.norms()
    first = [norm for norm in norms if torch.equal(probe.calls[norm].args[0], probe.x)]
    if not first:
        raise ValueError(f"no norm receives the input of {name}, as in post-norm blocks")
    if len(first) > 1:
        raise ValueError(f"{' and '.join(first)} receive the same input, as in parallel blocks")
    second = probe.moving_with_x([norm for norm in norms if norm not in first], first)
    if len(second) > 1:
        raise ValueError(f"{' and '.join(second)} all receive the residual stream inside {name}")
    if not probe.output_moves_with_x((*first, *second)):
        raise ValueError(f"{name} uses its input outside {' and '.join((*first, *second))}, or scales it")
    if not second and len(readers := probe.readers(*first)) > 1:
        raise ValueError(f"{' and '.join(readers)} share {first[0]}, as in parallel blocks")
    return (*first, *second)


def _is_norm(module: nn.Module, call: _Call, like: Tensor) -> bool:
    """Whether a module without children maps [B, T, D] to [B, T, D] whatever the scale of its input."""
    if next(module.children(), None) is not None or len(call.args) != 1 or call.kwargs:
        return False
    if not all(isinstance(t, Tensor) and t.shape == like.shape for t in (call.args[0], call.output)):
        return False
    z = torch.randn(like.shape)
    with torch.no_grad():
        return torch.allclose(module(4.0 * z), module(z), rtol=1e-3, atol=1e-3)


def _final_norm(model: Any, backbone: nn.Module, beside: dict[str, _Call], calls: list[_Call]) -> str:
    """Path of the module that takes the last layer's output, if it is a norm and alone in that."""
    for call in calls[:-1]:
        if readers := [name for name, other in beside.items() if other.received(call.output)]:
            raise _refusal(model, f"{' and '.join(readers)} read the residual stream between layers")
    readers = [name for name, other in beside.items() if other.received(calls[-1].output)]
    if len(readers) != 1 or not _is_norm(
        _random_copy(backbone.get_submodule(readers[0])), beside[readers[0]], calls[-1].output
    ):
        raise _refusal(model, "the last layer's output does not go to one final norm")
    return readers[0]


def _random_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """The same module with random parameters, float32 on the CPU, in eager PyTorch.

    Args:
        memo: what stands in the copy for modules of these ids.
    """
    made = copy.deepcopy(module, memo).to(torch.float32).to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=1.0 if tensor.ndim < 2 else tensor.shape[-1] ** -0.5)
            else:
                tensor.fill_(tensor.dtype is torch.bool)
    for part in made.modules():
        if (config := vars(part).get("config")) is not None:
            config._attn_implementation = config._experts_implementation = "eager"
    return made
