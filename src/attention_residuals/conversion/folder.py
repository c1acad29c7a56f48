"""From a checkpoint folder to a converted one and back, file by file: weights are copied, never loaded.

The reads go into a file of their own, so a converted folder differs from the plain one by that file, the
index that names it, config.json and README.md. Everything is written into a folder beside the target, which
takes the target's name once it is complete and verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attention_residuals.config import AttnResConfig
from attention_residuals.conversion import config_json
from attention_residuals.conversion.architecture import (
    check_report,
    expected_missing,
    our_class_and_config,
    our_named_class,
    refuse_other_algorithm,
)
from attention_residuals.conversion.model_card import CARD, DEPTH_MAP, KEPT_CARD, write_card
from attention_residuals.conversion.stored import StoredTensor, StoredWeights, ignored_groups, read_stored
from attention_residuals.conversion.verify import Side, Verification, choose_inputs, compare
from attention_residuals.convert import lossless_settings, refuse_trained
from attention_residuals.errors import UserError

READS_FILE = "model-attn-res.safetensors"
# transformers takes a file called model.safetensors for all the weights there are
ONLY_SHARD = "model-00001-of-00001.safetensors"
# weights in other formats, and the state of a training
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt")
# dtype -> what safetensors calls it
_STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
COPIED_FOLDERS = ("additional_chat_templates",)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a conversion wrote.

    Attributes:
        folder: the target.
        parameters: how many parameters were added, or removed on the way back.
        kept: tensors that the architecture leaves aside, copied all the same: {"mtp.*": 12}.
        verification: None where it was not asked for.
    """

    folder: Path
    parameters: int
    kept: dict[str, int]
    verification: Verification | None


def convert_folder(
    source: Path, target: Path, settings: AttnResConfig, *, verify: bool = True, text: str | None = None
) -> Result:
    """Write a converted copy of a plain checkpoint folder.

    Args:
        settings: lossless ones, see `convert.lossless_settings`.
        verify: compare both folders' logits afterwards, in float32; see `verify.compare`.
        text: what they are compared on; a built-in paragraph by default.

    Raises:
        UserError: the source can't be converted, the target is not empty or can't be written, or the
            verification failed; the target then stays as it was.
    """
    _check_target(source, target)
    fields = config_json.read_plain(source)
    weights = read_stored(source)
    with _mistakes_of(source):
        refuse_other_algorithm(weights.tensors)
        ours, config, plain_class = our_class_and_config(AutoConfig.from_pretrained(source), settings)
        model = _fit_on_meta(ours, config, weights, reads_missing=True)
        # under the prefix that the checkpoint has
        reads = revert_weight_conversion(model, {k: t for k, t in model.state_dict().items() if _is_read(k)})
    stored = {key: StoredTensor(READS_FILE, tuple(t.shape), _STORED[t.dtype]) for key, t in reads.items()}
    files = {name: ONLY_SHARD if name == SAFE_WEIGHTS_NAME else name for name in weights.files}
    inputs = choose_inputs(source, text, config, ours) if verify else None
    verification = record = None
    with _new_folder(target, weights) as folder:
        _copy_beside(source, folder)
        for name, copy in files.items():
            shutil.copyfile(source / name, folder / copy)
        save_file({k: _fresh(k, t) for k, t in reads.items()}, folder / READS_FILE, metadata={"format": "pt"})
        tensors = {key: t._replace(file=files[t.file]) for key, t in weights.tensors.items()}
        _write_index(folder, tensors | stored, weights.metadata, added=stored.values(), sign=1)
        written = config_json.ours_of(fields, config, ours.__name__)
        config_json.write(folder / config_json.CONFIG, written)
        if inputs is not None:
            verification, record = compare(Side(source, plain_class), Side(folder, ours), inputs, folder)
            written = config_json.with_verification(written, verification)
            config_json.write(folder / config_json.CONFIG, written)
        write_card(source, folder, config, ours, verification, record)
    kept = ignored_groups(weights.tensors, model)
    return Result(target, sum(t.numel for t in stored.values()), kept, verification)


def restore_folder(source: Path, target: Path, *, verify: bool = True, text: str | None = None) -> Result:
    """Write the plain checkpoint back from a converted folder whose queries are all zero, bit for bit.

    Raises:
        UserError: as `convert_folder`, and where a query is not zero.
    """
    _check_target(source, target)
    fields = config_json.read_ours(source)
    weights = read_stored(source)
    reads = {key: tensor for key, tensor in weights.tensors.items() if _is_read(key)}
    with _mistakes_of(source):
        config = AutoConfig.from_pretrained(source)
        ours = our_named_class(config)
        lossless_settings(AttnResConfig.from_dict(config.get_text_config().attn_res))
        model = _fit_on_meta(ours, config, weights, reads_missing=False)
        refuse_trained(_stored_queries(source, reads))
    plain_class = ours.__bases__[1]  # beside the mixin
    left = {key: tensor for key, tensor in weights.tensors.items() if key not in reads}
    files = {name: name for name in dict.fromkeys(tensor.file for tensor in left.values())}
    if list(files) == [ONLY_SHARD]:
        files = {ONLY_SHARD: SAFE_WEIGHTS_NAME}
    mixed = {tensor.file for tensor in reads.values()}
    inputs = choose_inputs(source, text, config, ours) if verify else None
    verification = None
    with _new_folder(target, weights) as folder:
        _copy_beside(source, folder)
        for name, copy in files.items():
            if name in mixed:
                _copy_without(source / name, folder / copy, reads)
            else:
                shutil.copyfile(source / name, folder / copy)
        if SAFE_WEIGHTS_NAME not in files.values():
            _write_index(folder, left, weights.metadata, added=reads.values(), sign=-1)
        plain = config_json.plain_of(fields, plain_class.__name__)
        config_json.write(folder / config_json.CONFIG, plain)
        if inputs is not None:
            verification, _ = compare(Side(folder, plain_class), Side(source, ours), inputs, folder)
    kept = ignored_groups(weights.tensors, model)
    return Result(target, sum(t.numel for t in reads.values()), kept, verification)


