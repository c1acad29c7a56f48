"""`attnres info`: versions, devices, backends and why one cannot run, and the supported families."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.table import Table

REQUIRED = ("attention_residuals", "torch", "transformers", "safetensors")
# distribution -> what it is for
OPTIONAL = {
    "accelerate": "training",
    "datasets": "training",
    "tokenizers": "training",
    "matplotlib": "pictures and reports",
    "fla-core": "fused kernels on CUDA",
    "peft": "adapters",
}
DTYPES = ("float32", "bfloat16", "float16")


def info() -> None:
    """Show versions, devices, backends and why one cannot run, and the supported model families."""
    from rich.console import Console

    console = Console()
    for table in (_versions(), _devices(), _backends(), _families()):
        console.print(table)
        console.print()


def _versions() -> Table:
    table = _table("versions", "package", "version", "for")
    for name in REQUIRED:
        table.add_row(name, version(name), "")
    table.add_row("python", platform.python_version(), "")
    for name, purpose in OPTIONAL.items():
        try:
            table.add_row(name, version(name), purpose)
        except PackageNotFoundError:
            table.add_row(name, "not installed", purpose)
    return table


def usable_devices() -> list[torch.device]:
    """The CPU, and every kind of accelerator that torch finds here."""
    import torch

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return devices


def _devices() -> Table:
    import torch

    table = _table("devices", "device", "what torch finds")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {platform.machine()}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "no usable GPU"
        table.add_row("cuda", f"not available: {reason}")
    table.add_row("mps", "available" if torch.backends.mps.is_available() else "not available")
    return table


def _backends() -> Table:
    import torch

    from attention_residuals.depth_attention import available_backends

    table = _table("backends of depth_attention", "device", "dtype", "backend", "runs, or why not")
    for device in usable_devices():
        for dtype in DTYPES:
            for name, reason in available_backends(device, getattr(torch, dtype)).items():
                table.add_row(str(device), dtype, name, "yes" if reason is None else reason)
    return table


def _families() -> Table:
    from attention_residuals.models.families import FAMILIES, TESTED_MODES

    # Each row has a model in tests/models/family_models.py, and a test asserts that.
    modes = ", ".join(" ".join(map(str, mode.values())) for mode in TESTED_MODES)
    table = _table(
        f"model families, each tested with modes {modes}",
        *("model type", "token mixers", "layers", "pre-norms", "final norm"),
    )
    for model_type, family in FAMILIES.items():
        mixers = ", ".join(name for _, name in family.mixer_names)
        table.add_row(model_type, mixers, family.layers, ", ".join(family.pre_norms), family.final_norm)
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
