"""Case M8: what doesn't work with attention residuals is refused with the reason, never silently wrong."""

from __future__ import annotations

import pytest
import tiny
import torch

import attention_residuals as ar
from attention_residuals.models.attach import attach
from attention_residuals.models.families import FAMILIES

BLOCK = {"mode": "block", "sublayers_per_block": 3}


def test_pipeline_parallelism_of_transformers():
    for distributed in ({"pp_size": 2}, type("Config", (), {"pp_size": 2})()):
        with pytest.raises(ValueError, match="pp_size must be 1, got 2"):
            ar.Qwen3_5AttnResForCausalLM.prepare_distribute_model(distributed)
    assert not ar.Qwen3_5AttnResForCausalLM(tiny.attn_res_config(BLOCK)).pp_plan


def test_layers_that_are_missing_or_skipped():
    model = tiny.attn_res_model(BLOCK)
    model.config.num_hidden_layers = 3  # how early exit is done in transformers
    with pytest.raises(RuntimeError, match="needs all 4 layers, but 3 ran"):
        model(tiny.token_ids(), use_cache=False)


def test_assisted_decoding():
    model, assistant = (tiny.attn_res_model(BLOCK, dtype=torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(tiny.token_ids(1), assistant_model=assistant, max_new_tokens=4)


def test_packed_rows_without_boundaries():
    """Case Q1: positions that restart inside a row."""
    model, ids = tiny.attn_res_model(BLOCK), tiny.token_ids(1, 8)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="position_ids restart"):
        model(ids, position_ids=packed)
    with pytest.raises(ValueError, match="seq_idx"):  # the convolution would still leak
        model(ids, position_ids=packed, cu_seq_lens_q=torch.tensor([0, 4, 8]))
    assert torch.equal(model(ids, position_ids=torch.arange(8)[None]).logits, model(ids).logits)


def test_attention_keeps_packed_documents_apart_or_refuses():
    """Case Q1 without recurrent layers: with a cache, transformers would read the row as one document."""
    model, ids = tiny.trained_model(BLOCK, "llama"), tiny.token_ids(1, 8)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids, position_ids=packed)
    together = model(ids, position_ids=packed, use_cache=False).logits
    apart = torch.cat([model(half, use_cache=False).logits for half in ids.split(4, 1)], 1)
    assert (together - apart).abs().max() <= 1e-6 * apart.abs().max()


def test_a_norm_or_final_read_on_its_own():
    model = tiny.attn_res_model(BLOCK)
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="outside its decoder layer"):
        model.model.layers[1].input_layernorm(x)
    with pytest.raises(RuntimeError, match="outside a model forward"):
        model.model.norm(x)


def test_attaching_twice():
    model = tiny.attn_res_model(BLOCK)
    with pytest.raises(ValueError, match="already"):
        attach(model.model, ar.AttnResConfig(), FAMILIES["qwen3_5_text"])


def test_a_layer_outside_a_forward_takes_its_blocks_as_arguments():
    """What a pipeline stage does: layer(x, *blocks) returns the sum and what closed inside."""
    model, ids = tiny.trained_model(BLOCK), tiny.token_ids()
    layer = model.model.layers[1]  # sublayers 2 and 3: a block closes after sublayer 2
    embedding = model.model.embed_tokens(ids)
    partial = torch.randn_like(embedding)
    rotary = model.model.rotary_emb(embedding, torch.arange(ids.shape[1]).expand(3, *ids.shape))
    tail, closed = layer(partial, embedding, position_embeddings=rotary)
    first = layer.input_layernorm.read((embedding, partial))
    norm = layer.input_layernorm
    mixed = layer.linear_attn(hidden_states=norm.attn_res_plain_class.forward(norm, first))
    torch.testing.assert_close(closed, partial + mixed, rtol=1e-5, atol=1e-5)
    assert tail.shape == closed.shape
