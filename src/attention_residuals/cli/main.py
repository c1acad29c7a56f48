"""The `attnres` command: registers the commands, and turns errors into one line and an exit status."""

from __future__ import annotations

import importlib
import sys

import click
import typer

from attention_residuals.errors import UserError

# command name -> module that holds a function of the same name
COMMANDS = {
    "demo": "attention_residuals.cli.demo",
    "train": "attention_residuals.cli.train",
    "generate": "attention_residuals.cli.generate",
    "inspect": "attention_residuals.cli.inspect",
    "info": "attention_residuals.cli.info",
}


def build_app() -> typer.Typer:
    """The Typer application with every command."""
    app = typer.Typer(
        name="attnres",
        help="Attention Residuals: train, run and look into Transformers with attention over depth.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, module in COMMANDS.items():
        app.command(name)(getattr(importlib.import_module(module), name))
    return app


def main(args: list[str] | None = None) -> None:
    """Run the command line; exit status 0 for success, 2 for something the user can mend, 130 for Ctrl-C."""
    try:
        status = build_app()(args=args, standalone_mode=False)
    except (UserError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print("attnres: " + " ".join(message.split()), file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        print("attnres: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
