"""TRL's SFTTrainer trains our models, and documents packed into one row stay apart (case Q1)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_adapters import queries
from test_optimizer import model_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import attention_residuals as ar
from attention_residuals.training.adapters import adapted_modules, lora_config

TEXTS = ["one two three", "four five six seven", "eight nine", "ten"] * 4


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<end>", "<pad>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")


def trainer(model: Any, folder: Path, *, peft_config: Any = None, **changes: Any) -> SFTTrainer:
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "max_length": 32,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(**{**fields, **changes}),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def test_two_steps_and_a_saved_model(tmp_path: Path) -> None:
    model = model_of("block")
    plain = copy.deepcopy(model)
    sft = trainer(model, tmp_path)
    batch = next(iter(sft.get_train_dataloader()))
    torch.testing.assert_close(sft.compute_loss(model, dict(batch)), plain(**batch).loss, rtol=1e-5, atol=0)
    sft.train()
    assert sft.state.global_step == 2
    assert all(query.abs().sum() > 0 for query in queries(model))
    sft.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, ar.Qwen3_5AttnResForCausalLM)
    ids = batch["input_ids"]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_with_adapters(tmp_path: Path) -> None:
    base = model_of("block")
    sft = trainer(base, tmp_path, peft_config=lora_config(base), activation_checkpointing=True)
    assert adapted_modules(sft.model).counts["reads"] == (4, 4)
    sft.train()
    assert all(query.abs().sum() > 0 for query in queries(sft.model))


@pytest.mark.parametrize("changes", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_packed_rows_are_refused_where_delta_nets_would_join_them(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """TRL passes the boundaries; without the CUDA kernels that heed them transformers refuses."""
    with pytest.raises(ValueError, match="can't keep packed sequences apart without `causal_conv1d`"):
        trainer(model_of("block"), tmp_path, **changes).train()


def test_packed_documents_stay_apart_in_attention() -> None:
    config = ar.LlamaAttnResConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_res={"mode": "full"},
    )
    model = ar.LlamaAttnResForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.read.query)
    documents = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": document} for document in documents])
    packed = model(**batch, use_cache=False).logits  # as TRL calls it
    apart = torch.cat([model(torch.tensor([document])).logits for document in documents], dim=1)
    assert packed.shape == apart.shape == (1, 12, 64)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
    joined = model(batch["input_ids"], use_cache=False).logits
    assert (joined - apart).abs().max() > 100 * (packed - apart).abs().max(), "the boundaries matter"
