"""The card of a converted folder, and what would be sent to the Hub."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import plain_checkpoints as plain
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import hub

import attention_residuals as ar
from attention_residuals.conversion import verify
from attention_residuals.conversion.folder import convert_folder
from attention_residuals.convert import LOSSLESS


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "NEW_TOKENS", 2)
    plain.save_layout("single", tmp_path / "small-model")
    return tmp_path / "small-model"


def test_the_card_says_what_was_done(source, tmp_path):
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: de\ntags:\n- small\n---\n\n# A model\n")
    found = convert_folder(source, tmp_path / "out", LOSSLESS).verification
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit" and card.data.language == "de"
    assert card.data.tags == ["small", "attention-residuals", "arxiv:2603.15031"]
    assert card.data.library_name == "transformers"
    for words in (
        "`small-model` (llama)",
        "| `num_blocks` | 8 |",
        "| `read_scale` | sum |",
        "README.plain.md",
    ):
        assert words in card.text
    assert f"at most {found.max_change:.1e} of their range" in card.text
    assert f"{found.same_tokens} of 2 greedy tokens agree" in card.text
    assert "![Depth map](depth_map.png)" in card.text
    assert (tmp_path / "out" / "depth_map.png").read_bytes().startswith(b"\x89PNG")


def test_a_card_without_verification(source, tmp_path):
    convert_folder(source, tmp_path / "out", LOSSLESS, verify=False)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "was not verified" in text and "depth_map" not in text and "README.plain.md" not in text


def test_without_matplotlib_there_is_no_picture(source, tmp_path, monkeypatch):
    monkeypatch.delattr("attention_residuals.analysis.plots", raising=False)
    monkeypatch.setitem(sys.modules, "attention_residuals.analysis.plots", None)
    convert_folder(source, tmp_path / "out", LOSSLESS)
    assert "depth_map" not in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "depth_map.png").exists()


def test_push_to_hub_sends_weights_config_and_card(monkeypatch):
    sent: dict[str, bytes] = {}

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **kwargs):
            assert repo_id == "me/model"
            sent.update({op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations})

    def no_card_yet(*args, **kwargs):
        raise EntryNotFoundError("no README.md")

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub.ModelCard, "load", no_card_yet)
    ar.convert(plain.plain_model("llama")).push_to_hub("me/model", tags=["attention-residuals"])
    assert set(sent) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert b'"attn_res_conversion"' in sent["config.json"]
    assert b"attention-residuals" in sent["README.md"]
