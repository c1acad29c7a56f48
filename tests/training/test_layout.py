from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import quiet, tiny_settings

import attention_residuals as ar
from attention_residuals.errors import UserError
from attention_residuals.models.auto import config_class
from attention_residuals.training.layout import Layout, fit_rows
from attention_residuals.training.parallel_trainer import check_layout
from attention_residuals.training.prepare import prepare
from attention_residuals.training.settings import TrainSettings
from attention_residuals.training.sharding import projection_styles
from tiny_shapes import DECODER, DELTA_NET


def test_the_ranks_that_are_left_are_data_parallel() -> None:
    layout = Layout(processes=16, pipeline=2, tensor_parallel=2)
    assert layout.data_ranks == 4 and not layout.plain
    assert layout.describe() == "--pipeline 2, --data-parallel 4, --tensor-parallel 2"
    assert Layout(processes=4).plain and Layout(processes=4).data_ranks == 4
    assert Layout(processes=1).plain and not Layout(processes=4, fsdp=True).plain


def test_schedules_and_microbatches_by_default() -> None:
    assert Layout(processes=4, pipeline=2).schedule_name == "1f1b"
    assert Layout(processes=4, pipeline=2, virtual_stages=2).schedule_name == "interleaved_1f1b"
    assert Layout(processes=4, pipeline=2, pipeline_schedule="gpipe").schedule_name == "gpipe"
    assert Layout(processes=4, pipeline=4).microbatch_count == 4
    assert Layout(processes=4, pipeline=4, microbatches=8).microbatch_count == 8


def test_the_number_of_processes_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert Layout.of_torchrun(pipeline=3).data_ranks == 2
    monkeypatch.delenv("WORLD_SIZE")
    assert Layout.of_torchrun().processes == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"processes": 4, "pipeline": 3},
            "need a multiple of 3 processes, but 4 were started",
        ),
        ({"processes": 4, "data_parallel": 2}, "--data-parallel 2 need 2 processes, but 4 were started"),
        (
            {"processes": 8, "data_parallel": 2, "pipeline": 2, "tensor_parallel": 4},
            "need 16 processes",
        ),
        (
            {"processes": 1, "fsdp": True},
            "--fsdp shares weights among .*start more processes",
        ),
        ({"processes": 2, "fsdp": True, "tensor_parallel": 2}, "--tensor-parallel 2 leave one"),
        ({"processes": 2, "fsdp": True, "pipeline": 2}, "--pipeline 2, --data-parallel 1 --fsdp leave one"),
        ({"processes": 4, "microbatches": 2}, "--microbatches belongs to --pipeline"),
        ({"processes": 4, "pipeline_schedule": "gpipe"}, "--pipeline-schedule belongs to --pipeline"),
        ({"processes": 4, "tensor_parallel": 0}, "--tensor-parallel must be at least 1, got 0"),
        ({"processes": 4, "timeout": 0}, "--timeout must be at least 1, got 0"),
    ],
)
def test_layouts_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout(**options)


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        ({"fsdp": True}, {"optimizer": "muon"}, "--optimizer muon needs whole matrices"),
        ({"pipeline": 2}, {"chunked_loss": True}, "--chunked-loss replaces the whole model's forward"),
    ],
)
def test_settings_that_need_whole_weights(
    layout: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Layout(processes=2, **layout).check_settings(TrainSettings(**settings))


def test_muon_goes_with_a_pipeline() -> None:
    Layout(processes=2, pipeline=2).check_settings(TrainSettings(optimizer="muon"))


def test_models_that_cannot_be_cut() -> None:
    config = ar.Qwen3_5AttnResConfig(**DECODER, **DELTA_NET, num_hidden_layers=4)
    with pytest.raises(UserError, match="must divide num_key_value_heads 1, got 2"):
        Layout(processes=2, tensor_parallel=2).check_model(config)
    with pytest.raises(UserError, match="needs a layer for each of its 8 stages, but the model has 4"):
        Layout(processes=4, pipeline=4, virtual_stages=2).check_model(config)
    config.attn_res = {"read_schedule": "two_phase"}
    with pytest.raises(UserError, match="two_phase needs the queries of several layers at once"):
        Layout(processes=2, fsdp=True).check_model(config)


def test_plans_that_cut_something_else_than_projections() -> None:
    with pytest.raises(UserError, match="transformers has no plan for gpt2"):
        projection_styles(config_class("gpt2")())
    with pytest.raises(UserError, match="the plan for qwen3_moe has moe_tp_experts, packed_colwise"):
        projection_styles(config_class("qwen3_moe")())
    assert "layers.*.self_attn.q_proj" in projection_styles(config_class("qwen3_5_text")())


def test_schedules_and_stages_that_do_not_go_together(tmp_path: Path) -> None:
    prepared = prepare(tiny_settings(tmp_path), quiet())
    layout = Layout(processes=2, pipeline=2, pipeline_schedule="backwards")
    with pytest.raises(UserError, match="--pipeline 2: schedule must be one of gpipe"):
        check_layout(layout, prepared)
    v = {"processes": 2, "pipeline": 2, "pipeline_schedule": "dual_pipe_v"}
    with pytest.raises(UserError, match="dual_pipe_v runs two stages per rank, got 1; take 2 virtual stages"):
        check_layout(Layout(**v), prepared)
    with pytest.raises(UserError, match="1f1b needs at least as many microbatches as stages, got 1 and 2"):
        check_layout(Layout(processes=2, pipeline=2, microbatches=1), prepared)


def test_a_batch_has_a_row_for_each_microbatch() -> None:
    Layout(processes=2, pipeline=2).check_batch(3)
    with pytest.raises(UserError, match="--microbatches 4 need as many rows, but a batch has 3"):
        Layout(processes=2, pipeline=2, microbatches=4).check_batch(3)


def test_a_step_keeps_its_rows_on_other_ranks() -> None:
    assert fit_rows(8, 4, 2) == (4, 1)
    assert fit_rows(8, 4, 1) == (4, 2)
    assert fit_rows(8, 4, 8) == (1, 1)
    assert fit_rows(12, 4, 2) == (3, 2), "the largest batch that divides what a rank has"
    with pytest.raises(UserError, match="steps have 8 rows, which 3 data-parallel ranks can't share equally"):
        fit_rows(8, 4, 3)
