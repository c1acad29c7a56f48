"""From a plain architecture of transformers to ours: config and model classes, known to the Auto classes.

Each class is the plain one of transformers plus reads. `config.attn_res` holds the fields of `AttnResConfig`;
with mode "standard" nothing is changed at all. Classes are made when somebody asks for them, by name
(`Qwen3_5AttnResForCausalLM`), by plain class or by model type, so that importing this costs no modeling file.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from attention_residuals.config import AttnResConfig
from attention_residuals.models.families import COMPOSITES, FAMILIES
from attention_residuals.models.forward import backbone_forward, head_forward
from attention_residuals.models.mixins import (
    AttnResBackbone,
    AttnResConfigMixin,
    AttnResHead,
)

OURS = "_attn_res"
AUTOS = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModelForImageTextToText,
    AutoModelForImageClassification,
)


def our_model_type(plain_type: str) -> str:
    """qwen3_5_text -> qwen3_5_attn_res; qwen3_5, with a vision tower -> qwen3_5_multimodal_attn_res."""
    return (
        f"{plain_type}_multimodal" if plain_type in COMPOSITES else plain_type.removesuffix("_text")
    ) + OURS


def plain_model_type(our_type: str) -> str | None:
    """The model type that `our_model_type` was given, or None for a type that isn't ours."""
    if not our_type.endswith(OURS):
        return None
    stem = our_type.removesuffix(OURS)
    for plain_type in (f"{stem}_text", stem, stem.removesuffix("_multimodal")):
        if plain_type in CONFIG_MAPPING_NAMES and our_model_type(plain_type) == our_type:
            return plain_type
    return None


def _stem(plain_type: str) -> str:
    """What class names of ours begin with: Qwen3_5 for Qwen3_5TextConfig."""
    stem = CONFIG_MAPPING_NAMES[plain_type].removesuffix("Config")
    return f"{stem}Multimodal" if plain_type in COMPOSITES else stem.removesuffix("Text")


@functools.cache
def config_class(plain_type: str) -> Any:
    """Our config class of an architecture, e.g. `Qwen3_5AttnResConfig` of "qwen3_5_text".

    The Auto classes then know it, and with it each model class that they know the plain config with.
    """
    plain, ours = CONFIG_MAPPING[plain_type], _config_class(plain_type)
    CONFIG_MAPPING.register(ours.model_type, ours, exist_ok=True)
    mapping = get_checkpoint_conversion_mapping(plain_type)
    if mapping is not None:  # e.g. the prefix of multimodal Qwen3.5 checkpoints
        register_checkpoint_conversion_mapping(ours.model_type, mapping, overwrite=True)
    for auto in AUTOS:
        if plain in auto._model_mapping:
            ours_of_it = model_class(auto._model_mapping[plain], plain_type)
            # Not auto.register, which refuses a composite's language model class, as transformers has it.
            auto._model_mapping.register(ours, ours_of_it, exist_ok=True)
    return ours


@functools.cache
def _config_class(plain_type: str) -> Any:
    plain = CONFIG_MAPPING[plain_type]
    fields: dict[str, Any] = {"model_type": our_model_type(plain_type)}
    bases: tuple[type, ...] = (plain,)
    if plain_type in COMPOSITES:
        text = config_class(COMPOSITES[plain_type].text_type)
        fields["base_model_pp_plan"] = None
        fields["sub_configs_defaults"] = {**plain.sub_configs_defaults, "text_config": text}
    else:
        bases = (AttnResConfigMixin, plain)
        fields |= {"family": plain_type, "attn_res": None, "attn_res_family": None}
        fields["__annotations__"] = {
            "family": ClassVar[str],
            "attn_res": dict[str, Any] | None,
            "attn_res_family": dict[str, Any] | None,
        }
    return _make_class(
        f"{_stem(plain_type)}AttnResConfig", bases, fields, f"`{plain.__name__}` with `attn_res`."
    )


