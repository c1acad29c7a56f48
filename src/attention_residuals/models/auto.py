"""Config and model classes per family, registered with transformers' Auto classes on import.

Each class is the plain one of transformers plus reads. `config.attn_res` holds the fields of `AttnResConfig`;
with mode "standard" nothing is changed at all. Annotations are evaluated here, since transformers reads
`config` from them.
"""

from typing import Any, ClassVar

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)
from transformers import initialization as init
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextForSequenceClassification
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from attention_residuals.config import AttnResConfig
from attention_residuals.models.attach import attach
from attention_residuals.models.families import FAMILIES
from attention_residuals.models.forward import backbone_forward, head_forward
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.schedule import ReadGroup, least_traffic_groups


class AttnResConfigMixin:
    """Adds the field `attn_res`: the settings of `AttnResConfig` as a dict, validated at once."""

    family: ClassVar[str]
    # Hugging Face's pipeline parallelism ships hidden states only, not the blocks.
    base_model_pp_plan: ClassVar[Any] = None

    attn_res: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        self.attn_res = AttnResConfig.from_dict(self.attn_res or {}).to_dict()
        super().__post_init__(**kwargs)  # type: ignore[misc]


class _Reads:
    """What every model of ours shares: how reads are initialised, and what is refused."""

    _pp_plan: ClassVar[Any] = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DepthRead):
            init.zeros_(module.query)
            init.ones_(module.key_weight)
        else:
            super()._init_weights(module)  # type: ignore[misc]

    @classmethod
    def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
        pp_size = distributed_config.get("pp_size") if isinstance(distributed_config, dict) else None
        pp_size = getattr(distributed_config, "pp_size", pp_size)
        if pp_size is not None and pp_size > 1:
            raise ValueError(
                f"pp_size must be 1, got {pp_size}: transformers' pipeline parallelism sends only hidden "
                "states from stage to stage, but depth attention needs the blocks as well"
            )
        return super().prepare_distribute_model(distributed_config, device_map)  # type: ignore[misc]


class AttnResBackbone(_Reads):
    """Mixin of a backbone (embedding, layers, final norm) with reads.

    Attributes:
        depth_plan: which sources each read sees.
        read_groups: which reads share a first phase where they run in two; none under "per_read".
        depth_records: lists that receive a `DepthTrace` of every forward; empty when nobody looks.
    """

    depth_plan: DepthPlan
    read_groups: tuple[ReadGroup, ...]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        attach_to_backbone(self)


