"""From a sharded checkpoint to the whole model, in one process and without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from attention_residuals.errors import UserError
from attention_residuals.models.auto import causal_lm_class
from attention_residuals.training.model_share import first_names


def load_shards(checkpoint: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a checkpoint that `training.shard_checkpoints` wrote; the optimizer's tensors aren't read.

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
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise UserError(
            f"{checkpoint} could not be loaded: {reason}; copy it again or use an earlier checkpoint"
        ) from error
    return model


def _check_no_others(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint with more tensors, since torch reads those it is asked for."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    known = {f"model.{name}" for name in tensors}
    if others := sorted(name for name in stored if name.startswith("model.") and name not in known):
        raise UserError(
            f"{checkpoint} holds {len(others)} unknown tensors, such as {others[0].removeprefix('model.')}; "
            "they do not belong to its run's config.json"
        )
