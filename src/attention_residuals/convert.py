"""Plain model or checkpoint -> attention residuals, and back, without changing what the model computes.

The sources are a partition of the residual stream, so with zero queries and read_scale="sum" every weight is
1 and each read is the standard residual stream itself. What changes is the order of additions: rounding.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from attention_residuals.config import AttnResConfig
from attention_residuals.conversion.architecture import (
    RECORD,
    check_report,
    conversion_record,
    expected_missing,
    our_class_and_config,
    our_named_class,
    plain_types,
    recognised_family,
    refuse_other_algorithm,
)
from attention_residuals.conversion.stored import HUB_ARGUMENTS, ignored_groups, stored_keys
from attention_residuals.models import attach
from attention_residuals.models.auto import model_class, our_config, plain_config, plain_model_type
from attention_residuals.models.families import COMPOSITES
from attention_residuals.models.mixins import AttnResBackbone, backbone_of, give_reads
from attention_residuals.read import DepthRead

LOSSLESS = AttnResConfig(mode="block", num_blocks=8, read_scale="sum")

_logger = logging.getLogger(__name__)
_Model = TypeVar("_Model")


def convert(
    model_or_path: PreTrainedModel | str | os.PathLike[str],
    config: AttnResConfig | None = None,
    *,
    back: bool = False,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Give a plain pretrained decoder attention residuals, without changing a logit beyond rounding.

    Queries start at zero and key weights at one. Untouched weights keep their names and values; `config.json`
    gets `attn_res` (the settings) and `attn_res_conversion` (where the model comes from).

    Args:
        model_or_path: a model of transformers, changed in place and returned: same parameters, tied weights,
            dtypes, devices, training flags and generation config. Or a folder or a name on the Hub: the model
            that its `config.json` names (`architectures`) is loaded, a vision tower included.
        config: how depth is divided; eight blocks by default. `read_scale` must be "sum": with "mean" the
            stream would be divided by the number of sources, which differs from read to read, and eps and the
            sublayers of models without RMSNorm would see it.
        back: the other direction: a converted model whose queries are all still zero becomes the plain one.
        **from_pretrained_kwargs: for a path; passed on (dtype, device_map, revision, token ...).

    Returns:
        A model of class `<Family>AttnRes...`, or the plain class with `back`.

    Raises:
        TypeError: not a model of transformers, or loading arguments beside a model.
        ValueError: converted already; settings that would change the function; dispatched over several
            devices, sharded or hooked; an architecture without the two pre-norms; a checkpoint of another
            algorithm, or whose tensors don't fit the architecture; trained queries on the way back.
    """
    if back and config is not None:
        raise ValueError("config belongs to the way there, but back=True was given; leave config out")
    settings = lossless_settings(config)
    if isinstance(model_or_path, (str, os.PathLike)):
        path = os.fspath(model_or_path)
        if back:
            return to_plain(_load_ours(path, from_pretrained_kwargs))
        return _load_plain(path, settings, from_pretrained_kwargs)
    if from_pretrained_kwargs:
        raise TypeError(
            f"{sorted(from_pretrained_kwargs)} are for loading, but a model was given; give its path instead"
        )
    if not isinstance(model_or_path, PreTrainedModel):
        raise TypeError(
            f"model_or_path must be a model of transformers or a path, got {type(model_or_path).__name__}; "
            "convert the model first, then compile, wrap or adapt it"
        )
    return to_plain(model_or_path) if back else to_ours(model_or_path, settings)


def lossless_settings(config: AttnResConfig | None) -> AttnResConfig:
    """The settings, or the default ones; refused where zero queries would not be the plain model."""
    if config is None:
        return LOSSLESS
    if not isinstance(config, AttnResConfig):
        raise TypeError(f"config must be an AttnResConfig, got {type(config).__name__}")
    if config.mode == "standard":
        raise ValueError(
            "mode='standard' has no reads, so there is nothing to convert; use mode='block' or 'full'"
        )
    if config.read_scale != "sum":
        raise ValueError(
            f"read_scale must be 'sum' to keep a pretrained model's function, got {config.read_scale!r}, "
            "which divides the residual stream by the number of sources; use AttnResConfig(read_scale='sum')"
        )
    refuse_lossy_variant(config)
    return config


