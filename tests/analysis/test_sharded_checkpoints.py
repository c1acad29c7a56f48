"""Runs whose checkpoints are in shards, looked into by one process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.analysis.over_training import MEASURES, depth_over_training
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.summary import summarise
from attention_residuals.cli.main import main
from attention_residuals.errors import UserError
from attention_residuals.training.shard_checkpoints import is_sharded, save_whole_model
from tiny_shapes import LLAMA_TO_TRAIN

TEXT = "Blocks close, sums are kept."
PROGRAM = "from attention_residuals.cli.main import main; main()"
LAYOUTS = {"fully sharded": ("--fsdp",), "pipeline": ("--pipeline", "2")}


def train(folder: Path, layout: tuple[str, ...]) -> Path:
    """Four steps on two processes, as torchrun starts them; checkpoints after steps 2 and 4."""
    text, shape = folder / "text.txt", folder / "shape.json"
    text.write_text("\n".join(f"{i}. {TEXT}" for i in range(60)), encoding="utf-8")
    shape.write_text(json.dumps(LLAMA_TO_TRAIN), encoding="utf-8")
    command = [
        *(sys.executable, "-c", PROGRAM, "train", *layout, "--output-dir", folder / "run"),
        *("--model-config", shape, "--mode", "block", "--num-blocks", "2", "--data", text),
        *("--vocab-size", "300", "--cache-dir", folder / "cache", "--context", "16", "--batch-size", "2"),
        *("--max-steps", "4", "--save-every", "2", "--warmup", "0", "--learning-rate", "0.02"),
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(i), "LOCAL_RANK": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)
    return folder / "run"


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("sharded"), request.param)


def test_a_checkpoint_is_the_model_that_was_trained(run: Path) -> None:
    checkpoint = run / "checkpoints" / "checkpoint-4"
    assert is_sharded(checkpoint)
    found, expected = (load_model(path, device="cpu").model.state_dict() for path in (checkpoint, run))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert not torch.distributed.is_initialized()


def test_each_step_is_that_of_its_checkpoint(run: Path, tmp_path: Path) -> None:
    history = depth_over_training(run, TEXT, device="cpu")
    assert history.steps.tolist() == [2, 4]
    for i, step in enumerate(history.steps):
        whole = tmp_path / str(step)
        shutil.copytree(run, whole, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
        checkpoint = run / "checkpoints" / f"checkpoint-{step}"
        save_whole_model(checkpoint, AutoConfig.from_pretrained(run), whole)
        loaded = load_model(whole, device="cpu")
        summary = summarise(record_forward(loaded.model, encode(loaded, TEXT)))
        for name in MEASURES:
            expected = getattr(summary, name)
            np.testing.assert_array_equal(history.measures[name][i, : len(expected)], expected)
    changed = history.measures["entropy"][0, 1:] != history.measures["entropy"][1, 1:]
    assert changed.all()


def test_the_command_looks_into_a_run_that_was_killed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def attnres(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        return int(stopped.value.code or 0), *capsys.readouterr()

    killed = tmp_path / "killed"
    shutil.copytree(run, killed, ignore=shutil.ignore_patterns("*.safetensors", "report"))
    status, _, err = attnres("inspect", killed, "--prompt", TEXT)
    newest = killed / "checkpoints" / "checkpoint-4"
    assert status == 2 and f"the newest checkpoint in it is {newest}" in err
    status, out, err = attnres("inspect", newest, "--prompt", TEXT, "--output-dir", tmp_path / "report")
    assert (status, err) == (0, "") and "layer 1 mlp" in out and (tmp_path / "report/report.html").is_file()


def test_a_checkpoint_outside_its_run_is_refused(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "alone"
    shutil.copytree(run / "checkpoints" / "checkpoint-4", alone)
    with pytest.raises(UserError, match=f"which holds config.json, but {tmp_path} holds none; move"):
        load_model(alone, device="cpu")


def test_damage_and_other_models_are_told(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    checkpoint = copy / "checkpoints" / "checkpoint-2"
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"checkpoint-2 could not be loaded: .*layers\.2.*earlier checkpoint"):
        load_model(checkpoint, device="cpu")
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"checkpoint-2 holds 13 unknown tensors, such as model\.layers\.1"):
        load_model(checkpoint, device="cpu")
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(UserError, match="must be of a language model, got model_type 'vit'"):
        load_model(checkpoint, device="cpu")
    (copy / "config.json").write_text(json.dumps(config))
    for shard in checkpoint.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=r"checkpoint-2 could not be loaded: .*; copy it again"):
        load_model(checkpoint, device="cpu")
