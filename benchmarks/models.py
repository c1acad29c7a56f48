"""What benchmarks do to models before they time them."""

from __future__ import annotations

from torch import nn

import attention_residuals as ar


def move_queries(model: nn.Module) -> None:
    """Draw every read's query, so that its depth weights differ, as after training."""
    for read in (module for module in model.modules() if isinstance(module, ar.DepthRead)):
        nn.init.normal_(read.query, std=read.width**-0.5)
