"""From a model folder or a sharded checkpoint to a model with its tokenizer, and from text to token ids.

Faults are UserErrors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attention_residuals.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")


class LoadedModel(NamedTuple):
    """A model in eval mode on its device, and the tokenizer saved beside it."""

    model: Any  # a PreTrainedModel that generates; transformers has no type for the two together
    tokenizer: PreTrainedTokenizerBase


def load_model(folder: Path, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a folder that save_pretrained or `attnres train` wrote; nothing is downloaded.

    Args:
        folder: a model folder, or a sharded checkpoint in its run's folder.
        device: a torch device such as "cpu" or "cuda:1"; "auto" takes CUDA, then MPS, then the CPU.
        dtype: one of DTYPES; "auto" keeps the checkpoint's.

    Raises:
        UserError: the folder, its configuration, weights or tokenizer is missing, damaged or of another
            model, or the device or dtype is not to be had.
    """
    sharded = (folder / ".metadata").is_file()  # as `is_sharded` has it, whose module imports torch
    home = _run_of(folder) if sharded else folder
    _check_folder(home)
    if not sharded:
        _check_weights(folder)
    target = choose_device(device)
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    tokenizer = _load_tokenizer(home)
    model = _load_shards(folder, home, dtype) if sharded else _load_weights(folder, dtype)
    return LoadedModel(model.to(target).eval(), tokenizer)


def choose_device(device: str) -> torch.device:
    """The torch device of that name, or the best there is for "auto".

    Raises:
        UserError: no such device on this machine.
    """
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {device!r} cannot be used: {_first_line(error)}; try --device cpu"
        ) from error
    if target.type == "meta":
        raise UserError("device 'meta' holds no numbers, so nothing can run on it; try --device cpu")
    return target


def encode(loaded: LoadedModel, text: str, *, max_tokens: int | None = None) -> torch.Tensor:
    """Token ids [1, T] on the model's device, cut to the first `max_tokens`.

    Raises:
        UserError: no token is left, or an id lies outside the model's vocabulary.
    """
    import torch

    ids = loaded.tokenizer(text)["input_ids"][:max_tokens]
    if not ids:
        raise UserError("the text is empty once tokenised; give at least one token, such as --prompt 'a'")
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    if max(ids) >= vocabulary:
        raise UserError(
            f"the tokenizer gives token {max(ids)}, but the model has {vocabulary} embeddings; "
            "the tokenizer belongs to another model, so copy the model's own into its folder"
        )
    return torch.tensor([ids], device=loaded.model.device)


def token_texts(loaded: LoadedModel, input_ids: torch.Tensor) -> list[str]:
    """What each of the first row's tokens [B, T] says; a token that is part of a letter shows as \\ufffd."""
    return [str(loaded.tokenizer.decode([token])) for token in input_ids[0].tolist()]


def _run_of(checkpoint: Path) -> Path:
    """The run of a sharded checkpoint, which keeps configuration and tokenizer once."""
    run = checkpoint.resolve().parent.parent
    if not (run / "config.json").is_file():
        raise UserError(
            f"a sharded checkpoint must lie in checkpoints/ of its run, which holds config.json, but {run} "
            f"holds none; move {checkpoint} back"
        )
    return run


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise UserError(
            f"model folder {folder} does not exist; attnres train --output-dir {folder} makes one"
        )
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json, so it is not a model folder{_newest_in(folder)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{folder / 'config.json'} names no model_type, so it is not a model's configuration")


def _check_weights(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        remedy = _newest_in(folder) or "; save the model there again"
        raise UserError(f"{folder} holds no weights (model.safetensors){remedy}")


def _newest_in(folder: Path) -> str:
    """What to add to an error where a run was given in place of a checkpoint of it; empty if it has none."""
    kinds = ("config.json", ".metadata")  # of the Trainer's checkpoints and of sharded ones
    saved = [path for kind in kinds for path in folder.glob(f"**/checkpoint-*/{kind}")]
    newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    return "" if newest is None else f"; the newest checkpoint in it is {newest.parent}"


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # the tokenizers library raises bare Exception for a damaged tokenizer.json
    except Exception as error:
        raise UserError(
            f"no tokenizer can be loaded from {folder}: {_first_line(error)}; "
            "save one there with tokenizer.save_pretrained"
        ) from error


def _load_weights(folder: Path, dtype: str) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import attention_residuals  # noqa: F401  registers our models with the Auto classes

    requested = dtype if dtype == "auto" else getattr(torch, dtype)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(folder, dtype=requested, local_files_only=True, output_loading_info=True)
    except SafetensorError as error:
        raise UserError(
            f"the weights in {folder} are damaged ({_first_line(error)}); "
            "copy them again or use an earlier checkpoint"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, EOFError) as error:
        raise UserError(f"{folder} cannot be loaded as a language model: {_first_line(error)}") from error
    _check_complete(folder, report)
    return model


def _load_shards(checkpoint: Path, run: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig

    import attention_residuals  # noqa: F401  registers our models with the Auto classes
    from attention_residuals.training.shard_checkpoints import load_whole_model

    try:
        config = AutoConfig.from_pretrained(run, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{run} has no usable configuration: {_first_line(error)}") from error
    model = load_whole_model(checkpoint, config)
    return model if dtype == "auto" else model.to(getattr(torch, dtype))


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    """transformers fills missing tensors with random numbers; a model like that is not the one asked for."""
    for name, what in (("missing_keys", "lack"), ("unexpected_keys", "hold unknown")):
        if keys := sorted(map(str, report.get(name) or ())):
            raise UserError(
                f"the weights in {folder} {what} {len(keys)} tensors, such as {keys[0]}; "
                "they do not belong to its config.json"
            )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
