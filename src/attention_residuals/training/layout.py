"""Layout: how the processes of a run share model and batch. Integers, checked before anything starts."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from attention_residuals.config import AttnResConfig
from attention_residuals.training.settings import TrainSettings, require

PIPELINE_OPTIONS = ("virtual_stages", "microbatches", "pipeline_schedule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """P pipeline ranks times D data-parallel ranks times T tensor-parallel ranks.

    Ranks are numbered with the tensor-parallel index running fastest, then the data-parallel one, so that the
    ranks that exchange most are neighbours.

    Args:
        processes: how many there are, P D T.
        data_parallel: D; None for the processes that the other two leave.
        fsdp: whether the D ranks share weights, gradients and optimizer states layer by layer, in a pipeline
            those of each stage; else each keeps all.
        tensor_parallel: T.
        pipeline: P.
        virtual_stages: pipeline stages per rank; None for one.
        microbatches: pieces a batch is cut into for the pipeline; None for P.
        pipeline_schedule: a name of `pipeline.SCHEDULES`; None for 1F1B, interleaved where a rank has several
            stages.
        timeout: seconds a process waits for another one before it gives up.

    Raises:
        UserError: the product is not the number of processes, or options contradict each other.
    """

    processes: int = 1
    data_parallel: int | None = None
    fsdp: bool = False
    tensor_parallel: int = 1
    pipeline: int = 1
    virtual_stages: int | None = None
    microbatches: int | None = None
    pipeline_schedule: str | None = None
    timeout: int = 1800

    def __post_init__(self) -> None:
        names = ("data_parallel", "tensor_parallel", "pipeline", "virtual_stages", "microbatches", "timeout")
        for name in names:
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            require(value is None or value >= 1, f"{option} must be at least 1, got {value}")
        if self.data_parallel is None:
            object.__setattr__(self, "data_parallel", self._ranks_left())
        product = self.pipeline * self.data_ranks * self.tensor_parallel
        require(
            product == self.processes,
            f"{self.describe()} need {product} processes, but {self.processes} were started; start torchrun "
            f"with --nproc-per-node (times --nnodes) {product}, or change the options",
        )
        if self.pipeline == 1:
            for name in PIPELINE_OPTIONS:
                option = "--" + name.replace("_", "-")
                require(getattr(self, name) is None, f"{option} belongs to --pipeline; give both or neither")
        require(
            not self.fsdp or self.data_ranks > 1,
            f"--fsdp shares weights among data-parallel ranks, but {self.describe()} leave one; start more "
            "processes, or leave --fsdp out",
        )

    def _ranks_left(self) -> int:
        others = self.pipeline * self.tensor_parallel
        require(
            self.processes % others == 0,
            f"--pipeline {self.pipeline} and --tensor-parallel {self.tensor_parallel} need a multiple of "
            f"{others} processes, but {self.processes} were started; start torchrun with such a number, or "
            "change the options",
        )
        return self.processes // others

    @classmethod
    def of_torchrun(cls, **options: Any) -> Layout:
        """The layout of the processes that torchrun has started, or of this one alone."""
        return cls(processes=int(os.environ.get("WORLD_SIZE", "1")), **options)

    @property
    def data_ranks(self) -> int:
        """D, once it is settled."""
        return self.data_parallel or 1

    @property
    def plain(self) -> bool:
        """Whether every process holds the whole model: one process, or data parallelism alone."""
        return not self.fsdp and self.tensor_parallel == 1 and self.pipeline == 1

    @property
    def microbatch_count(self) -> int:
        """Pieces a batch is cut into; 1 without a pipeline."""
        return self.microbatches or self.pipeline

    @property
    def schedule_name(self) -> str:
        """The pipeline's schedule."""
        return self.pipeline_schedule or ("interleaved_1f1b" if (self.virtual_stages or 1) > 1 else "1f1b")

    def describe(self) -> str:
        """The options in words, as in "--pipeline 2, --data-parallel 2"."""
        parts = [f"--pipeline {self.pipeline}"] if self.pipeline > 1 else []
        parts.append(f"--data-parallel {self.data_ranks}" + (" --fsdp" if self.fsdp else ""))
        parts += [f"--tensor-parallel {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the run's record."""
        return dataclasses.asdict(self)

    def check_settings(self, settings: TrainSettings) -> None:
        """Refuse what only runs where every process holds the whole model.

        Raises:
            UserError: an option that this layout doesn't support was given.
        """
        require(
            settings.lora is None,
            f"--lora needs whole weights on every process, got {self.describe()}; leave these out",
        )
        require(
            settings.optimizer != "muon" or (not self.fsdp and self.tensor_parallel == 1),
            "--optimizer muon needs whole matrices, which --fsdp and --tensor-parallel cut; use adamw, or "
            "--pipeline",
        )
        require(
            not (settings.chunked_loss and self.pipeline > 1),
            "--chunked-loss replaces the whole model's forward, which --pipeline cuts; leave one of them out",
        )

    def check_model(self, config: Any) -> None:
        """Refuse a model that can't be cut this way.

        Args:
            config: of the model to train.

        Raises:
            UserError: heads or layers don't divide, or the model has no tensor-parallel plan.
        """
        reads = AttnResConfig.from_dict(config.attn_res)
        require(
            not (self.fsdp and reads.read_schedule == "two_phase"),
            "read_schedule=two_phase needs the queries of several layers at once, which --fsdp shards; use "
            "read_schedule=auto or per_read",
        )
        if self.tensor_parallel > 1:
            self._check_tensor_parallel(config)
        stages = self.pipeline * (self.virtual_stages or 1)
        require(
            stages <= config.num_hidden_layers,
            f"--pipeline {self.pipeline} needs a layer for each of its {stages} stages, but the model has "
            f"{config.num_hidden_layers}; take fewer",
        )

    def _check_tensor_parallel(self, config: Any) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            require(
                heads is None or heads % self.tensor_parallel == 0,
                f"--tensor-parallel must divide {name} {heads}, got {self.tensor_parallel}",
            )

    def check_batch(self, batch_size: int) -> None:
        """Refuse a batch with fewer rows than microbatches.

        Raises:
            UserError: it has.
        """
        require(
            batch_size >= self.microbatch_count,
            f"--microbatches {self.microbatch_count} need as many rows, but a batch has {batch_size}; raise "
            "--batch-size, or take fewer",
        )


def fit_rows(rows_per_step: int, batch_size: int, data_ranks: int) -> tuple[int, int]:
    """Rows per forward pass and forward passes per step that keep a run's steps on another number of ranks.

    Args:
        rows_per_step: rows of one optimizer step, over all ranks.
        batch_size: rows per forward pass so far; not exceeded.
        data_ranks: ranks with rows of their own.

    Raises:
        UserError: the rows can't be shared equally.
    """
    per_rank, over = divmod(rows_per_step, data_ranks)
    require(
        over == 0,
        f"the run's steps have {rows_per_step} rows, which {data_ranks} data-parallel ranks can't share "
        "equally; resume with a number of them that divides it",
    )
    batch = max(size for size in range(1, min(batch_size, per_rank) + 1) if per_rank % size == 0)
    return batch, per_rank // batch
