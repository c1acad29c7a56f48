"""`attnres generate`: continue a prompt, writing each token as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

TEMPERATURE = 0.8
TOP_P = 0.95


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, as attnres train writes it.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help=f"Below 1 is bolder, above 1 wilder. (default: {TEMPERATURE})")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Keep the likeliest tokens up to this sum. (default: {TOP_P})")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens. (default: all)")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same sample.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    verbose: VerboseFlag = False,
) -> None:
    """Continue a prompt, writing each token as it comes."""
    sampling = sampling_settings(greedy=greedy, temperature=temperature, top_p=top_p, top_k=top_k)
    if verbose:
        set_verbosity(verbose=True)
    from transformers import TextStreamer, set_seed

    from attention_residuals.analysis.load_model import encode, load_model

    loaded = load_model(model, device=device, dtype=dtype)
    input_ids = encode(loaded, prompt)
    if seed is not None:
        set_seed(seed)
    # the prompt is printed too, so that prompt and continuation read as one text
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=False, skip_special_tokens=True)
    try:
        loaded.model.generate(
            input_ids,
            attention_mask=input_ids.new_ones(input_ids.shape),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            pad_token_id=_pad_token(loaded.tokenizer),
            **sampling,
        )
    except KeyboardInterrupt:
        streamer.end()
        sys.stdout.flush()
        raise


def sampling_settings(
    *, greedy: bool, temperature: float | None, top_p: float | None, top_k: int | None
) -> dict[str, Any]:
    """The keyword arguments of transformers' generate().

    Raises:
        UserError: a value is out of range, or a sampling option stands beside greedy.
    """
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if greedy:
        if extra := [name for name, value in given.items() if value is not None]:
            raise UserError(
                f"--greedy does not sample, so --{extra[0].replace('_', '-')} has no use; drop one"
            )
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    temperature = TEMPERATURE if temperature is None else temperature
    top_p = TOP_P if top_p is None else top_p
    top_k = 0 if top_k is None else top_k
    if not 0.0 < temperature < float("inf"):
        raise UserError(f"--temperature must be above 0, got {temperature}; use --greedy for no randomness")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"--top-p must be above 0 and at most 1, got {top_p}; 1 keeps every token")
    if top_k < 0:
        raise UserError(f"--top-k must be at least 0, got {top_k}; 0 keeps every token")
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def _pad_token(tokenizer: Any) -> int | None:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
