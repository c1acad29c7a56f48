"""What a plain model keeps for backward and multiplies, without memory for it: a run on fake tensors.

PyTorch's `FakeTensorMode` runs every operation on shapes alone, and dispatches as the device would. What
autograd saves is attributed to the layer, and to the pre-norm, that saves it first. So the counts are those
of the model's own code on that device, for any architecture; no formula per family has to be kept true.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import masking_utils

from attention_residuals.planner.plain_model import PlainModel, representatives, thin_model
from attention_residuals.read import DepthRead
from attention_residuals.variant import ReadVariant

# A longer row is extrapolated from three shorter ones, since token-by-token loops take long even without
# numbers. What is kept is a polynomial of degree two in the tokens, so nothing is lost.
LONGEST_ROW = 1024
ROW_UNIT = 256


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


# the CPU's fused attention, which PyTorch's table of operations lacks
FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclasses.dataclass(frozen=True)
class PartCount:
    """What one part of the plain model keeps for backward, in bytes, and multiplies in a forward.

    Attributes:
        kept: bytes beside weights; for a layer without its norms, for the head without the final norm.
        norms: bytes that each norm keeps beside its input.
        norm_keeps_input: whether each norm keeps its input as it is.
        flops: of matrix products and attention, two per multiplication and addition.
    """

    kept: int
    norms: tuple[int, ...] = ()
    norm_keeps_input: tuple[bool, ...] = ()
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The parts of a plain model for rows [B, T]: before the layers, a layer of each kind, after them."""

    embedding: PartCount
    layers: tuple[PartCount, ...]
    head: PartCount


def dry_run(
    model: PlainModel, *, batch: int, context: int, dtype: torch.dtype, device: str = "cpu"
) -> DryRun:
    """Count one forward with labels on B rows of T tokens.

    Raises:
        ValueError: the model's code needs numbers to run, such as experts chosen one by one.
    """
    if context <= LONGEST_ROW:
        return _run(model, batch, context, dtype, device)
    # rows in whole units, as long rows are, so that padding to chunks falls away
    at = [ROW_UNIT * i for i in (1, 2, 3)]
    return _extrapolate(at, [_run(model, batch, tokens, dtype, device) for tokens in at], context)


def _run(model: PlainModel, batch: int, context: int, dtype: torch.dtype, device: str) -> DryRun:
    with FakeTensorMode(allow_non_fake_inputs=True):
        thin = thin_model(model, dtype, device).train()
        ids = torch.zeros(batch, context, dtype=torch.long, device=device)
        ledger = _Ledger(model, thin)
        flops = FlopCounterMode(display=False, custom_mapping=FLOPS)
        try:
            saved = torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda tensor: tensor)
            with flops, saved, _no_packed_documents():
                thin(ids, labels=ids, use_cache=False)
        except Exception as error:  # fake tensors raise many kinds
            raise ValueError(
                f"{type(thin).__name__} in {dtype} on {device} can't run without numbers, so it can't be "
                "planned; plan experts in bfloat16, and kernels of CUDA on device cpu "
                f"({str(error).splitlines()[0]})"
            ) from error
    return ledger.counts(flops.get_flop_counts())


@contextlib.contextmanager
def _no_packed_documents() -> Iterator[None]:
    """A row is one document. transformers looks for restarting positions, which fake numbers can't tell, and
    would make a mask [T, T] that a real run hasn't.
    """
    plain = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = plain


