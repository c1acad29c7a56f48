"""Layout: how a model is spread over ranks, and what one step works on. Validated once, integers."""

from __future__ import annotations

import dataclasses
import math

from attention_residuals.variant import check_count, require

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
DEFAULT_BANDWIDTH = 50.0  # GB/s: one direction of a 400 Gbit/s link


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a plan is made for.

    Ranks: `pipeline_ranks` x `tensor_parallel` x `data_parallel`.

    Args:
        pipeline_ranks: P, ranks that the layers are divided over.
        virtual_stages: V, stages of layers on each of them.
        tensor_parallel: ranks that share the matrices of each layer. They also share the residual stream,
            along the sequence, as the paper's prefill does (arXiv 2603.15031).
        data_parallel: replicas that see different rows.
        fsdp: whether these share weights, gradients and optimizer states (FSDP2's `fully_shard`).
        batch: B, rows of a microbatch of one replica.
        context: T, tokens of a row.
        microbatches: M, microbatches of a step; None for 2 P with a pipeline and 1 without.
        dtype: of weights, gradients, optimizer states and activations.
        gradient_checkpointing: whether each layer keeps its inputs only and runs again in backward.
        cache: whether a rank keeps block sums from one of its stages to the next.
        prefill_chunk: tokens of a row that a prefill works on at once; None for all of them.
        bandwidth: GB/s (1e9 bytes) of the link between neighbouring pipeline ranks, one direction.

    Raises:
        ValueError: a value breaks its rule; the message names rule, value and remedy.
        TypeError: a count is no int.
    """

    pipeline_ranks: int = 1
    virtual_stages: int = 1
    tensor_parallel: int = 1
    data_parallel: int = 1
    fsdp: bool = False
    batch: int = 1
    context: int = 2048
    microbatches: int | None = None
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    cache: bool = True
    prefill_chunk: int | None = None
    bandwidth: float = DEFAULT_BANDWIDTH

    def __post_init__(self) -> None:
        counts = ("pipeline_ranks", "virtual_stages", "tensor_parallel", "data_parallel", "batch", "context")
        for name in counts:
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be an int, got None; 1 is the least")
            check_count(name, getattr(self, name), "1 is the least")
        check_count("microbatches", self.microbatches, "leave it out for the default")
        check_count("prefill_chunk", self.prefill_chunk, "leave it out to prefill a row at once")
        require(
            self.dtype in DTYPE_BYTES,
            f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}",
        )
        require(
            math.isfinite(self.bandwidth) and self.bandwidth > 0,
            f"bandwidth must be a finite number of GB/s above 0, got {self.bandwidth}",
        )
        require(
            not self.fsdp or self.data_parallel > 1,
            f"fsdp shares weights among replicas, so data_parallel must be at least 2, got "
            f"{self.data_parallel}; leave fsdp out, or take more",
        )
        if self.microbatches is None:
            filled = 1 if self.pipeline_ranks == 1 else 2 * self.pipeline_ranks
            object.__setattr__(self, "microbatches", filled)

    @property
    def num_stages(self) -> int:
        """C = P V."""
        return self.pipeline_ranks * self.virtual_stages

    @property
    def num_microbatches(self) -> int:
        assert self.microbatches is not None  # filled in
        return self.microbatches

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]

    def stream_bytes(self, width: int, tokens: int | None = None) -> int:
        """Bytes of one tensor [B, T, D] of the residual stream on one rank.

        Args:
            tokens: of a row, where they are not the whole context.
        """
        per_row = -(-(self.context if tokens is None else tokens) // self.tensor_parallel)
        return self.batch * per_row * width * self.itemsize

    def scalar_bytes(self) -> int:
        """Bytes of one number a token, as a read keeps them: float32, or float64 beside float64."""
        per_row = -(-self.context // self.tensor_parallel)
        return self.batch * per_row * max(4, self.itemsize)
