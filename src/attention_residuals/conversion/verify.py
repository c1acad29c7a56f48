"""Do a plain folder and its converted copy compute the same? Logits and a greedy continuation, in float32."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_residuals.analysis.record import DepthRecord, record_depth_weights
from attention_residuals.conversion.architecture import check_report
from attention_residuals.conversion.stored import read_stored
from attention_residuals.errors import UserError
from attention_residuals.models.auto import plain_model_type

# Of the range of the logits: what any conversion may change; tests/conversion/test_exactness.py holds to it.
MOST_CHANGE = 1e-5
# A deep model, or a tie between experts, can amplify rounding beyond that. Then this many times what rounding
# alone was measured to do is allowed, up to a change that rounding doesn't explain. Random models of up to 64
# layers stayed below 2.5 times, but for two of 81.
TIMES_ROUNDING = 4
MOST_ROUNDING = 1e-3
MOST_TOKENS = 128
NEW_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
PARAGRAPH = """\
A river begins as a spring that no map shows. Rain falls on the hills (some 900 mm a year), sinks through moss
and gravel, and comes out again lower down, cold & clear. By the first village it turns a mill; by the second
it has a name. "How deep is it?" the children ask, and measure with a stick: 0.4 m, then 1.2 m, then too deep.
def depth(stick, mark): return stick.length - mark  # Wie tief? Combien? 多深？
"""


class Side(NamedTuple):
    """One of the two models compared: a folder, and the class that loads it."""

    folder: Path
    model_class: Any


class Inputs(NamedTuple):
    """What both models read: arguments of their forward, and where these come from."""

    arguments: dict[str, Tensor]
    origin: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """How far a converted model is from the plain one, in float32.

    Attributes:
        inputs: "text", "random tokens" where the folder has no tokenizer, or "random image".
        tokens: how many tokens were read; 0 for an image.
        max_change: largest change of a logit (of a hidden state where there is no head), in units of the
            range of the logits.
        rounding: the same for the plain model against itself, its embedding moved to neighbouring floats.
        same_tokens: how many tokens of the greedy continuation agree, from its start; None for models that
            don't generate.
        new_tokens: how many were generated.
        offloaded: whether weights stayed on the disk, for want of memory.
    """

    inputs: str
    tokens: int
    max_change: float
    rounding: float
    same_tokens: int | None
    new_tokens: int
    offloaded: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)


class _Outputs(NamedTuple):
    values: Tensor
    rounding: float
    continuation: list[int] | None
    offloaded: bool
    record: DepthRecord | None


def compare(plain: Side, ours: Side, inputs: Inputs, scratch: Path) -> tuple[Verification, DepthRecord]:
    """Run both models in float32, one after the other; gives the figures and what our reads did.

    A model that would take more than half of the free memory stays on the disk and is read layer by layer,
    where accelerate is installed.

    Args:
        scratch: a folder on the disk that may hold those weights for a while.

    Raises:
        UserError: a folder doesn't fit its class, or the outputs differ by more than rounding.
    """
    expected, found = (_outputs(side, inputs, scratch) for side in (plain, ours))
    assert found.record is not None
    change = _relative_change(expected.values, found.values)
    allowed = max(MOST_CHANGE, min(TIMES_ROUNDING * expected.rounding, MOST_ROUNDING))
    if not change <= allowed:
        raise UserError(
            f"verification failed: outputs change by {change:.1e} of their range, and rounding allows "
            f"{allowed:.0e}; nothing was written. The checkpoint may be damaged, or its architecture may "
            "read the residual stream in another place"
        )
    same = None
    if expected.continuation is not None and found.continuation is not None:
        agree = [a == b for a, b in zip(expected.continuation, found.continuation, strict=True)]
        same = [*agree, False].index(False)
    ids = inputs.arguments.get("input_ids")
    verification = Verification(
        inputs=inputs.origin,
        tokens=0 if ids is None else ids.shape[1],
        max_change=change,
        rounding=expected.rounding,
        same_tokens=same,
        new_tokens=0 if same is None else NEW_TOKENS,
        offloaded=expected.offloaded or found.offloaded,
    )
    return verification, found.record


def choose_inputs(folder: Path, text: str | None, config: Any, model_class: Any) -> Inputs:
    """Token ids [1, T] of a text in the folder's own tokens, random ids without a tokenizer, or an image.

    Args:
        text: a built-in paragraph if None.

    Raises:
        UserError: a text without a tokenizer, an empty one, or a tokenizer of another model.
    """
    generator = torch.Generator().manual_seed(0)
    if model_class.main_input_name == "pixel_values":
        shape = (1, config.num_channels, config.image_size, config.image_size)
        return Inputs({"pixel_values": torch.randn(shape, generator=generator)}, "random image")
    vocabulary = config.get_text_config().vocab_size
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if text is not None:
            raise UserError(f"{folder} has no tokenizer to read --text with; leave --text out")
        ids = torch.randint(vocabulary, (1, MOST_TOKENS), generator=generator)
        return Inputs({"input_ids": ids}, "random tokens")
    tokens = _tokenize(folder, PARAGRAPH if text is None else text)[:MOST_TOKENS]
    if not tokens:
        raise UserError("the text is empty once tokenised; give --text a file with at least one token")
    if max(tokens) >= vocabulary:
        raise UserError(
            f"the tokenizer gives token {max(tokens)}, but the model has {vocabulary} embeddings; put the "
            "model's own tokenizer into its folder, or verify with random ids by taking it out"
        )
    return Inputs({"input_ids": torch.tensor([tokens])}, "text")


def _tokenize(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"]
    # the tokenizers library raises bare Exception for a damaged tokenizer.json
    except Exception as error:
        raise UserError(
            f"the tokenizer in {folder} can't be loaded ({str(error).strip()}); copy it again, or give "
            "--no-verify"
        ) from error


@torch.no_grad()
def _outputs(side: Side, inputs: Inputs, scratch: Path) -> _Outputs:
    with _loaded(side, scratch) as model:
        values = _values(model, inputs)
        continuation = None
        if model.can_generate() and "input_ids" in inputs.arguments:
            ids = inputs.arguments["input_ids"]
            count = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **count)
            continuation = made[0, ids.shape[1] :].tolist()
        record, rounding = None, 0.0
        if plain_model_type(model.config.model_type):
            with record_depth_weights(model) as record:
                model(**inputs.arguments)
        else:
            rounding = max(_relative_change(values, _nudged(model, inputs, seed)) for seed in range(2))
        offloaded = "disk" in getattr(model, "hf_device_map", {}).values()
        return _Outputs(values, rounding, continuation, offloaded, record)


def _values(model: Any, inputs: Inputs) -> Tensor:
    """Logits [T, V], or hidden states [T, D] where there is no head."""
    out = model(**inputs.arguments)
    return (out.logits if "logits" in out else out.last_hidden_state)[0].float().cpu()


def _nudged(model: Any, inputs: Inputs, seed: int) -> Tensor:
    """The same with every number of the embedding moved up or down by one rounding step."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(module: Any, args: Any, embedding: Tensor) -> Tensor:
        up = torch.randint(2, embedding.shape, generator=generator).to(embedding)
        return embedding * (1 + torch.finfo(torch.float32).eps * (2 * up - 1))

    handle = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        return _values(model, inputs)
    finally:
        handle.remove()


def _relative_change(expected: Tensor, found: Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


@contextlib.contextmanager
def _loaded(side: Side, scratch: Path) -> Iterator[Any]:
    """The model of one side, and its memory free again afterwards."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".offload") as offload:
        placement = _placement(4 * sum(t.numel for t in read_stored(side.folder).tensors.values()), offload)
        model, report = side.model_class.from_pretrained(
            side.folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, **placement
        )
        check_report(report, str(side.folder), reads_missing=False)
        yield model
        del model
        gc.collect()


def _placement(nbytes: int, offload: str) -> dict[str, Any]:
    """Arguments of from_pretrained for weights of this size: in memory, or partly on the disk."""
    if importlib.util.find_spec("accelerate") is None:
        return {}
    from accelerate.utils import get_max_memory

    free = get_max_memory()["cpu"]
    if 2 * nbytes <= free:
        return {}
    return {"device_map": "auto", "max_memory": {"cpu": free // 2}, "offload_folder": offload}
