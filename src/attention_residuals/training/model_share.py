"""What one rank holds of a model that several ranks train, and how it computes losses and gradients with it.

Every tensor keeps the name it has in the whole model, so that optimizer groups, checkpoints and the saved
model don't depend on the layout.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from attention_residuals.training.gradients import average_gradients, complete_gradients, gradient_norm
from attention_residuals.training.layout import Layout
from attention_residuals.training.optimizer import ParameterGroup
from attention_residuals.training.sharding import free_whole_weights, shard_layers, shard_projections

Batch = Mapping[str, Tensor]


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name in a whole model's state dict to the same tensor's first one (a tied head's embedding)."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: seen.setdefault(id(tensor), name) for name, tensor in state.items()}


class ModelShare(ABC):
    """The modules of one rank.

    Args:
        modules: whole models, or pipeline stages of one.
        names: `first_names` of the whole model.
        layout: how the ranks share the work.
        mesh: the ranks as a cube (`sharding.make_mesh`).
        bf16: whether to compute in bfloat16.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        names: Mapping[str, str],
        layout: Layout,
        mesh: DeviceMesh,
        *,
        bf16: bool,
    ) -> None:
        self.modules = list(modules)
        self.names = names
        self.layout = layout
        self.mesh = mesh
        self.device = torch.device(mesh.device_type)
        self.bf16 = bf16

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by their first names in the whole model."""
        states = (module.state_dict() for module in self.modules)
        return {self.names[name]: tensor for state in states for name, tensor in state.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of this rank by their first names in the whole model."""
        found = (pair for module in self.modules for pair in module.named_parameters())
        return {self.names[name]: parameter for name, parameter in found if parameter.requires_grad}

    def train(self) -> None:
        for module in self.modules:
            module.train()

    def autocast(self) -> torch.autocast:
        """The scope of a forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    @abstractmethod
    def add_gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of one step; then every gradient is the mean over all rows of all ranks.

        Args:
            batches: this rank's, all of one size; `input_ids` and `labels`, int64 [B, T].

        Returns:
            The mean loss of these batches in nats per token.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss over the labelled tokens of a batch; NaN if there are none."""

    def gradient_norm(self) -> float:
        """The L2 norm of the whole model's gradients, before any clipping."""
        return gradient_norm(self.counted_parameters(), self.mesh.get_group("pipeline"))

    def counted_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters without copies of what another stage holds too."""
        return list(self.parameters().values())

    def losses_seen(self) -> float:
        """This rank's weight in a sum of losses over all ranks: 1 for one of those that share a batch."""
        return 1.0 if self.mesh.get_local_rank("tensor") == 0 else 0.0


class WholeModel(ModelShare):
    """Every layer on every rank: whole, with cut projections, sharded by FSDP2, or both.

    Args:
        model: the whole model, on the CPU; it is changed in place.
    """

    def __init__(self, model: Any, layout: Layout, mesh: DeviceMesh, *, bf16: bool = False) -> None:
        super().__init__([model], first_names(model), layout, mesh, bf16=bf16)
        model.to(self.device)
        if layout.tensor_parallel > 1:
            shard_projections(model, mesh["tensor"])
        if layout.fsdp:
            shard_layers(model, mesh["data"])

    def add_gradients(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with self.autocast():
                loss = self._loss(batch) / len(batches)
            loss.backward()
            total = total + loss.detach()
        parameters = list(self.parameters().values())
        complete_gradients(parameters)
        average_gradients(parameters, self.mesh.get_group("data"))
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        (model,) = self.modules
        model.eval()
        try:
            with self.autocast():
                return self._loss(batch)
        finally:
            free_whole_weights(model)
            model.train()

    def _loss(self, batch: Batch) -> Tensor:
        (model,) = self.modules
        loss: Tensor = model(
            **{name: rows.to(self.device) for name, rows in batch.items()}, use_cache=False
        ).loss
        return loss


def group_names(groups: Sequence[ParameterGroup]) -> list[tuple[ParameterGroup, tuple[str, ...]]]:
    """A whole model's groups without its parameters, and their names."""
    return [
        (dataclasses.replace(group, parameters=()), tuple(name for name, _ in group.parameters))
        for group in groups
    ]


def groups_of_share(
    groups: Sequence[tuple[ParameterGroup, tuple[str, ...]]], share: ModelShare
) -> list[ParameterGroup]:
    """The groups over what this rank holds; apart by mesh, since fused optimizers take one at a time."""
    held = share.parameters()
    made = []
    for group, names in groups:
        by_mesh: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name in names:
            if name in held:
                mesh = held[name].device_mesh if isinstance(held[name], DTensor) else None  # type: ignore[attr-defined]
                by_mesh.setdefault(mesh, []).append((name, held[name]))
        made += [dataclasses.replace(group, parameters=tuple(pairs)) for pairs in by_mesh.values()]
    return made


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Each number summed over all ranks."""
    totals = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()
