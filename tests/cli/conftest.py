from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_model import save_tiny_model

from attention_residuals.cli import main as command_line

Outcome = tuple[int, str, str]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests: not to be written to."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model_dir(saved_model: Path, tmp_path: Path) -> Path:
    """A copy of the model that the test may damage."""
    return Path(shutil.copytree(saved_model, tmp_path / "run"))


@pytest.fixture
def attnres(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process; gives exit status, standard output and standard error."""

    def run(*args: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            command_line.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run
