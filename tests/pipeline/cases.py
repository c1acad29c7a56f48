"""One model over several processes against the same model in one: what each runs, and what it finds."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from float64 import all_in_float64

import attention_residuals as ar
from attention_residuals.models.auto import causal_lm_class, config_class
from attention_residuals.pipeline import Pipeline, StagePlan, plan_stages
from attention_residuals.pipeline.pipeline import PLACED_AS_V
from tiny_shapes import DECODER, DELTA_NET

FIELDS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "qwen3_5_text": {
        **DECODER,
        **DELTA_NET,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    },
    "gemma2": {**DECODER, "sliding_window": 4},
    "gpt2": {
        "vocab_size": 67,
        "n_embd": 16,
        "n_head": 2,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mamba": {**DECODER, "state_size": 4},
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is split, and a schedule.

    Attributes:
        sublayers_per_block: 0 stands for standard mode.
        layers: decoder layers of each stage.
        frozen: "embedding", "all but reads" or nothing.
        padded: whether rows begin with padding, under an attention mask.
    """

    layers: tuple[int, ...] = (3, 3)
    schedule: str = "1f1b"
    microbatches: int = 2
    cache: bool = True
    sublayers_per_block: int = 3
    family: str = "llama"
    rows: int = 5
    tokens: int = 7
    window: int | None = None
    tied: bool = False
    frozen: str = ""
    checkpointing: bool = False
    padded: bool = False

    @property
    def name(self) -> str:
        """Its fields that aren't the default's."""
        default = Case()
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }
        return ", ".join(f"{name}={value}" for name, value in changed.items()) or "default"


@dataclasses.dataclass
class Finding:
    """What one process found in two steps of a case.

    Attributes:
        loss_error: relative, the larger of both steps.
        gradient_error: L2 norm of the difference over that of the gradient, the largest of all parameters and
            both steps.
        names: this process's parameters that need a gradient.
        all_names: those of the whole model.
        left: kept block sums after the steps.
        seen: bytes that the process group was given to send in one step.
        counted: bytes that the pipeline says it has sent in that step.
        planned: bytes that the plan predicts.
    """

    loss_error: float = 0.0
    gradient_error: float = 0.0
    names: set[str] = dataclasses.field(default_factory=set)
    all_names: set[str] = dataclasses.field(default_factory=set)
    left: int = 0
    seen: int = 0
    counted: int = 0
    planned: int = 0


def make_model(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    """A random model whose queries are far from zero."""
    torch.manual_seed(1)
    attn_res: dict[str, Any] = {"mode": "standard"}
    if case.sublayers_per_block:
        attn_res = {"mode": "block", "sublayers_per_block": case.sublayers_per_block, "window": case.window}
    config = config_class(case.family)(
        **FIELDS[case.family],
        num_hidden_layers=sum(case.layers),
        tie_word_embeddings=case.tied,
        attn_res=attn_res,
    )
    model = causal_lm_class(config)(config).to(dtype)
    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            torch.nn.init.normal_(module.query, std=0.7)
    if case.frozen == "embedding":
        model.get_input_embeddings().requires_grad_(False)
    elif case.frozen == "all but reads":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".read." in name)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def plan_of(case: Case, model: Any, world: int) -> StagePlan:
    return plan_stages(
        model,
        world,
        virtual_stages=len(case.layers) // world,
        layers=case.layers,
        cache=case.cache,
        placement="v" if case.schedule in PLACED_AS_V else "loop",
    )


def make_batch(case: Case, seed: int = 3) -> dict[str, torch.Tensor]:
    """Rows with a different number of labels each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 67, (case.rows, case.tokens), generator=generator)
    labels = ids.clone()
    for row in range(case.rows):
        labels[row, : row % (case.tokens - 1)] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case.padded:
        batch["attention_mask"] = (labels != -100).long()
    return batch


def run_case(case: Case, world: int) -> Finding:
    """Two steps of SGD, in this process's share of the pipeline and in the whole model."""
    model = make_model(case)
    whole = copy.deepcopy(model)
    plan = plan_of(case, model, world)
    pipeline = Pipeline(model, plan, schedule=case.schedule, num_microbatches=case.microbatches)
    finding = Finding(all_names={name for name, p in whole.named_parameters() if p.requires_grad})
    optimizers = [
        torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)
        for parameters in ([*whole.parameters()], [*pipeline.parameters()])
        if any(p.requires_grad for p in parameters)
    ]
    for step in range(2):
        batch = make_batch(case, seed=step)
        expected = whole(**batch).loss
        expected.backward()
        with bytes_sent() as sent:
            loss = pipeline.step(**batch)
        finding.loss_error = max(finding.loss_error, abs((loss - expected) / expected).item())
        error, finding.names = compare_gradients(pipeline, whole)
        finding.gradient_error = max(finding.gradient_error, error)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    finding.left = pipeline.kept_blocks
    sizes = {"rows": case.rows, "tokens": case.tokens, "width": 16, "itemsize": 8}
    for stage, (forward, backward) in pipeline.sent_bytes.items():
        finding.counted += forward + backward
        after = plan.hop_bytes(stage + 1, **sizes) if stage + 1 < plan.num_stages else 0
        finding.planned += after + plan.hop_bytes(stage, **sizes)
    # the tied weight's gradients are exchanged once a step, apart from hops
    finding.seen = sum(sent) - (67 * 16 * 8 if pipeline.exchanges_tied_gradient else 0)
    return finding


def compare_gradients(pipeline: Pipeline, whole: Any) -> tuple[float, set[str]]:
    """The largest relative error of this process's gradients, and the names it has."""
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    worst, names = 0.0, set()
    for name, parameter in pipeline.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            difference = torch.linalg.vector_norm(parameter.grad - expected[name])
            worst = max(worst, (difference / torch.linalg.vector_norm(expected[name])).item())
            names.add(name)
        else:
            assert parameter.grad is None, name
    return worst, names


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """What torch.distributed is given to send, counted at its own function and not by the stages."""
    original = dist.isend
    sent: list[int] = []

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = counting
    try:
        yield sent
    finally:
        dist.isend = dist.distributed_c10d.isend = original


def run_cases(rank: int, world: int, cases: tuple[Case, ...]) -> list[Finding]:
    """Every case, one after the other, in this process."""
    with all_in_float64():
        return [run_case(case, world) for case in cases]
