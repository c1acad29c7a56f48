"""Whole runs on several processes: losses, gradient norms and weights are those of one process.

Models are in float64 here, so that only the loss and the norms, which transformers computes in float32 at any
dtype, leave a difference.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_run import SHAPE, losses, quiet, tiny_settings
from transformers import AutoModelForCausalLM

from attention_residuals.training import run
from attention_residuals.training.checkpoints import complete_checkpoints
from attention_residuals.training.layout import Layout
from attention_residuals.training.process_group import process_group
from attention_residuals.training.settings import TrainSettings
from attention_residuals.training.shard_checkpoints import is_sharded

# what can be cut in two: heads, and layers into four stages
HEADS = {"num_key_value_heads": 2, "linear_num_value_heads": 2}
LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
WIDE = SHAPE | HEADS | LAYERS
ROWS = 4  # of a step
# measured after 6 steps of the layouts below: 1.1e-7 in metrics, and in weights, where Adam magnifies what
# rounding does to gradients near zero, 1.2e-6
TOLERANCE = 1e-6
BFLOAT16 = 5e-3  # of losses computed in bfloat16; measured: 1.1e-3

# name, layout, settings
Case = tuple[str, dict[str, Any], dict[str, Any]]


def settings_of(folder: Path, name: str, ranks: int = 1, **changes: Any) -> TrainSettings:
    """Settings whose steps have `ROWS` rows on so many data-parallel ranks; `shape` changes the model."""
    shape = folder / f"{name}.json"
    shape.write_text(json.dumps(WIDE | changes.pop("shape", {})))
    fields = {"model_config": str(shape), "batch_size": ROWS // ranks, "warmup": 0.0, "learning_rate": 0.01}
    fields["eval_every"] = 2  # just before each checkpoint, which must not see what an evaluation leaves
    return tiny_settings(folder, name, **{**fields, **changes})


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Train float64 models."""
    make, empty = run.make_model, run._empty
    patch.setattr(run, "make_model", lambda *args: make(*args).double())
    patch.setattr(run, "_empty", lambda *args: empty(*args).double())


def train_cases(folder: Path, cases: Sequence[Case]) -> None:
    """In each rank: one run after the other; a case whose name names a folder with a run is resumed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    processes = int(os.environ["WORLD_SIZE"])
    with process_group(600):
        for name, options, changes in cases:
            layout = Layout(processes=processes, **options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run, "_report", lambda *args: None)
                if not changes.get("bf16"):
                    in_float64(patch)
                if (folder / name).exists():
                    run.resume(str(folder / name), changes, layout=layout)
                else:
                    run.train(settings_of(folder, name, layout.data_ranks, **changes), layout=layout)


def train_alone(folder: Path, name: str, *, float64: bool = True, **changes: Any) -> Path:
    """The same run on one process by the Trainer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_report", lambda *args: None)
        if float64:
            in_float64(patch)
        return run.train(settings_of(folder, name, **changes), console=quiet()).folder


def assert_same_run(found: Path, expected: Path, tolerance: float = TOLERANCE) -> None:
    """Equal lines in metrics.jsonl up to the tolerance, and equal weights up to ten times that."""
    lines, expected_lines = losses(found), losses(expected)
    assert [sorted(line) for line in lines] == [sorted(line) for line in expected_lines]
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert line == pytest.approx(expected_line, rel=tolerance, abs=tolerance)
    weights, expected_weights = (load_file(run / "model.safetensors") for run in (found, expected))
    assert set(weights) == set(expected_weights)
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight.double(), expected_weights[name].double(), rtol=0, atol=10 * tolerance
        )


