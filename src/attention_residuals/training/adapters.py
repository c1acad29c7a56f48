"""A model to its LoRA configuration, and an adapted model to a count of what was adapted (PEFT).

Three of four Qwen3.5 layers have no `q_proj`, so lists of names written for other models skip them in
silence. Here the names come from the model's own layers, and reads are trained and saved with the adapter.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from attention_residuals.models.attach import AttnResNorm
from attention_residuals.models.mixins import AttnResBackbone, family_of

READ = "read"  # the attribute of a norm that holds its DepthRead; PEFT compares it with the end of names

# Mamba's code and kernels read these weights without calling their modules, so an adapter would be ignored.
BYPASSED = ("mixer.x_proj", "mixer.dt_proj", "mixer.out_proj")


class Projection(NamedTuple):
    """A weight that LoRA can adapt.

    Attributes:
        path: where it is in its decoder layer, e.g. "self_attn.q_proj".
        stacked: whether it is one parameter [experts, out, in] rather than a module.
        adapted: whether an adapter is on it.
    """

    path: str
    stacked: bool
    adapted: bool


@dataclasses.dataclass(frozen=True)
class AdaptedModules:
    """How many projections of each layer type, and how many reads, an adapter trains.

    Attributes:
        counts: "attention", "delta net", "mlp", "reads" -> (adapted, all).
    """

    counts: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        return ", ".join(f"{kind} {adapted} of {total}" for kind, (adapted, total) in self.counts.items())


def lora_config(model: Any, r: int = 8, **kwargs: Any) -> LoraConfig:
    """A LoRA of rank `r` on every projection of every layer type, that also trains and saves the reads.

    Of Mamba's projections only `in_proj`: the others' weights are used without their modules.

    Args:
        model: one of our models, with or without a head; its embedding, head and vision tower are left alone.
        r: rank of the update of each weight.
        kwargs: further fields of `peft.LoraConfig`, in place of those chosen here. `lora_alpha` is `r` unless
            given, so that the update's scale is 1. `modules_to_save` adds to the reads.

    Returns:
        What `peft.get_peft_model(model, config)` takes.

    Raises:
        TypeError: the model has no attention residuals.
    """
    backbone = _backbone(model)
    found = [projection for layer in _layers(backbone) for projection in _projections(layer)]
    fields: dict[str, Any] = {
        "lora_alpha": r,
        "target_modules": sorted({projection.path for projection in found if not projection.stacked}),
        "target_parameters": sorted({projection.path for projection in found if projection.stacked}) or None,
        "task_type": "CAUSAL_LM" if model.can_generate() else None,
    }
    to_save = list(kwargs.pop("modules_to_save", None) or ())
    if READ not in to_save and any(_reads(backbone)):
        to_save.append(READ)
    return LoraConfig(r=r, modules_to_save=to_save or None, **{**fields, **kwargs})


def adapted_modules(model: Any) -> AdaptedModules:
    """Count what the adapters of `model` train, per layer type; warns of a type that has nothing adapted.

    Args:
        model: what `peft.get_peft_model` returned, or a model with adapters inside.

    Raises:
        TypeError: the model has no attention residuals.
    """
    backbone = _backbone(model)
    titles = dict(family_of(backbone.config).mixer_names)
    found: dict[str, list[Projection]] = {}
    for layer in _layers(backbone):
        for projection in _projections(layer):
            part = projection.path.partition(".")[0]
            found.setdefault(titles.get(part, part), []).append(projection)
    counts = {}
    for kind, projections in sorted(found.items()):
        counts[kind] = sum(projection.adapted for projection in projections), len(projections)
        if counts[kind][0] == 0:
            names = ", ".join(sorted({path.rpartition(".")[2] for path, *_ in projections}))
            _warn(f"no {kind} projection is adapted (0 of {len(projections)}); add {names} to target_modules")
    reads = list(_reads(backbone))
    if reads:
        counts["reads"] = sum(isinstance(read, ModulesToSaveWrapper) for read in reads), len(reads)
        if counts["reads"][0] == 0:
            _warn(
                f"queries and key weights of the {len(reads)} reads are neither trained nor saved with the "
                f"adapter; add modules_to_save=[{READ!r}]"
            )
    return AdaptedModules(counts)


def _warn(gap: str) -> None:
    warnings.warn(f"{gap}, or use lora_config(model)", stacklevel=3)


def _backbone(model: Any) -> Any:
    backbone = next((module for module in model.modules() if isinstance(module, AttnResBackbone)), None)
    if backbone is None:
        raise TypeError(f"{type(model).__name__} has no attention residuals; convert the model first")
    return backbone


def _layers(backbone: Any) -> Iterator[nn.Module]:
    return iter(family_of(backbone.config).layers_of(backbone))


def _reads(backbone: Any) -> Iterator[nn.Module]:
    norms = (module for module in backbone.modules() if isinstance(module, AttnResNorm))
    return (norm.read for norm in norms if norm.read is not None)


def _projections(module: Any, path: str = "", wrapped: tuple[str, ...] = ()) -> Iterator[Projection]:
    """The projections below `module`; `wrapped` names its parameters that have an adapter."""
    tuner: Any = module if isinstance(module, BaseTunerLayer) else None
    if tuner is not None:
        parameter = getattr(tuner, "parameter_name", None)
        if parameter is None:
            yield Projection(path, False, True)
        else:  # one wrapper per stacked parameter, around each other
            yield from _projections(tuner.base_layer, path, (*wrapped, parameter))
        return
    if path in BYPASSED:
        return
    if isinstance(module, (nn.Linear, Conv1D)):
        yield Projection(path, False, False)
        return
    if not isinstance(module, nn.Conv1d):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3:
                yield Projection(f"{path}.{name}", True, name in wrapped)
    for name, child in module.named_children():
        yield from _projections(child, f"{path}.{name}" if path else name)
