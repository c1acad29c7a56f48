"""A model's parameters to optimizer groups, each parameter in exactly one, and the optimizer over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from attention_residuals.read import DepthRead

BETAS = (0.9, 0.95)
EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share an update rule.

    Attributes:
        name: "matrices", "embeddings", "vectors" or "reads".
        parameters: (name, parameter) pairs.
        lr_factor: multiplies the learning rate.
        weight_decay: decay per unit of learning rate.
        algorithm: "adamw" or "muon".
    """

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]
    lr_factor: float
    weight_decay: float
    algorithm: str

    @property
    def num_elements(self) -> int:
        """Numbers held by the group's parameters."""
        return sum(parameter.numel() for _, parameter in self.parameters)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, read_lr_factor: float = 1.0, optimizer: str = "adamw"
) -> list[ParameterGroup]:
    """Sort the trainable parameters into groups; empty groups are left out.

    * matrices: the weights of linear layers, an untied output head included. The only group that decays.
      Under "muon" the hidden ones are updated by Muon and the output head stays with AdamW.
    * embeddings: no decay, which would shrink rare words' rows for want of gradients.
    * vectors: norms, biases, convolution taps, A_log and dt_bias. No decay.
    * reads: queries and key weights of every `DepthRead`. No decay (it pulls towards equal depth weights),
      never Muon (a query is a vector), and a learning-rate factor of their own.

    Raises:
        AssertionError: a trainable parameter landed in no group or in two; a fault of this function.
    """
    kinds = _kinds(model)
    muon = "muon" if optimizer == "muon" else "adamw"
    rules = {
        "matrices": (1.0, weight_decay, muon),
        "head": (1.0, weight_decay, "adamw"),
        "embeddings": (1.0, 0.0, "adamw"),
        "vectors": (1.0, 0.0, "adamw"),
        "reads": (read_lr_factor, 0.0, "adamw"),
    }
    if muon == "adamw":
        kinds = {name: "matrices" if kind == "head" else kind for name, kind in kinds.items()}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for kind, (factor, decay, algorithm) in rules.items():
        members = tuple((name, p) for name, p in trainable if kinds[name] == kind)
        if members:
            groups.append(ParameterGroup(kind, members, factor, decay, algorithm))
    placed = [id(p) for group in groups for _, p in group.parameters]
    assert len(placed) == len(set(placed)), "a parameter is in two groups"
    assert set(placed) == {id(p) for _, p in trainable}, "a trainable parameter is in no group"
    return groups


def _kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter, by its name in `model.named_parameters()`."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    reads = {id(p) for m in model.modules() if isinstance(m, DepthRead) for p in m.parameters()}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    head_id = id(head.weight) if isinstance(head, nn.Linear) else None

    def kind(parameter: nn.Parameter) -> str:
        if id(parameter) in reads:
            return "reads"
        if id(parameter) in embeddings:  # before the head: a tied head is the embedding
            return "embeddings"
        if id(parameter) == head_id:
            return "head"
        return "matrices" if parameter.ndim == 2 else "vectors"

    return {name: kind(parameter) for name, parameter in model.named_parameters()}


def make_optimizer(groups: list[ParameterGroup], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over `groups`, or, where a group asks for it, Muon and AdamW in one optimizer."""
    param_groups = [
        {
            "params": [parameter for _, parameter in group.parameters],
            "name": group.name,
            "algorithm": group.algorithm,
            "lr": learning_rate * group.lr_factor,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
    if any(group.algorithm == "muon" for group in groups):
        return MuonAdamW(param_groups, lr=learning_rate)
    return torch.optim.AdamW(param_groups, lr=learning_rate, betas=BETAS, eps=EPS, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups whose `algorithm` is "muon", AdamW for the others, as one optimizer.

    The two share this object's groups and state, so schedulers and checkpoints see a single optimizer.
    Muon's steps are scaled to AdamW's size ("match_rms_adamw"): one learning rate and decay serve both.

    Args:
        param_groups: groups with the extra key `algorithm`.
        lr: learning rate of groups that have none of their own.
    """

    def __init__(self, param_groups: list[dict[str, Any]], lr: float) -> None:
        by_algorithm: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
        for group in param_groups:
            by_algorithm[group["algorithm"]].append(group)
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if by_algorithm["muon"]:
            self._parts["muon"] = torch.optim.Muon(
                by_algorithm["muon"], lr=lr, adjust_lr_fn="match_rms_adamw"
            )
        if by_algorithm["adamw"]:
            self._parts["adamw"] = torch.optim.AdamW(
                by_algorithm["adamw"], lr=lr, betas=BETAS, eps=EPS, fused=True
            )
        # the parts have filled in their own defaults, such as momentum and betas
        filled = [group for part in self._parts.values() for group in part.param_groups]
        super().__init__(filled, {"lr": lr})
        self._share()

    def _share(self) -> None:
        for algorithm, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """One step of both parts; `closure`, if given, computes the loss anew first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()`; the parts go on sharing this object's groups and state."""
        super().load_state_dict(state_dict)
        self._share()


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, schedule: str, max_steps: int, warmup: float, decay: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """Learning rate over the steps: linear warmup from 0, then `schedule`.

    Args:
        schedule: "wsd" (stable, then a decay as 1 - sqrt over the last share), "cosine" or "linear" (to 0),
            or "constant".
        warmup: steps if 1 or more, else a share of `max_steps`.
        decay: share of `max_steps` in which "wsd" decays.
    """
    warmup_steps = int(warmup) if warmup >= 1 else int(warmup * max_steps)
    warmup_steps = min(warmup_steps, max_steps)
    if schedule != "wsd":
        name = "constant_with_warmup" if schedule == "constant" else schedule
        return get_scheduler(name, optimizer, warmup_steps, max_steps)
    decay_steps = min(round(decay * max_steps), max_steps - warmup_steps)
    return get_scheduler(
        "warmup_stable_decay",
        optimizer,
        warmup_steps,
        max_steps,
        scheduler_specific_kwargs={"num_decay_steps": decay_steps, "decay_type": "1-sqrt"},
    )
