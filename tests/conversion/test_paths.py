"""convert() on a checkpoint: every layout loads whole, and nothing loads that doesn't belong."""

from __future__ import annotations

import json
import logging

import plain_checkpoints as plain
import pytest
import torch
from transformers import LlamaForCausalLM

import attention_residuals as ar


@pytest.mark.parametrize("layout", plain.LAYOUTS)
def test_every_layout(layout, tmp_path):
    model = plain.save_layout(layout, tmp_path)
    converted = ar.convert(tmp_path, dtype=torch.bfloat16)
    assert "AttnRes" in type(converted).__name__ and converted.dtype == torch.bfloat16
    assert not converted.training
    expected, found = model.state_dict(), converted.state_dict()
    plain.assert_same_tensors(expected, {key: t for key, t in found.items() if ".read." not in key})
    assert not any(t.any() for key, t in found.items() if key.endswith("read.query"))
    if layout.startswith("tied"):
        assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight


@pytest.mark.parametrize("layout", plain.LAYOUTS)
def test_the_way_back_from_a_saved_model(layout, tmp_path):
    model = plain.save_layout(layout, tmp_path / "plain")
    converted = ar.convert(str(tmp_path / "plain"))
    converted.save_pretrained(tmp_path / "ours")
    back = ar.convert(tmp_path / "ours", back=True)
    assert type(back) is type(model)
    plain.assert_same_tensors(model.state_dict(), back.state_dict())
    back.save_pretrained(tmp_path / "back")
    stored = plain.stored_tensors(tmp_path / "plain")
    loaded = {
        key: tensor for key, tensor in stored.items() if "mtp." not in key and "visual.patch" not in key
    }
    if "composite" in layout:
        loaded = {key: tensor for key, tensor in stored.items() if "mtp." not in key}
    if layout == "tied with a head":
        del loaded["lm_head.weight"]
    plain.assert_same_tensors(loaded, plain.stored_tensors(tmp_path / "back"))


def test_ignored_groups_are_reported(tmp_path, caplog):
    plain.save_layout("prefixed", tmp_path)
    with caplog.at_level(logging.WARNING, logger="attention_residuals"):
        ar.convert(tmp_path)
    text = caplog.text
    assert "2 tensors of mtp.*" in text and "1 tensors of model.visual.*" in text
    assert "read.query" not in text, "reads that are missing as they should are no news"


def test_unknown_leftovers_fail(tmp_path):
    plain.save_layout("single", tmp_path)
    plain.rewrite(tmp_path, **{"model.layers.0.adapter.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.adapter\.weight"):
        ar.convert(tmp_path)


def test_another_algorithm_is_refused(tmp_path):
    plain.save_layout("single", tmp_path)
    plain.rewrite(tmp_path, **{"model.layers.0.attn_res_bias": torch.ones(2)})
    with pytest.raises(ValueError, match="another algorithm"):
        ar.convert(tmp_path)


@pytest.mark.parametrize("layout", ["single", "prefixed"])
def test_missing_tensors_fail(layout, tmp_path):
    plain.save_layout(layout, tmp_path)
    plain.rewrite(tmp_path, lambda key: key.replace("layers.1.mlp", "layers.1.nothing"))
    with pytest.raises(ValueError, match="don't belong together"):
        ar.convert(tmp_path)


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_a_converted_checkpoint_is_not_converted_again(tmp_path):
    ar.convert(plain.plain_model("llama")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="already"):
        ar.convert(tmp_path)
    with pytest.raises(ValueError, match="no way back"):
        ar.convert(save_plain(tmp_path / "plain"), back=True)


def save_plain(folder):
    plain.save_layout("single", folder)
    return folder


def test_the_class_comes_from_the_config(tmp_path):
    plain.save_layout("composite", tmp_path)
    edit_config(tmp_path, architectures=["Qwen3_5ForCausalLM"])
    alone = ar.convert(tmp_path)
    assert type(alone) is ar.Qwen3_5AttnResForCausalLM, "the language model of a composite checkpoint"
    edit_config(tmp_path, architectures=None)
    assert type(ar.convert(tmp_path)) is ar.Qwen3_5AttnResForCausalLM
    edit_config(tmp_path, architectures=["MyOwnModel"])
    with pytest.raises(ValueError, match="MyOwnModel is no class of transformers"):
        ar.convert(tmp_path)


def test_loading_arguments_arrive(tmp_path):
    plain.save_layout("single", tmp_path)
    model = ar.convert(
        tmp_path,
        dtype=torch.float32,
        device_map={"": "cpu"},
        attn_implementation="eager",
        local_files_only=True,
    )
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"
    assert type(ar.convert(model, back=True)) is LlamaForCausalLM


def test_weights_that_stay_on_the_disk(tmp_path):
    expected = plain.save_layout("single", tmp_path / "plain")
    device_map = {"model": "cpu", "lm_head": "disk"}
    model = ar.convert(tmp_path / "plain", device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.lm_head.weight.is_meta
    assert plain.change(expected, model) < 0.02, "bfloat16"
    with pytest.raises(ValueError, match="dispatched over several devices"):
        ar.convert(model, back=True)


def test_a_name_of_nothing(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        ar.convert(tmp_path / "nowhere")
