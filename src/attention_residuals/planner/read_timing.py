"""What reads add, timed: a stack of layers that do nothing but norm, without reads and with them.

The stack goes through the one mechanism that gives models reads (`models/attach.py`), so the difference
holds all of it: reads in place of norms, the handling of the stream, and the sum of gradients in the blocks.
"""

from __future__ import annotations

import copy
import functools
import statistics
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attention_residuals.config import AttnResConfig
from attention_residuals.models.attach import attach
from attention_residuals.models.families import Family
from attention_residuals.models.model_pass import model_pass
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.variant import ReadVariant

LAYERS = 4
RUNS = 15
OTHER_MEMORY = 1 << 23  # elements, in place of the weights that a whole model reads between its reads

Line = tuple[float, float]


class _NormLayer(nn.Module):
    """x = x + norm(x) for each pre-norm of the family."""

    def __init__(self, family: Family, norm: nn.Module) -> None:
        super().__init__()
        self.paths = family.pre_norms
        for path in self.paths:
            _put(self, path, copy.deepcopy(norm))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for path in self.paths:
            hidden_states = hidden_states + self.get_submodule(path)(hidden_states)
        return hidden_states


def time_reads(
    family: Family,
    norm: nn.Module,
    width: int,
    rows: dict[str, tuple[int, int]],
    *,
    variant: ReadVariant | None = None,
    clock: Callable[[], float],
) -> dict[str, Line]:
    """What a read adds to the plain model: per phase seconds of a read of no source, and of each source.

    Few sources are timed in a stack of one block, more in one of a sublayer a block. Either number may be
    below zero, where a read is faster than the norm that it replaces.

    Args:
        norm: a norm of the model; its device and dtype are those of the rows.
        rows: B and T by "prefill", "decode" and "training", which gives "forward" and "backward".
    """
    changed = {} if variant is None else variant.changed_fields()
    few, many = (
        AttnResConfig.from_dict({**fields, **changed}) for fields in ({"num_blocks": 1}, {"mode": "full"})
    )
    stacks = [_stack(family, norm, width, config) for config in (None, few, many)]
    reads, *sources = (_counts(config, family) for config in (few, few, many))
    like = next(norm.parameters(), torch.empty(0))
    lines: dict[str, Line] = {}
    for phase, shape in rows.items():
        x = torch.randn(*shape, width).to(like)
        passes = [functools.partial(_run, stack, family, x, phase, clock) for stack in stacks]
        for one in passes:
            one()
        rounds = [[one() for one in passes] for _ in range(RUNS)]
        for name in rounds[0][0]:
            added = [
                statistics.median(found[i][name] - found[0][name] for found in rounds) / reads[0]
                for i in (1, 2)
            ]
            mean = [total / reads[0] for _, total in sources]
            slope = (added[1] - added[0]) / (mean[1] - mean[0])
            lines[name] = (added[0] - slope * mean[0], slope)
    return lines


def _counts(config: AttnResConfig, family: Family) -> tuple[int, int]:
    """Reads of more than one source in a stack, and their sources."""
    plan = DepthPlan(family.sublayers_per_layer * LAYERS, config)
    counts = [plan.num_sources(read) for read in range(1, plan.num_reads)]
    return len(counts), sum(counts)


def _stack(family: Family, norm: nn.Module, width: int, config: AttnResConfig | None) -> nn.Module:
    """Layers and a final norm where the family has them; with reads under `config`."""
    backbone = nn.Module()
    backbone.config = types.SimpleNamespace(hidden_size=width)  # type: ignore[assignment]
    _put(backbone, family.layers, nn.ModuleList(_NormLayer(family, norm) for _ in range(LAYERS)))
    _put(backbone, family.final_norm, copy.deepcopy(norm))
    if config is not None:
        attach(backbone, config, family)
        for read in (module for module in backbone.modules() if isinstance(module, DepthRead)):
            for parameter in read.weighing_parameters():
                nn.init.normal_(parameter, std=width**-0.5)
    return backbone.train()


@functools.cache
def _other_memory(elements: int) -> Tensor:
    return torch.zeros(elements)


def touch_other_memory(elements: int) -> None:
    """Put other memory into the CPU's caches, as the rest of a whole model does between two steps.

    Sizes are those at which `python -m benchmarks planner` comes nearest to whole models.
    """
    _other_memory(elements).add_(1)


def _put(module: nn.Module, path: str, part: nn.Module) -> None:
    *above, name = path.split(".")
    for step in above:
        if not hasattr(module, step):
            module.add_module(step, nn.Module())
        module = getattr(module, step)
    module.add_module(name, part)


def _run(
    stack: nn.Module, family: Family, x: Tensor, phase: str, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of one pass by phase; "training" gives "forward" and "backward"."""
    training = phase == "training"
    if phase == "decode":
        touch_other_memory(OTHER_MEMORY)
    has_reads = any(isinstance(module, DepthRead) for module in stack.modules())
    x = x.detach().requires_grad_(training)
    with torch.set_grad_enabled(training), model_pass(None) if has_reads else nullcontext():
        started = clock()
        stream: Any = x * 1  # no leaf, as an embedding isn't
        for layer in family.layers_of(stack):
            stream = layer(stream)
        output = family.final_norm_of(stack)(stream)
        between = clock()
    if not training:
        return {phase: between - started}
    output.backward(torch.ones_like(output))
    ended = clock()
    stack.zero_grad(set_to_none=True)
    return {"forward": between - started, "backward": ended - between}
