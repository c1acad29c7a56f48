"""Depth attention as others wrote it: oracles that share no line with this package.

All take packed sources [N, ..., D] and return the mixture [..., D] and the depth weights [N, ...].
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def fla_file(name: str) -> Path:
    """A file of fla-core's attnres package. Importing the package would need Triton, a gigabyte."""
    try:
        distribution = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    return Path(str(distribution.locate_file(f"fla/ops/attnres/{name}.py")))


def naive_attnres() -> Callable[..., tuple[Tensor, Tensor]]:
    """flash-linear-attention's own oracle, from the file that ships with its kernel."""
    path = fla_file("naive")
    spec = importlib.util.spec_from_file_location("fla_naive_attnres", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


def fused_attnres_arguments() -> list[str]:
    """Names of the parameters of fla-core's kernel, read rather than imported."""
    tree = ast.parse(fla_file("fused").read_text())
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "fused_attnres")
    return [argument.arg for argument in function.args.args]


def fla_equation(sources, query, key_weight, eps=1e-6, scale=1.0, norm_weight=None):
    """FLA's test: the keys by rms_norm, the query scaled before the product; one eps for both norms."""
    return naive_attnres()(query, sources, key_weight, norm_weight, eps, scale, return_weights=True)


def liger_equation(sources, query, key_weight, eps=1e-6):
    """Liger's test: a division by the root, then keys that are rounded to the sources' dtype."""
    root = (sources.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    keys = (sources / root).to(sources.dtype) * key_weight
    weights = torch.einsum("nbtd,d->nbt", keys, query).softmax(0)
    return torch.einsum("nbtd,nbt->btd", sources, weights), weights


def block_attn_res(blocks: list[Tensor], partial_block: Tensor, proj: nn.Linear, norm: nn.RMSNorm):
    """The paper's function for one sublayer: stack blocks and partial sum, norm, score, softmax, mix."""
    values = torch.stack([*blocks, partial_block])
    logits = torch.einsum("d, n b t d -> n b t", proj.weight.squeeze(0), norm(values))
    weights = logits.softmax(0)
    return torch.einsum("n b t, n b t d -> b t d", weights, values), weights


def article_equation(sources, query, key_weight, eps=1e-6):
    """`block_attn_res` with our vectors as the parameters of its two modules."""
    width = sources.shape[-1]
    proj, norm = nn.Linear(width, 1, bias=False), nn.RMSNorm(width, eps=eps)
    del proj.weight, norm.weight  # so that tensors with a graph may take the parameters' place
    proj.weight, norm.weight = query.unsqueeze(0), key_weight
    *blocks, partial_block = sources.unbind(0)
    return block_attn_res(blocks, partial_block, proj, norm)
