"""TiedHead: one weight that is the embedding on the first stage and the head on the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class TiedHead:
    """Keeps the two copies of a tied weight one weight.

    Both begin with the first rank's values, and each step leaves the sum of both gradients on either. Where
    FSDP2 shards them, the ranks hold, and exchange, the same rows.

    Args:
        module: the embedding on the first rank, the head on the last; it may get another `weight` later.
        peer: rank in the world of the other copy.
        group: the ranks of the pipeline.
        first: whether this is the embedding.
    """

    def __init__(self, module: nn.Module, peer: int, group: dist.ProcessGroup | None, *, first: bool) -> None:
        self.module, self.peer, self.group = module, peer, group
        theirs = self._exchange(self.weight.detach())
        if not first:
            with torch.no_grad():
                self.weight.copy_(theirs)

    @property
    def weight(self) -> Any:
        """This rank's copy [vocabulary, D]."""
        return self.module.weight

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """The scope of one forward and backward; at its end both ranks have the same sum, to the bit.

        The gradient of earlier steps has both parts already and is put aside meanwhile.
        """
        earlier, self.weight.grad = self.weight.grad, None
        try:
            yield
            weight = self.weight
            if weight.requires_grad:
                own = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = own + self._exchange(own)
        finally:
            if earlier is not None:
                self.weight.grad = earlier if self.weight.grad is None else self.weight.grad + earlier

    def _exchange(self, own: Tensor) -> Tensor:
        theirs = torch.empty_like(own, memory_format=torch.contiguous_format)
        sent, received = (t.to_local() if isinstance(t, DTensor) else t for t in (own, theirs))
        ops: list[Any] = [
            dist.P2POp(dist.isend, sent.contiguous(), self.peer, self.group),
            dist.P2POp(dist.irecv, received, self.peer, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs
