"""A real comparison of two arms and two seeds, and what happens when runs are killed or stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_comparison import losses, quiet, tiny_settings

from attention_residuals.comparison.report import write_report
from attention_residuals.comparison.results import read_record
from attention_residuals.comparison.run import run_plan
from attention_residuals.comparison.settings import PlannedRun
from attention_residuals.errors import UserError
from attention_residuals.training.model import make_config, make_model
from attention_residuals.training.run_folder import RunFolder


def run_all(plan, jobs=2):
    return run_plan(plan, jobs=jobs, threads=1, console=quiet())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def finished(place):
    settings = tiny_settings(place, seeds=[0, 1])
    plan = settings.plan()
    outcome = run_all(plan)
    assert outcome.failures == {} and outcome.signal is None
    return plan


@pytest.fixture(scope="module")
def report(finished, place):
    return write_report(finished, place / "out")


def stored(run: PlannedRun) -> dict:
    return RunFolder(run.settings.output_dir).read_run()


def test_every_arm_of_a_seed_sees_the_same_tokens_in_the_same_order(finished, report):
    lines = report.tables[0].read_text(encoding="utf-8").splitlines()
    rows = {row["name"]: row for row in map(json.loads, lines)}
    for seed in (0, 1):
        first, second = (rows[f"shape-{arm}-seed-{seed}"] for arm in ("baseline", "block-2"))
        assert first["data"] == second["data"] == stored(finished[0])["data"]["fingerprint"]
        assert first["order"] == second["order"] and first["tokens"] == second["tokens"] == 4 * 2 * 16
        assert first["loss"] != second["loss"]
    assert rows["shape-baseline-seed-0"]["order"] != rows["shape-baseline-seed-1"]["order"]


def test_every_arm_of_a_seed_starts_from_the_same_weights(finished):
    """The reads add tensors that take no random numbers, so all others are drawn as in the baseline."""

    class Tokenizer:
        eos_token_id = pad_token_id = 0

        def __len__(self) -> int:
            return 300

    baseline, block = (
        make_model(make_config(run.settings, Tokenizer()), run.settings) for run in finished[:2]
    )
    weights = block.state_dict()
    assert len(weights) > len(baseline.state_dict())
    for name, weight in baseline.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_differences_in_the_report_are_those_of_the_runs(finished, report):
    by_name = {run.name: stored(run)["eval_loss"] for run in finished}
    baseline, block = report.results
    expected = {
        seed: by_name[f"shape-block-2-seed-{seed}"] - by_name[f"shape-baseline-seed-{seed}"]
        for seed in (0, 1)
    }
    assert baseline.arm == "baseline" and block.difference.by_seed == expected


def test_the_page_is_self_contained_and_has_every_part(finished, report):
    page = report.page.read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page and "src=" in page
    assert page.count('src="data:image/png;base64,') == len(report.pictures) == 3
    for word in (
        "Losses",
        "Over depth",
        "Depth map of block:2",
        "minus first arm",
        *(r.name for r in finished),
    ):
        assert word in page
    difference = report.results[1].difference
    for value in (difference.value, *difference.by_seed.values()):
        assert f"<td>{value:+.4f}</td>" in page
    assert not [path for path in report.page.parent.iterdir() if path.name.startswith(".")]


def test_runs_that_are_not_finished_have_no_figures(finished, tmp_path):
    (run,) = tiny_settings(tmp_path, arms=["block:2"]).plan()
    assert (read_record(run).status, read_record(run).loss) == ("missing", None)
    shutil.copytree(finished[1].settings.output_dir, run.settings.output_dir)
    assert read_record(run).loss == stored(run)["eval_loss"]
    failed = read_record(run, "killed by SIGKILL")
    assert (failed.status, failed.reason, failed.loss) == ("failed", "killed by SIGKILL", None)
    RunFolder(run.settings.output_dir).update_run(status="interrupted")
    assert (read_record(run).status, read_record(run).loss) == ("interrupted", None)


def test_torchrun_is_refused(finished, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        run_all(finished)


def test_finished_runs_are_not_run_again(finished):
    times = [Path(run.settings.output_dir, "run.json").stat().st_mtime_ns for run in finished]
    start = time.perf_counter()
    assert run_all(finished).failures == {}
    assert time.perf_counter() - start < 2
    assert times == [Path(run.settings.output_dir, "run.json").stat().st_mtime_ns for run in finished]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"max_steps": 5}}, "was made with max_steps 4, now it is 5"),
        ({"train": {"warmup": 2}}, "was made with warmup 0.05, now it is 2.0"),
        ({"arms": [{"name": "block-2", "mode": "block", "num_blocks": 3}]}, "num_blocks 2, now it is 3"),
    ],
)
def test_changed_settings_are_refused(finished, place, changes, words):
    before = losses(Path(finished[1].settings.output_dir))
    with pytest.raises(UserError) as error:
        run_all(tiny_settings(place, seeds=[0, 1], **changes).plan())
    assert words in str(error.value) and "another --output-dir" in str(error.value)
    assert losses(Path(finished[1].settings.output_dir)) == before


def test_a_run_killed_before_its_model_was_published_is_finished(finished, tmp_path):
    """Its last checkpoint has no step left, so it is published with the validation loss it had."""
    run = tiny_settings(tmp_path, arms=["block:2"]).plan()[0]
    folder = RunFolder(run.settings.output_dir)
    shutil.copytree(finished[1].settings.output_dir, folder.path)
    folder.update_run(
        status="running",
        settings={
            **stored(finished[1])["settings"],
            "data": run.settings.data,
            "model_config": run.settings.model_config,
        },
    )
    (folder.path / "model.safetensors").unlink()
    assert run_all([run]).failures == {}
    assert losses(folder.path) == losses(Path(finished[1].settings.output_dir))
    assert (folder.path / "model.safetensors").is_file() and stored(run)["status"] == "finished"
    assert stored(run)["eval_loss"] == stored(finished[1])["eval_loss"] is not None


def when_at_step(run: PlannedRun, step: int, act: Callable[[], None]) -> threading.Thread:
    """Watch the run from another thread, and act once it has done that step."""

    def watch() -> None:
        metrics = RunFolder(run.settings.output_dir)
        while not any(line["step"] >= step for line in metrics.read_metrics()):
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def kill_child() -> None:
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


def test_a_killed_and_then_stopped_run_ends_like_one_that_never_was(tmp_path, monkeypatch):
    monkeypatch.setattr("attention_residuals.comparison.run.REFRESH", 0.02)
    train = {"max_steps": 100, "save_every": 10, "eval_every": 50}
    whole, broken = (
        tiny_settings(tmp_path, arms=["baseline"], train=train, output_dir=str(tmp_path / name)).plan()[0]
        for name in ("whole", "broken")
    )
    watcher = when_at_step(broken, 12, kill_child)
    outcome = run_all([broken])
    watcher.join()
    assert outcome.failures == {broken.name: "killed by SIGKILL"} and stored(broken)["status"] == "running"
    assert 12 <= losses(Path(broken.settings.output_dir))[-1][0] < 100

    watcher = when_at_step(broken, 25, lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = run_all([broken])
    watcher.join()
    assert outcome.signal == signal.SIGINT and stored(broken)["status"] == "interrupted"
    assert not multiprocessing.active_children()

    for run in (whole, broken):
        assert run_all([run]).failures == {}
    assert losses(Path(broken.settings.output_dir)) == losses(Path(whole.settings.output_dir))


def test_a_run_that_diverges_is_told_and_does_not_stop_the_others(tmp_path):
    settings = tiny_settings(
        tmp_path, arms=["baseline"], learning_rates=[1e-3, 1e30], train={"max_grad_norm": 0.0, "warmup": 0}
    )
    plan = settings.plan()
    outcome = run_all(plan)
    assert list(outcome.failures) == ["shape-baseline-lr-1e+30-seed-0"]
    assert "training has diverged" in outcome.failures["shape-baseline-lr-1e+30-seed-0"]
    report = write_report(plan, tmp_path / "out", failures=outcome.failures)
    (result,) = report.results
    assert result.best.learning_rate == 1e-3 and result.rates[1].missing == (0,)
    page = report.page.read_text(encoding="utf-8")
    assert "training has diverged" in page and "0.001 (best)" in page
    assert (tmp_path / "out" / "sweep-shape.png").is_file()


def test_a_run_that_cannot_start_ends_the_comparison(tmp_path):
    settings = tiny_settings(tmp_path, train={"context": 100_000})
    with pytest.raises(UserError, match="could not start: --context 100000 is longer than the data allows"):
        run_all(settings.plan())
    assert not multiprocessing.active_children()
