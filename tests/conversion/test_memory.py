"""Peak memory of a conversion: the weights are copied, not loaded."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

# Three shards of 0.45 GB: what is loaded whole, or shard by shard beside a copy, would show.
CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=15,
    num_attention_heads=16,
    num_key_value_heads=4,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)
MEASURED = """
import pathlib, sys
import torch
torch.set_num_threads(1)
from attention_residuals.cli.main import main
try:
    main(["convert", *sys.argv[1:]])
finally:
    # not ru_maxrss, which begins with what the process that started this one held
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", 1024 * int(status.partition("VmHWM:")[2].split()[0]))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "in"
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    model.config.save_pretrained(folder)
    names, weight_map = list(model.state_dict().items()), {}
    third = len(names) // 3 + 1
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        part = names[third * i : third * (i + 1)]
        values = {
            key: torch.ones(t.shape, dtype=torch.bfloat16)
            if t.ndim == 1
            else torch.empty(t.shape, dtype=torch.bfloat16).normal_(std=0.02)
            for key, t in part
        }
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(values, file)

    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


@pytest.mark.slow
def test_peak_memory(shards, tmp_path):
    """Less than the largest shard and 1 GB, there and back."""
    largest = max(path.stat().st_size for path in shards.glob("*.safetensors"))
    for arguments in ([shards, tmp_path / "out"], [tmp_path / "out", tmp_path / "again", "--back"]):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *map(str, arguments), "--no-verify"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peak = int(done.stdout.split()[-1])
        assert largest > 4e8 and peak < largest + 1e9, f"{peak:,} bytes"
    for path in shards.glob("*.safetensors"):
        assert filecmp.cmp(path, tmp_path / "again" / path.name, shallow=False)
