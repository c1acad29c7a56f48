"""The arithmetic of times on round numbers; and, slow, predictions against whole models."""

from __future__ import annotations

import sys
from pathlib import Path

import family_models
import pytest
import torch

from attention_residuals.config import AttnResConfig
from attention_residuals.models.families import FAMILIES
from attention_residuals.planner.calibration import (
    FORWARD_FLOPS,
    PHASES,
    Calibration,
    PartSeconds,
    calibrated_rows,
)
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import describe
from attention_residuals.planner.prediction import Planner
from attention_residuals.planner.times import TimeModel, pipeline_seconds


def planner_of(layers=4, **layout):
    model = describe("tiny", family_models.plain_model("llama", layers), FAMILIES["llama"])
    return Planner(model, Layout(**{"batch": 2, "context": 16, **layout}))


def timed(planner, *, batch=2, context=16, vocabulary=67, read=0.25, source=0.5):
    """The planner as if a layer took 8 seconds of each phase, the ends 4, and reads a quarter plus N / 2."""
    part = PartSeconds(ends=4.0, layers=(8.0,), read=read, source=source)
    calibration = Calibration(
        device="cpu",
        threads=1,
        batch=batch,
        context=context,
        decode_batch=planner.layout.batch,
        vocabulary=vocabulary,
        phases=dict.fromkeys(PHASES, part),
        copy_bandwidth=1.0,
        flops_per_second=1.0,
    )
    counted = planner._count(batch, context)
    planner.calibration = calibration
    planner.times = TimeModel(planner.model, planner.layout, calibration, planner.run, counted)
    return planner


def test_one_pass_adds_its_parts():
    times = timed(planner_of()).predict(AttnResConfig(num_blocks=1)).times
    added = 8 * (0.25 + 2 * 0.5)  # all reads but the first have two sources
    for what in ("prefill", "decode"):
        assert (times[what].plain, times[what].reads) == (4 + 4 * 8, 4 + 4 * 8 + added)
        assert times[what].overhead == pytest.approx(added / 36)
    assert times["training step"].plain == 2 * 36  # forward and backward
    assert times["training step"].reads == 2 * (36 + added)


def test_standard_mode_adds_nothing():
    times = timed(planner_of()).predict(AttnResConfig(mode="standard")).times
    assert all(estimate.overhead == 0 for estimate in times.values())


def test_shorter_rows_are_scaled():
    """Twice the rows and twice the vocabulary of what was timed; a decoding step is timed as it is."""
    planner = timed(planner_of(batch=4), batch=2, vocabulary=67 / 2)
    times = planner.predict(AttnResConfig(num_blocks=1)).times
    added = 8 * 1.25
    assert times["prefill"].plain == 2 * 2 * 4 + 2 * 32
    assert times["prefill"].reads - times["prefill"].plain == 2 * added
    assert times["decode"].plain == 2 * 4 + 32
    assert times["decode"].reads - times["decode"].plain == added


def test_checkpointed_layers_run_forward_twice():
    planner = timed(planner_of(gradient_checkpointing=True))
    times = planner.predict(AttnResConfig(mode="standard")).times
    assert times["training step"].plain == 2 * 4 + 3 * 32


def test_a_pipeline_waits_for_its_slowest_rank():
    """Two ranks of two layers, the head on the second: 2 x 16 and 2 x 20 seconds; M = 3 and one turn idle."""
    planner = timed(planner_of(pipeline_ranks=2, microbatches=3, bandwidth=1e-6), read=0.0, source=0.0)
    found = planner.predict(AttnResConfig(num_blocks=2))
    one = planner.layout.stream_bytes(16)
    assert [hop.tensors for hop in found.hops] == [2]  # the embedding and the first block; none is open
    plain = 40 + 2 * one / 1e3
    assert found.split == (2, 2)
    assert found.times["training step"].plain == pytest.approx((3 + 1) * plain)
    assert found.times["training step"].reads == pytest.approx((3 + 1) * (plain + 2 * one / 1e3))


def test_the_bubble():
    planner = planner_of(pipeline_ranks=2, virtual_stages=2)
    stages = planner.stage_plan(planner.depth_plan(AttnResConfig()))
    seconds = pipeline_seconds(1.0, stages, 6)
    idle = (2 - 1) / (2 * 6 + 2 - 1)  # (P - 1) / (V M + P - 1)
    assert seconds * (1 - idle) == pytest.approx(6)


def test_tensor_parallelism_divides():
    times = timed(planner_of(tensor_parallel=2)).predict(AttnResConfig(num_blocks=1)).times
    assert times["prefill"].plain == 18


def test_long_rows_are_cut():
    planner = planner_of(batch=1024, context=1024)
    run, layout = planner.run, planner.layout
    batch, context = calibrated_rows(run, layout)
    assert 1 <= batch <= 1024 and 64 <= context <= 1024
    whole = run.head.flops + sum(part.flops for part in run.layers)
    assert whole * batch * context / 1024**2 <= FORWARD_FLOPS < whole


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="2 ranks of 3 stages for the 4 layers"):
        planner_of(pipeline_ranks=2, virtual_stages=3)


def test_two_phases_are_not_planned():
    with pytest.raises(ValueError, match="read_schedule must be 'auto' or 'per_read'"):
        planner_of().predict(AttnResConfig(mode="full", read_schedule="two_phase"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_times_are_within_a_quarter(name):
    """Prefill, decode and training step, plain and with reads; `python -m benchmarks planner` has more."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.planner import compare

    torch.set_num_threads(1)
    for what, figures in compare(name, runs=5).items():
        if what != "batch":
            for arm, ratio in figures["predicted_over_measured"].items():
                assert ratio == pytest.approx(1, abs=0.25), (what, arm, figures)
