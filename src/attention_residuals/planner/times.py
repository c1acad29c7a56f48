"""From a calibration to seconds of a prefill, a decoding step and a training step, without and with reads.

What a layer takes is timed, and what reads add to a stack of norms; the additions stay, since the partial sum
is still formed. Assumed, not timed: that tensor parallelism divides the work evenly at
no cost, that every rank is like this machine, and that a hop takes its bytes over the given bandwidth with
nothing in parallel. The optimizer and the reduction of gradients are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.plan import DepthPlan
from attention_residuals.planner.calibration import Calibration
from attention_residuals.planner.dry_run import DryRun
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import PlainModel
from attention_residuals.planner.traffic import Hop


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one pass over the plain model and over the one with reads."""

    plain: float
    reads: float

    @property
    def overhead(self) -> float:
        """What the reads add, as a share of the plain time."""
        return self.reads / self.plain - 1


class TimeModel:
    """Seconds of each part for the layout's rows.

    Args:
        run: counts for the layout's rows.
        calibrated: counts for the rows that were timed.
    """

    def __init__(
        self,
        model: PlainModel,
        layout: Layout,
        calibration: Calibration,
        run: DryRun,
        calibrated: DryRun,
    ) -> None:
        self.model, self.layout, self.calibration = model, layout, calibration
        # a kind without a matrix product, which no known architecture has, would scale like the head
        self.layer_scale = [
            full.flops / timed.flops for full, timed in zip(run.layers, calibrated.layers, strict=True)
        ]
        self.tokens = layout.batch * layout.context / (calibration.batch * calibration.context)
        self.vocabulary = model.config.vocab_size / calibration.vocabulary

    def layer(self, index: int, phase: str) -> float:
        kind = self.model.kinds[index]
        scale = 1.0 if phase == "decode" else self.layer_scale[kind]
        return scale * self.calibration.phases[phase].layers[kind] / self.layout.tensor_parallel

    def ends(self, phase: str) -> float:
        """Embedding, final norm and head; a prefill makes the logits of the last token only."""
        rows = self.layout.batch / self.calibration.batch
        scale = {"prefill": rows, "decode": 1.0}.get(phase, self.tokens)
        return scale * self.vocabulary * self.calibration.phases[phase].ends / self.layout.tensor_parallel

    def read(self, num_sources: int, phase: str) -> float:
        """What one read adds to the plain model, which has a norm in its place."""
        if num_sources == 1:
            return 0.0
        part = self.calibration.phases[phase]
        added = part.read + num_sources * part.source
        return (1.0 if phase == "decode" else self.tokens) * added / self.layout.tensor_parallel

    def reads(self, depth: DepthPlan, layers: Sequence[int], phase: str) -> float:
        """The reads of these layers; none in standard mode."""
        count = self.model.family.sublayers_per_layer
        counts = (depth.num_sources(count * index + i) for index in layers for i in range(count))
        return sum(self.read(num_sources, phase) for num_sources in counts)

    def one_pass(self, depth: DepthPlan, phase: str) -> Estimate:
        """All layers on one rank, one of `PHASES`."""
        layers = range(self.model.num_layers)
        plain = self.ends(phase) + sum(self.layer(index, phase) for index in layers)
        added = self.reads(depth, layers, phase) + self.read(depth.num_sources(depth.num_sublayers), phase)
        return Estimate(plain, plain + added)

    def training_phases(self) -> tuple[str, ...]:
        """A checkpointed layer runs forward twice."""
        return ("forward", *(("forward",) if self.layout.gradient_checkpointing else ()), "backward")

    def layer_training(self, index: int, depth: DepthPlan | None) -> float:
        """Seconds of a layer in training, with its reads unless `depth` is None."""
        return sum(
            self.layer(index, phase) + (0.0 if depth is None else self.reads(depth, [index], phase))
            for phase in self.training_phases()
        )

    def head_training(self, depth: DepthPlan | None) -> float:
        """Embedding and head, nearly all of it the head, with the final read."""
        final = 0 if depth is None else depth.num_sources(depth.num_sublayers)
        found = sum(self.ends(phase) for phase in ("forward", "backward"))
        return found + sum(self.read(final, phase) for phase in ("forward", "backward") if final)

    def training_step(self, stages: StagePlan, crossed: Sequence[Hop], plain_hop: int) -> Estimate:
        """One step of M microbatches through the pipeline.

        Args:
            crossed: the hops with reads.
            plain_hop: bytes of a hop of the plain model: the residual stream.
        """
        sizes = {hop.stage: hop.bytes for hop in crossed}
        plain = self._slowest_rank(stages, None, dict.fromkeys(sizes, plain_hop))
        return Estimate(
            pipeline_seconds(plain, stages, self.layout.num_microbatches),
            pipeline_seconds(
                self._slowest_rank(stages, stages.depth, sizes), stages, self.layout.num_microbatches
            ),
        )

    def _slowest_rank(self, stages: StagePlan, depth: DepthPlan | None, received: dict[int, int]) -> float:
        seconds = []
        for rank in range(stages.num_ranks):
            own = stages.stages_of(rank)
            layers = [index for stage in own for index in stages.layer_range(stage)]
            # a hop's gradients go back over the other direction of the link, after the forward
            hop = 2 * sum(received.get(stage, 0) for stage in own) / (1e9 * self.layout.bandwidth)
            seconds.append(hop + sum(self.layer_training(index, depth) for index in layers))
        seconds[-1] += self.head_training(depth)
        return max(seconds)


def pipeline_seconds(slowest_rank: float, stages: StagePlan, num_microbatches: int) -> float:
    """M microbatches, and the bubble: P - 1 of the V M + P - 1 turns of the slowest rank are idle.

    Args:
        slowest_rank: seconds that one microbatch takes on it, all its stages together.
    """
    idle_turns = (stages.num_ranks - 1) / stages.virtual_stages
    return (num_microbatches + idle_turns) * slowest_rank
