"""Our models against transformers' own, and against the residual stream written out by hand."""

from __future__ import annotations

import pytest
import tiny
import torch

import attention_residuals as ar

# transformers computes the norms and the delta rule of a float64 model in float32.
ROUNDING = 5e-6
SUM_MODES = [
    {"mode": "full", "read_scale": "sum"},
    *({"mode": "block", "sublayers_per_block": s, "read_scale": "sum"} for s in (1, 2, 3, 4, 5, 12)),
    *({"mode": "block", "num_blocks": n, "read_scale": "sum"} for n in (1, 2, 8, 99)),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_standard_mode_is_the_plain_model_to_the_bit(family, dtype):
    plain = tiny.plain_model(family, dtype=dtype)
    ours = tiny.attn_res_model({"mode": "standard"}, family, dtype=dtype)
    ids = tiny.token_ids()
    assert set(plain.state_dict()) == set(ours.state_dict())
    assert torch.equal(ours(ids).logits, plain(ids).logits)
    generate = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(ids, **generate), plain.generate(ids, **generate))


@pytest.mark.parametrize("attn_res", SUM_MODES, ids=str)
def test_zero_queries_with_the_sum_scale_are_the_plain_model(attn_res):
    ids = tiny.token_ids()
    expected = tiny.plain_model(layers=5)(ids).logits
    logits = tiny.attn_res_model(attn_res, layers=5)(ids).logits
    assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_families_with_zero_queries_are_the_plain_model(family):
    ids = tiny.token_ids()
    expected = tiny.plain_model(family)(ids).logits
    for attn_res in SUM_MODES:
        logits = tiny.attn_res_model(attn_res, family)(ids).logits
        assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()


def test_irregular_layer_types():
    layer_types = [
        "full_attention",
        "linear_attention",
        "full_attention",
        "full_attention",
        "linear_attention",
    ]
    attn_res = {"mode": "block", "sublayers_per_block": 3, "read_scale": "sum"}
    ids = tiny.token_ids()
    expected = tiny.plain_model(layers=5, layer_types=layer_types)(ids).logits
    logits = tiny.attn_res_model(attn_res, layers=5, layer_types=layer_types)(ids).logits
    assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()


def written_out(model, ids):
    """Logits of our model with the stream written out: sublayers called one by one, sources in a plain list.

    Independent of attach, stream and plan: block ends are counted here, and the mixing is its own formula.
    """
    backbone, config = model.model, model.config.attn_res
    layers = backbone.layers
    length = 1 if config["mode"] == "full" else config["sublayers_per_block"]
    if config["mode"] == "block" and length is None:
        length = -(-2 * len(layers) // config["num_blocks"])

    def mix(read, sources):
        if read is None:
            (only,) = sources
            return only
        scores = [
            (read.query * read.key_weight * s).sum(-1) / (s.pow(2).mean(-1) + 1e-6).sqrt() for s in sources
        ]
        weights = torch.stack(scores).softmax(0)
        return sum(weight[..., None] * source for weight, source in zip(weights, sources, strict=True))

    def norm(module, h):
        if module.read is None:  # the first read leaves the norm to transformers, in float32
            return module.attn_res_plain_class.forward(module, h)
        scale = 1 + module.weight if "Qwen3_5" in type(module).__name__ else module.weight
        return h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale

    embedding = backbone.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = backbone.rotary_emb(
        embedding, positions.expand(3, *ids.shape) if hasattr(layers[0], "block_type") else positions
    )
    mask = torch.full((ids.shape[1],) * 2, float("-inf"), dtype=embedding.dtype).triu(1)[None, None]
    finished, partial, written = [embedding], None, 0
    for layer in layers:
        for read_norm in (layer.input_layernorm, layer.post_attention_layernorm):
            sources = finished if partial is None else [*finished, partial]
            x = norm(read_norm, mix(read_norm.read, sources))
            if read_norm is layer.post_attention_layernorm:
                out = layer.mlp(x)
            elif hasattr(layer, "linear_attn"):
                out = layer.linear_attn(hidden_states=x)
            else:
                out, _ = layer.self_attn(hidden_states=x, attention_mask=mask, position_embeddings=rotary)
            partial = out if partial is None else partial + out
            written += 1
            if written % length == 0:
                finished, partial = [*finished, partial], None
    sources = finished if partial is None else [*finished, partial]
    return model.lm_head(norm(backbone.norm, mix(backbone.norm.read, sources)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("attn_res", tiny.MODES, ids=str)
def test_trained_reads_equal_the_stream_written_out(family, attn_res):
    model = tiny.trained_model(attn_res, family)
    ids = tiny.token_ids()
    expected = written_out(model, ids)
    bound = ROUNDING if family == "qwen3_5" else 1e-12
    assert (model(ids, use_cache=False).logits - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(
    "layers", [n if n in (1, 2, 5, 7) else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 14)]
)
def test_every_depth_and_block_length(layers):
    """Case M3: lengths that don't divide the depth; the short last block is in the final read."""
    ids = tiny.token_ids(1, 5)
    for length in range(1, 7):
        model = tiny.trained_model({"mode": "block", "sublayers_per_block": length}, layers=layers)
        expected = written_out(model, ids)
        logits = model(ids, use_cache=False).logits
        assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max(), length


def test_dropping_the_final_read_is_noticed():
    """The comparison above would see a wrong final read."""
    model = tiny.trained_model({"mode": "block", "sublayers_per_block": 3})
    ids = tiny.token_ids()
    expected = written_out(model, ids)
    with torch.no_grad():
        model.model.norm.read.query.zero_()
    assert (model(ids).logits - expected).abs().max() > 1e-3


def test_bfloat16_error_stays_near_the_plain_models():
    """Against float64, zero queries at the sum scale add little to what bfloat16 itself costs."""
    ids = tiny.token_ids(4, 33)
    exact = tiny.plain_model(layers=8)(ids).logits
    plain = tiny.plain_model(layers=8, dtype=torch.bfloat16)(ids).logits.double()
    for attn_res in SUM_MODES[:4]:
        ours = tiny.attn_res_model(attn_res, layers=8, dtype=torch.bfloat16)(ids).logits.double()
        assert (ours - exact).pow(2).mean().sqrt() <= 1.2 * (plain - exact).pow(2).mean().sqrt()


def test_reads_are_depth_reads_with_a_query_except_the_first():
    model = tiny.attn_res_model({"mode": "block", "sublayers_per_block": 3})
    reads = [module for module in model.modules() if isinstance(module, ar.DepthRead)]
    assert len(reads) == model.model.depth_plan.num_reads - 1
    assert all(read.query.shape == (16,) and read.key_weight.shape == (16,) for read in reads)
    assert not [
        name for name, _ in model.named_parameters() if name.startswith("model.layers.0.input_layernorm.read")
    ]