class _Ledger:
    """Who saved what: storages by the part that runs, each once."""

    def __init__(self, model: PlainModel, thin: Any) -> None:
        self.seen: dict[int, Any] = {}  # keeps storages alive, so that none takes the place of another
        self.weights = {p.untyped_storage()._cdata for p in thin.parameters()}
        self.kept: Counter[Any] = Counter()
        self.inputs: set[Any] = set()
        self.given: dict[int, Any] = {}
        self.norm_input: int | None = None
        self.part: Any = "embedding"
        self.outer: Any = None
        self.names = {module: name for name, module in thin.named_modules()}
        self.layers = representatives(model, thin)
        self.norms: list[list[nn.Module]] = [model.family.pre_norms_of(layer) for layer in self.layers]
        for kind, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._begin_layer(kind), with_kwargs=True)
            layer.register_forward_hook(self._end)
            for i, norm in enumerate(self.norms[kind]):
                self._watch_norm(norm, (kind, i))
        self._watch_norm(model.family.final_norm_of(thin.base_model), ("head", 0))

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.weights:
            return tensor
        if key == self.norm_input:
            self.inputs.add(self.part)
        if key not in self.seen:
            self.seen[key] = storage
            if key == self.norm_input:
                return tensor  # the residual stream, which is counted apart
            self.kept["embedding" if key in self.given else self.part] += storage.nbytes()
        return tensor

    def _begin_layer(self, kind: int) -> Any:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # masks and rotary tables, which all layers share
            others = [t for t in tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
            stream = args[0] if args else kwargs["hidden_states"]
            storages = (tensor.untyped_storage() for tensor in others if tensor is not stream)
            self.given |= {storage._cdata: storage for storage in storages}
            self.part = kind

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.part = "head"

    def _watch_norm(self, norm: nn.Module, part: Any) -> None:
        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.outer, self.part = self.part, part
            self.norm_input = args[0].untyped_storage()._cdata

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self.part, self.norm_input = self.outer, None

        norm.register_forward_pre_hook(begin)
        norm.register_forward_hook(end)

    def counts(self, flops: dict[str, dict[Any, int]]) -> DryRun:
        def flops_of(module: nn.Module) -> int:
            found = [f for name, f in flops.items() if name.partition(".")[2] == self.names[module]]
            return sum(sum(by_operation.values()) for by_operation in found)

        layers = tuple(
            PartCount(
                self.kept[kind],
                tuple(self.kept[kind, i] for i in range(len(norms))),
                tuple((kind, i) in self.inputs for i in range(len(norms))),
                flops_of(layer),
            )
            for kind, (layer, norms) in enumerate(zip(self.layers, self.norms, strict=True))
        )
        total = sum(flops["Global"].values())
        rest = total - sum(part.flops for part in layers)
        head = PartCount(self.kept["head"], (self.kept["head", 0],), (("head", 0) in self.inputs,), rest)
        return DryRun(PartCount(self.kept["embedding"]), layers, head)


def _extrapolate(at: Sequence[int], runs: Sequence[DryRun], context: int) -> DryRun:
    """The polynomial of degree two in the tokens through three runs, exactly."""
    weights = [
        Fraction(
            (context - at[(i + 1) % 3]) * (context - at[(i + 2) % 3]),
            (at[i] - at[(i + 1) % 3]) * (at[i] - at[(i + 2) % 3]),
        )
        for i in range(3)
    ]

    def value(numbers: Sequence[int]) -> int:
        return round(sum(weight * number for weight, number in zip(weights, numbers, strict=True)))

    def part(parts: Sequence[PartCount]) -> PartCount:
        return PartCount(
            value([p.kept for p in parts]),
            tuple(map(value, zip(*(p.norms for p in parts), strict=True))),
            parts[0].norm_keeps_input,
            value([p.flops for p in parts]),
        )

    layers = tuple(part(same) for same in zip(*(run.layers for run in runs), strict=True))
    return DryRun(part([run.embedding for run in runs]), layers, part([run.head for run in runs]))


def variant_read_bytes(
    variant: ReadVariant, num_sources: int, has_partial: bool, *, width: int, tokens: int, dtype: torch.dtype
) -> int:
    """Bytes that a read in plain autograd keeps for backward beside its sources."""
    with FakeTensorMode():
        read = DepthRead(
            width, variant=variant, num_sources=num_sources, has_partial=has_partial, dtype=dtype
        )
        sources = [torch.empty(tokens, width, dtype=dtype, requires_grad=True) for _ in range(num_sources)]
        known = {t.untyped_storage()._cdata for t in (*sources, *read.parameters())}
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                kept[storage._cdata] = storage
            return tensor

        norm_weight = torch.empty(width, dtype=dtype, requires_grad=True)
        known.add(norm_weight.untyped_storage()._cdata)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            read(sources, norm_weight=norm_weight)
    return sum(storage.nbytes() for storage in kept.values())
