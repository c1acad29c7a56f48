"""How many bytes of tensors are alive: measured beneath autograd, by when storages come and go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages that operations make while it is open, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        return outputs


def kept_by_forward(model: Any, ids: torch.Tensor) -> int:
    """Bytes beside weights that are alive between forward and backward, the loss being all that is held."""
    model.train()
    with LiveBytes() as live:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        gc.collect()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        kept = sum(size for key, size in live.sizes.items() if key not in weights)
    assert loss.requires_grad
    return kept
