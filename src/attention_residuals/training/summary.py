"""What a run is about to do, as tables: model, depth plan, optimizer groups, data, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention_residuals.config import AttnResConfig
from attention_residuals.models.mixins import family_of
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.training.data import TokenData
from attention_residuals.training.optimizer import ParameterGroup

FLOAT_BYTES = 4
CHUNK = 64  # tokens of a Gated DeltaNet chunk, whose token-by-token matrices are kept for backward


def model_facts(model: PreTrainedModel) -> dict[str, int]:
    """Parameter counts: all, the embeddings', and the reads'."""
    reads = [p for m in model.modules() if isinstance(m, DepthRead) for p in m.parameters()]
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "embedding_parameters": sum(p.numel() for p in embeddings),
        "read_parameters": sum(p.numel() for p in reads),
    }


def depth_plan_of(config: PreTrainedConfig) -> DepthPlan:
    """The depth plan of a model's configuration."""
    num_sublayers = family_of(config).sublayers_per_layer * config.num_hidden_layers
    return DepthPlan(num_sublayers, AttnResConfig.from_dict(config.attn_res))


def describe_plan(plan: DepthPlan) -> str:
    """The depth plan in one line."""
    if plan.config.mode == "standard":
        return f"standard residual additions over {plan.num_sublayers} sublayers"
    widest = max(plan.num_sources(read) for read in range(plan.num_reads))
    return (
        f"{plan.config.mode}: {plan.num_blocks} blocks of {plan.sublayers_per_block} "
        f"sublayer{'s' if plan.sublayers_per_block > 1 else ''} ({plan.num_sublayers} in all), "
        f"{plan.num_reads} reads, the widest of {widest} sources"
    )


def describe_adapters(model: nn.Module) -> str:
    """How many projections of each layer type, and how many reads, the adapters of a model train."""
    from attention_residuals.training.adapters import adapted_modules  # needs PEFT

    return str(adapted_modules(model))


def memory_estimate(
    config: PreTrainedConfig,
    groups: Sequence[ParameterGroup],
    *,
    rows: int,
    context: int,
    gradient_checkpointing: bool,
    chunked_loss: bool = False,
    frozen: int = 0,
) -> dict[str, int]:
    """Bytes a process needs at the peak of a step: exact for weights and states, rough for activations.

    Args:
        rows: rows in one forward pass.
        context: tokens in a row.
        chunked_loss: whether the logits are never whole.
        frozen: numbers in weights that are not trained.
    """
    states = {"adamw": 2, "muon": 1}  # moments kept per number
    numbers = sum(group.num_elements for group in groups)
    layers = [_layer_numbers(config, kind) for kind in _layer_types(config)]
    kept = config.hidden_size * len(layers) + max(layers) if gradient_checkpointing else sum(layers)
    logits = 0 if chunked_loss else 3 * config.vocab_size  # logits, their log-softmax and their gradient
    return {
        "weights": (numbers + frozen) * FLOAT_BYTES,
        "gradients": numbers * FLOAT_BYTES,
        "optimizer": sum(group.num_elements * states[group.algorithm] for group in groups) * FLOAT_BYTES,
        "activations": rows * context * (kept + logits) * FLOAT_BYTES,
    }


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _layer_numbers(config: PreTrainedConfig, kind: str) -> int:
    """Numbers one layer keeps for backward, per token."""
    norms = 6 * config.hidden_size
    if hasattr(config, "state_size"):  # Mamba: PyTorch keeps the states of every token
        return norms + (8 + 3 * config.state_size) * config.intermediate_size
    mlp = 4 * (
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    )  # GPT-2 has no such field
    if kind == "linear_attention":
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return mlp + norms + 10 * keys + 12 * values + 6 * config.linear_num_value_heads * CHUNK
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = 4 * config.num_attention_heads
    heads += 4 * getattr(config, "num_key_value_heads", config.num_attention_heads)
    return mlp + norms + 2 * heads * head_dim


def print_summary(
    console: Console,
    *,
    name: str,
    config: PreTrainedConfig,
    facts: dict[str, int],
    groups: Sequence[ParameterGroup],
    data: TokenData,
    adapters: str | None,
    memory: dict[str, int],
    schedule: str,
) -> None:
    """Print the summary that precedes training."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "model",
        f"{name}: {facts['parameters']:,} parameters, of which embedding "
        f"{facts['embedding_parameters']:,} and reads {facts['read_parameters']:,}; "
        f"{facts['trained_parameters']:,} trained",
    )
    table.add_row("depth plan", describe_plan(depth_plan_of(config)))
    if adapters is not None:
        table.add_row("adapters", adapters)
    validation = f"{len(data.validation):,}" if data.validation else "none"
    table.add_row(
        "data",
        f"{data.num_documents:,} document{'s' if data.num_documents != 1 else ''}, {data.num_tokens:,} "
        f"tokens; rows of {data.train.context}: {len(data.train):,} to train on, {validation} to validate on",
    )
    table.add_row("schedule", schedule)
    table.add_row(
        "memory",
        f"about {format_bytes(sum(memory.values()))}: "
        + ", ".join(f"{part} {format_bytes(size)}" for part, size in memory.items()),
    )
    console.print(table)
    console.print(_group_table(groups))


def _group_table(groups: Sequence[ParameterGroup]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group")
    for column in ("tensors", "parameters", "rate factor", "decay"):
        table.add_column(column, justify="right")
    table.add_column("optimizer")
    for group in groups:
        values: list[Any] = [
            group.name,
            len(group.parameters),
            f"{group.num_elements:,}",
            f"{group.lr_factor:g}",
            f"{group.weight_decay:g}",
            {"adamw": "AdamW", "muon": "Muon"}[group.algorithm],
        ]
        table.add_row(*map(str, values))
    return table


def format_bytes(number: float) -> str:
    """Bytes in the unit a reader would choose (binary multiples)."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
