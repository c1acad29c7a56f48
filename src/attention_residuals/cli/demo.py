"""`attnres demo`: train a small model on real text, read its output, and look into it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity

# Chosen for what two CPU cores read in about three minutes; `docs/training.md` has the measurements.
STEPS = 560
PROMPT = "The people of the United States"
SAMPLE_TOKENS = 80


def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the demo's run; a demo that it holds is replaced.")
    ] = Path("runs/demo"),
    max_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = STEPS,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    verbose: VerboseFlag = False,
) -> None:
    """Train a small Qwen3.5 with Block Attention Residuals on speeches, sample from it, draw its reads."""
    # everything needed is installed: no library may wait for a network
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    set_verbosity(verbose=verbose)
    start = time.perf_counter()
    from attention_residuals.training import run
    from attention_residuals.training.settings import TrainSettings

    settings = TrainSettings(
        preset="tiny",
        mode="block",
        num_blocks=4,
        vocab_size=2048,
        max_steps=max_steps,
        learning_rate=5e-3,
        warmup=0.03,
        decay=0.4,
        eval_every=max(1, -(-max_steps // 4)),
        save_every=max(1, -(-max_steps // 4)),
        eval_blocks=32,
        keep_checkpoints=1,
        threads=threads,
        output_dir=str(output_dir),
    )
    result = run.train(settings, overwrite=True)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
    sample = sample_text(result.folder, PROMPT, SAMPLE_TOKENS)
    print(f"\nsample:\n{sample}\n")
    print(f"validation loss: {result.eval_loss:.4f} nats per token")
    print(f"report: {result.report}")
    print(f"time: {time.perf_counter() - start:.0f} s")
    print(f'more: attnres generate {result.folder} --prompt "{PROMPT}"')


def sample_text(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """The prompt and its sampled continuation by the model in `folder`; the same each time."""
    import torch

    from attention_residuals.analysis.load_model import encode, load_model

    loaded = load_model(folder)
    input_ids = encode(loaded, prompt)
    torch.manual_seed(0)
    output = loaded.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        pad_token_id=loaded.tokenizer.pad_token_id,
    )
    return str(loaded.tokenizer.decode(output[0], skip_special_tokens=True))
