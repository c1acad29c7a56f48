"""How much the libraries underneath may say: errors only, or warnings and progress too."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

VerboseFlag = Annotated[bool, typer.Option("--verbose", help="Show warnings and progress of the libraries.")]


def set_verbosity(*, verbose: bool) -> None:
    """Quiet transformers, its progress bars and Python warnings, or let them speak.

    Sets what the libraries read when they are imported, so that it costs no import by itself, and tells
    transformers directly where it is loaded already.
    """
    if verbose:
        for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.pop(name, None)
        warnings.simplefilter("default")
    else:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        warnings.simplefilter("ignore")
    if "transformers" not in sys.modules:
        return
    from transformers.utils import logging

    if verbose:
        logging.set_verbosity_warning()
        logging.enable_progress_bar()
    else:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
