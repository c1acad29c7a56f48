"""The `attnres` command: registers the commands, and turns errors into one line and an exit status."""

from __future__ import annotations

import importlib
import io
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from attention_residuals.cli.verbosity import VerboseFlag, set_verbosity
from attention_residuals.errors import UserError

# command name -> module that holds a function of the same name
COMMANDS = {
    "demo": "attention_residuals.cli.demo",
    "train": "attention_residuals.cli.train",
    "compare": "attention_residuals.cli.compare",
    "generate": "attention_residuals.cli.generate",
    "inspect": "attention_residuals.cli.inspect",
    "convert": "attention_residuals.cli.convert",
    "plan": "attention_residuals.cli.plan",
    "info": "attention_residuals.cli.info",
}

# The base of every usage error. Recent versions of typer carry their own copy of click, earlier ones use
# click itself; BadParameter is public in both.
USAGE_ERROR: type[Exception] = [
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base is not Exception
][-1]

STATUS_MISTAKE = 2
STATUS_INTERRUPTED = 130


def build_app() -> typer.Typer:
    """The Typer application with every command."""
    app = typer.Typer(
        name="attnres",
        help="Attention Residuals: train, run and look into Transformers with attention over depth.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_before_command)
    for name, module in COMMANDS.items():
        app.command(name)(getattr(importlib.import_module(module), name))
    return app


def main(args: list[str] | None = None) -> None:
    """Run the command line; exit status 0 for success, 2 for something the user can mend, 130 for Ctrl-C."""
    try:
        status = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has left, as `head` does; what is still buffered goes nowhere, without a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _run(args: list[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    try:
        status = build_app()(args=args, standalone_mode=False, prog_name="attnres")
    except (UserError, USAGE_ERROR) as error:
        return _fail(_message(error), STATUS_MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        status = STATUS_INTERRUPTED
    if status == STATUS_INTERRUPTED:
        return _fail("interrupted", STATUS_INTERRUPTED)
    return status if isinstance(status, int) else 0


def _message(error: Exception) -> str:
    """What is wrong, and for mistakes in the words of the command line, where its help is."""
    if isinstance(error, UserError):
        return str(error)
    format_message = getattr(error, "format_message", error.__str__)
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" (see {context.command_path} --help)"
    return format_message().rstrip(".") + hint


def _fail(message: str, status: int) -> int:
    print("attnres: " + " ".join(message.split()), file=sys.stderr)
    return status


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"attnres {version('attention_residuals')}")
        raise typer.Exit


def _before_command(
    context: typer.Context,
    verbose: VerboseFlag = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    set_verbosity(verbose=verbose)
    if context.invoked_subcommand is None:
        print(context.get_help())
