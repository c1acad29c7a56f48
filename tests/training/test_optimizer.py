from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_run import SHAPE
from torch import nn

from attention_residuals import DepthRead, Qwen3_5AttnResConfig, Qwen3_5AttnResForCausalLM
from attention_residuals.training.optimizer import (
    ParameterGroup,
    make_optimizer,
    make_scheduler,
    parameter_groups,
)


def model_of(mode: str = "block", **changes: object) -> Qwen3_5AttnResForCausalLM:
    return Qwen3_5AttnResForCausalLM(
        Qwen3_5AttnResConfig(**{**SHAPE, "vocab_size": 64, "attn_res": {"mode": mode}, **changes})
    )


def by_name(groups: list[ParameterGroup]) -> dict[str, ParameterGroup]:
    assert len({group.name for group in groups}) == len(groups)
    return {group.name: group for group in groups}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["standard", "full", "block"])
def test_every_parameter_is_in_exactly_one_group(mode: str, tied: bool, optimizer: str) -> None:
    model = model_of(mode, tie_word_embeddings=tied)
    groups = parameter_groups(model, weight_decay=0.1, optimizer=optimizer)
    placed = [name for group in groups for name, _ in group.parameters]
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
    assert len(placed) == len(set(placed))
    assert ("reads" in by_name(groups)) == (mode != "standard")


def test_reads_have_no_decay_and_a_factor_of_their_own() -> None:
    model = model_of()
    reads = by_name(parameter_groups(model, weight_decay=0.1, read_lr_factor=0.5))["reads"]
    expected = {id(p) for m in model.modules() if isinstance(m, DepthRead) for p in m.parameters()}
    assert {id(p) for _, p in reads.parameters} == expected
    assert (reads.weight_decay, reads.lr_factor, reads.algorithm) == (0.0, 0.5, "adamw")


def test_only_matrices_decay() -> None:
    groups = by_name(parameter_groups(model_of(tie_word_embeddings=False), weight_decay=0.1))
    assert {name for name, group in groups.items() if group.weight_decay} == {"matrices"}
    assert all(p.ndim == 2 for _, p in groups["matrices"].parameters)
    names = " ".join(name for name, _ in groups["vectors"].parameters)
    assert all(part in names for part in ("A_log", "dt_bias", "conv1d", "layernorm"))
    assert [name for name, _ in groups["embeddings"].parameters] == ["model.embed_tokens.weight"]


def test_muon_receives_hidden_matrices_only() -> None:
    groups = parameter_groups(model_of(tie_word_embeddings=False), weight_decay=0.1, optimizer="muon")
    muon = [group for group in groups if group.algorithm == "muon"]
    assert [group.name for group in muon] == ["matrices"]
    names = [name for name, _ in muon[0].parameters]
    assert not any("read" in name or "embed" in name or "lm_head" in name for name in names)
    assert [name for name, _ in by_name(groups)["head"].parameters] == ["lm_head.weight"]


def test_frozen_parameters_are_left_out() -> None:
    model = model_of()
    model.model.embed_tokens.weight.requires_grad_(False)
    groups = by_name(parameter_groups(model, weight_decay=0.1))
    assert "embeddings" not in groups


def test_a_parameter_shared_by_two_groups_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = nn.Parameter(torch.ones(2, 2))
    monkeypatch.setattr(nn.Module, "named_parameters", lambda self: [("a", shared), ("b", shared)])
    with pytest.raises(AssertionError, match="in two groups"):
        parameter_groups(nn.Linear(2, 2), weight_decay=0.1)


def test_zero_gradients_leave_queries_alone_but_shrink_matrices() -> None:
    model = model_of()
    read = next(m for m in model.modules() if isinstance(m, DepthRead))
    nn.init.ones_(read.query)
    matrix = model.model.layers[0].mlp.up_proj.weight
    before = matrix.detach().clone()
    optimizer = make_optimizer(parameter_groups(model, weight_decay=0.5), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(read.query, torch.ones_like(read.query))
    torch.testing.assert_close(matrix, before * 0.95)


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 8), generator=generator)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_survives_to_the_bit(kind: str) -> None:
    first = model_of()
    optimizer = make_optimizer(parameter_groups(first, weight_decay=0.1, optimizer=kind), 0.01)
    train_steps(first, optimizer, 2, seed=1)
    second = copy.deepcopy(first)
    restored = make_optimizer(parameter_groups(second, weight_decay=0.1, optimizer=kind), 0.5)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert restored.param_groups[0]["lr"] == 0.01
    train_steps(first, optimizer, 2, seed=2)
    train_steps(second, restored, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_muon_and_adamw_together_equal_the_two_apart() -> None:
    together, apart = model_of(), model_of()
    apart.load_state_dict(together.state_dict())
    one = make_optimizer(parameter_groups(together, weight_decay=0.1, optimizer="muon"), 0.01)
    two = parameter_groups(apart, weight_decay=0.1, optimizer="muon")
    parts = [
        torch.optim.Muon(
            [p for _, p in group.parameters], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        if group.algorithm == "muon"
        else make_optimizer([group], 0.01)
        for group in two
    ]
    for _ in range(2):
        for model in (together, apart):
            ids = torch.arange(16).reshape(2, 8)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        one.step()
        one.zero_grad()
        for part in parts:
            part.step()
            part.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(together.parameters(), apart.parameters(), strict=True))


def rates(schedule: str, *, max_steps: int = 10, warmup: float = 2, decay: float = 0.4) -> list[float]:
    groups = [
        ParameterGroup("matrices", (("a", nn.Parameter(torch.ones(1))),), 1.0, 0.0, "adamw"),
        ParameterGroup("reads", (("b", nn.Parameter(torch.ones(1))),), 0.5, 0.0, "adamw"),
    ]
    optimizer = make_optimizer(groups, 2.0)
    scheduler = make_scheduler(optimizer, schedule=schedule, max_steps=max_steps, warmup=warmup, decay=decay)
    values = []
    for _ in range(max_steps):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == first / 2
        values.append(first)
        optimizer.step()
        scheduler.step()
    return values


def test_warmup_stable_decay() -> None:
    values = rates("wsd")
    assert values[:7] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert values[7:] == pytest.approx([2 * (1 - math.sqrt(part / 4)) for part in (1, 2, 3)])
    assert rates("wsd", warmup=0.2) == values, "a share of the steps"


def test_other_schedules() -> None:
    assert rates("constant")[2:] == [2.0] * 8
    assert rates("linear")[2:] == pytest.approx([2 * (10 - step) / 8 for step in range(2, 10)])
    assert rates("cosine")[2:] == pytest.approx(
        [1 + math.cos(math.pi * (step - 2) / 8) for step in range(2, 10)]
    )


def test_short_runs_have_a_schedule() -> None:
    assert rates("wsd", max_steps=1, warmup=0.05) == [2.0]
    assert len(rates("wsd", max_steps=3, warmup=100)) == 3