def refuse_lossy_variant(config: AttnResConfig) -> None:
    """Raise unless reads with equal weights add up to the residual stream, and can learn others."""
    if config.window is not None:
        raise ValueError(
            f"window must be None to keep a pretrained model's function, got {config.window}: sources "
            "outside it would be missing from the residual stream; leave it out, or train from scratch"
        )
    if config.values != "plain":
        raise ValueError(
            f"values must be 'plain' to keep a pretrained model's function, got {config.values!r}: "
            "normalised sources don't add up to the residual stream; leave it out, or train from scratch"
        )
    if config.weights == "uniform":
        raise ValueError(
            "weights='uniform' has nothing to learn, so the converted model would stay the plain one; "
            "use another value of weights"
        )


def to_ours(model: Any, settings: AttnResConfig) -> Any:
    """Swap classes and configs of a plain model, in place; `settings` are lossless."""
    _refuse_unsuitable(model)
    family = recognised_family(model)
    plain_type = model.config.model_type
    ours = model_class(type(model), plain_type)  # type: ignore[arg-type]
    record = conversion_record(model.config)
    swapped: dict[int, Any] = {}
    before = _swap_configs(
        model, lambda plain: _ours_of(plain, settings, family, swapped), plain_types(plain_type)
    )
    whole = issubclass(ours, AttnResBackbone)
    backbone = model if whole else backbone_of(model, ours.attn_res_path)
    plain_backbone = type(backbone)
    try:
        give_reads(backbone, ours if whole else ours.attn_res_backbone)
    except Exception:  # an architecture that can't have reads leaves the model as it came
        for module, config in before:
            module.config = config
        backbone.__class__ = plain_backbone
        raise
    model.__class__ = ours
    setattr(model.config, RECORD, record)
    model.config.architectures = [ours.__name__]
    _refresh(model)
    return model


def to_plain(model: Any) -> Any:
    """Undo `to_ours`, in place; refused unless all queries are zero and the scale is the lossless one."""
    backbone: Any = next((m for m in model.modules() if isinstance(m, AttnResBackbone)), None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} has no attention residuals, so there is no way back")
    _refuse_hooks(model)
    settings = AttnResConfig.from_dict(backbone.config.attn_res)
    if settings.mode != "standard" and settings.read_scale != "sum":
        raise ValueError(
            f"only read_scale='sum' has a plain model of the same function, got {settings.read_scale!r}; "
            "keep this model as it is"
        )
    refuse_lossy_variant(settings)
    reads = [(name, m) for name, m in model.named_modules() if isinstance(m, DepthRead)]
    refuse_trained((name, parameter) for name, read in reads for parameter in read.weighing_parameters())
    swapped: dict[int, Any] = {}
    types = {config.model_type for config in (model.config, backbone.config)}
    architectures = getattr(model.config, RECORD, {}).get("architectures")
    _swap_configs(model, lambda ours: _plain_of(ours, swapped), types)
    for module in list(model.modules()):
        if plain := getattr(type(module), "attn_res_plain_class", None):
            _strip(module)
            module.__class__ = plain
    for name in ("depth_plan", "read_groups", "depth_records"):
        delattr(backbone, name)
    for module in dict.fromkeys((backbone, model)):
        module.__class__ = type(module).__bases__[1]  # beside the mixin
    _CAN_RECORD_REGISTRY[backbone] = backbone._can_record_outputs
    model.config.architectures = architectures or None
    _refresh(model)
    return model


