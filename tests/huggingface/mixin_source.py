"""From the installed transformers' version to its own test mixins, taken from the source distribution.

The wheel holds no tests, and the source distribution only the files directly in tests/: `MISSING` names what
the mixins import but the distribution lacks, and what stands in for it. Nothing of transformers' tests is
kept in this repository.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

import transformers

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "huggingface_tests"
PACKAGE = "huggingface_tests"  # the name under which the distribution's tests/ is imported


def fetch(version: str = transformers.__version__) -> Path:
    """The folder tests/ of transformers' source distribution; downloaded once, then read from the cache.

    Raises:
        RuntimeError: pip can't get the distribution, or it has no test mixins.
    """
    target = CACHE / version
    if (target / "test_modeling_common.py").is_file():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        unpacked = _unpack_tests(_download(version, Path(scratch)), Path(scratch))
        if not (unpacked / "test_modeling_common.py").is_file():
            raise RuntimeError(f"the source distribution of transformers {version} holds no test mixins")
        (unpacked / "__init__.py").touch()  # the distribution leaves it out, and one mixin executes it
        if not (target / "test_modeling_common.py").is_file():  # another process may have been faster
            shutil.rmtree(target, ignore_errors=True)
            unpacked.rename(target)
    return target


def _download(version: str, folder: Path) -> Path:
    requirement = f"transformers=={version}"
    options = ["--no-binary", "transformers", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(folder.glob("transformers-*.tar.gz"))
    if pip.returncode or not archives:
        tail = "\n".join((pip.stderr or pip.stdout).strip().splitlines()[-5:])
        raise RuntimeError(
            f"Hugging Face's model tests come from the source distribution of {requirement}, and pip could "
            "not download it; make a package registry reachable once (the tests are then kept in .cache/). "
            f"pip said:\n{tail}"
        )
    return archives[0]


def _unpack_tests(archive: Path, folder: Path) -> Path:
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        tests = [member for member in tar.getmembers() if member.name.startswith(f"{root}/tests/")]
        tar.extractall(folder, members=tests, filter="data")
    return folder / root / "tests"


class ExportTesterMixin:
    """Stands in for torch.export's mixin, a base of `ModelTesterMixin`: adds no tests."""


class GenerationTesterMixin:
    """Stands in for the mixin of `generate`: adds no tests. Ours are in the model tests."""


def _needs_processes(*args: Any, **kwargs: Any) -> Any:
    raise unittest.SkipTest("needs distributed_testing_utils, which is not in the source distribution")


# Settings that every configuration must keep when given to its constructor.
CONFIG_COMMON_KWARGS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["BertModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "problem_type": "regression",
}

MISSING: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_COMMON_KWARGS},
    "distributed_testing_utils": {
        "_get_distributed_device_type": lambda: "cpu",
        "_get_distributed_backend": _needs_processes,
        "_get_rank_device": _needs_processes,
        "_set_rank_device": _needs_processes,
        "_start_rank_processes": _needs_processes,
        "run_distributed": _needs_processes,
    },
}


def load(folder: Path) -> list[str]:
    """Make `folder` importable as the package `huggingface_tests`.

    Returns:
        The names of the modules that are missing from it, each replaced by its stand-in.
    """
    _add_package(PACKAGE, folder)
    stood_in = []
    for name, content in MISSING.items():
        parent, _, _ = name.rpartition(".")
        if (folder / f"{name.replace('.', '/')}.py").is_file():
            continue
        if parent and not (folder / parent).is_dir():
            _add_package(f"{PACKAGE}.{parent}", folder / parent)
        module = types.ModuleType(f"{PACKAGE}.{name}")
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
        stood_in.append(name)
    return stood_in


def _add_package(name: str, folder: Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def mixin_module(name: str) -> Any:
    """One module of the distribution's tests/, e.g. "test_modeling_common"; call `load` first."""
    return importlib.import_module(f"{PACKAGE}.{name}")
