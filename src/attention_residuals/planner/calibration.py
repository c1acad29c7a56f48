"""Short timings on the present machine: the plain model's parts, and reads. A few seconds.

Two hooks around each layer, and on the gradients of its input and output, give the time of every part from
one pass of a thin model. A long row is cut to what a forward of `FORWARD_FLOPS` can do, and the time scaled
by the ratio of the counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from attention_residuals.planner.dry_run import DryRun
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import PlainModel, representatives, thin_model
from attention_residuals.planner.read_timing import time_reads, touch_other_memory
from attention_residuals.variant import ReadVariant

PHASES = ("prefill", "decode", "forward", "backward")
FORWARD_FLOPS = 32e9  # of one calibrated forward
PHASE_SECONDS = 1.0  # spent on repeating one pass
LEAST_RUNS, MOST_RUNS = 3, 40
VOCABULARY = 32_768  # rows of the output matrix that are timed; more take proportionally longer
CACHED_TOKENS = 64  # in the cache of a timed decoding step, at most
OTHER_MEMORY = 1 << 21  # elements, in place of the layers left out between two decoding steps
MEMORY_ELEMENTS = 1 << 24  # of the tensor whose copy is timed

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class PartSeconds:
    """Seconds of one pass over the calibrated rows.

    Attributes:
        ends: what comes before and after the layers.
        layers: a layer of each kind.
        read: what a read of no source adds to the plain model, by a straight line.
        source: what each of its sources adds to that.
    """

    ends: float
    layers: tuple[float, ...]
    read: float
    source: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was timed, on which rows, and where.

    Attributes:
        batch, context: the rows of prefill and training.
        decode_batch: rows of a decoding step.
        vocabulary: rows of the output matrix.
        phases: by the names in `PHASES`; forward and backward are those of training.
        copy_bandwidth: bytes a second that a copy reads and writes.
        flops_per_second: of the timed layers in a prefill.
    """

    device: str
    threads: int
    batch: int
    context: int
    decode_batch: int
    vocabulary: int
    phases: dict[str, PartSeconds]
    copy_bandwidth: float
    flops_per_second: float


