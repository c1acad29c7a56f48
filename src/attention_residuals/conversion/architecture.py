"""From a config to the classes behind a checkpoint, and the checks that its tensors belong to them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from attention_residuals.config import AttnResConfig
from attention_residuals.models import auto
from attention_residuals.models.auto import model_class, our_config
from attention_residuals.models.families import COMPOSITES, FAMILIES

PACKAGE = "attention_residuals"
# the field of config.json that says where a model comes from
RECORD = "attn_res_conversion"
OTHER_ALGORITHM = "res_bias"


def conversion_record(plain: PreTrainedConfig) -> dict[str, Any]:
    """What `config.json` keeps of the plain model, so that the way back needs no guess."""
    return {
        "model_type": plain.model_type,
        "architectures": list(plain.architectures or []),
        "package": f"{PACKAGE} {version(PACKAGE)}",
    }


def plain_types(model_type: str) -> set[str]:
    """The model type, and with a composite that of its language model."""
    composite = COMPOSITES.get(model_type)
    return {model_type} if composite is None else {model_type, composite.text_type}


def recognised_family(model: Any) -> dict[str, Any] | None:
    """Where the parts of an architecture without a row in `FAMILIES` are; None for those with one."""
    if plain_types(model.config.model_type) & FAMILIES.keys():
        return None
    from attention_residuals.models.recognise import recognise

    return recognise(model).to_dict()


def refuse_other_algorithm(names: Iterable[str]) -> None:
    """Checkpoints with a bias per source hold a trained depth attention of another form."""
    if found := next((name for name in names if OTHER_ALGORITHM in name), None):
        raise ValueError(
            f"{found} belongs to another algorithm of attention residuals, which this package doesn't "
            "compute; convert a plain checkpoint"
        )


def named_class(config: Any) -> Any:
    """The class of transformers that a plain config's `architectures` names, else its language model."""
    if not config.architectures:
        try:
            return AutoModelForCausalLM._model_mapping[type(config)]
        except KeyError:
            raise ValueError(
                f"config.json names no architecture, and {config.model_type} has no language model in "
                "transformers; write its class into architectures"
            ) from None
    found = getattr(transformers, config.architectures[0], None)
    if found is None:
        raise ValueError(
            f"{config.architectures[0]} is no class of transformers {transformers.__version__}; load the "
            "model yourself and convert(model)"
        )
    return found


def our_class_and_config(plain: Any, settings: AttnResConfig) -> tuple[Any, Any, Any]:
    """From a plain config: our model class and config, and the plain class."""
    plain_class = named_class(plain)
    if plain_class.config_class is not type(plain):
        plain = plain.get_text_config()  # the language model alone, from the checkpoint of a composite
    family = None
    if not plain_types(plain.model_type) & FAMILIES.keys():
        with torch.device("meta"):
            model = plain_class(plain)
        family = recognised_family(model)
    ours = our_config(plain, settings, family)
    setattr(ours, RECORD, conversion_record(plain))
    return model_class(plain_class, plain.model_type), ours, plain_class


def check_report(report: dict[str, Any], where: str, *, reads_missing: bool) -> None:
    """Raise unless a checkpoint fits its architecture, reads apart if they may be missing.

    Args:
        report: what from_pretrained gives with output_loading_info=True.
        where: what the message calls the checkpoint.
    """
    refuse_other_algorithm(report["unexpected_keys"])
    missing = {key for key in report["missing_keys"] if not (reads_missing and ".read." in key)}
    faults = (
        (missing, "lacks"),
        (report["unexpected_keys"], "holds, unknown to its architecture,"),
        ({key[0] for key in report["mismatched_keys"]}, "holds in other shapes"),
    )
    for keys, fault in faults:
        if keys:
            raise ValueError(
                f"{where} {fault} {len(keys)} tensors, such as {min(keys)}; its weights and its config.json "
                "don't belong together"
            )


@contextlib.contextmanager
def expected_missing() -> Iterator[None]:
    """Without transformers' table of missing keys: the report is checked instead."""
    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(_errors_only)
    try:
        yield
    finally:
        reporter.removeFilter(_errors_only)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def our_named_class(config: Any) -> Any:
    """Our class that one of our configs names in `architectures`, else its language model."""
    if config.architectures:
        return getattr(auto, config.architectures[0])
    return auto.causal_lm_class(config)