@functools.cache
def model_class(plain: Any, plain_type: str) -> Any:
    """Our class of a plain model class, e.g. `Qwen3_5AttnResForCausalLM` of `Qwen3_5ForCausalLM`."""
    composite = COMPOSITES.get(plain_type)
    if composite is not None and plain.config_class is CONFIG_MAPPING[composite.text_type]:
        return model_class(plain, composite.text_type)  # the language model alone, from a checkpoint of all
    stem = CONFIG_MAPPING_NAMES[plain_type].removesuffix("Config")
    suffix = plain.__name__.removeprefix(stem).removeprefix(stem.removesuffix("Text")).removeprefix("Text")
    name = f"{_stem(plain_type)}AttnRes{suffix}"
    text = f"`{plain.__name__}` whose residual additions are reads."
    fields: dict[str, Any] = {"__annotations__": {"config": _config_class(plain_type)}}
    if composite is not None:
        fields["attn_res_path"] = composite.path_in(plain)
        fields["attn_res_backbone"] = _backbone_class(composite.text_type)
        return _make_class(name, (AttnResHead, plain), fields, text)
    if plain is _plain_backbone(plain_type):
        fields["forward"] = backbone_forward(plain.forward)
        return _make_class(name, (AttnResBackbone, plain), fields, text)
    fields["forward"] = head_forward(plain.forward)
    fields["attn_res_backbone"] = _backbone_class(plain_type)
    return _make_class(name, (AttnResHead, plain), fields, text)


def causal_lm_class(config: Any) -> Any:
    """Our language model class of one of our configs."""
    return AutoModelForCausalLM._model_mapping[type(config)]


def _plain_backbone(plain_type: str) -> Any:
    return AutoModel._model_mapping[CONFIG_MAPPING[plain_type]]


def _backbone_class(plain_type: str) -> Any:
    return model_class(_plain_backbone(plain_type), plain_type)


def _make_class(name: str, bases: tuple[type, ...], fields: dict[str, Any], text: str) -> Any:
    made = type(name, bases, {"__module__": __name__, "__qualname__": name, "__doc__": text, **fields})
    setattr(sys.modules[__name__], name, made)  # where pickle looks
    mapping = get_checkpoint_conversion_mapping(bases[-1].__name__)
    if mapping is not None:  # some architectures have it under a class instead, e.g. ViTModel
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    # Where `transformers serve` looks for config.architectures. On the module's class, since transformers
    # puts a second module in its own place when it loads processors.
    setattr(type(transformers), name, made)
    return made


def our_config(plain_config: Any, settings: AttnResConfig, family: dict[str, Any] | None = None) -> Any:
    """Our config with every field of a plain one, a composite's text part included.

    Args:
        family: where a recognised architecture keeps its parts; None for those in the table.
    """
    fields = plain_config.to_dict()
    fields.pop("model_type")
    added = {"attn_res": settings.to_dict()} | ({} if family is None else {"attn_res_family": family})
    if plain_config.model_type in COMPOSITES:
        fields["text_config"] = our_config(plain_config.text_config, settings)
    else:
        fields |= added
    ours = config_class(plain_config.model_type)(**fields)
    ours._attn_implementation = plain_config._attn_implementation
    ours._experts_implementation = plain_config._experts_implementation
    return ours


def plain_config(ours: Any) -> Any:
    """The plain config inside one of ours; `our_config` the other way round."""
    plain_type = plain_model_type(ours.model_type)
    if plain_type is None:
        raise TypeError(f"{type(ours).__name__} has no attention residuals")
    fields = ours.to_dict()
    for name in ("model_type", "attn_res", "attn_res_family"):
        fields.pop(name, None)
    if plain_type in COMPOSITES:
        fields["text_config"] = plain_config(ours.text_config)
    plain = CONFIG_MAPPING[plain_type](**fields)
    plain._attn_implementation = ours._attn_implementation
    plain._experts_implementation = ours._experts_implementation
    return plain


class _LazyConfigs(dict[str, Any]):
    """What transformers' config mapping holds beside its own: our model types, made when asked for."""

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or (
            isinstance(model_type, str) and plain_model_type(model_type) is not None
        )

    def __getitem__(self, model_type: str) -> Any:
        if not super().__contains__(model_type) and (plain_type := plain_model_type(model_type)):
            return config_class(plain_type)
        return super().__getitem__(model_type)


def __getattr__(name: str) -> Any:
    """`Qwen3_5AttnResForCausalLM` and its like, for every family."""
    stem, ours, suffix = name.partition("AttnRes")
    if ours and not name.startswith("_"):
        for plain_type in (*FAMILIES, *COMPOSITES, *CONFIG_MAPPING_NAMES):
            if _stem(plain_type) == stem:
                made = config_class(plain_type)  # and with it the models of this architecture
                found = made if suffix == "Config" else vars(sys.modules[__name__]).get(name)
                if found is not None:
                    return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    """Make transformers know our model types; an exported copy of this file leaves the package's in place."""
    if type(CONFIG_MAPPING._extra_content).__name__ != _LazyConfigs.__name__:
        CONFIG_MAPPING._extra_content = _LazyConfigs(CONFIG_MAPPING._extra_content)


_register()
