"""Prediction: everything `attnres plan` says about one model, block setting and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.calibration import Calibration, calibrate, calibrated_rows
from attention_residuals.planner.dry_run import DryRun, dry_run
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.memory import KeptBytes, RankMemory, rank_memory, read_parameters
from attention_residuals.planner.plain_model import PlainModel
from attention_residuals.planner.split import balanced_split
from attention_residuals.planner.times import Estimate, TimeModel
from attention_residuals.planner.traffic import (
    Hop,
    ReadTraffic,
    bytes_per_step,
    hops,
    prefill_block_bytes,
    read_traffic,
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a run would cost.

    Attributes:
        split: layers of each stage.
        read_parameters: numbers that the reads learn.
        plain_memory, memory: per pipeline rank, without and with reads.
        traffic: tensors that reads move.
        hops: of one microbatch.
        hop_bytes_per_step: of all hops, forward and backward.
        plain_hop_bytes_per_step: the same for the residual stream alone.
        prefill_blocks: bytes of the sources at the end of a prefill, on each tensor-parallel rank.
        times: by "prefill", "decode" and "training step"; None without a calibration.
    """

    model: str
    parameters: int
    depth: DepthPlan
    layout: Layout
    split: tuple[int, ...]
    read_parameters: int
    plain_memory: tuple[RankMemory, ...]
    memory: tuple[RankMemory, ...]
    traffic: ReadTraffic
    hops: tuple[Hop, ...]
    hop_bytes_per_step: int
    plain_hop_bytes_per_step: int
    prefill_blocks: int
    times: dict[str, Estimate] | None

    @property
    def peak_memory(self) -> int:
        """Bytes of a training step on the fullest rank."""
        return max(rank.total for rank in self.memory)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, derived ones included."""
        fields = dataclasses.asdict(self)
        fields["depth"] = {
            "num_sublayers": self.depth.num_sublayers,
            "num_blocks": self.depth.num_blocks,
            "sublayers_per_block": self.depth.sublayers_per_block,
            "attn_res": self.depth.config.to_dict(),
        }
        fields["traffic"] |= {
            "per_sublayer": self.traffic.per_sublayer,
            "two_phase_per_sublayer": self.traffic.two_phase_per_sublayer,
        }
        for name in ("plain_memory", "memory"):
            for values, rank in zip(fields[name], getattr(self, name), strict=True):
                values["total"] = rank.total
        for name, estimate in (self.times or {}).items():
            fields["times"][name]["overhead"] = estimate.overhead
        return fields


class Planner:
    """A model and a layout, counted once (and timed once) and then predicted for any block setting.

    Args:
        device: what operations would run on; their counts follow its code, and timings run there.

    Raises:
        ValueError: the model's code can't be counted without numbers, or has fewer layers than stages.
    """

    def __init__(self, model: PlainModel, layout: Layout, *, device: str = "cpu") -> None:
        if layout.num_stages > model.num_layers:
            raise ValueError(
                f"a stage needs at least one layer, got {layout.pipeline_ranks} ranks of "
                f"{layout.virtual_stages} stages for the {model.num_layers} layers of {model.name}; take "
                "fewer"
            )
        self.model, self.layout, self.device = model, layout, device
        self.run = self._count(layout.batch, layout.context)
        self.calibration: Calibration | None = None
        self.times: TimeModel | None = None

    def _count(self, batch: int, context: int) -> DryRun:
        dtype = getattr(torch, self.layout.dtype)
        return dry_run(self.model, batch=batch, context=context, dtype=dtype, device=self.device)

    def calibrate(self, config: AttnResConfig | None = None, **options: Any) -> None:
        """Time parts of the model and the reads of `config` here; `options` go to `calibrate`."""
        rows = calibrated_rows(self.run, self.layout)
        same = rows == (self.layout.batch, self.layout.context)
        counted = self.run if same else self._count(*rows)
        variant = None if config is None else config.variant
        self.calibration = calibrate(
            self.model, self.layout, rows, counted, variant=variant, device=self.device, **options
        )
        self.times = TimeModel(self.model, self.layout, self.calibration, self.run, counted)

    def depth_plan(self, config: AttnResConfig) -> DepthPlan:
        """The sources of each read of this model.

        Raises:
            ValueError: reads in two phases are asked for, which keep more and are not planned.
        """
        if config.read_schedule == "two_phase":
            raise ValueError(
                "read_schedule must be 'auto' or 'per_read' to be planned, got 'two_phase', whose first "
                "phase keeps more; the tensors it moves are shown either way"
            )
        return DepthPlan(self.model.num_sublayers, config)

    def stage_plan(self, depth: DepthPlan) -> StagePlan:
        """The stages with a balanced split of the layers."""
        return StagePlan(
            depth=depth,
            layers=self.split(depth),
            num_ranks=self.layout.pipeline_ranks,
            cache=self.layout.cache,
            sublayers_per_layer=self.model.family.sublayers_per_layer,
        )

    def split(self, depth: DepthPlan) -> tuple[int, ...]:
        """Balanced by seconds of a training step, or by products of matrices where nothing was timed."""
        layers, num_stages = range(self.model.num_layers), self.layout.num_stages
        if self.times is None:
            costs = [float(self.run.layers[kind].flops) for kind in self.model.kinds]
            return balanced_split(costs, num_stages, last=float(self.run.head.flops))
        reads = None if depth.config.mode == "standard" else depth
        seconds = [self.times.layer_training(index, reads) for index in layers]
        return balanced_split(seconds, num_stages, last=self.times.head_training(reads))

    def predict(self, config: AttnResConfig) -> Prediction:
        """All figures for one block setting.

        Raises:
            ValueError: the setting doesn't fit the model.
        """
        depth, model, layout = self.depth_plan(config), self.model, self.layout
        stages = self.stage_plan(depth)
        plain = dataclasses.replace(
            stages, depth=DepthPlan(depth.num_sublayers, AttnResConfig(mode="standard"))
        )
        crossed, plain_crossed = (hops(plan, layout, model.width) for plan in (stages, plain))
        times = None
        if self.times is not None:
            times = {phase: self.times.one_pass(depth, phase) for phase in ("prefill", "decode")}
            one = layout.stream_bytes(model.width)
            times["training step"] = self.times.training_step(stages, crossed, one)
        return Prediction(
            model=model.name,
            parameters=model.parameters,
            depth=depth,
            layout=layout,
            split=stages.layers,
            read_parameters=sum(read_parameters(depth, model.width)),
            plain_memory=self._memory(plain),
            memory=self._memory(stages),
            traffic=read_traffic(depth, model.family.sublayers_per_layer),
            hops=crossed,
            hop_bytes_per_step=bytes_per_step(crossed, layout),
            plain_hop_bytes_per_step=bytes_per_step(plain_crossed, layout),
            prefill_blocks=prefill_block_bytes(depth, layout, model.width),
            times=times,
        )

    def _memory(self, stages: StagePlan) -> tuple[RankMemory, ...]:
        kept = KeptBytes(self.model, stages.depth, self.run, self.layout)
        return rank_memory(self.model, kept, stages, self.layout)
