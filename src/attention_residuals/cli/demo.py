"""`attnres demo`: train a small model on real text, read its output, and look into it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

if TYPE_CHECKING:
    from attention_residuals.training.settings import TrainSettings

STEPS = 560  # enough for text that looks like English
FEWEST_STEPS = 100
TRAINING_SECONDS = 200.0  # what training may take; a slower machine takes fewer steps
COMMAND = "demo"  # tells a demo's folder, which may be replaced, from other runs
VOCABULARY = 2048
ROWS, CONTEXT = 8, 128  # Gated DeltaNet works in chunks of 64 tokens
PROMPT = "The people of the United States"
SAMPLE_TOKENS = 80
MOST_SECONDS = 250  # of training, where it slows down on the way; the whole demo has six minutes
PROBE_SECONDS = 0.3  # for each number of threads that is tried


def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the demo's run; a demo that it holds is replaced.")
    ] = Path("runs/demo"),
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Optimizer steps. (default: {STEPS}, fewer where they take long)"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    verbose: VerboseFlag = False,
) -> None:
    """Train a small Qwen3.5 with Block Attention Residuals on speeches, sample from it, draw its reads."""
    # everything needed is installed: no library may wait for a network
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    set_verbosity(verbose=verbose)
    start = time.perf_counter()
    import torch

    from attention_residuals.training import run
    from attention_residuals.training.run_folder import RunFolder

    folder = RunFolder(output_dir)
    if folder.run_file.is_file() and folder.read_run().get("command") != COMMAND:
        raise UserError(f"--output-dir {output_dir} holds a run that is no demo; give another folder")
    settings = demo_settings(output_dir, max_steps or STEPS, threads)
    if not torch.accelerator.is_available():
        threads = threads or fastest_threads()
        torch.set_num_threads(threads)
        seconds = seconds_per_step(settings)
        steps = max_steps or affordable_steps(seconds)
        settings = demo_settings(output_dir, steps, threads)
        print(f"a step takes {seconds:.2f} s with {threads} thread{'s' if threads > 1 else ''}")
        if max_steps is None and steps < STEPS:
            print(f"{steps} steps instead of {STEPS}, to take about {TRAINING_SECONDS:.0f} s on this machine")
    result = run.train(settings, overwrite=True, command=COMMAND, time_limit=MOST_SECONDS)
    if result.step < (settings.max_steps or 0) and result.signal is None:
        print(f"stopped after {result.step} steps: other programs slowed this machine down")
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
    sample = sample_text(result.folder, PROMPT, SAMPLE_TOKENS)
    print(f"\nsample:\n{sample}\n")
    print(f"validation loss: {result.eval_loss:.4f} nats per token")
    print(f"report: {result.report}")
    print(f"time: {time.perf_counter() - start:.0f} s")
    print(f'more: attnres generate {result.folder} --prompt "{PROMPT}"')


def demo_settings(output_dir: Path, max_steps: int, threads: int | None) -> TrainSettings:
    """The demo's run: the tiny preset, 16 sublayers in 4 blocks, 1,024 tokens a step."""
    from attention_residuals.training.settings import TrainSettings

    quarter = -(-max_steps // 4)
    return TrainSettings(
        preset="tiny",
        mode="block",
        num_blocks=4,
        vocab_size=VOCABULARY,
        context=CONTEXT,
        batch_size=ROWS,
        max_steps=max_steps,
        learning_rate=5e-3,
        warmup=0.03,
        decay=0.4,
        eval_every=quarter,
        save_every=quarter,
        eval_blocks=32,
        keep_checkpoints=1,
        threads=threads,
        output_dir=str(output_dir),
    )


def fastest_threads() -> int:
    """The number of CPU threads, up to PyTorch's choice, that runs operations of the demo's size fastest.

    Measured, because a small model on many cores, or on cores that others use, is slower with more threads.
    """
    import torch

    most = torch.get_num_threads()
    tokens, weight = torch.randn(ROWS * CONTEXT, 128), torch.randn(128, 512)
    rates = []
    for threads in sorted({1 << power for power in range(most.bit_length())} | {most}):
        torch.set_num_threads(threads)
        torch.nn.functional.silu(tokens @ weight)
        calls, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < PROBE_SECONDS:
            torch.nn.functional.silu(tokens @ weight)
            calls += 1
        rates.append((calls / passed, threads))
    torch.set_num_threads(most)
    return max(rates)[1]


def seconds_per_step(settings: TrainSettings) -> float:
    """Time of a forward and backward pass of the demo's model: the better of two, after one to warm up."""
    import torch

    from attention_residuals import Qwen3_5AttnResConfig, Qwen3_5AttnResForCausalLM
    from attention_residuals.training.presets import PRESETS

    fields = {**PRESETS["tiny"].fields, "vocab_size": VOCABULARY, "attn_res": settings.attn_res_fields()}
    model = Qwen3_5AttnResForCausalLM(Qwen3_5AttnResConfig(**fields))
    ids = torch.arange(ROWS * CONTEXT).reshape(ROWS, CONTEXT) % VOCABULARY
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        durations.append(time.perf_counter() - start)
    return min(durations[1:])


def affordable_steps(seconds: float) -> int:
    """How many steps of `seconds` each fit into the time training may take."""
    return max(FEWEST_STEPS, min(STEPS, int(TRAINING_SECONDS / seconds)))


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
