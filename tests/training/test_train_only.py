"""`--train-only reads`: everything but queries and key weights is frozen."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_optimizer import model_of
from tiny_run import losses, quiet, text_of, tiny_settings
from transformers import AutoModelForCausalLM

import attention_residuals as ar
from attention_residuals.errors import UserError
from attention_residuals.training.model import train_only_reads
from attention_residuals.training.optimizer import parameter_groups
from attention_residuals.training.run import resume, train
from attention_residuals.training.settings import TrainSettings

IDS = torch.arange(24).reshape(2, 12) * 5 % 64


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_reads_are_the_only_group(optimizer: str) -> None:
    model = model_of("block")
    train_only_reads(model)
    (group,) = parameter_groups(model, weight_decay=0.1, optimizer=optimizer)
    reads = {id(p) for m in model.modules() if isinstance(m, ar.DepthRead) for p in m.parameters()}
    assert group.name == "reads" and (group.weight_decay, group.algorithm) == (0.0, "adamw")
    assert {id(p) for _, p in group.parameters} == reads


@pytest.mark.parametrize(
    "attn_res", [{"mode": "full"}, {"mode": "block", "read_schedule": "two_phase"}], ids=str
)
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_gradients_are_those_of_training_everything(
    attn_res: dict[str, Any], checkpointing: dict[str, bool] | None
) -> None:
    model = model_of(attn_res=attn_res).double().train()
    for module in model.modules():
        if isinstance(module, ar.DepthRead):
            torch.nn.init.normal_(module.query)
    expected = gradients(model)
    frozen = copy.deepcopy(model)
    train_only_reads(frozen)
    if checkpointing is not None:
        frozen.activation_checkpointing_enable(checkpointing)
    found = gradients(frozen)
    assert set(found) == {name for name in expected if ".read." in name}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
        assert gradient.abs().sum() > 0, name


def test_a_model_without_reads() -> None:
    with pytest.raises(UserError, match="--train-only reads needs a model with reads; add --mode block"):
        train_only_reads(model_of("standard"))


def test_the_run_folder_is_a_whole_model(tmp_path: Path) -> None:
    """The cheapest retrofit: a plain model receives reads, and they alone are trained."""
    train(tiny_settings(tmp_path, "plain", mode="standard", num_blocks=None, max_steps=2), console=quiet())
    fields: dict[str, Any] = {
        "from_checkpoint": str(tmp_path / "plain"),
        "mode": "block",
        "num_blocks": 2,
        "train_only": "reads",
        "data": (str(tmp_path / "text.txt"),),
        "context": 16,
        "batch_size": 2,
        "save_every": 1,
        "gradient_checkpointing": True,
    }
    console = quiet()
    result = train(TrainSettings(**fields, max_steps=3, output_dir=str(tmp_path / "reads")), console=console)
    told = text_of(console)
    assert "and reads 256; 256 trained" in told and "gradients 1 KiB" in told.replace("1.0 KiB", "1 KiB"), (
        told
    )
    facts = json.loads((result.folder / "run.json").read_text())["model"]
    assert facts["trained_parameters"] == facts["read_parameters"] == 256

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "reads"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    added = {name: weight for name, weight in after.items() if name not in before}
    assert len(added) == 8 and all(".read." in name for name in added)
    assert all(weight.abs().sum() > 0 for name, weight in added.items() if name.endswith("query"))
    assert isinstance(AutoModelForCausalLM.from_pretrained(result.folder), ar.Qwen3_5AttnResForCausalLM)

    train(TrainSettings(**fields, max_steps=5, output_dir=str(tmp_path / "whole")), console=quiet())
    resume(str(tmp_path / "reads"), {"max_steps": 5}, console=quiet())
    resumed, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("reads", "whole"))
    assert all(torch.equal(resumed[name], before[name]) for name in before)
    assert [line["step"] for line in losses(tmp_path / "reads") if "loss" in line] == [1, 2, 3, 4, 5]
    assert whole.keys() == resumed.keys()


def test_the_folder_to_start_from_is_kept_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with adapters reads it again when it is resumed, maybe from another working directory."""
    model_of("standard").save_pretrained(tmp_path / "plain")
    monkeypatch.chdir(tmp_path)
    assert TrainSettings(from_checkpoint="plain").from_checkpoint == str(tmp_path / "plain")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_only": "queries"}, "--train-only must be one of reads, got 'queries'"),
        ({"train_only": "reads", "mode": "standard", "num_blocks": None}, "needs a model with reads"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(tiny_settings(tmp_path, **changes), console=quiet())
    assert not (tmp_path / "run").exists()
