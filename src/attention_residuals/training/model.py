"""Settings to a model: from a preset, a configuration file or a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attention_residuals.config import AttnResConfig
from attention_residuals.convert import refuse_lossy_variant
from attention_residuals.errors import UserError
from attention_residuals.models.auto import causal_lm_class, config_class, plain_model_type
from attention_residuals.models.families import FAMILIES
from attention_residuals.read import DepthRead
from attention_residuals.training.presets import PRESETS
from attention_residuals.training.settings import TrainSettings

# families that transformers has a language model of
LANGUAGE_FAMILIES = tuple(name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ROUND_VOCABULARY_TO = 64  # rows of the embedding are rounded up to this, which matrix kernels like


def make_config(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The model's configuration, with a vocabulary that holds the tokenizer's.

    Raises:
        UserError: the fields do not make a model, or the tokenizer does not fit the saved model.
    """
    if settings.from_checkpoint is not None:
        config = _saved_config(settings.from_checkpoint, settings.attn_res_fields())
        if len(tokenizer) > config.vocab_size:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} tokens, the model in --from {settings.from_checkpoint} "
                f"has {config.vocab_size}; leave --tokenizer out to use the model's own"
            )
        return config
    fields: dict[str, Any] = {}
    if settings.model_config is not None:
        fields = _read_fields(settings.model_config)
    elif settings.preset is not None:
        fields = dict(PRESETS[settings.preset].fields)
    rows = -(-len(tokenizer) // ROUND_VOCABULARY_TO) * ROUND_VOCABULARY_TO
    keeps_rows = settings.tokenizer in (None, "qwen3.5") and fields.get("vocab_size", 0) >= len(tokenizer)
    fields["vocab_size"] = fields["vocab_size"] if keeps_rows else rows
    fields |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields["attn_res"] = fields.get("attn_res", {}) | settings.attn_res_fields()
    model_type = fields.pop("model_type", "qwen3_5_text")
    try:
        return config_class(_family(model_type))(**fields)
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"the model's configuration does not hold: {error}") from error


def make_model(config: PreTrainedConfig, settings: TrainSettings) -> PreTrainedModel:
    """The model in float32, initialised with `settings.seed` or loaded from `settings.from_checkpoint`.

    A plain model that is loaded receives zero queries, so that it starts as the function it was.

    Raises:
        UserError: the saved weights are damaged or do not fit the configuration.
    """
    model_class = causal_lm_class(config)
    torch.manual_seed(settings.seed)
    if settings.from_checkpoint is None:
        return model_class(config)
    try:
        model, report = model_class.from_pretrained(
            settings.from_checkpoint, config=config, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # safetensors, torch and transformers each raise their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--from {settings.from_checkpoint} could not be loaded: {reason}") from error
    missing = [name for name in report["missing_keys"] if ".read." not in name]
    if missing:
        raise UserError(
            f"--from {settings.from_checkpoint} lacks {len(missing)} weights of the model, {missing[0]} first"
        )
    return model


def train_only_reads(model: PreTrainedModel) -> None:
    """Freeze everything but queries and key weights, in place.

    The embedding's output then asks for gradients, because reentrant checkpointing gives none to a layer
    whose input doesn't.

    Raises:
        UserError: the model has no reads.
    """
    reads = [module for module in model.modules() if isinstance(module, DepthRead)]
    if not reads:
        raise UserError("--train-only reads needs a model with reads; add --mode block, or leave it out")
    model.requires_grad_(False)
    for read in reads:
        read.requires_grad_(True)
    model.enable_input_require_grads()


def make_trainable(model: PreTrainedModel, settings: TrainSettings) -> Any:
    """The model with what `settings` freezes frozen, and wrapped by PEFT where they ask for adapters.

    Raises:
        UserError: `settings.train_only` names a part that the model doesn't have.
    """
    if settings.train_only is not None:
        train_only_reads(model)
    if settings.lora is None:
        return model
    from peft import get_peft_model

    from attention_residuals.training.adapters import lora_config

    return get_peft_model(model, lora_config(model, r=settings.lora))


def _family(model_type: str) -> str | None:
    """The family of a model type, plain or with reads; None where it is no language model with a row."""
    plain_type = plain_model_type(model_type) or model_type
    return plain_type if plain_type in LANGUAGE_FAMILIES else None


def _read_fields(path: str) -> dict[str, Any]:
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"--model-config {path} is not a JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"--model-config {path} must hold an object, got {type(fields).__name__}")
    model_type = fields.get("model_type", "qwen3_5_text")
    if _family(model_type) is None:
        raise UserError(
            f"--model-config {path} has model_type {model_type!r}; supported are "
            f"{', '.join(LANGUAGE_FAMILIES)}"
        )
    # what a saved config.json says about its file rather than about the model
    for name in ("architectures", "transformers_version", "dtype", "torch_dtype"):
        fields.pop(name, None)
    return fields


def _saved_config(folder: str, given: dict[str, Any]) -> PreTrainedConfig:
    """The saved configuration, with reads added to a plain model where `given` asks for a mode."""
    try:
        saved = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--from {folder} could not be loaded: {str(error).splitlines()[0]}") from error
    saved = saved.get_text_config()
    if _family(saved.model_type) is None:
        raise UserError(
            f"--from {folder} is of type {saved.model_type!r}; supported are {', '.join(LANGUAGE_FAMILIES)}"
        )
    fields = saved.to_dict()
    has_reads = (fields.get("attn_res") or {"mode": "standard"})["mode"] != "standard"
    if has_reads:
        kept = AttnResConfig.from_dict(fields["attn_res"])
        changed = {name: value for name, value in given.items() if getattr(kept, name) != value}
        if changed:
            raise UserError(
                f"--from {folder} already has reads ({kept.to_dict()}) and was given {changed}; leave these "
                "options out"
            )
        return saved
    try:
        refuse_lossy_variant(AttnResConfig.from_dict(given))
    except ValueError as error:
        raise UserError(f"--from {folder} is a plain model, and {error}") from error
    # zero queries with "sum" give exactly the residual stream the weights were trained with
    attn_res = {"read_scale": "sum", **given} if given.get("mode", "block") != "standard" else given
    fields["attn_res"] = attn_res if given else {"mode": "standard"}
    for name in ("model_type", "architectures", "transformers_version"):
        fields.pop(name, None)
    return config_class(_family(saved.model_type))(**fields)
