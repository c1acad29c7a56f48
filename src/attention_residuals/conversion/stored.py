"""What a checkpoint holds: its files, and name, shape and dtype of its tensors, without their values."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from attention_residuals.errors import UserError

# arguments of from_pretrained that say where a file of a model is found
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")
PICKLES = ("*.bin", "*.pth")


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint; `dtype` as safetensors spells it, such as BF16."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.numel * (int(bits[0]) if bits else 8) // 8


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The safetensors files of a folder.

    Attributes:
        files: their names.
        tensors: name of a tensor -> where and what it is.
        metadata: what the index says beside the names; empty without an index.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any]


def read_stored(folder: Path) -> StoredWeights:
    """Read the headers of a folder's weights, as transformers would find them.

    Raises:
        UserError: no safetensors weights, a damaged file, or an index that doesn't agree with the files.
    """
    index: dict[str, Any] = {}
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        files: tuple[str, ...] = (SAFE_WEIGHTS_NAME,)
    elif (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        index = read_json(folder / SAFE_WEIGHTS_INDEX_NAME)
        files = tuple(sorted(set(index.get("weight_map", {}).values())))
    else:
        _refuse_no_weights(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _read_header(folder, file)
    if index:
        _check_index(folder, index["weight_map"], tensors)
    return StoredWeights(folder, files, tensors, index.get("metadata") or {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: no such file, or no object in it.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give a folder as save_pretrained writes it") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); copy it again") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds no JSON object; copy it again")
    return fields


def stored_keys(path: str, hub: dict[str, Any]) -> list[str]:
    """The names of tensors in the safetensors of a folder or a name on the Hub; none for other formats."""
    found = {
        name: cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    }
    if (single := found[SAFE_WEIGHTS_NAME]) is not None:
        with safe_open(single, framework="pt") as file:
            return list(file.keys())
    index = found[SAFE_WEIGHTS_INDEX_NAME]
    return [] if index is None else list(read_json(Path(index))["weight_map"])


def ignored_groups(keys: Iterable[str], model: Any) -> dict[str, int]:
    """How many stored tensors the architecture leaves aside by its own rules, e.g. {"mtp.*": 12}."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    prefix, own = f"{model.base_model_prefix}.", model.state_dict().keys()
    groups: collections.Counter[str] = collections.Counter()
    for key in keys:
        loaded = {key, key.removeprefix(prefix), f"{prefix}{key}"} & own
        if not loaded and any(pattern.search(key) for pattern in patterns):
            first, *rest = key.split(".")
            groups[f"{first}.{rest[0]}.*" if first == "model" and rest else f"{first}.*"] += 1
    return dict(groups)


def _read_header(folder: Path, file: str) -> dict[str, StoredTensor]:
    try:
        with safe_open(folder / file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no dict)
            return {
                key: StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
                for key, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / file} is missing or damaged ({error}); copy it again") from error


def _check_index(folder: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    actual = {key: tensor.file for key, tensor in tensors.items()}
    if wrong := sorted(actual.items() ^ weight_map.items()):
        raise UserError(
            f"the index in {folder} and its files disagree about {len({key for key, _ in wrong})} tensors, "
            f"such as {wrong[0][0]}; copy the folder again"
        )


def _refuse_no_weights(folder: Path) -> Any:
    if any(path for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"the weights in {folder} are pickles, which are not converted file by file; load the model and "
            "save it again with save_pretrained, which writes safetensors"
        )
    raise UserError(f"{folder} holds no safetensors weights; give a folder as save_pretrained writes it")
