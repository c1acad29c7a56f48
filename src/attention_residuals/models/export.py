"""From a model to a folder that loads without this package: weights, config and our source files beside them.

`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` then needs transformers and torch only.
Each module that the model classes import is written as one flat file, since transformers follows relative
imports within one folder.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attention_residuals.models.auto import AUTOS

PACKAGE = "attention_residuals"
ENTRY = f"{PACKAGE}.models.auto"
_IMPORT = re.compile(rf"^(\s*)from ({PACKAGE}[\w.]*) import", re.MULTILINE)


def export_with_code(model: PreTrainedModel, folder: str | Path) -> Path:
    """Save a model so that it loads with `trust_remote_code=True` where this package isn't installed.

    Args:
        model: one of our models (with head or without).
        folder: where weights, `config.json` and the `.py` files go; made if needed.

    Returns:
        The folder.

    Raises:
        TypeError: the model is not one of ours.
    """
    folder = Path(folder)
    config = model.config
    if not hasattr(config, "attn_res"):
        raise TypeError(f"{type(model).__name__} has no attention residuals; use save_pretrained")
    model.save_pretrained(folder)
    for module in required_modules():
        _write(folder / f"{flat_name(module)}.py", _flattened_source(module))
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields["auto_map"] = _auto_map(config)
    _write(folder / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return folder


def _auto_map(config: Any) -> dict[str, str]:
    """Auto class -> file and class, for every Auto class that knows this architecture."""
    entry = flat_name(ENTRY)
    known: dict[str, Any] = {auto.__name__: auto._model_mapping for auto in AUTOS}
    classes = {name: m[type(config)].__name__ for name, m in known.items() if type(config) in m}
    return {"AutoConfig": f"{entry}.{type(config).__name__}"} | {
        n: f"{entry}.{c}" for n, c in classes.items()
    }


def flat_name(module: str) -> str:
    """attention_residuals.models.auto -> attn_res_models_auto."""
    return module.replace(PACKAGE, "attn_res", 1).replace(".", "_")


def required_modules() -> list[str]:
    """The modules of this package that the model classes need, found by following their imports."""
    found: list[str] = []
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.append(module)
            waiting += [match[1] for match in _IMPORT.findall(_source(module))]
    return sorted(found)


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")


def _flattened_source(module: str) -> str:
    source = _IMPORT.sub(lambda m: f"{m[1]}from .{flat_name(m[2])} import", _source(module))
    ast.parse(source)
    return source


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
