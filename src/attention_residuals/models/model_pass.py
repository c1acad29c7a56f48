"""The state of one model forward: its residual stream, its trace, and what phase 1 found for coming reads.

It lives in a thread-local for the duration of the forward; nothing of it stays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_residuals.depth_attention import available_backends
from attention_residuals.depth_attention.dispatch import is_plain_inference
from attention_residuals.depth_attention.recorded import ReadMemory, difference_norms
from attention_residuals.depth_attention.two_phase import SharedRead, attend_to_shared
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.schedule import ReadGroup
from attention_residuals.stream import ResidualStream

# Per thread: `model_pass`, the model forward under way; `frame`, the layer forward under way; `handover`,
# where a model forward that runs some of the layers takes the stream up.
LOCAL = threading.local()

# Elements of one source [B, T, D] from which on read_schedule="auto" may choose two phases.
LEAST_ELEMENTS = 1 << 17


class LayerMemory(NamedTuple):
    """Memory for what a layer's reads and sublayers hand out."""

    reads: tuple[ReadMemory, ...]
    output_norms: tuple[Tensor, ...]


class TraceMemory:
    """Memory for all depth weights and norms of one forward, in one piece.

    Apart they would lie between a forward's temporaries, so that malloc returns more pages and fetches them
    again.
    """

    def __init__(self, plan: DepthPlan, shape: torch.Size) -> None:
        counts = [plan.num_sources(read) for read in range(plan.num_reads)]
        rows = torch.empty(
            sum(counts) + plan.num_reads + plan.num_sublayers, *shape, dtype=torch.float32, device="cpu"
        )
        weights, inputs, outputs = rows.split([sum(counts), plan.num_reads, plan.num_sublayers])
        self.reads = [ReadMemory(*pair) for pair in zip(weights.split(counts), inputs.unbind(), strict=True)]
        self.output_norms = outputs.unbind()

    def of(self, first: int, count: int) -> LayerMemory:
        """That of `count` sublayers and their reads."""
        last = first + count
        return LayerMemory(tuple(self.reads[first:last]), self.output_norms[first:last])