def calibrated_rows(run: DryRun, layout: Layout) -> tuple[int, int]:
    """Rows and tokens of a row of which one forward takes about `FORWARD_FLOPS`; at least 64 tokens."""
    tokens = layout.batch * layout.context
    per_token = (run.head.flops + sum(part.flops for part in run.layers)) / tokens
    allowed = int(FORWARD_FLOPS / max(1.0, per_token))
    context = min(layout.context, max(64, allowed // 64 * 64))
    return min(layout.batch, max(1, allowed // context)), context


def calibrate(
    model: PlainModel,
    layout: Layout,
    rows: tuple[int, int],
    counted: DryRun,
    *,
    variant: ReadVariant | None = None,
    device: torch.device | str = "cpu",
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Time the plain model's parts and reads in the layout's dtype.

    Args:
        rows: B and T to time, as `calibrated_rows` gives them.
        counted: the dry run of these rows.
        variant: of the reads; None for the paper's.
        clock: seconds; `time.thread_time` where one thread works and others share the cores.
    """
    device, dtype = torch.device(device), getattr(torch, layout.dtype)
    vocabulary = min(model.config.vocab_size, VOCABULARY)
    changed: dict[str, Any] = {"vocab_size": vocabulary}
    if (getattr(model.config, "pad_token_id", None) or 0) >= vocabulary:
        changed["pad_token_id"] = None
    thin = thin_model(model, dtype, device, **changed)
    thin.apply(thin._init_weights)
    watch = _Stopwatch(model, thin, _synchronised(clock, device))
    ids = torch.randint(0, vocabulary, rows, device=device)
    # training comes first, since the C library's heap has then grown, and a prefill fetches no new pages
    parts = {
        **_time_training(watch, thin.train(), ids),
        "prefill": _time_forward(watch, thin.eval(), ids),
        "decode": _time_decode(watch, thin, ids[:1, :CACHED_TOKENS].expand(layout.batch, -1)),
    }
    reads = time_reads(
        model.family,
        model.family.final_norm_of(thin.base_model),
        model.width,
        {"prefill": rows, "decode": (layout.batch, 1), "training": rows},
        variant=variant,
        clock=watch.clock,
    )
    phases = {name: PartSeconds(**parts[name], read=reads[name][0], source=reads[name][1]) for name in PHASES}
    multiplied = sum(part.flops for part in counted.layers)
    return Calibration(
        device=str(device),
        threads=torch.get_num_threads(),
        batch=rows[0],
        context=rows[1],
        decode_batch=layout.batch,
        vocabulary=vocabulary,
        phases=phases,
        copy_bandwidth=_copy_bandwidth(device, watch.clock),
        flops_per_second=multiplied / sum(phases["prefill"].layers),
    )


def _synchronised(clock: Clock, device: torch.device) -> Clock:
    if device.type == "cpu":
        return clock
    accelerator = getattr(torch, device.type)

    def read_clock() -> float:
        accelerator.synchronize()
        return clock()

    return read_clock


class _Stopwatch:
    """Notes when the layers of a thin model begin and end, in forward and backward."""

    def __init__(self, model: PlainModel, thin: Any, clock: Clock) -> None:
        self.clock = clock
        self.kinds = len(representatives(model, thin))
        self.marks: dict[tuple[str, int, str], float] = {}
        for kind, layer in enumerate(representatives(model, thin)):
            self._watch(layer, kind)

    def _watch(self, module: nn.Module, kind: int) -> None:
        def note(direction: str, end: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                self.marks[direction, kind, end] = self.clock()

            return hook

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            if stream.requires_grad:
                stream.register_hook(note("backward", "end"))
            self.marks["forward", kind, "begin"] = self.clock()

        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            self.marks["forward", kind, "end"] = self.clock()
            if output.requires_grad:
                output.register_hook(note("backward", "begin"))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def run(self, passes: Callable[[], dict[str, float]]) -> dict[str, dict[str, Any]]:
        """Repeat `passes`, which gives the whole seconds of each direction; medians of every part."""
        passes()
        found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        started = time.perf_counter()
        for i in range(MOST_RUNS):
            if i >= LEAST_RUNS and time.perf_counter() - started > PHASE_SECONDS:
                break
            for direction, whole in passes().items():
                layers = [self._span(direction, kind) for kind in range(self.kinds)]
                found[direction].append((whole - sum(layers), *layers))
        result = {}
        for direction, runs in found.items():
            ends, *layers = map(statistics.median, zip(*runs, strict=True))
            result[direction] = {"ends": ends, "layers": tuple(layers)}
        return result

    def _span(self, direction: str, kind: int) -> float:
        return self.marks[direction, kind, "end"] - self.marks[direction, kind, "begin"]


def _time_forward(watch: _Stopwatch, thin: Any, ids: Tensor) -> dict[str, Any]:
    def once() -> dict[str, float]:
        started = watch.clock()
        thin(ids, use_cache=True, logits_to_keep=1)
        return {"forward": watch.clock() - started}

    with torch.no_grad():
        return watch.run(once)["forward"]


def _time_decode(watch: _Stopwatch, thin: Any, ids: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        cache = DynamicCache(config=thin.config)
        thin(ids, cache=cache, use_cache=True, logits_to_keep=1)

        def once() -> dict[str, float]:
            touch_other_memory(OTHER_MEMORY)
            started = watch.clock()
            thin(ids[:, :1], cache=cache, use_cache=True)
            return {"forward": watch.clock() - started}

        return watch.run(once)["forward"]


def _time_training(watch: _Stopwatch, thin: Any, ids: Tensor) -> dict[str, dict[str, Any]]:
    def once() -> dict[str, float]:
        started = watch.clock()
        loss = thin(ids, labels=ids, use_cache=False).loss
        between = watch.clock()
        loss.backward()
        ended = watch.clock()
        thin.zero_grad(set_to_none=True)
        return {"forward": between - started, "backward": ended - between}

    return watch.run(once)


def _copy_bandwidth(device: torch.device, clock: Clock) -> float:
    source = torch.zeros(MEMORY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(LEAST_RUNS):
        started = clock()
        target.copy_(source)
        seconds.append(clock() - started)
    return 2 * source.nbytes / statistics.median(seconds)
