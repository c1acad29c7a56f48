"""config.json of a plain model -> of ours, and back: only what differs is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention_residuals.conversion.architecture import RECORD
from attention_residuals.conversion.stored import read_json
from attention_residuals.conversion.verify import Verification
from attention_residuals.errors import UserError
from attention_residuals.models.auto import our_model_type, plain_model_type

CONFIG = "config.json"
SETTINGS = ("attn_res", "attn_res_family")


def read_plain(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json.

    Raises:
        UserError: no folder, no config.json, one of ours already, or of a quantized model.
    """
    fields = _read(folder)
    if plain_model_type(fields["model_type"]):
        raise UserError(
            f"{folder} has attention residuals already; it loads as it is, and --back makes it plain again"
        )
    if any("quantization_config" in part for part in (fields, fields.get("text_config") or {})):
        raise UserError(
            f"the weights in {folder} are quantized, so float32 can't show that their function is kept; "
            "convert the checkpoint they were made from, then quantize"
        )
    return fields


def read_ours(folder: Path) -> dict[str, Any]:
    """The fields of a converted folder's config.json.

    Raises:
        UserError: no folder, no config.json, or of a plain model.
    """
    fields = _read(folder)
    if plain_model_type(fields["model_type"]) is None:
        raise UserError(f"{folder} has no attention residuals, so there is no way back; leave --back out")
    return fields


def ours_of(fields: dict[str, Any], ours: Any, class_name: str) -> dict[str, Any]:
    """The fields of the converted model; `attn_res_conversion` keeps those that were replaced.

    Args:
        ours: the config of the converted model.
        class_name: what `architectures` is to name.
    """
    if our_model_type(fields["model_type"]) != ours.model_type:
        raise UserError(
            f"config.json is of {fields['model_type']}, but its architectures name {ours.model_type} alone; "
            "save that model with save_pretrained first"
        )
    record = {**getattr(ours, RECORD), "architectures": fields.get("architectures")}
    fields = dict(fields)
    if "auto_map" in fields:  # it names code of the plain model
        record["auto_map"] = fields.pop("auto_map")
    fields |= {"model_type": ours.model_type, "architectures": [class_name], RECORD: record}
    text = ours.get_text_config()
    added = {name: getattr(text, name) for name in SETTINGS if getattr(text, name) is not None}
    if text is ours:
        return fields | added
    return fields | {"text_config": fields["text_config"] | added | {"model_type": text.model_type}}


def with_verification(fields: dict[str, Any], verification: Verification) -> dict[str, Any]:
    """The fields with the figures in `attn_res_conversion`."""
    return fields | {RECORD: fields[RECORD] | {"verification": verification.to_dict()}}


def plain_of(fields: dict[str, Any], class_name: str) -> dict[str, Any]:
    """Undo `ours_of`.

    Args:
        class_name: what `architectures` is to name where nothing is recorded.
    """
    record = fields.get(RECORD) or {}
    fields = _plain_part(fields)
    fields["architectures"] = record.get("architectures") or [class_name]
    if "auto_map" in record:
        fields["auto_map"] = record["auto_map"]
    if isinstance(fields.get("text_config"), dict):
        fields["text_config"] = _plain_part(fields["text_config"])
    return fields


def write(path: Path, fields: dict[str, Any]) -> None:
    """Write fields as transformers does, beside the file first."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(path)


def _plain_part(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name not in (*SETTINGS, RECORD)}
    plain_type = plain_model_type(fields.get("model_type") or "")
    return kept if plain_type is None else kept | {"model_type": plain_type}


def _read(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder; download the checkpoint first, for example with "
            "hf download NAME --local-dir FOLDER"
        )
    fields = read_json(folder / CONFIG)
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"{folder / CONFIG} names no model_type, so it is not a model's configuration")
    return fields