class DepthTrace:
    """What the reads of one model forward, or of one layer's, made; collected only on request.

    Args:
        keep_mixtures: whether the mixtures are kept too; without them looking costs little time and memory.
        plan: of the model's forward; None for one layer's trace.

    Attributes:
        weights: per read, depth weights [N, B, T].
        input_norms: per read, L2 norm of the mixture h before the sublayer's norm [B, T], float32.
        mixtures: per read, h itself [B, T, D]; empty unless kept.
        output_norms: per sublayer, L2 norm of its output [B, T], float32.
        memory: for what the coming reads hand out, where some is prepared.
    """

    def __init__(self, *, keep_mixtures: bool = False, plan: DepthPlan | None = None) -> None:
        self.keep_mixtures, self.plan = keep_mixtures, plan
        self.memory: Iterator[ReadMemory] = iter(())
        self.whole_memory: TraceMemory | None = None
        self.weights: list[Tensor] = []
        self.input_norms: list[Tensor] = []
        self.mixtures: list[Tensor] = []
        self.output_norms: list[Tensor] = []

    def memory_like(self, x: Tensor) -> TraceMemory | None:
        """Memory for a forward over x [B, T, D]; None under autograd or a compiler, or off the CPU."""
        if self.plan is None or not x.is_cpu or not is_plain_inference():
            return None
        if self.whole_memory is None:
            self.whole_memory = TraceMemory(self.plan, x.shape[:-1])
        return self.whole_memory

    def add_read(self, weights: Tensor, norms: Tensor, mixture: Tensor) -> None:
        self.weights.append(weights)
        self.input_norms.append(norms)
        if self.keep_mixtures:
            self.mixtures.append(mixture)

    def add_output(self, before: Tensor, after: Tensor, memory: Tensor | None) -> None:
        """Note what a sublayer wrote, from the open block's sum [B, T, D] before and after it."""
        self.output_norms.append(difference_norms(after, before, memory))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it in one tuple, for a layer to return; `take` puts it together again."""
        return (*self.weights, *self.input_norms, *self.output_norms, *self.mixtures)

    def take(self, tensors: Sequence[Tensor], num_sublayers: int) -> None:
        """Append the `tensors()` of a layer's trace, which has as many reads as sublayers."""
        fields = (self.weights, self.input_norms, self.output_norms, self.mixtures)
        for i, tensor in enumerate(tensors):
            fields[i // num_sublayers].append(tensor)


def own_tokens(hidden_states: Tensor) -> Tensor:
    """This rank's part of the embedding [B, T, D]: of a `DTensor` (`sharded_prefill`) its local part."""
    return hidden_states.to_local() if hasattr(hidden_states, "to_local") else hidden_states


class Phases(NamedTuple):
    """Which reads of a model forward may run in two phases.

    Attributes:
        groups: reads that share a first phase.
        reads: gives the model's reads in order.
        always: whether every group does, or only where that was measured to be faster.
    """

    groups: tuple[ReadGroup, ...]
    reads: Callable[[], list[DepthRead | None]]
    always: bool

    def group_at(self, read: int) -> ReadGroup | None:
        """The group that begins with this read, if it has a first phase."""
        return next((group for group in self.groups if group.reads[0] == read and group.two_phase), None)


class ModelPass:
    """One model forward: the stream so far, how many layers wrote it, and the trace if one is wanted.

    Where reads run in two phases, also what phase 1 found for those of the open group that are still to come.
    """

    def __init__(self, trace: DepthTrace | None, phases: Phases | None) -> None:
        self.stream: ResidualStream | None = None
        self.layers_run = 0
        self.trace = trace
        self.phases = phases
        self.num_shared = 0
        self.shared: tuple[SharedRead, ...] = ()

    def begin_group(self, first_read: int, stream: ResidualStream, checkpointed: bool) -> None:
        """Phase 1 of the group that begins with this read of a layer, if one does and runs in two phases."""
        phases = self.phases
        if phases is None or not (phases.always or _pays(stream, checkpointed)):
            return
        group = phases.group_at(first_read)
        if group is None:
            return
        found = phases.reads()
        reads = [read for read in (found[i] for i in group.reads) if read is not None]
        if reason := _why_not(stream.blocks[0].device, reads):
            if phases.always:
                raise ValueError(f"read_schedule='two_phase' {reason}; use read_schedule='per_read'")
            return
        queries, key_weights = [read.query for read in reads], [read.key_weight for read in reads]
        self.num_shared = group.num_shared
        self.shared = attend_to_shared(stream.blocks, queries, key_weights, eps=reads[0].eps)

    def take_shared(self, count: int) -> tuple[SharedRead, ...]:
        """What phase 1 found for the next reads; empty where they are not in two phases."""
        taken, self.shared = self.shared[:count], self.shared[count:]
        return taken


def _why_not(device: torch.device, reads: Sequence[DepthRead]) -> str | None:
    """None where these reads can run in two phases, else the reason."""
    for read in reads:
        if read.query.device != device or hasattr(read.query, "placements"):
            return (
                "needs the queries of several layers at once, as whole tensors on the blocks' device "
                f"{device}, but one is on {read.query.device} or sharded"
            )
        if read.backend != "auto":
            return f"has an implementation of its own, but a read asks for backend={read.backend!r}"
    return None


def _pays(stream: ResidualStream, checkpointed: bool) -> bool:
    """Whether "auto" takes two phases: where reads run in PyTorch on a CPU, and not for small inputs.

    Measured (docs/log.md). Where the compiled kernel runs, reads one by one are faster. Under activation
    checkpointing phase 1 would about double what is kept.
    """
    if checkpointed or torch.compiler.is_compiling():  # first, so that no guard on the size is compiled in
        return False
    source = stream.blocks[0]
    if source.numel() < LEAST_ELEMENTS or source.device.type != "cpu":
        return False
    return available_backends(source.device, source.dtype)["cpu"] is not None


@contextlib.contextmanager
def model_pass(trace: DepthTrace | None, phases: Phases | None = None) -> Iterator[ModelPass]:
    """The scope of one model forward in this thread; nothing of the stream outlives it.

    Args:
        trace: receives what the reads make; None where nobody looks.
        phases: which reads may run in two phases; None where all are read one by one.
    """
    outer = getattr(LOCAL, "model_pass", None)
    LOCAL.model_pass = current = ModelPass(trace, phases)
    handover: Handover | None = getattr(LOCAL, "handover", None)
    if handover is not None:
        current.stream, current.layers_run = handover.stream, handover.layers_run
    try:
        yield current
        if handover is not None:
            handover.stream = current.stream
    finally:
        LOCAL.model_pass = outer


class Handover:
    """Where a model forward that runs some of its layers takes the residual stream up, and leaves it.

    Attributes:
        stream: what the first layer to run receives, None for the embedding; after the forward, what the last
            one left. In standard mode it has no blocks, and the partial sum is the residual stream.
        layers_run: how many layers ran before.
    """

    def __init__(self, stream: ResidualStream | None, layers_run: int) -> None:
        self.stream, self.layers_run = stream, layers_run


@contextlib.contextmanager
def handover(stream: ResidualStream | None, layers_run: int) -> Iterator[Handover]:
    """The scope of a model forward that begins with this stream after `layers_run` layers."""
    outer = getattr(LOCAL, "handover", None)
    LOCAL.handover = current = Handover(stream, layers_run)
    try:
        yield current
    finally:
        LOCAL.handover = outer
