"""What a class of transformers gets beside its own code: settings in its config, reads in its modules.

`auto.py` puts each of these before a plain class to make one of ours.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import nn
from transformers import initialization as init
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from attention_residuals.config import AttnResConfig
from attention_residuals.models.attach import attach
from attention_residuals.models.families import FAMILIES, Family
from attention_residuals.plan import DepthPlan
from attention_residuals.read import DepthRead
from attention_residuals.schedule import ReadGroup, least_traffic_groups


class AttnResConfigMixin:
    """Adds the field `attn_res`: the settings of `AttnResConfig` as a dict, validated at once.

    Attributes:
        family: model type of the plain architecture.
        attn_res_family: where a recognised architecture, one without a row in `FAMILIES`, keeps its parts.
    """

    family: ClassVar[str]
    # Hugging Face's pipeline parallelism ships hidden states only, not the blocks.
    base_model_pp_plan: ClassVar[Any] = None

    attn_res: dict[str, Any] | None
    attn_res_family: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        self.attn_res = AttnResConfig.from_dict(self.attn_res or {}).to_dict()
        super().__post_init__(**kwargs)  # type: ignore[misc]


def family_of(config: Any) -> Family:
    """The family row of one of our configs.

    Raises:
        ValueError: the architecture has no row, and the config doesn't say where its parts are.
    """
    if config.family in FAMILIES:
        return FAMILIES[config.family]
    if config.attn_res_family is None:
        raise ValueError(
            f"{config.family!r} is no known family, so its config needs attn_res_family: which attributes "
            "hold layers, pre-norms and final norm; attention_residuals.convert() finds them"
        )
    return Family.from_dict(config.attn_res_family)


class _Reads:
    """What every model of ours shares: how reads are initialised, and what is refused."""

    _pp_plan: ClassVar[Any] = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DepthRead):
            module.reset_parameters(init)
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
    depth_records: list[Any]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attach_to_backbone(self)


class AttnResHead(_Reads):
    """Mixin of a model around a backbone, with a head or a vision tower: its backbone becomes one with reads.

    Attributes:
        attn_res_backbone: the class of the backbone.
        attn_res_path: where the backbone is; empty for the base model.
    """

    attn_res_backbone: ClassVar[type[nn.Module]]
    attn_res_path: ClassVar[str] = ""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        backbone = backbone_of(self, self.attn_res_path)
        if not isinstance(backbone, AttnResBackbone):
            give_reads(backbone, self.attn_res_backbone)


def backbone_of(model: Any, path: str) -> Any:
    return operator.attrgetter(path)(model) if path else model.base_model


def give_reads(backbone: Any, backbone_class: type[nn.Module]) -> None:
    """Make a plain backbone one of ours, in place; its config is one of ours already."""
    backbone.__class__ = backbone_class
    # transformers looks up what a model can record by its class, and notes the class in __init__.
    _CAN_RECORD_REGISTRY[backbone] = backbone._can_record_outputs
    attach_to_backbone(backbone)


def attach_to_backbone(backbone: Any) -> None:
    """Attach reads according to `backbone.config.attn_res`."""
    config = AttnResConfig.from_dict(backbone.config.attn_res)
    family = family_of(backbone.config)
    backbone.depth_plan = attach(backbone, config, family)
    # Two phases have the paper's reads only; `AttnResConfig` has refused to force them on others.
    per_read = config.read_schedule == "per_read" or config.window is not None or config.changed_fields()
    plan, count = backbone.depth_plan, family.sublayers_per_layer
    backbone.read_groups = () if per_read else least_traffic_groups(plan, count)
    backbone.depth_records = []
