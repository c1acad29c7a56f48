"""LoRA adapters: every layer type is adapted, and reads are trained and saved with the adapter (case Q4)."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from test_optimizer import model_of
from tiny_run import losses, quiet, text_of, tiny_settings
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

import attention_residuals as ar
from attention_residuals.cli.main import main
from attention_residuals.errors import UserError
from attention_residuals.models.auto import our_config
from attention_residuals.training.adapters import adapted_modules, lora_config
from attention_residuals.training.optimizer import make_optimizer, parameter_groups
from attention_residuals.training.progress import ProgressReport
from attention_residuals.training.run import resume, train
from attention_residuals.training.settings import TrainSettings

IDS = torch.arange(24).reshape(2, 12) * 5 % 64
# delta net: qkv, z, a, b, out; attention: q, k, v, o; mlp: gate, up, down in both layers
COUNTS = {"attention": (4, 4), "delta net": (5, 5), "mlp": (6, 6)}


def moe_model() -> Any:
    shape = model_of().config.to_dict()
    fields = {name: shape[name] for name in Qwen3_5TextConfig().to_dict() if name in shape}
    fields.pop("model_type")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3_5MoeTextConfig(**fields, **experts, shared_expert_intermediate_size=8)
    return ar.Qwen3_5MoeAttnResForCausalLM(our_config(config, ar.AttnResConfig(mode="full")))


def queries(model: Any) -> list[torch.Tensor]:
    """The queries in use, in order, whether or not an adapter holds them."""
    norms = [m for m in model.modules() if getattr(m, "read", None) is not None]
    return [norm.read.query for norm in norms]


def step(model: Any, steps: int = 2) -> None:
    optimizer = make_optimizer(parameter_groups(model, weight_decay=0.0), 0.02)
    model.train()
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize(
    "attn_res", [{"mode": "full"}, {"mode": "block", "read_schedule": "two_phase"}], ids=str
)
def test_train_save_load_and_merge(tmp_path: Path, attn_res: dict[str, Any]) -> None:
    base = model_of(attn_res=attn_res).eval()
    fresh = copy.deepcopy(base)
    before = {name: p.clone() for name, p in base.named_parameters() if ".read." not in name}
    start = base(IDS).logits
    model = peft.get_peft_model(base, lora_config(base, r=4))
    assert torch.equal(model.eval()(IDS).logits, start), "an untrained adapter changes nothing"
    assert all("lora_" in name or ".read." in name for name, p in model.named_parameters() if p.requires_grad)
    step(model)
    trained = model(IDS).logits
    assert not torch.allclose(trained, start)
    assert all(query.abs().sum() > 0 for query in queries(model))
    for name, value in fresh.named_parameters():
        assert ".read." in name or torch.equal(value, before[name]), "the base stays as it was"
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, start)

    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, trained)
    assert all(torch.equal(*pair) for pair in zip(queries(loaded), queries(model), strict=True))
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        saved = [name for name in file.keys() if name.endswith("read.query")]  # noqa: SIM118
    assert len(saved) == len(queries(model)) == 4

    merged = loaded.merge_and_unload()
    assert type(merged) is ar.Qwen3_5AttnResForCausalLM
    assert {name for name, _ in merged.named_parameters()} == {
        name for name, _ in model_of().named_parameters()
    }
    torch.testing.assert_close(merged(IDS).logits, trained, rtol=1e-5, atol=1e-5)


def test_every_layer_type_is_adapted() -> None:
    base = model_of("block")
    config = lora_config(base, r=4, lora_dropout=0.5, modules_to_save=["lm_head"])
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 4, 0.5)
    assert config.task_type == "CAUSAL_LM" and config.modules_to_save == ["lm_head", "read"]
    model = peft.get_peft_model(base, lora_config(base))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = adapted_modules(model)
    assert report.counts == {**COUNTS, "reads": (4, 4)}
    assert str(report) == "attention 4 of 4, delta net 5 of 5, mlp 6 of 6, reads 4 of 4"


def test_names_written_for_other_models_are_told() -> None:
    """Case Q4: most layers of a Qwen3.5 have no q_proj, and PEFT trains no read unless it is named."""
    base = model_of("block")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=names))
    with pytest.warns(UserWarning) as told:
        report = adapted_modules(model)
    assert report.counts == {**COUNTS, "delta net": (0, 5), "reads": (0, 4)}
    delta_net, reads = (str(warning.message) for warning in told)
    assert delta_net.startswith(
        "no delta net projection is adapted (0 of 5); add in_proj_a, in_proj_b, in_proj_qkv"
    )
    assert "neither trained nor saved with the adapter; add modules_to_save=['read']" in reads
    assert told[0].filename == __file__


def test_experts_are_adapted() -> None:
    base = moe_model().eval()
    start = base(IDS).logits
    model = peft.get_peft_model(base, lora_config(base, r=2, init_lora_weights=False)).eval()
    # per layer two stacked parameters, the shared expert's three projections and its gate
    assert adapted_modules(model).counts["mlp"] == (12, 12)
    changed = model(IDS).logits
    assert not torch.allclose(changed, start)
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, changed, rtol=1e-5, atol=1e-5)
    only_shared = peft.LoraConfig(r=2, target_modules=["shared_expert.up_proj"], modules_to_save=["read"])
    model = peft.get_peft_model(moe_model(), only_shared)
    with pytest.warns(UserWarning, match="no (attention|delta net) projection"):
        assert adapted_modules(model).counts["mlp"] == (2, 12)


@pytest.mark.parametrize(
    ("model_type", "fields", "counts"),
    [
        ("Mamba", {"state_size": 4}, {"state space": (2, 2), "reads": (2, 2)}),
        ("GPT2", {"num_attention_heads": 2}, {"attention": (4, 4), "mlp": (4, 4), "reads": (4, 4)}),
    ],
)
def test_other_architectures(
    model_type: str, fields: dict[str, int], counts: dict[str, tuple[int, int]]
) -> None:
    """Merged weights give what the adapters gave, so no adapter was bypassed."""
    config = getattr(ar, f"{model_type}AttnResConfig")
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "attn_res": {"mode": "full"}}
    base = AutoModelForCausalLM.from_config(config(**shape, **fields))
    model = peft.get_peft_model(base, lora_config(base, init_lora_weights=False)).eval()
    assert adapted_modules(model).counts == counts
    changed = model(IDS).logits
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, changed, rtol=1e-4, atol=1e-5)


def test_without_reads() -> None:
    standard = model_of("standard")
    assert lora_config(standard).modules_to_save is None
    assert adapted_modules(peft.get_peft_model(standard, lora_config(standard))).counts == COUNTS
    plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    for function in (lora_config, adapted_modules):
        with pytest.raises(TypeError, match="has no attention residuals; convert the model first"):
            function(plain)


def test_every_trainable_parameter_has_a_group_and_a_gradient() -> None:
    base = model_of("block")
    model = peft.get_peft_model(base, lora_config(base))
    groups = {group.name: group for group in parameter_groups(model, weight_decay=0.1, optimizer="muon")}
    assert set(groups) == {"matrices", "reads"}
    assert all("lora_" in name for name, _ in groups["matrices"].parameters)
    assert len(groups["reads"].parameters) == 8
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_residuals.training.run._report", lambda *args: None)
        train(tiny_settings(folder, max_steps=2, eval_every=2), console=quiet())
    return folder


def lora_settings(base_run: Path, folder: Path, **changes: Any) -> TrainSettings:
    fields: dict[str, Any] = {
        "from_checkpoint": str(base_run / "run"),
        "lora": 4,
        "data": (str(base_run / "text.txt"),),
        "context": 16,
        "batch_size": 2,
        "max_steps": 4,
        "eval_blocks": 2,
        "save_every": 1,
        "output_dir": str(folder),
    }
    return TrainSettings(**{**fields, **changes})


def test_the_run_folder_holds_the_merged_model(
    base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)
    console = quiet()
    whole = train(lora_settings(base_run, tmp_path / "whole", gradient_checkpointing=True), console=console)
    assert "adapters    attention 4 of 4, delta net 5 of 5, mlp 6 of 6, reads 4 of 4" in text_of(console)
    merged = AutoModelForCausalLM.from_pretrained(whole.folder).eval()
    assert type(merged) is ar.Qwen3_5AttnResForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_run / "run")
    checkpoint = whole.folder / "checkpoints" / "checkpoint-4"
    assert not (checkpoint / "model.safetensors").exists(), "a checkpoint holds the adapter alone"
    adapted = peft.PeftModel.from_pretrained(base, checkpoint).eval()
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-5, atol=1e-5)

    original = ProgressReport.on_step_begin

    def interrupt(self: ProgressReport, args: Any, state: Any, control: Any, **more: Any) -> None:
        original(self, args, state, control, **more)
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressReport, "on_step_begin", interrupt)
        train(lora_settings(base_run, tmp_path / "parts", gradient_checkpointing=True), console=quiet())
    resume(str(tmp_path / "parts"), console=quiet())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["model"]["trained_parameters"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"from_checkpoint": None}, "--lora 4 adapts a saved model; name it with --from"),
        ({"lora": 0}, "--lora must be at least 1, got 0"),
        ({"train_only": "reads"}, "give one of the two"),
    ],
)
def test_mistakes_are_told(base_run: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lora_settings(base_run, tmp_path, **changes)


def test_without_peft(base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--lora needs the package peft, which is not installed; pip install"):
        lora_settings(base_run, tmp_path)


def test_the_documented_commands_run(
    base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The section "Fine-tuning" of docs/training.md, from a plain model on."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.split("## Fine-tuning")[1].split("\n## ")[0]
    (commands,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)
    shutil.copy(base_run / "text.txt", "text.txt")
    model_of("standard", vocab_size=320).save_pretrained("plain")
    AutoTokenizer.from_pretrained(base_run / "run").save_pretrained("plain")
    for command in commands.splitlines():
        with pytest.raises(SystemExit) as stopped:
            main([*shlex.split(command)[1:], "--context", "16", "--batch-size", "2"])
        assert stopped.value.code == 0, (command, capsys.readouterr().err)
    exec(compile(example, "docs/training.md", "exec"), {})
    assert "reads 4 of 4" in capsys.readouterr().out.splitlines()[-1]
