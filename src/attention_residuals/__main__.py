"""`python -m attention_residuals PROGRAM ...`: another package's command, in a process that knows our models.

`transformers serve` and `lm_eval` don't import this package, so they refuse the model type of a folder that
`save_pretrained` wrote. `python -m` has imported it by the time this file runs.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

USAGE = (
    "usage: python -m attention_residuals PROGRAM [ARGUMENT ...]\n"
    "runs an installed command that then knows our model types, for example\n"
    "  python -m attention_residuals transformers serve run\n"
    "(this package's own commands: attnres --help)"
)
STATUS_MISTAKE = 2


def main(arguments: list[str]) -> Any:
    """Run an installed command in this process.

    Args:
        arguments: the command's name, then what it is given.

    Returns:
        What the command returns: an exit status, or None for success.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else STATUS_MISTAKE
    program = arguments[0]
    found = tuple(entry_points(group="console_scripts", name=program))
    if not found:
        print(
            f"PROGRAM must be a command of an installed Python package, got {program!r}; install the package "
            "that has it (this package's own commands: attnres --help)",
            file=sys.stderr,
        )
        return STATUS_MISTAKE
    sys.argv = arguments
    return found[0].load()()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
