"""Real processes, really killed: what is left must resume as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_run import arguments, losses, quiet, start, tiny_settings

from attention_residuals.training.run import resume, train

KILL = "__import__('os').kill(__import__('os').getpid(), 9)"
IN_A_STEP = f"""
from attention_residuals.read import DepthRead
calls, forward = [], DepthRead.forward
def counted(self, *args, **options):
    calls.append(1)
    if len(calls) > {{calls}}:
        {KILL}
    return forward(self, *args, **options)
DepthRead.forward = counted
"""
IN_A_SAVE = f"""
import os, torch
save = torch.save
def cut_short(content, file, *args, **options):
    save(content, file, *args, **options)
    if str(file).endswith("checkpoint-4/{{file}}"):
        size = os.path.getsize(file)
        os.truncate(file, size // 2)
        {KILL}
torch.save = cut_short
"""
IN_A_MARK = f"""
from attention_residuals.training import trainer
mark = trainer.mark_complete
def killed(folder):
    if folder.name == "checkpoint-4":
        {KILL}
    mark(folder)
trainer.mark_complete = killed
"""
IN_A_ROTATION = f"""
from attention_residuals.training import trainer
keep = trainer.keep_latest
def killed(folder, number):
    import shutil
    def rmtree(path, *args, **options):
        (path / "optimizer.pt").unlink()
        {KILL}
    if (folder / "checkpoint-6").exists():
        shutil.rmtree = rmtree
    keep(folder, number)
trainer.keep_latest = killed
"""


def kill_and_resume(tmp_path: Path, code: str) -> None:
    settings = tiny_settings(tmp_path, "killed", max_steps=8)
    process = start("train", *arguments(settings), code=code)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    reached = losses(tmp_path / "killed")[-1]["step"]
    assert 1 <= reached < 8
    resume(str(tmp_path / "killed"), console=quiet())
    train(tiny_settings(tmp_path, "whole", max_steps=8), console=quiet())
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    killed, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert killed == whole


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, IN_A_SAVE.format(file="optimizer.pt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        IN_A_STEP.format(calls=8),
        IN_A_STEP.format(calls=28),
        IN_A_SAVE.format(file="rng_state.pth"),
        IN_A_MARK,
        IN_A_ROTATION,
    ],
    ids=["first steps", "later step", "random state", "before the mark", "rotation"],
)
def test_killed_elsewhere(tmp_path: Path, code: str) -> None:
    kill_and_resume(tmp_path, code)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(tmp_path: Path, number: signal.Signals, status: int) -> None:
    settings = tiny_settings(tmp_path, max_steps=100_000, save_every=100_000, eval_every=100_000)
    process = start("train", *arguments(settings))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "checkpoint saved; continue with attnres train --resume" in out
    assert "Traceback" not in errors
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
