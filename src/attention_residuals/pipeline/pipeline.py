"""Pipeline: training steps of one model over several ranks.

The schedules and the transport are those of torch.distributed.pipelining.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from attention_residuals.pipeline.block_cache import BlockCache
from attention_residuals.pipeline.stage import DepthStage
from attention_residuals.pipeline.stage_model import backbone_with_reads, running_part, split_model
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.pipeline.tied_head import TiedHead

# name -> class of torch.distributed.pipelining
SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": schedules.ScheduleDualPipeV,
}
ONE_STAGE_PER_RANK = ("gpipe", "1f1b")
# They run the backward of a stage's inputs and that of its weights apart.
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v")
PLACED_AS_V = ("zbv_zero_bubble", "dual_pipe_v")


class Pipeline:
    """One rank's share of a model that is split over the ranks of a process group.

    Every rank makes its own from the same model and calls `step` with the same rows. The loss and every
    gradient are those of one process, up to the order of sums.

    Args:
        model: the whole model, equal on every rank (seed or checkpoint); or this rank's stage models, from
            `split_model`. On its final dtype; its parameters are shared, so drop it to free what others own.
        plan: `plan_stages(model, num_ranks, ...)`.
        schedule: a name of `SCHEDULES`.
        num_microbatches: pieces of a batch, by rows; the last ones may be a row shorter.
        group: the ranks of this pipeline, in order; None for all.
        device: where this rank computes; None for where the model is.

    Attributes:
        models: this rank's stage models, in order; their parameters have the names of the whole model's.
        plan: as given.

    Raises:
        TypeError, ValueError: the model can't be split, or schedule, plan and group don't go together.
        RuntimeError: this PyTorch is too old.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        plan: StagePlan,
        *,
        schedule: str = "1f1b",
        num_microbatches: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if torch.__version__ < "2.13":
            raise RuntimeError(
                f"a pipeline needs PyTorch 2.13 or newer, got {torch.__version__}: it builds on parts of "
                "torch.distributed.pipelining that were different before"
            )
        check_schedule(schedule, plan, num_microbatches)
        if dist.get_world_size(group) != plan.num_ranks:
            raise ValueError(
                f"the plan is for {plan.num_ranks} ranks, but the process group has "
                f"{dist.get_world_size(group)}; start as many processes, or plan for as many"
            )
        if plan.num_ranks == 1:  # nothing is sent, so there is nothing to save; and a hop has its tensors
            plan = dataclasses.replace(plan, cache=False)
        self.plan, self.schedule, self.num_microbatches, self.group = plan, schedule, num_microbatches, group
        self.rank = dist.get_rank(group)
        self.models = split_model(model, plan, self.rank) if isinstance(model, nn.Module) else list(model)
        if device is None:
            device = next(itertools.chain(*(made.parameters() for made in self.models))).device
        self.device = torch.device(device)
        for made in self.models:
            made.to(self.device)
        self._tied = self._tie_head()
        self._cache = BlockCache()
        self._stages: list[DepthStage] = []
        self._schedule: Any = None  # made at the first step, and anew after an exception

    def step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Forward and backward of one batch; gradients are added to those that are there.

        Args:
            input_ids: token ids [B, T], the same on every rank.
            labels: [B, T] as the model takes them, unshifted; -100 doesn't count.
            attention_mask: [B, T], ones for tokens, zeros for padding.
            position_ids: [B, T].
            num_items_in_batch: what the sum over tokens is divided by; None for the labels that count in this
                batch. Give it where several batches or pipelines make up one step of the optimizer.

        Returns:
            The mean loss, a float64 scalar in nats, on every rank.

        Raises:
            ValueError: fewer rows than microbatches, or inputs that don't match.
        """
        if num_items_in_batch is None:
            num_items_in_batch = (labels[:, 1:] != -100).sum()
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        with nullcontext() if self._tied is None else self._tied.one_step():
            losses = self._run(batch, labels, num_items_in_batch, has_backward=True)
        return self._sum_on_every_rank(losses)

    @torch.no_grad()
    def eval(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | None:
        """Forward of one batch, in the models' mode (`train(False)` first, for no dropout).

        Returns:
            With labels the mean loss, on every rank; without them the logits [B, T, vocabulary] on the last
            stage's rank and None on the others.

        Raises:
            ValueError: as for `step`.
        """
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        count = None if labels is None else (labels[:, 1:] != -100).sum()
        outputs = self._run(batch, labels, count, has_backward=False)
        if labels is not None:
            return self._sum_on_every_rank(outputs)
        return torch.cat(outputs) if outputs else None

    def train(self, mode: bool = True) -> Pipeline:
        """Training or evaluation mode of every stage model."""
        for model in self.models:
            model.train(mode)
        return self

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model, each once."""
        seen: set[int] = set()
        for name, parameter in itertools.chain(*(model.named_parameters() for model in self.models)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once: what its optimizer gets."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the whole model's state dict; over all ranks they make up the whole one."""
        merged: dict[str, Tensor] = {}
        for model in self.models:
            merged |= model.state_dict()
        return merged

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load this rank's part of a state dict, which may be the whole model's.

        Raises:
            KeyError: a tensor of this rank is missing.
        """
        for model in self.models:
            model.load_state_dict({name: state[name] for name in model.state_dict()})

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the whole model's, over all ranks, has at most this L2 norm.

        Returns:
            The norm before, on every rank; a tied weight counts once.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None and not self._counted_elsewhere(p)]
        square = get_total_norm(grads).to(self.device, torch.float64) ** 2
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    @property
    def parts(self) -> list[nn.Module]:
        """What runs of each of `models`: the backbone, on the last stage with its head.

        For FSDP2, `fully_shard` their layers and then them before the first step, with
        reshard_after_forward=False.
        """
        stages = self.plan.stages_of(self.rank)
        return [
            running_part(model, self.plan, stage) for stage, model in zip(stages, self.models, strict=True)
        ]

    @property
    def sent_bytes(self) -> dict[int, tuple[int, int]]:
        """Bytes that this rank handed to the transport in the latest step, per stage: forward, backward.

        Forward counts the hop out of the stage, backward the gradients of the hop into it.
        """
        return {stage.stage_index: (stage.sent_forward, stage.sent_backward) for stage in self._stages}

    @property
    def exchanges_tied_gradient(self) -> bool:
        """Whether this rank has one of two copies of a tied weight, and sends its gradient in each step."""
        return self._tied is not None

    @property
    def kept_blocks(self) -> int:
        """Block sums that wait for a later stage of this rank or for their gradients; 0 between steps."""
        return len(self._cache)

    def _run(
        self,
        batch: dict[str, Tensor | None],
        labels: Tensor | None,
        count: Tensor | int | None,
        *,
        has_backward: bool,
    ) -> list[Tensor]:
        """What the last stage returned for each microbatch, on its rank; an empty list on others."""
        if self._schedule is None:
            self._build()
        microbatches = self._split({**batch, "labels": labels})
        for stage in self._stages:
            stage.sent_forward = stage.sent_backward = 0
            stage.microbatches = microbatches
            if not stage.is_last:
                stage.microbatches = [_without_labels(inputs) for inputs in microbatches]
            elif labels is not None:
                stage.microbatches = [{**inputs, "num_items_in_batch": count} for inputs in microbatches]
        outputs: list[Tensor] = []
        run = self._schedule.step if has_backward else self._schedule.eval
        # The stages have their inputs and labels; what the schedule splits only says how many there are.
        target = torch.zeros(self.num_microbatches)
        try:
            run(target=target, losses=outputs, return_outputs=False)
        except BaseException:
            self._schedule, self._stages, self._cache = None, [], BlockCache()
            raise
        for stage in self._stages:
            stage.clear_runtime_states()
            stage.microbatches = []
        return [output.detach() for output in outputs]

    def _build(self) -> None:
        width = backbone_with_reads(self.models[0]).config.hidden_size
        self._stages = [
            DepthStage(
                part,
                self.plan,
                stage,
                self._cache,
                width=width,
                dtype=_stream_dtype(part),
                device=self.device,
                group=self.group,
            )
            for stage, part in zip(self.plan.stages_of(self.rank), self.parts, strict=True)
        ]
        stages: Any = self._stages[0] if self.schedule in ONE_STAGE_PER_RANK else self._stages
        self._schedule = SCHEDULES[self.schedule](
            stages, self.num_microbatches, loss_fn=lambda output, target: output, scale_grads=False
        )

    def _split(self, batch: dict[str, Tensor | None]) -> list[dict[str, Tensor]]:
        given = {name: tensor.to(self.device) for name, tensor in batch.items() if tensor is not None}
        shape = given["input_ids"].shape
        for name, tensor in given.items():
            if tensor.ndim != 2 or tensor.shape != shape:
                raise ValueError(
                    f"{name} must be [B, T] like input_ids {tuple(shape)}, got {tuple(tensor.shape)}"
                )
        if shape[0] < self.num_microbatches:
            raise ValueError(
                f"a batch needs at least one row per microbatch, got {shape[0]} rows and "
                f"{self.num_microbatches} microbatches; take fewer microbatches or more rows"
            )
        pieces = {name: tensor.tensor_split(self.num_microbatches) for name, tensor in given.items()}
        return [{name: piece[i] for name, piece in pieces.items()} for i in range(self.num_microbatches)]

    def _sum_on_every_rank(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss
        dist.broadcast(total, group=self.group, group_src=self.plan.rank_of(self.plan.num_stages - 1))
        return total

    def _tie_head(self) -> TiedHead | None:
        """The tied weight's exchange, on the two ranks that have a copy; makes them equal."""
        first, last = 0, self.plan.rank_of(self.plan.num_stages - 1)
        model: Any = self.models[0 if self.rank == first else -1]
        if first == last or not model.config.tie_word_embeddings or self.rank not in (first, last):
            return None
        is_first = self.rank == first
        part = model.get_input_embeddings() if is_first else model.get_output_embeddings()
        world: Any = dist.group.WORLD if self.group is None else self.group
        peer = dist.get_global_rank(world, last if is_first else first)
        return TiedHead(part, peer, self.group, first=is_first)

    def _counted_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether this is the head's copy of a tied weight, which the first rank counts."""
        return self._tied is not None and self.rank != 0 and parameter is self._tied.weight


def check_schedule(schedule: str, plan: StagePlan, num_microbatches: int) -> None:
    """Refuse schedules that the plan doesn't go with, before anything is built.

    Raises:
        ValueError: an unknown schedule, or one that needs another plan or number of microbatches.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    if schedule in ZERO_BUBBLE and plan.cache:
        raise ValueError(
            f"{schedule} can't run with cached blocks: it computes gradients of what a stage received apart "
            "from those of its weights, and blocks that the rank has kept are neither, so theirs would be "
            "lost; plan with cache=False, or take interleaved_1f1b"
        )
    if (plan.placement == "v") != (schedule in PLACED_AS_V):
        need = "v" if schedule in PLACED_AS_V else "loop"
        raise ValueError(f"{schedule} needs placement={need!r}, got {plan.placement!r}")
    if schedule in PLACED_AS_V and plan.virtual_stages != 2:
        raise ValueError(
            f"{schedule} runs two stages per rank, got {plan.virtual_stages}; take 2 virtual stages"
        )
    if schedule in ONE_STAGE_PER_RANK and plan.virtual_stages > 1:
        raise ValueError(
            f"{schedule} runs one stage per rank, got {plan.virtual_stages}; take interleaved_1f1b or "
            "looped_bfs"
        )
    if schedule in ("1f1b", "dual_pipe_v") and num_microbatches < plan.num_stages:
        other = "gpipe or interleaved_1f1b" if schedule == "1f1b" else "or zbv_zero_bubble"
        raise ValueError(
            f"{schedule} needs at least as many microbatches as stages, got {num_microbatches} and "
            f"{plan.num_stages}; take more microbatches, {other}"
        )


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}


def _stream_dtype(model: Any) -> torch.dtype:
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    dtype: torch.dtype = embedding.dtype if weight is None else weight.dtype
    return dtype
