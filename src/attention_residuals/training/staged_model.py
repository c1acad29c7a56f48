"""The stages that one pipeline rank holds, as a `ModelShare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attention_residuals.errors import UserError
from attention_residuals.pipeline import Pipeline, StagePlan, plan_stages
from attention_residuals.pipeline.pipeline import PLACED_AS_V, ZERO_BUBBLE, check_schedule
from attention_residuals.training.gradients import average_gradients, complete_gradients
from attention_residuals.training.layout import Layout
from attention_residuals.training.model_share import Batch, ModelShare, first_names
from attention_residuals.training.sharding import free_whole_weights, shard_projections, shard_stages


def stages_of_layout(model: nn.Module, layout: Layout) -> StagePlan:
    """The stages of a model under a layout with a pipeline, the layers split evenly.

    Raises:
        UserError: the model can't be split, or schedule, stages and microbatches don't go together.
    """
    schedule = layout.schedule_name
    try:
        plan = plan_stages(
            model,
            layout.pipeline,
            virtual_stages=layout.virtual_stages or 1,
            cache=schedule not in ZERO_BUBBLE,
            placement="v" if schedule in PLACED_AS_V else "loop",
        )
        check_schedule(schedule, plan, layout.microbatch_count)
    except (TypeError, ValueError) as error:
        raise UserError(f"--pipeline {layout.pipeline}: {error}") from error
    return plan


class StagedModel(ModelShare):
    """Some layers on every rank, as `Pipeline` runs them; projections cut, sharded by FSDP2, or both.

    Args:
        model: the whole model, on the CPU; this rank's layers are taken from it, and the others emptied.
    """

    def __init__(self, model: Any, layout: Layout, mesh: DeviceMesh, *, bf16: bool = False) -> None:
        self.pipeline = Pipeline(
            model,
            stages_of_layout(model, layout),
            schedule=layout.schedule_name,
            num_microbatches=layout.microbatch_count,
            group=mesh.get_group("pipeline"),
            device=mesh.device_type,
        )
        super().__init__(self.pipeline.models, first_names(model), layout, mesh, bf16=bf16)
        for stage in self.modules:
            if layout.tensor_parallel > 1:
                shard_projections(stage, mesh["tensor"])
            if bf16:
                # around the forward alone, since the schedule runs backwards as well
                for module in (stage, stage.base_model):
                    module.forward = self.autocast()(module.forward)
        if layout.fsdp:
            shard_stages(self.pipeline.parts, mesh["data"])
        held = set(self.pipeline.parameters())
        for parameter in model.parameters():
            if parameter not in held:  # whoever still has the whole model shouldn't keep weights alive
                parameter.data = parameter.new_empty(0)

    def add_gradients(self, batches: Sequence[Batch]) -> Tensor:
        labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            total = total + self.pipeline.step(**batch, num_items_in_batch=labels)
        parameters = list(self.parameters().values())
        complete_gradients(parameters)
        average_gradients(parameters, self.mesh.get_group("data"))
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        self.pipeline.train(False)
        try:
            loss = self.pipeline.eval(**batch)
        finally:
            for stage in self.modules:
                free_whole_weights(stage)
            self.pipeline.train()
        assert loss is not None, "an evaluation with labels gives a loss"
        return loss

    def counted_parameters(self) -> list[nn.Parameter]:
        own = {name for stage in self.modules for name, _ in stage.named_parameters()}
        return [p for name, p in self.parameters().items() if name in own]

    def losses_seen(self) -> float:
        first = self.mesh.get_local_rank("pipeline") == 0
        return super().losses_seen() if first else 0.0