def refuse_trained(queries: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Raise unless every query, or what a variant has instead, is zero; each comes with its read's name."""
    trained = [name for name, query in queries if query.is_meta or bool(query.count_nonzero())]
    if trained:
        raise ValueError(
            f"all queries must be zero for the way back, but {len(trained)} are not, such as that of "
            f"{trained[0]}; a trained read has no counterpart in the plain model"
        )


def _ours_of(
    plain: Any, settings: AttnResConfig, family: dict[str, Any] | None, swapped: dict[int, Any]
) -> Any:
    if id(plain) not in swapped:
        ours = our_config(plain, settings, family)
        _same_state(ours, plain, lambda text: _ours_of(text, settings, family, swapped))
        swapped[id(plain)] = ours
    return swapped[id(plain)]


def _plain_of(ours: Any, swapped: dict[int, Any]) -> Any:
    if id(ours) not in swapped:
        plain = plain_config(ours)
        for name in ("attn_res", "attn_res_family", RECORD):
            vars(plain).pop(name, None)
        _same_state(plain, ours, lambda text: _plain_of(text, swapped))
        swapped[id(ours)] = plain
    return swapped[id(ours)]


def _same_state(target: Any, source: Any, swap_text: Any) -> None:
    """Also what a config holds beside its fields (name, implementations); other sub-configs are kept."""
    own = ("attn_res", "attn_res_family", RECORD, "model_type")
    vars(target).update({name: value for name, value in vars(source).items() if name not in own})
    if target.model_type in COMPOSITES or plain_model_type(target.model_type) in COMPOSITES:
        target.text_config = swap_text(source.text_config)


def _swap_configs(model: Any, swap: Any, types: set[str]) -> list[tuple[Any, Any]]:
    """Gives the modules with a config of these types another one; returns them with what they had."""
    held = [(module, vars(module).get("config")) for module in model.modules()]
    held = [(m, c) for m, c in held if isinstance(c, PreTrainedConfig) and type(c).model_type in types]
    for module, config in held:
        module.config = swap(config)
    return held


def _strip(module: Any) -> None:
    """Remove what `attach` has put into a norm or a layer: the attributes that its mixin declares."""
    for mixin in type(module).__mro__:
        if mixin.__module__ == attach.__name__:
            for name in inspect.get_annotations(mixin):
                if name in vars(module) or name in module._modules:
                    delattr(module, name)


def _refresh(model: Any) -> None:
    """What a class decides at the end of `__init__`; also, new reads train as their norm does."""
    for module in model.modules():
        read = getattr(module, "read", None)
        if isinstance(read, DepthRead):
            read.train(module.training)
    for module in reversed(list(model.modules())):
        if isinstance(module, PreTrainedModel):
            module.init_parallel_plans()


def _refuse_unsuitable(model: Any) -> None:
    if plain_model_type(model.config.model_type) or any(
        isinstance(m, AttnResBackbone) for m in model.modules()
    ):
        raise ValueError(
            f"{type(model).__name__} has attention residuals already; convert a plain model, or go back "
            "first with convert(model, back=True)"
        )
    refuse_other_algorithm(name for name, _ in model.named_parameters())
    _refuse_hooks(model)


def _refuse_hooks(model: Any) -> None:
    """A forward in an instance hides that of the class, so swapping classes would do nothing."""
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(
            "the model is dispatched over several devices, whose hooks hide a new class; give the path and "
            "the device_map instead: convert(path, device_map=...)"
        )
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {name or 'the model'} was replaced, by a hook or a kernel, which would hide "
                "a new class; convert the model before that"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise ValueError(f"{name} is sharded; convert the model before it is distributed")


def _load_plain(path: str, settings: AttnResConfig, kwargs: dict[str, Any]) -> Any:
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    plain = AutoConfig.from_pretrained(path, **hub)
    if plain_model_type(plain.model_type):
        raise ValueError(f"{path} has attention residuals already; load it with from_pretrained")
    ours, config, _ = our_class_and_config(plain, settings)
    with expected_missing():
        model, report = ours.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    check_report(report, path, reads_missing=True)
    for group, count in ignored_groups(stored_keys(path, hub), model).items():
        _logger.warning("%s: %d tensors of %s are not loaded by %s", path, count, group, ours.__name__)
    return model


def _load_ours(path: str, kwargs: dict[str, Any]) -> Any:
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    config = AutoConfig.from_pretrained(path, **hub)
    if plain_model_type(config.model_type) is None:
        raise ValueError(f"{path} has no attention residuals, so there is no way back")
    ours = our_named_class(config)
    model, report = ours.from_pretrained(path, output_loading_info=True, **kwargs)
    check_report(report, path, reads_missing=False)
    return model
