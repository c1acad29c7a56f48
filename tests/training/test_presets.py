from __future__ import annotations

import pytest
import torch

from attention_residuals import Qwen3_5AttnResConfig, Qwen3_5AttnResForCausalLM
from attention_residuals.training.presets import BPE_VOCABULARY, PRESETS, _shape

# millions of parameters without the reads; the published sizes are the language models of their names
SIZES = {
    "tiny": 2.3,
    "small": 11.9,
    "0.8B": 752,
    "2B": 1882,
    "4B": 4206,
    "9B": 8954,
    "27B": 26896,
}


def on_meta(name: str, attn_res: dict[str, object]) -> Qwen3_5AttnResForCausalLM:
    fields = {"vocab_size": BPE_VOCABULARY, **PRESETS[name].fields}
    with torch.device("meta"):
        return Qwen3_5AttnResForCausalLM(Qwen3_5AttnResConfig(**fields, attn_res=attn_res))


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name: str) -> None:
    count = on_meta(name, {"mode": "standard"}).num_parameters()
    assert count / 1e6 == pytest.approx(SIZES[name], rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_reads_are_a_small_part(name: str) -> None:
    plain = on_meta(name, {"mode": "standard"}).num_parameters()
    with_reads = on_meta(name, {"mode": "block", "num_blocks": 8}).num_parameters()
    assert 0 < with_reads - plain < 0.003 * plain


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_small_shapes_run(name: str) -> None:
    fields = {**PRESETS[name].fields, "vocab_size": 64}
    model = Qwen3_5AttnResForCausalLM(Qwen3_5AttnResConfig(**fields))
    ids = torch.arange(10)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_rope_sections_must_fit_the_head() -> None:
    with pytest.raises(ValueError, match="mrope_section must sum to head_dim / 8 = 8"):
        _shape(
            8,
            2,
            8,
            heads=(1, 1),
            head_dim=64,
            linear_heads=(1, 1),
            linear_head_dim=8,
            mrope_section=(1, 1, 1),
        )
