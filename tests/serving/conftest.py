from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from documented import python_block
from served_model import save_served_model


@pytest.fixture(scope="session")
def installed() -> None:
    """Fails, rather than skips, where the programs are missing."""
    for package in ("openai", "fastapi", "uvicorn", "lm_eval"):
        if importlib.util.find_spec(package) is None:
            pytest.fail(
                f"{package} must be installed for these tests; run them by `make test-all`, or first "
                '`pip install -c constraints.txt -e ".[serving,evaluation]"`'
            )


@pytest.fixture(scope="session")
def workplace(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model folder `run`, and `exported` made from it as the page says."""
    folder = tmp_path_factory.mktemp("serving")
    save_served_model(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(python_block("export_with_code"), "docs/serving.md", "exec"), {})
    return folder
