"""`NAME=VALUE` options to values by name."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from attention_residuals.errors import UserError


def parse_assignments(flag: str, options: Sequence[str], example: str) -> dict[str, Any]:
    """Names and values of a repeatable option; a value is TOML, or else text.

    Raises:
        UserError: one of them has no "=".
    """
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise UserError(f"{flag} needs NAME=VALUE, such as {example}; got {option!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        values[name.strip().replace("-", "_")] = value
    return values
