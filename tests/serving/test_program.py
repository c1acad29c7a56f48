"""Another package's command in a process that knows our model types, and the names it looks for."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
import transformers.processing_utils

import attention_residuals as ar
from attention_residuals.__main__ import main


def test_an_installed_command_runs_in_this_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)  # put back afterwards
    with pytest.raises(SystemExit) as stopped:
        main(["attnres", "--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"attnres {version('attention_residuals')}\n"


def test_an_unknown_program_is_refused(capsys):
    assert main(["no-such-program", "--port", "1"]) == 2
    message = capsys.readouterr().err
    assert "must be a command of an installed Python package, got 'no-such-program'; install" in message


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2)], ids=str)
def test_usage(capsys, arguments, status):
    assert main(arguments) == status
    assert "PROGRAM [ARGUMENT ...]" in capsys.readouterr().out


def test_transformers_has_our_classes_by_name():
    """In either of its modules: loading processors puts a second one in the place of the first."""
    ours = ar.LlamaAttnResForCausalLM
    for module in (sys.modules["transformers"], transformers.processing_utils.transformers_module):
        assert module.LlamaAttnResForCausalLM is ours
