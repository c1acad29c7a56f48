"""What crosses the hops of a pipeline: a table, `python -m attention_residuals.pipeline.traffic`.

Tensors [B, T, D] of one microbatch over all hops, in one direction (gradients come back as many). The paper
counts block sums alone, N_p of them made by each of C = P V stages (arXiv 2603.15031):

    naive   C (C - 1) / 2 N_p
    cached  P (P - 1) / 2 N_p + (V - 1) P^2 N_p

Here a rank also keeps the blocks it has made itself, which the paper's receives back: (V - 1) P N_p fewer.
The embedding is one more source, sent once to each stage, or with the cache to each rank; it is counted
apart, as is the partial sum of a block that a hop leaves open.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from attention_residuals.config import AttnResConfig
from attention_residuals.pipeline.stage_plan import StagePlan, even_split
from attention_residuals.plan import DepthPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Tensors [B, T, D] of one microbatch over all hops, forward.

    Attributes:
        name: what is sent, e.g. "Block, cached".
        blocks: block sums, the embedding not counted.
        embeddings: copies of the embedding.
        partials: open blocks' sums; in standard mode the residual stream.
        widest: tensors of the largest hop.
        paper: the paper's count of block sums; None where it gives no formula, or stages differ in blocks.
    """

    name: str
    blocks: int
    embeddings: int
    partials: int
    widest: int
    paper: int | None

    @property
    def total(self) -> int:
        """All tensors."""
        return self.blocks + self.embeddings + self.partials


def count_traffic(plan: StagePlan, name: str) -> Traffic:
    """What a plan sends."""
    later = range(1, plan.num_stages)
    embeddings = sum(0 in plan.received(stage) for stage in later)
    return Traffic(
        name=name,
        blocks=plan.block_tensors() - embeddings,
        embeddings=embeddings,
        partials=sum(plan.partial_after(stage - 1) for stage in later),
        widest=max((plan.hop_tensors(stage) for stage in later), default=0),
        paper=papers_count(plan),
    )


def papers_count(plan: StagePlan) -> int | None:
    """Block sums by the paper's formula; None where stages differ in how many they complete."""
    made = {plan.blocks_after(stage) - plan.blocks_after(stage - 1) for stage in range(1, plan.num_stages)}
    made |= {plan.blocks_after(0) - 1}
    if plan.depth.config.mode == "standard" or len(made) > 1:
        return None
    per_stage, ranks, stages = made.pop(), plan.num_ranks, plan.num_stages
    if not plan.cache:
        return stages * (stages - 1) // 2 * per_stage
    return (ranks * (ranks - 1) // 2 + (plan.virtual_stages - 1) * ranks**2) * per_stage


def compare_traffic(
    num_layers: int, num_ranks: int, virtual_stages: int, sublayers_per_block: int
) -> list[Traffic]:
    """Rows of the table: standard, Full and Block, naive and cached, for decoder layers of two sublayers.

    Raises:
        ValueError: fewer layers than stages, or a block below one sublayer.
    """
    block = AttnResConfig(mode="block", sublayers_per_block=sublayers_per_block)
    kinds = {
        "standard": (AttnResConfig(mode="standard"), False),
        "Full, naive": (AttnResConfig(mode="full"), False),
        "Full, cached": (AttnResConfig(mode="full"), True),
        "Block, naive": (block, False),
        "Block, cached": (block, True),
    }
    layers = even_split(num_layers, num_ranks * virtual_stages)
    return [
        count_traffic(
            StagePlan(
                depth=DepthPlan(2 * num_layers, config), layers=layers, num_ranks=num_ranks, cache=cache
            ),
            name,
        )
        for name, (config, cache) in kinds.items()
    ]


def traffic(
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = 32,
    ranks: Annotated[int, typer.Option(help="Pipeline ranks P.", min=1)] = 4,
    virtual_stages: Annotated[int, typer.Option(help="Stages per rank V.", min=1)] = 2,
    sublayers_per_block: Annotated[int, typer.Option(help="Block size S.", min=1)] = 8,
    width: Annotated[int, typer.Option(help="Width D.", min=1)] = 4096,
    bytes_per_value: Annotated[int, typer.Option(help="2 for bfloat16, 4 for float32.", min=1)] = 2,
) -> None:
    """Show what crosses the hops of a pipeline, forward; gradients come back as many."""
    from rich.console import Console
    from rich.table import Table

    try:
        rows = compare_traffic(layers, ranks, virtual_stages, sublayers_per_block)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    shape = f"{layers} layers, P = {ranks}, V = {virtual_stages}, S = {sublayers_per_block}"
    table = Table(title=f"{shape}: tensors over all hops", title_justify="left")
    for column in ("", "blocks", "paper", "embedding", "partial", "all", "widest", "KiB/token"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        counts = (row.blocks, row.paper, row.embeddings, row.partials, row.total, row.widest)
        kib = row.total * width * bytes_per_value / 1024
        table.add_row(row.name, *("-" if count is None else str(count) for count in counts), f"{kib:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(traffic)
