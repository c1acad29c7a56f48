"""The README.md of a converted folder: settings, verification figures, depth map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData, metadata_load

from attention_residuals.conversion.architecture import RECORD
from attention_residuals.conversion.verify import Verification
from attention_residuals.models.auto import AUTOS

if TYPE_CHECKING:
    from attention_residuals.analysis.record import DepthRecord

CARD = "README.md"
KEPT_CARD = "README.plain.md"
DEPTH_MAP = "depth_map.png"
TAGS = ("attention-residuals", "arxiv:2603.15031")

_TEXT = """\
# {name}

{source} with [Attention Residuals](https://arxiv.org/abs/2603.15031): its residual additions are depth
attention, so each sublayer can choose among the blocks below it. **Every query is still zero, so the model
computes what the plain one does**; training the queries is what makes it choose.

```python
import attention_residuals  # makes the Auto classes know this architecture
from transformers import {auto}

model = {auto}.from_pretrained("FOLDER")
```

| setting | value |
|---|---|
{settings}

{verification}
{picture}
The plain checkpoint comes back, bit for bit, with `attnres convert FOLDER OUT --back`{kept}.
Written by {package}.
"""


def write_card(
    source: Path,
    folder: Path,
    config: Any,
    model_class: Any,
    verification: Verification | None,
    record: DepthRecord | None,
) -> None:
    """Write README.md, and the depth map where a record is given and matplotlib is installed.

    Args:
        source: the plain folder; its card's metadata (licence, language, base model) is taken over.
        config: the config of the converted model, and `model_class` its class.
    """
    attn_res = config.get_text_config().attn_res
    settings = "\n".join(f"| `{key}` | {value} |" for key, value in attn_res.items() if value is not None)
    picture = ""
    if record is not None and _draw(record, folder / DEPTH_MAP):
        picture = (
            f"\n![Depth map]({DEPTH_MAP})\n\nMean depth weight per read and source: uniform until trained.\n"
        )
    plain = getattr(config, RECORD)
    text = _TEXT.format(
        name=f"{source.resolve().name} with attention residuals",
        source=f"`{source.resolve().name}` ({plain['model_type']})",
        auto=_auto_class(config, model_class),
        settings=settings,
        verification=_figures(verification),
        picture=picture,
        kept=f"; its own card is {KEPT_CARD}" if (source / CARD).is_file() else "",
        package=plain["package"],
    )
    (folder / CARD).write_text(f"---\n{_metadata(source).to_yaml()}\n---\n\n{text}", encoding="utf-8")


def _auto_class(config: Any, model_class: Any) -> str:
    """Which of the Auto classes loads this class."""
    mappings = {auto.__name__: auto._model_mapping for auto in AUTOS}
    known = (name for name, m in mappings.items() if type(config) in m and m[type(config)] is model_class)
    return next(known, model_class.__name__)


def _metadata(source: Path) -> ModelCardData:
    known = (metadata_load(source / CARD) if (source / CARD).is_file() else None) or {}
    tags = [*(known.pop("tags", None) or []), *TAGS]
    known = {"library_name": "transformers", **known, "tags": list(dict.fromkeys(tags))}
    return ModelCardData(**known, ignore_metadata_errors=True)


def _figures(verification: Verification | None) -> str:
    if verification is None:
        return "The conversion was not verified by running both models."
    read = f"{verification.inputs}, {verification.tokens} tokens" if verification.tokens else "a random image"
    change = f"{verification.max_change:.1e}"
    figures = f"Verified in float32 on {read}: outputs change by at most {change} of their range"
    if verification.same_tokens is None:
        return f"{figures}."
    return f"{figures}, and {verification.same_tokens} of {verification.new_tokens} greedy tokens agree."


def _draw(record: DepthRecord, path: Path) -> bool:
    from attention_residuals.analysis.summary import summarise

    try:
        from attention_residuals.analysis import plots
    except ImportError:  # matplotlib is optional
        return False
    plots.save_picture(plots.draw_depth_map(summarise(record)), path)
    return True
