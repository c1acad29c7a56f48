"""A model spread by `device_map`, also with layers on the disk, computes what it computed in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from accelerate import infer_auto_device_map
from transformers import AutoModelForCausalLM

IDS = tiny.token_ids()
DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module", params=["per_read", "auto"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A trained model's folder, its logits and what it generates."""
    folder = tmp_path_factory.mktemp(request.param)
    attn_res = {"mode": "block", "sublayers_per_block": 3, "read_schedule": request.param}
    model = tiny.trained_model(attn_res, dtype=torch.float32)
    model.save_pretrained(folder)
    generated = model.generate(IDS, max_new_tokens=6, do_sample=False)
    return folder, model(IDS).logits.detach(), generated


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, DISK], ids=["auto", "cpu", "disk"])
def test_logits_and_generation(saved, device_map, tmp_path: Path):
    folder, logits, generated = saved
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path)
    on_disk = device_map is DISK
    assert model.model.layers[1].mlp.up_proj.weight.is_meta == on_disk
    assert model.model.norm.read.query.is_meta == on_disk
    for _ in range(2):
        assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), generated)
    assert model.model.norm.read.query.is_meta == on_disk, "the weights went back to the disk"


def test_depth_weights_of_offloaded_layers(saved, tmp_path: Path):
    folder, _, _ = saved
    whole = AutoModelForCausalLM.from_pretrained(folder)
    spread = AutoModelForCausalLM.from_pretrained(folder, device_map=DISK, offload_folder=tmp_path)
    expected = whole(IDS, output_depth_weights=True).depth_weights
    found = spread(IDS, output_depth_weights=True).depth_weights
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_two_phases_are_refused_where_queries_are_on_the_disk(tmp_path: Path):
    model = tiny.trained_model({"mode": "full", "read_schedule": "two_phase"}, layers=6, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    disk = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers": "disk",
        "model.norm": "disk",
    }
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**disk, "lm_head": "cpu"}, offload_folder=tmp_path / "offloaded"
    )
    with pytest.raises(
        ValueError, match="read_schedule='two_phase' needs the queries of several layers at once"
    ):
        spread(IDS)


def test_a_layer_is_never_split():
    """A read needs its layer's sources, so device maps place whole layers."""
    model = tiny.attn_res_model({"mode": "full"}, dtype=torch.float32)
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    memory = {"cpu": 3 * layer, "disk": 100 * layer}
    found = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    assert set(found.values()) == {"cpu", "disk"}
    assert not [name for name in found if name.startswith("model.layers.") and name.count(".") > 2], found
