"""One text through every checkpoint of a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_reads import choosing_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attention_residuals as ar
from attention_residuals.analysis.over_training import MEASURES, depth_over_training
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.summary import summarise
from attention_residuals.errors import UserError
from attention_residuals.training.checkpoints import mark_complete

TEXT = "a b c d e"


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{w: i for i, w in enumerate(TEXT.split(), 1)}}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_step(folder: Path, strength: float, **attn_res: object) -> ar.DepthRecord:
    """A model whose queries are `strength` times those of another, and its record of TEXT."""
    model = choosing_model(**attn_res).float()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ar.DepthRead):
                module.query.mul_(strength)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return record_forward(model, torch.tensor([[1, 2, 3, 4, 5]]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 10, half of one of step 12, and the model of step 11."""
    for step, strength in ((10, 0.5), (2, 0.0), (12, 0.7)):
        checkpoint = tmp_path / "run" / "checkpoints" / f"checkpoint-{step}"
        save_step(checkpoint, strength)
        if step < 12:
            mark_complete(checkpoint)
    save_step(tmp_path / "run", 1.0)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"step": 11}))
    return tmp_path / "run"


def test_steps_rise_and_each_row_is_that_of_its_checkpoint(run: Path, tmp_path: Path) -> None:
    history = depth_over_training(run, TEXT, device="cpu")
    assert history.steps.tolist() == [2, 10, 11]
    assert history.read_names[-1] == "final" and set(history.measures) == set(MEASURES)
    summary = summarise(save_step(tmp_path / "other", 0.5))
    for name in MEASURES:
        values = history.measures[name]
        assert values.shape == (3, 9)
        expected = getattr(summary, name)
        np.testing.assert_allclose(values[1, : len(expected)], expected, rtol=1e-4)
    assert np.isnan(history.measures["output_norm"][:, -1]).all()
    np.testing.assert_allclose(history.measures["normalised_entropy"][0, 1:], 1.0, rtol=1e-5)
    assert (np.diff(history.measures["entropy"][:, 1:], axis=0) < 0).all()


def test_the_table_is_steps_by_reads(run: Path) -> None:
    history = depth_over_training(run, TEXT, max_tokens=3, device="cpu")
    table = history.to_table()
    assert {len(column) for column in table.values()} == {27}
    at = (table["step"] == 10) & (table["read_name"] == "final")
    assert table["read"][at].tolist() == [8]
    assert table["locality"][at].tolist() == [history.measures["locality"][1, 8]]


def test_reads_with_a_window_are_measured_over_what_they_see(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    window = {"mode": "full", "window": 2}
    records = [save_step(checkpoints / f"checkpoint-{step}", step, **window) for step in (0, 1)]
    for step in (0, 1):
        mark_complete(checkpoints / f"checkpoint-{step}")
    measures = depth_over_training(tmp_path / "run", TEXT, device="cpu").measures
    np.testing.assert_allclose(measures["normalised_entropy"][0, 1:], 1.0, rtol=1e-5)
    np.testing.assert_allclose(measures["effective_sources"][0], [1, 2, 3, 3, 3, 3, 3, 3, 3], rtol=1e-5)
    np.testing.assert_allclose(measures["locality"][0, 1:], 0.5, rtol=1e-5)
    weights = records[1].weights[7].double()
    assert measures["locality"][1, 7] == pytest.approx((weights[1] / 2 + weights[2]).mean().item(), rel=1e-4)


def test_a_run_without_checkpoints_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--keep-checkpoints"):
        depth_over_training(tmp_path, TEXT)
