"""DepthStage: a stage of torch.distributed.pipelining whose hop carries block sums and the partial sum.

    stage c-1 -> (*block sums that the rank lacks, partial sum if a block is open) -> stage c

The number of tensors of each hop follows from the plan, so no forward is run to find it. Buffers are made
when something is about to arrive and dropped when it has been used: between steps there are parameters and
gradients only, and microbatches may differ in rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from attention_residuals.pipeline.block_cache import BlockCache
from attention_residuals.pipeline.stage_model import run_stage
from attention_residuals.pipeline.stage_plan import StagePlan
from attention_residuals.stream import ResidualStream


class DepthStage(PipelineStage):
    """One stage on one rank.

    Args:
        model: what runs of the stage's model (`running_part`). Under FSDP2 its gradients are reduced after
            the last microbatch.
        plan: the plan it was split by.
        stage: which stage it is.
        cache: the rank's kept blocks; all its stages share one.
        width: D of the residual stream.
        dtype: of the residual stream.
        device: where the model is.
        group: the ranks of this pipeline.

    Attributes:
        microbatches: arguments of the model's forward for each microbatch of the step under way.
        sent_forward: bytes sent to the next stage in this step.
        sent_backward: bytes of gradients sent to the stage before in this step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        stage: int,
        cache: BlockCache,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        last = stage == plan.num_stages - 1
        # Shapes are not known yet: these say how many tensors a hop has, and that they need gradients.
        like = torch.empty(0, 0, width, dtype=dtype, device="meta", requires_grad=True)
        super().__init__(
            model,
            stage,
            plan.num_stages,
            device,
            input_args=(like,) * plan.hop_tensors(stage),
            output_args=(like,) * (1 if last else plan.hop_tensors(stage + 1)),
            group=group,
        )
        self.plan, self.cache, self.like = plan, cache, like
        self.microbatches: list[dict[str, Any]] = []
        self.sent_forward = self.sent_backward = 0
        self._microbatch = -1
        self._runtime_validate = False  # it would compare with the shapes above

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def forward_maybe_with_nosync(self, *hop: Tensor, **kwargs: Any) -> Any:
        kept = self.cache.take(self._microbatch)
        stream = None
        if self.stage_index > 0:
            blocks, partial = hop, None
            if self.plan.partial_after(self.stage_index - 1):
                blocks, partial = hop[:-1], hop[-1]
            stream = ResidualStream((*kept, *blocks), partial)
        inputs = self.microbatches[self._microbatch]
        left = run_stage(self.submod, self.plan, self.stage_index, stream, inputs)
        if isinstance(left, Tensor):
            return left
        later = self.stage_index + self.plan.num_ranks
        if self.plan.cache and later < self.num_stages:
            self.cache.keep(self.stage_index, self._microbatch, left.blocks, has_backward=self.has_backward)
        sent = [left.blocks[i] for i in self.plan.received(self.stage_index + 1)]
        if left.partial is not None:
            sent.append(left.partial)
        return tuple(_Sent.apply(tensor) for tensor in sent)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        self._microbatch = bwd_chunk_id
        received = self.fwd_cache[bwd_chunk_id][1][: self.plan.hop_tensors(self.stage_index)]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        # A block that no read here has used still returns a gradient: the stage before waits for one.
        self.bwd_cache[bwd_chunk_id] = tuple(
            torch.zeros_like(x) if grad is None else grad.contiguous()
            for x, grad in zip(received, self.bwd_cache[bwd_chunk_id], strict=True)
        )
        if not self.is_last:
            _drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not self.is_last and backward_type == "full":
            blocks, grads = self.cache.take_gradients(self.stage_index, self._microbatch)
            outputs = (*bwd_kwargs["stage_output"], *blocks)
            if not any(output.requires_grad for output in outputs):  # everything up to here is frozen
                return (None,) * len(bwd_kwargs["input_values"]), None
            bwd_kwargs = {
                **bwd_kwargs,
                "stage_output": outputs,
                "output_grads": (*bwd_kwargs["output_grads"], *grads),
            }
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the stage before, on the same rank; torch asks in an evaluation too, for none."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.sent_forward += sum(op.tensor.nbytes for op in ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent_backward += sum(op.tensor.nbytes for op in ops)
        return ops

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing to clean up, since no forward finds shapes; torch's would drop sharded gradients."""

    def _make_buffers(self, infos: tuple[Any, ...], microbatch: int) -> None:
        shape = (*self.microbatches[microbatch]["input_ids"].shape, self.like.shape[-1])
        for info in infos:
            info.buffer = torch.empty(shape, dtype=self.like.dtype, device=self.device)


class _Sent(torch.autograd.Function):
    """The same values as an output of their own.

    Zero-bubble schedules detach a stage's outputs in place, which must not be tensors that a read has saved.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _drop_buffers(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None