def _is_read(key: str) -> bool:
    return ".read." in key


def _fresh(key: str, like: torch.Tensor) -> torch.Tensor:
    make = torch.ones if key.endswith(".key_weight") else torch.zeros
    return make(like.shape, dtype=like.dtype)


def _fit_on_meta(ours: Any, config: Any, weights: StoredWeights, *, reads_missing: bool) -> Any:
    """Load names and shapes alone, as transformers would load the weights; raises where they don't fit."""
    named = {name: dtype for dtype, name in _STORED.items()}
    empty = {
        key: torch.empty(tensor.shape, dtype=named.get(tensor.dtype, torch.float32), device="meta")
        for key, tensor in weights.tensors.items()
    }
    with expected_missing():
        model, report = ours.from_pretrained(
            None, config=config, state_dict=empty, device_map={"": "meta"}, output_loading_info=True
        )
    check_report(report, str(weights.folder), reads_missing=reads_missing)
    return model


def _stored_queries(folder: Path, reads: dict[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in reads.items():
        name, _, parameter = key.rpartition(".")
        if parameter != "key_weight":
            with safe_open(folder / tensor.file, framework="pt") as opened:
                yield name, opened.get_tensor(key)


def _copy_without(path: Path, copy: Path, reads: dict[str, StoredTensor]) -> None:
    """A file of weights that holds reads among others, without them."""
    with safe_open(path, framework="pt") as opened:
        kept = {key: opened.get_tensor(key) for key in opened.keys() if key not in reads}  # noqa: SIM118
        save_file(kept, copy, metadata=opened.metadata())


def _copy_beside(source: Path, folder: Path) -> None:
    """Tokenizer, processor, generation config, licence: everything but weights and what is written anew."""
    going_back = (source / READS_FILE).is_file() or (source / KEPT_CARD).is_file()
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name in COPIED_FOLDERS:
                shutil.copytree(path, folder / path.name)
        elif going_back and path.name in (CARD, DEPTH_MAP):
            continue
        elif path.name == CARD:
            shutil.copyfile(path, folder / KEPT_CARD)
        elif path.name == KEPT_CARD:
            shutil.copyfile(path, folder / CARD)
        elif not (
            path.name.startswith(".")
            or path.name == config_json.CONFIG
            or path.name.endswith((*NOT_COPIED, ".index.json"))
        ):
            shutil.copyfile(path, folder / path.name)


def _write_index(
    folder: Path,
    tensors: dict[str, StoredTensor],
    metadata: dict[str, Any],
    *,
    added: Iterable[StoredTensor],
    sign: int,
) -> None:
    """The index of a folder; `added` tensors came on top of the old totals (sign 1) or left (sign -1)."""
    added = list(added)
    totals = {"total_size": sum(t.nbytes for t in added), "total_parameters": sum(t.numel for t in added)}
    known = {"total_size": sum(t.nbytes for t in tensors.values()) - sign * totals["total_size"]} | metadata
    known |= {name: known[name] + sign * count for name, count in totals.items() if name in known}
    index = {"metadata": known, "weight_map": {key: tensor.file for key, tensor in tensors.items()}}
    config_json.write(folder / SAFE_WEIGHTS_INDEX_NAME, index)


@contextlib.contextmanager
def _mistakes_of(source: Path) -> Iterator[None]:
    """Errors about a checkpoint are mistakes that the user of a command can mend."""
    try:
        yield
    except (ValueError, TypeError, OSError, AttributeError, KeyError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{source} can't be converted: {lines[0]}") from error


def _check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise UserError(f"OUT must be another folder than IN, got {target} for both")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; give a new one, nothing is overwritten")


@contextlib.contextmanager
def _new_folder(target: Path, weights: StoredWeights) -> Iterator[Path]:
    """A folder beside the target that takes its name at the end, or vanishes with whatever is raised."""
    target = target.absolute()
    folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        needed = sum((weights.folder / name).stat().st_size for name in weights.files)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise UserError(
                f"{target} needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; give a folder on "
                "another disk"
            )
        folder.mkdir()
        yield folder
        for path in folder.rglob("*"):
            if path.is_file():
                _to_disk(path)
        folder.replace(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise UserError(f"{target} was not written: {reason}; nothing is left of it") from error
        raise


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