class AttnResHead(_Reads):
    """Mixin of a model with a head: swaps its plain backbone for the one with reads."""

    attn_res_backbone: ClassVar[type[nn.Module]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        backbone: Any = self.base_model  # type: ignore[attr-defined]
        if not isinstance(backbone, AttnResBackbone):
            backbone.__class__ = self.attn_res_backbone
            # transformers looks up what a model can record by its class, and notes the class in __init__.
            _CAN_RECORD_REGISTRY[backbone] = backbone._can_record_outputs
            attach_to_backbone(backbone)


def attach_to_backbone(backbone: Any) -> None:
    """Attach reads according to `backbone.config.attn_res`."""
    config = AttnResConfig.from_dict(backbone.config.attn_res)
    backbone.depth_plan = attach(backbone, config, FAMILIES[backbone.config.family])
    per_read = config.read_schedule == "per_read"
    backbone.read_groups = () if per_read else least_traffic_groups(backbone.depth_plan)
    backbone.depth_records = []


class Qwen3_5AttnResConfig(AttnResConfigMixin, Qwen3_5TextConfig):
    """`Qwen3_5TextConfig` with `attn_res`, e.g. `Qwen3_5AttnResConfig(attn_res={"mode": "full"})`."""

    model_type = "qwen3_5_attn_res"
    family: ClassVar[str] = "qwen3_5_text"
    attn_res: dict[str, Any] | None = None


class Qwen3_5AttnResModel(AttnResBackbone, Qwen3_5TextModel):
    config: Qwen3_5AttnResConfig
    forward = backbone_forward(Qwen3_5TextModel.forward)


class Qwen3_5AttnResForCausalLM(AttnResHead, Qwen3_5ForCausalLM):
    """Qwen3.5 language model whose residual additions are reads: drop-in for `Qwen3_5ForCausalLM`."""

    config: Qwen3_5AttnResConfig
    attn_res_backbone = Qwen3_5AttnResModel
    forward = head_forward(Qwen3_5ForCausalLM.forward)


class Qwen3_5AttnResForSequenceClassification(AttnResHead, Qwen3_5TextForSequenceClassification):
    config: Qwen3_5AttnResConfig
    attn_res_backbone = Qwen3_5AttnResModel
    forward = head_forward(Qwen3_5TextForSequenceClassification.forward)


class LlamaAttnResConfig(AttnResConfigMixin, LlamaConfig):
    model_type = "llama_attn_res"
    family: ClassVar[str] = "llama"
    attn_res: dict[str, Any] | None = None


class LlamaAttnResModel(AttnResBackbone, LlamaModel):
    config: LlamaAttnResConfig
    forward = backbone_forward(LlamaModel.forward)


class LlamaAttnResForCausalLM(AttnResHead, LlamaForCausalLM):
    config: LlamaAttnResConfig
    attn_res_backbone = LlamaAttnResModel
    forward = head_forward(LlamaForCausalLM.forward)


class LlamaAttnResForSequenceClassification(AttnResHead, LlamaForSequenceClassification):
    config: LlamaAttnResConfig
    attn_res_backbone = LlamaAttnResModel
    forward = head_forward(LlamaForSequenceClassification.forward)


class Qwen3AttnResConfig(AttnResConfigMixin, Qwen3Config):
    model_type = "qwen3_attn_res"
    family: ClassVar[str] = "qwen3"
    attn_res: dict[str, Any] | None = None


class Qwen3AttnResModel(AttnResBackbone, Qwen3Model):
    config: Qwen3AttnResConfig
    forward = backbone_forward(Qwen3Model.forward)


class Qwen3AttnResForCausalLM(AttnResHead, Qwen3ForCausalLM):
    config: Qwen3AttnResConfig
    attn_res_backbone = Qwen3AttnResModel
    forward = head_forward(Qwen3ForCausalLM.forward)


class Qwen3AttnResForSequenceClassification(AttnResHead, Qwen3ForSequenceClassification):
    config: Qwen3AttnResConfig
    attn_res_backbone = Qwen3AttnResModel
    forward = head_forward(Qwen3ForSequenceClassification.forward)


def _register() -> None:
    """Make the Auto classes know our model types; importing twice is harmless."""
    rows = (
        (
            Qwen3_5AttnResConfig,
            Qwen3_5AttnResModel,
            Qwen3_5AttnResForCausalLM,
            Qwen3_5AttnResForSequenceClassification,
        ),
        (
            LlamaAttnResConfig,
            LlamaAttnResModel,
            LlamaAttnResForCausalLM,
            LlamaAttnResForSequenceClassification,
        ),
        (
            Qwen3AttnResConfig,
            Qwen3AttnResModel,
            Qwen3AttnResForCausalLM,
            Qwen3AttnResForSequenceClassification,
        ),
    )
    autos = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification)
    for config_class, *model_classes in rows:
        if config_class.model_type not in CONFIG_MAPPING:  # an exported copy leaves the package's
            AutoConfig.register(config_class.model_type, config_class)
        for auto, model_class in zip(autos, model_classes, strict=True):
            auto.register(config_class, model_class, exist_ok=True)
        mapping = get_checkpoint_conversion_mapping(config_class.family)
        if mapping is not None:  # e.g. the prefix of multimodal Qwen3.5 checkpoints
            register_checkpoint_conversion_mapping(config_class.model_type, mapping, overwrite=True)


_register()
