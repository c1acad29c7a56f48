"""Help, version, interruption and info."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
import typer

from attention_residuals.cli import info
from attention_residuals.cli import main as command_line
from attention_residuals.models.families import FAMILIES


def test_help_lists_the_commands(attnres: Callable) -> None:
    status, out, err = attnres("--help")
    assert (status, err) == (0, "")
    assert all(name in out for name in command_line.COMMANDS)


def test_no_command_shows_the_help(attnres: Callable) -> None:
    status, out, _ = attnres()
    assert status == 0 and "inspect" in out


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_every_command_has_help(attnres: Callable, command: str) -> None:
    status, out, err = attnres(command, "--help")
    assert (status, err) == (0, "") and "--help" in out


def test_version(attnres: Callable) -> None:
    assert attnres("--version") == (0, f"attnres {version('attention_residuals')}\n", "")


def test_the_base_of_usage_errors_is_wide_enough() -> None:
    assert issubclass(typer.BadParameter, command_line.USAGE_ERROR)
    assert command_line.USAGE_ERROR is not Exception


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, typer.Abort])
def test_interruptions_exit_130(
    attnres: Callable, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupt() -> None:
        raise interruption

    monkeypatch.setattr("attention_residuals.cli.info._versions", interrupt)
    assert attnres("info") == (130, "", "attnres: interrupted\n")


def test_info_shows_versions_devices_backends_and_families(
    attnres: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    status, out, err = attnres("info")
    assert (status, err) == (0, "")
    for word in (version("attention_residuals"), platform.python_version(), torch.__version__, "matplotlib"):
        assert word in out
    for word in ("reference", "lean", "bfloat16", f"{torch.get_num_threads()} threads", *FAMILIES):
        assert word in out
    assert "each tested with modes full, block 2, block 3" in out
    if not torch.cuda.is_available():
        assert "cuda" in out and "not available" in out


def test_info_says_why_a_backend_cannot_run(attnres: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"lean": None, "abacus": "beads are missing"}
    # the package's attribute of this name is the function, so the module is looked up by its full name
    module = sys.modules["attention_residuals.depth_attention"]
    monkeypatch.setattr(module, "available_backends", lambda device, dtype: reasons)
    assert "beads are missing" in attnres("info")[1]


def test_info_names_packages_that_are_not_installed(
    attnres: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(info.OPTIONAL, "no-such-thing", "x")
    assert "not installed" in attnres("info")[1]