def copy_until(run_folder: Path, copy: Path, step: int) -> None:
    """A run as it was after a kill between two checkpoints."""
    shutil.copytree(run_folder, copy)
    for checkpoint in complete_checkpoints(copy / "checkpoints"):
        if checkpoint.name != f"checkpoint-{step}":
            (checkpoint / "complete.json").unlink()
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"status": "running"}))
    (copy / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process (`alone`), and of four in two layouts, the second resumed from the first."""
    folder = tmp_path_factory.mktemp("parallel")
    train_alone(folder, "alone")
    run_ranks(train_cases, 4, folder, folder, [("pipeline", {"pipeline": 2}, {})])
    copy_until(folder / "pipeline", folder / "moved", 4)
    cases = [
        ("sharded", {"fsdp": True, "tensor_parallel": 2}, {}),
        ("moved", {"fsdp": True}, {}),
        ("sharded_stages", {"pipeline": 2, "virtual_stages": 2, "fsdp": True}, {}),
        ("plain", {}, {}),
    ]
    run_ranks(train_cases, 4, folder, folder, cases)
    return folder


def test_pipeline_and_data_parallel(folder: Path) -> None:
    assert_same_run(folder / "pipeline", folder / "alone")
    record = json.loads((folder / "pipeline" / "run.json").read_text())
    assert record["status"] == "finished" and record["step"] == 6
    assert (record["layout"]["pipeline"], record["layout"]["data_parallel"]) == (2, 2)
    model = AutoModelForCausalLM.from_pretrained(folder / "pipeline")
    assert model.config.use_cache


def test_fully_sharded_and_tensor_parallel(folder: Path) -> None:
    assert_same_run(folder / "sharded", folder / "alone")


def test_pipeline_and_fully_sharded(folder: Path) -> None:
    assert_same_run(folder / "sharded_stages", folder / "alone")
    layout = json.loads((folder / "sharded_stages" / "run.json").read_text())["layout"]
    assert (layout["pipeline"], layout["data_parallel"], layout["fsdp"]) == (2, 2, True)


def test_plain_data_parallel_is_the_trainer(folder: Path) -> None:
    assert_same_run(folder / "plain", folder / "alone")
    checkpoint = folder / "plain" / "checkpoints" / "checkpoint-6"
    assert (checkpoint / "optimizer.pt").is_file() and not is_sharded(checkpoint)
    assert is_sharded(folder / "sharded" / "checkpoints" / "checkpoint-6")


def test_resumed_under_another_layout(folder: Path) -> None:
    """From pipeline x data parallel to four fully sharded ranks, whose batches are half as large."""
    assert_same_run(folder / "moved", folder / "alone")
    assert json.loads((folder / "moved" / "run.json").read_text())["layout"]["fsdp"]


# name, layout, settings that both runs have; on four ranks
MORE_LAYOUTS: list[Case] = [
    ("fsdp", {"fsdp": True}, {}),
    ("tensor", {"tensor_parallel": 2}, {}),
    ("pipeline_tensor", {"pipeline": 2, "tensor_parallel": 2}, {}),
    ("four_stages", {"pipeline": 4}, {}),
    ("interleaved", {"pipeline": 2, "virtual_stages": 2}, {}),
    ("gpipe", {"pipeline": 2, "microbatches": 1, "pipeline_schedule": "gpipe"}, {}),
    ("zero_bubble", {"pipeline": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_zero_bubble"}, {}),
    (
        "v",
        {
            "pipeline": 2,
            "tensor_parallel": 2,
            "virtual_stages": 2,
            "microbatches": 4,
            "pipeline_schedule": "zbv_zero_bubble",
        },
        {},
    ),
    ("untied", {"pipeline": 2}, {"shape": {"tie_word_embeddings": False}}),
    ("untied_fsdp", {"fsdp": True, "tensor_parallel": 2}, {"shape": {"tie_word_embeddings": False}}),
    ("muon", {"pipeline": 2}, {"optimizer": "muon", "shape": {"tie_word_embeddings": False}}),
    ("full", {"pipeline": 2}, {"mode": "full", "num_blocks": None}),
    ("standard", {"pipeline": 2}, {"mode": "standard", "num_blocks": None}),
    ("llama", {"fsdp": True, "tensor_parallel": 2}, {"shape": {"model_type": "llama"}}),
    ("llama_stages", {"pipeline": 2, "tensor_parallel": 2}, {"shape": {"model_type": "llama"}}),
    ("checkpointed", {"pipeline": 2}, {"gradient_checkpointing": True}),
    ("checkpointed_fsdp", {"fsdp": True}, {"gradient_checkpointing": True}),
    ("accumulated", {"pipeline": 2}, {"gradient_accumulation": 2}),
    ("accumulated_fsdp", {"fsdp": True}, {"gradient_accumulation": 2}),
    ("chunked", {"fsdp": True}, {"chunked_loss": True}),
    ("reads_fsdp", {"fsdp": True, "tensor_parallel": 2}, {"train_only": "reads"}),
    ("reads_stages", {"pipeline": 2}, {"train_only": "reads"}),
    ("unclipped", {"pipeline": 2}, {"max_grad_norm": 0.0}),
    ("strongly_clipped", {"fsdp": True, "tensor_parallel": 2}, {"max_grad_norm": 0.01}),
    ("bfloat16_fsdp", {"fsdp": True, "tensor_parallel": 2}, {"bf16": True}),
    ("bfloat16_stages", {"pipeline": 2}, {"bf16": True}),
    ("bfloat16_both", {"pipeline": 2, "fsdp": True}, {"bf16": True}),
    ("accumulated_both", {"pipeline": 2, "fsdp": True}, {"gradient_accumulation": 2}),
    ("reads_both", {"pipeline": 2, "fsdp": True}, {"train_only": "reads"}),
    ("strongly_clipped_both", {"pipeline": 2, "fsdp": True}, {"max_grad_norm": 0.01}),
    ("variant", {"pipeline": 2, "tensor_parallel": 2}, {"variant": {"activation": "sigmoid"}}),
]


def assert_same_losses(found: Path, expected: Path) -> None:
    """Equal losses as far as bfloat16 allows."""
    for line, expected_line in zip(losses(found), losses(expected), strict=True):
        for name in {"loss", "eval_loss"} & set(expected_line):
            assert line[name] == pytest.approx(expected_line[name], rel=BFLOAT16), expected_line["step"]


@pytest.mark.slow
def test_every_other_layout(tmp_path: Path) -> None:
    run_ranks(train_cases, 4, tmp_path, tmp_path, MORE_LAYOUTS)
    failed = []
    for name, _, changes in MORE_LAYOUTS:
        alone = train_alone(tmp_path, f"{name}_alone", float64=not changes.get("bf16"), **changes)
        try:
            if changes.get("bf16"):
                assert_same_losses(tmp_path / name, alone)
            else:
                # torch's Muon orthogonalises in bfloat16
                assert_same_run(tmp_path / name, alone, 1e-4 if "optimizer" in changes else TOLERANCE)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.slow
def test_resumed_from_sharded_stages(folder: Path, tmp_path: Path) -> None:
    layouts = {"cut": {"fsdp": True, "tensor_parallel": 2}, "again": {"fsdp": True, "pipeline": 2}}
    for name in layouts:
        copy_until(folder / "sharded_stages", tmp_path / name, 4)
    run_ranks(train_cases, 4, tmp_path, tmp_path, [(name, layout, {}) for name, layout in layouts.items()])
    for name in layouts:
        assert_same_run(tmp_path / name, folder / "alone")


def test_resumed_by_one_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float64(monkeypatch)
    monkeypatch.setattr(run, "_report", lambda *args: None)
    for name in ("pipeline", "sharded", "sharded_stages"):
        copy_until(folder / name, tmp_path / name, 4)
        assert run.resume(str(tmp_path / name), console=quiet()).step == 6
        assert_same_run(tmp_path / name, folder / "alone")
    assert not torch.distributed.is_initialized()


def test_what_a_run_of_the_trainer_cannot_be_resumed_under(folder: Path) -> None:
    with pytest.raises(run.UserError, match=r"can't be read under --data-parallel 2 --fsdp; leave these out"):
        run.resume(str(folder / "alone"), layout=Layout(processes=2, fsdp=True))
