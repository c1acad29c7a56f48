"""Folder to folder: what is written, that the way back is bit for bit, and that faults leave nothing."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import plain_checkpoints as plain
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import attention_residuals as ar
from attention_residuals.conversion import folder as conversion
from attention_residuals.conversion import verify
from attention_residuals.conversion.folder import READS_FILE, convert_folder, restore_folder
from attention_residuals.conversion.verify import MOST_CHANGE, NEW_TOKENS
from attention_residuals.convert import LOSSLESS
from attention_residuals.errors import UserError

FULL = ar.AttnResConfig(mode="full", read_scale="sum")
RECORD = "attn_res_conversion"


@pytest.fixture
def saved(tmp_path):
    """A plain folder with a tokenizer and other files that come with a model."""
    source = tmp_path / "in"
    plain.save_layout("single", source, vocab_size=plain.BYTES)
    plain.save_tokenizer(source)
    (source / "LICENSE").write_text("free")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "optimizer.pt").write_bytes(b"state")
    (source / ".git").mkdir()
    (source / "README.md").write_text("---\nlicense: mit\ntags:\n- small\n---\n\n# A model\n")
    return source


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit_config(folder: Path, **fields) -> None:
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **fields}))


def assert_nothing_left(target: Path, source: Path) -> None:
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("layout", "settings"), [*((layout, LOSSLESS) for layout in plain.LAYOUTS), ("composite", FULL)]
)
def test_there_and_back(layout, settings, tmp_path):
    source, target, again = (tmp_path / name for name in ("in", "out", "again"))
    plain.save_layout(layout, source)
    result = convert_folder(source, target, settings, verify=False)
    before, after = plain.stored_tensors(source), plain.stored_tensors(target)
    plain.assert_same_tensors(before, {key: t for key, t in after.items() if ".read." not in key})
    reads = load_file(target / READS_FILE)
    assert set(reads) == set(after) - set(before)
    assert result.parameters == sum(t.numel() for t in reads.values())
    index = read_json(target / "model.safetensors.index.json")
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    auto = AutoModelForImageTextToText if "composite" in layout else AutoModelForCausalLM
    model, report = auto.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.get_text_config().attn_res == settings.to_dict()
    assert model.dtype == torch.bfloat16
    in_memory = ar.convert(source, settings)
    assert type(in_memory) is type(model)
    plain.assert_same_tensors(in_memory.state_dict(), model.state_dict())
    restore_folder(target, again, verify=False)
    assert files(again) == files(source)


@pytest.mark.parametrize("layout", ["prefixed", "sharded", "composite"])
def test_back_from_what_save_pretrained_wrote(layout, tmp_path):
    """Reads lie among the other weights then, so those files are written anew."""
    source, saved, again = (tmp_path / name for name in ("in", "saved", "again"))
    plain.save_layout(layout, source)
    ar.convert(source).save_pretrained(saved, max_shard_size="8KB" if layout == "sharded" else "1GB")
    restore_folder(saved, again, verify=False)
    expected = plain.stored_tensors(source)
    expected = {key: t for key, t in expected.items() if "mtp." not in key and "visual.patch_e" not in key}
    if layout == "composite":
        expected = {key: t for key, t in plain.stored_tensors(source).items() if "mtp." not in key}
    plain.assert_same_tensors(expected, plain.stored_tensors(again))
    assert not list(again.glob("*.index.json")) or layout == "sharded"
    config, original = (AutoConfig.from_pretrained(folder) for folder in (again, source))
    assert type(config) is type(original) and config.architectures == original.architectures
    assert "attn_res" not in (again / "config.json").read_text()


def test_prefixed_checkpoints_stay_prefixed(tmp_path):
    plain.save_layout("prefixed", tmp_path / "in")
    result = convert_folder(tmp_path / "in", tmp_path / "out", LOSSLESS, verify=False)
    reads = load_file(tmp_path / "out" / READS_FILE)
    assert all(key.startswith("model.language_model.") for key in reads)
    assert result.kept == {"mtp.*": 2, "model.visual.*": 1}


TINY_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TINY_GPT2 = {"vocab_size": 67, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 128}


@pytest.mark.parametrize(
    ("make", "auto"),
    [
        (lambda: ViTForImageClassification(ViTConfig(**TINY_IMAGES)), "AutoModelForImageClassification"),
        (lambda: GPT2Model(GPT2Config(**TINY_GPT2)), "AutoModel"),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**plain.TEXT, num_labels=3)),
            "AutoModelForSequenceClassification",
        ),
    ],
)
def test_models_that_do_not_generate(make, auto, tmp_path):
    """Among them one whose weights are renamed on loading, by a rule under its class (ViT)."""
    make().save_pretrained(tmp_path / "in")
    result = convert_folder(tmp_path / "in", tmp_path / "out", LOSSLESS)
    assert result.verification.max_change < 1e-6 and result.verification.same_tokens is None
    assert result.kept == {}
    assert f"model = {auto}.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    restore_folder(tmp_path / "out", tmp_path / "again", verify=False)
    assert files(tmp_path / "again") == files(tmp_path / "in")


def test_experts_are_stored_one_by_one(tmp_path):
    plain.save_layout("experts", tmp_path / "in")
    assert any(".experts.0." in key for key in plain.stored_tensors(tmp_path / "in"))


@pytest.fixture
def short_continuation(monkeypatch):
    """A greedy continuation costs a test most of its time."""
    monkeypatch.setattr(verify, "NEW_TOKENS", 2)


def test_what_comes_with_a_model_is_copied(saved, tmp_path, short_continuation):
    convert_folder(saved, tmp_path / "out", LOSSLESS)
    written = files(tmp_path / "out")
    assert set(written) == {
        "LICENSE",
        "README.md",
        "README.plain.md",
        "additional_chat_templates/tools.jinja",
        "config.json",
        "depth_map.png",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model-attn-res.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert written["README.plain.md"] == (saved / "README.md").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"]
    restore_folder(tmp_path / "out", tmp_path / "again")
    kept = {name: data for name, data in files(saved).items() if name != "optimizer.pt"}
    assert files(tmp_path / "again") == kept


def test_verification_on_the_folders_own_tokens(saved, tmp_path):
    result = convert_folder(saved, tmp_path / "out", LOSSLESS, text="a short text")
    found = result.verification
    assert found.inputs == "text" and found.tokens == len("a short text") and not found.offloaded
    assert 0 < found.max_change <= MOST_CHANGE and 0 < found.rounding < MOST_CHANGE
    assert found.same_tokens == found.new_tokens == NEW_TOKENS
    config = AutoConfig.from_pretrained(tmp_path / "out")
    record = getattr(config, RECORD)
    assert record["verification"] == found.to_dict() and record["model_type"] == "llama"
    assert record["architectures"] == ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    assert read_json(tmp_path / "config" / "config.json")[RECORD] == record
    back = restore_folder(tmp_path / "out", tmp_path / "again")
    assert back.verification.max_change <= MOST_CHANGE


@pytest.mark.parametrize("kind", ["dense", pytest.param("composite moe", marks=pytest.mark.slow)])
def test_verification_without_enough_memory(kind, tmp_path, monkeypatch, short_continuation):
    model = plain.plain_model(kind)
    model.save_pretrained(tmp_path / "in")
    free = {"cpu": 4 * model.num_parameters()}
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda *args, **kwargs: free)
    found = convert_folder(tmp_path / "in", tmp_path / "out", LOSSLESS).verification
    assert found.offloaded and found.max_change <= MOST_CHANGE and found.inputs == "random tokens"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


def test_a_changed_function_fails_the_verification(saved, tmp_path, monkeypatch, short_continuation):
    monkeypatch.setattr(conversion, "_fresh", lambda key, like: torch.ones(like.shape, dtype=like.dtype))
    with pytest.raises(UserError, match="verification failed"):
        convert_folder(saved, tmp_path / "out", LOSSLESS)
    assert_nothing_left(tmp_path / "out", saved)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("a fault"), RuntimeError),
    ],
)
def test_whatever_stops_it_leaves_nothing_behind(tmp_path, monkeypatch, raised, seen):
    source, target = tmp_path / "in", tmp_path / "out"
    plain.save_layout("sharded", source)
    copy = shutil.copyfile
    shards = []

    def stop_at_the_second(path, to):
        if Path(path).suffix == ".safetensors":
            shards.append(path)
            assert not target.exists(), "the target must not look complete while it isn't"
            if len(shards) == 2:
                raise raised
        return copy(path, to)

    monkeypatch.setattr(shutil, "copyfile", stop_at_the_second)
    with pytest.raises(seen, match="nothing is left of it" if seen is UserError else None):
        convert_folder(source, target, LOSSLESS, verify=False)
    assert_nothing_left(target, source)
    monkeypatch.undo()
    target.mkdir()  # an empty folder may take the place
    convert_folder(source, target, LOSSLESS, verify=False)


def test_a_disk_that_is_too_small_is_noticed_before(saved, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"0\.0 GB are free"):
        convert_folder(saved, tmp_path / "out", LOSSLESS)
    assert_nothing_left(tmp_path / "out", saved)


def to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def index_that_disagrees(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (to_pickle, "pickles"),
        (truncate, "damaged"),
        (index_that_disagrees, "disagree"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors weights"),
        (lambda folder: (folder / "config.json").unlink(), "does not exist"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read|cannot be read"),
        (lambda folder: edit_config(folder, model_type=None), "names no model_type"),
        (lambda folder: edit_config(folder, model_type="perceptron"), "perceptron"),
        (lambda folder: edit_config(folder, architectures=["Unknown"]), "Unknown is no class"),
        (lambda folder: edit_config(folder, quantization_config={"bits": 4}), "quantized"),
        (lambda folder: edit_config(folder, hidden_size=32), "can't be converted"),
        (lambda folder: edit_config(folder, num_hidden_layers=5), "lacks 9 tensors"),
        (lambda folder: plain.rewrite(folder, **{"model.odd": torch.ones(1)}), r"model\.odd"),
        (
            lambda folder: plain.rewrite(folder, **{"model.layers.0.attn_res_bias": torch.ones(1)}),
            "another alg",
        ),
    ],
)
def test_sources_that_are_refused(spoil, words, saved, tmp_path):
    spoil(saved)
    with pytest.raises(UserError, match=words):
        convert_folder(saved, tmp_path / "out", LOSSLESS)
    assert_nothing_left(tmp_path / "out", saved)


def test_targets_that_are_refused(saved, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for target, words in ((saved, "another folder than IN"), (tmp_path / "full", "not an empty folder")):
        with pytest.raises(UserError, match=words):
            convert_folder(saved, target, LOSSLESS)
    with pytest.raises(UserError, match="hf download"):
        convert_folder(tmp_path / "missing", tmp_path / "out", LOSSLESS)
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_direction_and_training_are_checked(saved, tmp_path):
    with pytest.raises(UserError, match="leave --back out"):
        restore_folder(saved, tmp_path / "out")
    convert_folder(saved, tmp_path / "ours", LOSSLESS, verify=False)
    with pytest.raises(UserError, match="already"):
        convert_folder(tmp_path / "ours", tmp_path / "out", LOSSLESS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.nn.init.normal_(model.model.norm.read.query)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(UserError, match=r"model\.norm\.read"):
        restore_folder(tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_texts_and_tokenizers_that_do_not_fit(saved, tmp_path):
    with pytest.raises(UserError, match="empty once tokenised"):
        convert_folder(saved, tmp_path / "out", LOSSLESS, text="")
    tokenizer = saved / "tokenizer.json"
    whole = tokenizer.read_text()
    tokenizer.write_text("{")
    with pytest.raises(UserError, match="--no-verify"):
        convert_folder(saved, tmp_path / "out", LOSSLESS)
    tokenizer.unlink()
    (saved / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        convert_folder(saved, tmp_path / "out", LOSSLESS, text="a")
    shutil.rmtree(saved)
    plain.save_layout("single", saved)  # with fewer embeddings than there are bytes
    plain.save_tokenizer(saved)
    assert whole == tokenizer.read_text()
    with pytest.raises(UserError, match="has 67 embeddings"):
        convert_folder(saved, tmp_path / "out", LOSSLESS)
    assert_nothing_left(tmp_path / "out", saved)


def test_code_of_the_plain_model_is_not_named(saved, tmp_path):
    """auto_map would load the plain architecture; it comes back with the plain checkpoint."""
    edit_config(saved, auto_map={"AutoConfig": "configuration.Config"})
    convert_folder(saved, tmp_path / "out", LOSSLESS, verify=False)
    assert "auto_map" not in read_json(tmp_path / "out" / "config.json")
    restore_folder(tmp_path / "out", tmp_path / "again", verify=False)
    assert read_json(tmp_path / "again" / "config.json") == read_json(saved / "config.json")
