from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attention_residuals.errors import UserError
from attention_residuals.training.settings import TrainSettings


def test_round_trip_through_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    settings = TrainSettings(data=(str(tmp_path / "a.txt"), "owner/name"), mode="full", bf16=True)
    assert TrainSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_files_are_kept_as_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert TrainSettings(data=("a.txt", "owner/name", "missing.txt")).data == (
        str(tmp_path / "a.txt"),
        "owner/name",
        "missing.txt",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "--preset must be one of tiny, .*, got 'huge'"),
        ({"preset": "tiny", "from_checkpoint": "x"}, "give one of .* got --preset and --from"),
        ({"model_config": "missing.json"}, "--model-config missing.json does not exist"),
        ({"from_checkpoint": "missing"}, "--from must be a folder with a saved model"),
        ({"mode": "blocks"}, "mode must be one of standard, full, block, got 'blocks'"),
        ({"num_blocks": 2, "sublayers_per_block": 2}, "not both"),
        ({"mode": "full", "num_blocks": 2}, "num_blocks belongs to mode='block'"),
        ({"optimizer": "sgd"}, "--optimizer must be one of adamw, muon"),
        ({"schedule": "step"}, "--schedule must be one of wsd"),
        ({"max_steps": 3, "epochs": 1.0}, "--max-steps or --epochs, not both"),
        (
            {"tokenizer": "qwen3.5", "vocab_size": 300},
            "--vocab-size belongs to a tokenizer trained on the data",
        ),
        ({"max_steps": 0}, "--max-steps must be at least 1, got 0"),
        ({"context": 4}, "--context must be at least 8, got 4"),
        ({"learning_rate": 0.0}, "--learning-rate must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be a finite number above 0"),
        ({"weight_decay": -1.0}, "--weight-decay must be a finite number from 0"),
        ({"warmup": 1.5}, "--warmup must be a whole number of steps or a share below 1"),
        ({"decay": 2.0}, "--decay must be a share"),
        ({"validation_fraction": 0.9}, "--validation-fraction must be from 0 to 0.5"),
        ({"report_to": ("paper",)}, "--report-to must be one of tensorboard, trackio, wandb, got 'paper'"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainSettings(**changes)


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package wandb, which is not installed; pip install wandb"):
        TrainSettings(report_to=("wandb",))


def test_a_resumed_run_keeps_its_settings() -> None:
    settings = TrainSettings(max_steps=10, batch_size=2)
    assert settings.updated_for_resume({}) == settings
    assert settings.updated_for_resume({"batch_size": 2, "output_dir": "elsewhere"}) == settings
    assert settings.updated_for_resume({"max_steps": 20}).max_steps == 20
    with pytest.raises(UserError, match="keeps its settings: batch_size is 2, got 3"):
        settings.updated_for_resume({"batch_size": 3})


def test_settings_of_another_version() -> None:
    with pytest.raises(UserError, match=r"does not know: \['colour'\]"):
        TrainSettings.from_dict({"colour": "red"})
