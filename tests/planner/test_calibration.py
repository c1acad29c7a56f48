"""A real calibration of a tiny model: every part has a time, and the clock is the one that was given."""

from __future__ import annotations

import itertools

import family_models
import pytest
import torch

from attention_residuals.config import AttnResConfig
from attention_residuals.models.families import FAMILIES
from attention_residuals.planner import calibration, read_timing
from attention_residuals.planner.calibration import PHASES
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import describe, representatives, thin_model
from attention_residuals.planner.prediction import Planner


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(calibration, "PHASE_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "LEAST_RUNS", 2)
    monkeypatch.setattr(calibration, "MEMORY_ELEMENTS", 1 << 10)
    monkeypatch.setattr(read_timing, "RUNS", 2)


@pytest.mark.parametrize("family", ["qwen3_5_text", "gpt2"])
def test_every_part_is_timed(family):
    model = describe("tiny", family_models.plain_model(family, 4), FAMILIES[family])
    planner = Planner(model, Layout(batch=2, context=16))
    planner.calibrate(AttnResConfig(num_blocks=2))
    found = planner.calibration
    assert (found.batch, found.context, found.decode_batch) == (2, 16, 2)
    for phase in PHASES:
        part = found.phases[phase]
        assert len(part.layers) == len(set(model.kinds)) and min(part.layers) > 0
        assert part.ends > 0
    assert found.copy_bandwidth > 0 and found.flops_per_second > 0
    times = planner.predict(AttnResConfig(num_blocks=2)).times
    assert all(estimate.plain > 0 for estimate in times.values())


def test_the_clock_is_the_one_given():
    """A clock that counts its calls makes times that are the same in every run."""
    model = describe("tiny", family_models.plain_model("qwen3_5_text", 4), FAMILIES["qwen3_5_text"])
    found = []
    for _ in range(2):
        ticks = itertools.count()
        planner = Planner(model, Layout(batch=1, context=8))
        planner.calibrate(clock=lambda ticks=ticks: float(next(ticks)))
        found.append(planner.calibration)
    assert found[0] == found[1]
    assert found[0].phases["forward"].layers == (1.0, 1.0)


def test_variants_are_timed_as_themselves():
    model = describe("tiny", family_models.plain_model("llama", 4), FAMILIES["llama"])
    planner = Planner(model, Layout(batch=1, context=8))
    variant = AttnResConfig(num_blocks=2, weights="input_query", key_norm="none")
    planner.calibrate(variant)
    assert planner.predict(variant).times is not None


def test_a_thin_model_has_one_layer_of_each_kind():
    plain = family_models.plain_model("qwen3_5_text", 4)
    model = describe("tiny", plain, FAMILIES["qwen3_5_text"])
    assert model.kinds == (0, 1, 0, 1)
    thin = thin_model(model, torch.float32, "cpu")
    kept = [sum(p.numel() for p in layer.parameters()) for layer in thin.model.layers]
    assert kept == [*model.layer_parameters[:2], 0, 0]
    assert representatives(model, thin) == list(thin.model.layers[:2])
    assert thin.config.num_hidden_layers == plain.config.num_hidden_layers == 4
