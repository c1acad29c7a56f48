"""Real ranks, killed or stopped, without torchrun's agent: others end with a sentence, the run resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, attnres, run_ranks, start_ranks, wait_for
from test_parallel_runs import assert_same_run, settings_of, train_alone
from tiny_run import arguments

from attention_residuals.errors import UserError
from attention_residuals.training import parallel_trainer, run
from attention_residuals.training.checkpoints import complete_checkpoints
from attention_residuals.training.process_group import lost_process, process_group

LOST = 2  # the command's status for what the user can mend


def train_and_die(words: list[str], where: str) -> None:
    """`attnres WORDS` in every rank; rank 1 kills itself before its fifth step or while it saves after it."""
    run._report = lambda *args: None  # type: ignore[assignment]
    step, save = parallel_trainer.ParallelTrainer._step, parallel_trainer.save_shards

    def kill(reached: int) -> None:
        if reached == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def killing_step(self: Any, rows: Any) -> None:
        kill(self.state.global_step)
        step(self, rows)

    def killing_save(checkpoint: Path, *args: Any) -> None:
        kill(int(checkpoint.name.removeprefix("checkpoint-")))
        save(checkpoint, *args)

    if where == "step":
        parallel_trainer.ParallelTrainer._step = killing_step  # type: ignore[method-assign]
    elif where == "save":
        parallel_trainer.save_shards = killing_save
    attnres(*words)


def options(tmp_path: Path) -> list[str]:
    return ["train", *arguments(settings_of(tmp_path, "run", 2)), "--fsdp", "--timeout", "300"]


@pytest.mark.parametrize(
    ("where", "complete"),
    [
        ("step", ["checkpoint-2", "checkpoint-4"]),
        pytest.param("save", ["checkpoint-2"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    tmp_path: Path, where: str, complete: list[str]
) -> None:
    ranks = start_ranks(train_and_die, 2, tmp_path, options(tmp_path), where)
    assert wait_for(ranks, PATIENCE) == [LOST, -signal.SIGKILL]
    printed = (tmp_path / "rank-0.txt").read_text()
    assert "attnres: process 0 has lost another one (" in printed
    assert "so give the same command with --resume" in printed and "Traceback" not in printed
    kept = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [checkpoint.name for checkpoint in kept] == complete
    run_ranks(train_and_die, 2, tmp_path, [*options(tmp_path), "--resume"], "nowhere")
    alone = train_alone(tmp_path, "alone", float64=False)
    assert_same_run(tmp_path / "run", alone, 5e-5)  # measured: 1e-5, in float32
    assert "continuing" in (tmp_path / "rank-0.txt").read_text()
    assert "step" not in (tmp_path / "rank-1.txt").read_text(), "one rank speaks for all"


def train_and_signal(words: list[str]) -> None:
    """`attnres WORDS` in every rank; rank 1 alone receives SIGTERM in its third step."""
    step = parallel_trainer.ParallelTrainer._step

    def signalled_step(self: Any, rows: Any) -> None:
        if self.state.global_step == 2 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        step(self, rows)

    parallel_trainer.ParallelTrainer._step = signalled_step  # type: ignore[method-assign]
    attnres(*words)


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    ranks = start_ranks(train_and_signal, 2, tmp_path, options(tmp_path))
    assert wait_for(ranks, PATIENCE) == [128 + signal.SIGTERM] * 2, (tmp_path / "rank-0.txt").read_text()
    kept = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [checkpoint.name for checkpoint in kept] == ["checkpoint-2", "checkpoint-3"]
    assert "SIGTERM after step 3: checkpoint saved" in (tmp_path / "rank-0.txt").read_text()


def stop_in_an_exchange() -> None:
    """Rank 1 falls silent; rank 0 writes down what it makes of it."""
    with pytest.raises(UserError) as told, process_group(timeout=20):
        dist.barrier()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
    print(told.value)


def test_a_silent_rank_is_a_time_out(tmp_path: Path) -> None:
    ranks = start_ranks(stop_in_an_exchange, 2, tmp_path)
    assert wait_for(ranks[:1], PATIENCE) == [0]
    assert ranks[1].is_alive(), "it is stopped, not gone"
    ranks[1].kill()
    ranks[1].join()
    printed = (tmp_path / "rank-0.txt").read_text()
    assert "process 0 has lost another one (Timed out waiting 20000ms" in printed


def join_alone() -> None:
    with pytest.raises(UserError) as told, process_group(timeout=5):
        pass
    print(told.value)


def test_a_rank_that_never_comes_is_a_time_out(tmp_path: Path) -> None:
    ranks = start_ranks(join_alone, 1, tmp_path, processes=2)
    assert wait_for(ranks, PATIENCE) == [0]
    assert "process 0 has lost another one" in (tmp_path / "rank-0.txt").read_text()


def test_other_errors_stay_what_they_are() -> None:
    assert lost_process(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    gloo = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. More. Words"
    assert lost_process(RuntimeError(gloo)) == "Read error [127.0.0.1]:1: Connection reset by peer"
