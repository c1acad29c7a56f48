from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import losses, quiet, text_of, tiny_settings, write_inputs
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import attention_residuals as ar
from attention_residuals.errors import UserError
from attention_residuals.training.progress import ProgressReport
from attention_residuals.training.run import RunResult, resume, train
from attention_residuals.training.settings import TrainSettings


def run(settings: TrainSettings, **options: Any) -> RunResult:
    return train(settings, console=quiet(), **options)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take seconds; only the test of the folder's content draws them."""
    if "with_report" not in request.keywords:
        monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs and a finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_residuals.training.run._report", lambda *args: None)
        run(tiny_settings(folder))
    return folder


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal at the start of the step after `step`."""
    original = ProgressReport.on_step_begin

    def on_step_begin(self: ProgressReport, args: Any, state: Any, control: Any, **more: Any) -> None:
        original(self, args, state, control, **more)
        if state.global_step == step:
            signal.raise_signal(number)

    monkeypatch.setattr(ProgressReport, "on_step_begin", on_step_begin)


def test_run_folder_loads_as_a_model(finished: Path) -> None:
    folder = finished / "run"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, ar.Qwen3_5AttnResForCausalLM)
    assert model.config.attn_res["num_blocks"] == 2
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The residual", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= ids.shape[1] + 3
    queries = [p for name, p in model.named_parameters() if name.endswith("read.query")]
    assert queries and any(query.abs().sum() > 0 for query in queries), "the queries have learned"


def test_run_folder_content(finished: Path) -> None:
    folder = finished / "run"
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished" and record["step"] == 6 and record["seed"] == 0
    assert record["versions"]["torch"] == torch.__version__
    assert TrainSettings.from_dict(record["settings"]) == tiny_settings(finished)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"checkpoint-4", "checkpoint-6"}
    lines = losses(folder)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert record["eval_loss"] == lines[-1]["eval_loss"]
    assert lines[0]["tokens"] == 2 * 16
    weights = load_file(folder / "model.safetensors")
    last = load_file(folder / "checkpoints" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(weights[name], last[name]) for name in weights)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_same_seed_same_losses_to_the_bit(finished: Path, tmp_path: Path) -> None:
    run(tiny_settings(tmp_path))
    assert losses(tmp_path / "run") == losses(finished / "run")
    run(tiny_settings(tmp_path, "other", seed=1))
    assert losses(tmp_path / "other") != losses(finished / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation": 2, "optimizer": "muon"},
        {"bf16": True, "gradient_checkpointing": True, "mode": "full", "num_blocks": None},
        {"validation_fraction": 0.0, "schedule": "cosine"},
    ],
    ids=["plain", "muon", "bf16", "cosine"],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    run(tiny_settings(tmp_path, "whole", **changes))
    console = quiet()
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        result = train(tiny_settings(tmp_path, "parts", **changes), console=console)
    assert (result.signal, result.step) == (signal.SIGINT, 4), "the step is finished first"
    assert "continue with attnres train --resume --output-dir" in text_of(console)
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["status"] == "interrupted"
    AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    result = resume(str(tmp_path / "parts"), console=quiet())
    assert (result.signal, result.step) == (None, 6)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (files_below(tmp_path / name)["model.safetensors"] for name in ("whole", "parts"))
    assert whole == parts


def test_sigterm_saves_too_and_handlers_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_at(patch, 0, signal.SIGTERM)
        result = run(tiny_settings(tmp_path))
    assert (result.signal, result.step) == (signal.SIGTERM, 1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_killed_before_the_first_checkpoint(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    (tmp_path / "run" / "checkpoints" / "checkpoint-6" / "complete.json").unlink()
    (tmp_path / "run" / ".incomplete-x").mkdir()
    result = resume(str(tmp_path / "run"), console=quiet())
    assert result.step == 6
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert not (tmp_path / "run" / ".incomplete-x").exists()


def test_killed_between_the_last_checkpoint_and_the_model(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished / "run", folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    started = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(started | {"status": "running"}))
    result = resume(str(folder), console=quiet())
    assert result.step == 6
    assert (folder / "model.safetensors").read_bytes() == weights
    assert losses(folder) == losses(finished / "run")
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_more_steps_for_a_finished_run(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    with pytest.raises(UserError, match="has finished its 6 steps; raise --max-steps to go on"):
        resume(str(tmp_path / "run"), console=quiet())
    result = resume(str(tmp_path / "run"), {"max_steps": 8}, console=quiet())
    assert result.step == 8
    lines = losses(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert lines[:8] == losses(finished / "run")


def test_a_damaged_checkpoint_is_told_and_nothing_changes(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    before = files_below(tmp_path)
    with pytest.raises(UserError, match=r"checkpoint-6 is damaged: optimizer.pt has 0 bytes"):
        resume(str(tmp_path / "run"), {"max_steps": 8}, console=quiet())
    assert files_below(tmp_path) == before
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-6")
    resume(str(tmp_path / "run"), console=quiet())
    assert losses(tmp_path / "run") == losses(finished / "run")


def test_changed_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        run(tiny_settings(tmp_path))
    with (tmp_path / "text.txt").open("a") as file:
        file.write("more")
    with pytest.raises(UserError, match="the data is not what the run started with"):
        resume(str(tmp_path / "run"), console=quiet())


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.save

    def full(content: object, file: str, *args: Any, **options: Any) -> None:
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(28, "No space left on device")
        real(content, file, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError, match=r"checkpoint-4 could not be .*No space.*checkpoint-2 is"):
            run(tiny_settings(tmp_path))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert resume(str(tmp_path / "run"), console=quiet()).step == 6


def test_divergence_is_told(tmp_path: Path) -> None:
    settings = tiny_settings(
        tmp_path, learning_rate=1e30, warmup=0.0, schedule="constant", max_steps=20, max_grad_norm=0.0
    )
    with pytest.raises(UserError, match="training has diverged; lower --learning-rate"):
        run(settings)


def test_nothing_is_written_on_a_mistake(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    for changes, message in (
        ({"data": ("missing.txt",)}, "does not exist"),
        ({"context": 10_000}, "longer than the data allows"),
        ({"tokenizer": "no/such", "vocab_size": None}, "could not be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            run(tiny_settings(tmp_path, "sub/run", **changes))
        assert not (tmp_path / "sub").exists()


def test_an_old_run_stays_when_the_new_one_cannot_start(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    before = files_below(tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        run(tiny_settings(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        run(tiny_settings(tmp_path, data=("missing.txt",)), overwrite=True)
    assert files_below(tmp_path / "run") == before
    run(tiny_settings(tmp_path, max_steps=1), overwrite=True)
    assert [line["step"] for line in losses(tmp_path / "run") if "loss" in line] == [1]


def test_from_a_checkpoint(tmp_path: Path, finished: Path) -> None:
    settings = TrainSettings(
        from_checkpoint=str(finished / "run"),
        data=(str(finished / "text.txt"),),
        context=16,
        batch_size=2,
        max_steps=2,
        output_dir=str(tmp_path / "more"),
    )
    result = run(settings)
    first = losses(result.folder)[0]["loss"]
    assert first < losses(finished / "run")[0]["loss"] - 0.05, "it starts where the other run ended"
    tokenizers = (AutoTokenizer.from_pretrained(path) for path in (finished / "run", result.folder))
    assert len({json.dumps(tokenizer.get_vocab(), sort_keys=True) for tokenizer in tokenizers}) == 1
    with pytest.raises(UserError, match="already has reads"):
        run(TrainSettings(**{**settings.to_dict(), "mode": "full", "data": settings.data}), overwrite=True)


def test_from_a_plain_checkpoint_starts_as_the_same_function(tmp_path: Path, finished: Path) -> None:
    config = json.loads((finished / "run" / "config.json").read_text())
    names = ("attn_res", "model_type", "architectures", "transformers_version")
    plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{k: v for k, v in config.items() if k not in names}))
    plain.save_pretrained(tmp_path / "plain")
    AutoTokenizer.from_pretrained(finished / "run").save_pretrained(tmp_path / "plain")
    common: dict[str, Any] = {
        "from_checkpoint": str(tmp_path / "plain"),
        "data": (str(finished / "text.txt"),),
        "context": 16,
        "batch_size": 2,
        "max_steps": 1,
    }
    run(TrainSettings(**common, output_dir=str(tmp_path / "standard")))
    run(TrainSettings(**common, output_dir=str(tmp_path / "block"), mode="block", num_blocks=2))
    standard, block = (losses(tmp_path / name)[0]["loss"] for name in ("standard", "block"))
    assert block == pytest.approx(standard, rel=1e-6)
    saved = json.loads((tmp_path / "block" / "config.json").read_text())["attn_res"]
    assert (saved["mode"], saved["read_scale"]) == ("block", "sum")


def test_damaged_weights_to_start_from(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "old")
    weights = tmp_path / "old" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    settings = TrainSettings(
        from_checkpoint=str(tmp_path / "old"),
        data=(str(finished / "text.txt"),),
        context=16,
        output_dir=str(tmp_path / "new"),
    )
    with pytest.raises(UserError, match="could not be loaded"):
        run(settings)
    assert not (tmp_path / "new").exists()


def test_decay_parameters_survive_bfloat16(tmp_path: Path, finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "run").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    names = [name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias"))]
    assert names
    before, after = model.state_dict(), loaded.state_dict()
    for name in (*names, *(name for name in before if ".read." in name)):
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name


def test_trackers_receive_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tiny_settings(tmp_path, report_to=("tensorboard",), max_steps=2))
    assert list((tmp_path / "run" / "tensorboard").rglob("events.out.tfevents*"))


def test_epochs_count_passes_over_the_data(tmp_path: Path) -> None:
    result = run(tiny_settings(tmp_path, max_steps=None, epochs=0.05))
    record = json.loads((result.folder / "run.json").read_text())
    rows = (record["data"]["tokens"] * 0.95) // 16
    assert result.step == pytest.approx(0.05 * rows / 2, abs=1)


@pytest.mark.with_report
def test_report_and_summary(tmp_path: Path) -> None:
    console = quiet()
    result = train(tiny_settings(tmp_path, max_steps=2, optimizer="muon"), console=console)
    assert result.report == tmp_path / "run" / "report" / "report.html"
    assert result.report.is_file() and list(result.report.parent.glob("*.png"))
    told = text_of(console)
    for part in (
        "depth plan  block: 2 blocks of 2 sublayers (4 in all), 5 reads, the widest of 3 sources",
        "1 document,",
        "memory      about",
        "Muon",
        "step 2/2  loss",
        "tokens/s",
        "validation loss",
    ):
        assert part in told, told


@pytest.mark.with_report
def test_without_matplotlib_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else real(name, *more)
    )
    console = quiet()
    result = train(tiny_settings(tmp_path, max_steps=1), console=console)
    assert result.report is None and result.step == 1
    assert "no report, because matplotlib is not installed" in text_of(console)


def test_a_time_limit_ends_training_like_a_finished_run(tmp_path: Path) -> None:
    result = run(tiny_settings(tmp_path, max_steps=500), time_limit=0.0)
    assert result.step == 1 and result.signal is None and result.eval_loss is not None
    assert (tmp_path / "run" / "model.safetensors").is_file()
