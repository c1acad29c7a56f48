"""What is measured over depth.

With zero queries and read_scale="sum" every read is the residual stream itself, so hooks in a standard model
and the record of a model with reads must agree.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attention_residuals.comparison.depth import average, measure_depth
from attention_residuals.models.auto import config_class, model_class
from tiny_shapes import LLAMA_TO_TRAIN

IDS = torch.arange(24).reshape(2, 12)


def save_model(folder, attn_res):
    config_type = config_class("llama")
    fields = {name: value for name, value in LLAMA_TO_TRAIN.items() if name != "model_type"}
    torch.manual_seed(0)
    model = model_class(LlamaForCausalLM, "llama")(config_type(**fields, vocab_size=24, attn_res=attn_res))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8  # so that layers write as much as they receive
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), unk_token="a"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    return measure_depth(save_model(tmp_path_factory.mktemp("standard"), {"mode": "standard"}), IDS)


@pytest.mark.parametrize("attn_res", [{"mode": "full"}, {"mode": "block", "sublayers_per_block": 3}])
def test_hooks_and_record_agree(standard, tmp_path, attn_res):
    reads = measure_depth(save_model(tmp_path / "reads", {**attn_res, "read_scale": "sum"}), IDS)
    assert reads.sublayer_names == standard.sublayer_names and len(standard.sublayer_names) == 4
    for name in ("input_norm", "output_norm", "gradient_norm"):
        ours, plain = getattr(reads, name), getattr(standard, name)
        assert plain.min() > 0
        np.testing.assert_allclose(ours, plain, rtol=1e-5, err_msg=name)
    assert standard.gradient_norm.shape == (2,) and standard.summary is None and reads.summary is not None


def test_the_average_is_over_seeds(standard, tmp_path):
    other = measure_depth(save_model(tmp_path / "full", {"mode": "full"}), IDS)
    mean = average([standard, other])
    np.testing.assert_allclose(mean.input_norm, (standard.input_norm + other.input_norm) / 2)
    assert not np.allclose(standard.input_norm, other.input_norm)
