"""A folder exported with code loads in a process that can't import this package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tiny
import torch

from attention_residuals import DepthRead
from attention_residuals.models.export import export_with_code, required_modules

LOAD = """
import sys, torch

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "attention_residuals":
            raise ImportError("blocked")

sys.meta_path.insert(0, Blocker())
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.save(model(torch.arange(1, 9)[None], output_depth_weights=True).logits, folder + "/logits.pt")
model.generate(torch.arange(1, 9)[None], max_new_tokens=3, do_sample=False)
AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
assert "attention_residuals" not in sys.modules
"""


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_loads_without_the_package(tmp_path, family):
    model = tiny.trained_model({"mode": "block", "sublayers_per_block": 3}, family, dtype=torch.float32)
    export_with_code(model, tmp_path / "model")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model")], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for read in (m for m in model.modules() if isinstance(m, DepthRead)):
        read.backend = "lean"  # what the exported code has; the compiled kernel stays behind
    logits = torch.load(tmp_path / "model" / "logits.pt")
    assert torch.equal(logits, model(torch.arange(1, 9)[None], output_depth_weights=True).logits)


def test_only_what_the_models_need_is_exported():
    modules = required_modules()
    assert "attention_residuals.models.auto" in modules
    assert not [m for m in modules if any(word in m for word in ("cli", "training", "analysis", "export"))]


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="no attention residuals"):
        export_with_code(tiny.plain_model(), tmp_path)
