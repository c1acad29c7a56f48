"""Float64 where transformers turns to float32: norms, rotary positions, the delta rule and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Within it no float64 tensor becomes float32, so that results can be compared to 1e-12.

    By replacing methods, since a `TorchFunctionMode` doesn't reach what backward computes again.
    """
    plain_float, plain_to = torch.Tensor.float, torch.Tensor.to

    def widened(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.dtype == torch.float64:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {k: torch.float64 if arg is torch.float32 else arg for k, arg in kwargs.items()}
            return method(self, *args, **kwargs)

        return call

    torch.Tensor.to = widened(plain_to)
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else plain_float(self)
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to = plain_float, plain_to
