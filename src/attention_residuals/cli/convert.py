"""`attnres convert`: a checkpoint folder with attention residuals, or the plain one back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attention_residuals.cli.assignments import parse_assignments
from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.config import AttnResConfig
    from attention_residuals.conversion.folder import Result


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Checkpoint folder of a plain model.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the converted one.")],
    mode: Annotated[
        str | None, typer.Option(help="block, or full for one sublayer a block. (default: block)")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Divide the depth into this many blocks. (default: 8)")
    ] = None,
    sublayers_per_block: Annotated[
        int | None, typer.Option(help="Or this many sublayers a block; a layer has two.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="How reads differ from the paper's, such as activation=sigmoid; may be repeated.",
        ),
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="From a converted folder to the plain one, if untrained.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Run both models afterwards and compare their logits.")] = True,
    text: Annotated[
        Path | None, typer.Option(help="Text file to compare them on. (default: a built-in paragraph)")
    ] = None,
    verbose: VerboseFlag = False,
) -> None:
    """Give a checkpoint attention residuals without changing what it computes."""
    if verbose:
        set_verbosity(verbose=True)
    if text is not None and not verify:
        raise UserError("--text is for the verification, which --no-verify leaves out; drop one")
    words = None if text is None else _read_text(text)
    from attention_residuals.conversion.folder import convert_folder, restore_folder

    settings = lossless(mode, num_blocks, sublayers_per_block, variant or [], back=back)
    if settings is None:
        _report(restore_folder(source, target, verify=verify, text=words), "removed")
    else:
        _report(convert_folder(source, target, settings, verify=verify, text=words), "added")


def lossless(
    mode: str | None,
    num_blocks: int | None,
    sublayers_per_block: int | None,
    variant: Sequence[str] = (),
    *,
    back: bool,
) -> AttnResConfig | None:
    """The settings that the options say; None for the way back.

    Raises:
        UserError: a value breaks its rule, or settings are given for the way back.
    """
    from attention_residuals.config import AttnResConfig
    from attention_residuals.convert import lossless_settings

    given = {"mode": mode, "num_blocks": num_blocks, "sublayers_per_block": sublayers_per_block}
    given = {name: value for name, value in given.items() if value is not None}
    given |= parse_assignments("--variant", variant, "activation=sigmoid")
    if back:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise UserError(
                f"--{option} has no use with --back, which keeps what the plain model was; drop it"
            )
        return None
    try:
        return lossless_settings(AttnResConfig.from_dict({**given, "read_scale": "sum"}))
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path} can't be read as UTF-8 text: {error}") from error


def _report(result: Result, verb: str) -> None:
    for group, count in result.kept.items():
        print(f"kept, but no part of the model: {count} tensors of {group}")
    print(f"{verb} {result.parameters:,} parameters")
    found = result.verification
    if found is not None:
        read = f"{found.inputs}, {found.tokens} tokens" if found.tokens else found.inputs
        print(f"verified in float32 ({read}): outputs change by {found.max_change:.1e} of their range")
        if found.same_tokens is not None:
            print(f"greedy continuation: {found.same_tokens} of {found.new_tokens} tokens agree")
        if found.offloaded:
            print("the models were larger than half of the free memory and ran from the disk")
    print(result.folder)
