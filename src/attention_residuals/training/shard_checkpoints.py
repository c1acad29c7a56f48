"""Sharded checkpoints: every rank writes what it holds, and ranks in any other layout read what they need.

`torch.distributed.checkpoint` in one folder; tensors are named as in the whole model:

    model.NAME              parameters and persistent buffers
    optimizer.NAME.STATE    what the optimizer keeps of a parameter, such as exp_avg
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention_residuals.errors import UserError
from attention_residuals.models.auto import causal_lm_class
from attention_residuals.training.checkpoints import complete_checkpoints, keep_latest, mark_complete
from attention_residuals.training.model_share import ModelShare, first_names
from attention_residuals.training.process_group import lost_process, on_main

METADATA = ".metadata"  # written last by torch; only sharded checkpoints have it


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is of this kind, and not the Trainer's."""
    return (checkpoint / METADATA).is_file()


def save_shards(checkpoint: Path, share: ModelShare, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Write a checkpoint together, mark it complete, and only then remove the oldest. Every rank calls this.

    Raises:
        UserError: a rank could not write; earlier checkpoints are untouched.
    """
    _complete_state(optimizer)
    try:
        dcp.save(_state(share, optimizer), checkpoint_id=checkpoint)
    except Exception as error:
        if isinstance(error, RuntimeError) and lost_process(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        complete = complete_checkpoints(checkpoint.parent)
        remedy = f"{complete[-1].name} is complete; " if complete else ""
        raise UserError(
            f"{checkpoint.name} could not be written: {reason}; {remedy}make room and continue with --resume"
        ) from error

    def finish() -> None:
        mark_complete(checkpoint)
        keep_latest(checkpoint.parent, keep)

    on_main(finish)


def load_shards(checkpoint: Path, share: ModelShare, optimizer: torch.optim.Optimizer) -> None:
    """Fill this rank's parameters and optimizer from a checkpoint of any layout; every rank calls this.

    Raises:
        UserError: the checkpoint lacks a tensor, or has it in another shape.
    """
    _complete_state(optimizer)
    try:
        dcp.load(_state(share, optimizer), checkpoint_id=checkpoint)
    except dcp.CheckpointException as error:
        raise UserError(f"{checkpoint} could not be loaded: {_reason(error)}") from error


def load_whole_model(checkpoint: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a sharded checkpoint, in one process and without a process group.

    The optimizer's tensors aren't read.

    Args:
        config: the run's.

    Raises:
        UserError: the configuration is of no language model, or the checkpoint is damaged or of another.
    """
    try:
        model: PreTrainedModel = causal_lm_class(config)(config)
    except KeyError as error:
        raise UserError(
            f"config.json must be of a language model, got model_type {config.model_type!r}; put the run's "
            "own back"
        ) from error
    names = first_names(model)
    tensors = {names[name]: tensor for name, tensor in model.state_dict().items()}
    try:
        _check_no_others(checkpoint, tensors)
        with warnings.catch_warnings():  # one process is what is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({"model": tensors}, checkpoint_id=checkpoint, no_dist=True)
    except UserError:
        raise
    except (Exception, dcp.CheckpointException) as error:  # torch raises what reading and unpickling raise
        raise UserError(
            f"{checkpoint} could not be loaded: {_reason(error)}; copy it again or use an earlier checkpoint"
        ) from error
    return model


def save_whole_model(checkpoint: Path, config: PreTrainedConfig, folder: Path) -> None:
    """Write a sharded checkpoint's model as a Hugging Face folder. One process calls this, alone."""
    load_whole_model(checkpoint, config).save_pretrained(folder)


def _check_no_others(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint with more tensors, since torch reads those it is asked for."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    known = {f"model.{name}" for name in tensors}
    if others := sorted(name for name in stored if name.startswith("model.") and name not in known):
        raise UserError(
            f"{checkpoint} holds {len(others)} unknown tensors, such as {others[0].removeprefix('model.')}; "
            "they do not belong to its run's config.json"
        )


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _state(share: ModelShare, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors to write, or to read into."""
    kept: dict[str, Any] = {}
    for name, parameter in share.parameters().items():
        assert parameter in optimizer.state, f"{name} isn't the optimizer's"
        for field, value in optimizer.state[parameter].items():
            kept[f"{name}.{field}"] = value
    return {"model": share.tensors(), "optimizer": kept}


def _complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make what it keeps of parameters that had no gradient yet, as if at the start.

    Args:
        optimizer: between two steps, so that no parameter has a gradient.
    """
    groups = optimizer.param_groups
    fresh: list[nn.Parameter] = [p for group in groups for p in group["params"] if p not in optimizer.state]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in fresh:
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
