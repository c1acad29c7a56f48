"""Case M1: gradient checkpointing of both kinds gives the same gradients and keeps fewer bytes."""

from __future__ import annotations

import pytest
import tiny
import torch

MODES = ({"mode": "standard"}, *tiny.MODES)


def gradients(model, ids, **kwargs):
    model.zero_grad()
    model(ids, labels=ids, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def saved_bytes(model, ids) -> int:
    """Bytes of distinct storages that autograd keeps for the backward pass, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    total = sum(storage.nbytes() for storage in storages.values())
    loss.backward()
    return total


@pytest.mark.parametrize("attn_res", MODES, ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_equal_those_without_checkpointing(attn_res, use_reentrant):
    ids = tiny.token_ids()
    model = (tiny.trained_model if attn_res["mode"] != "standard" else tiny.attn_res_model)(attn_res).train()
    expected = gradients(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    for _ in range(2):
        found = gradients(model, ids)
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() <= 1e-12 * max(1.0, gradient.abs().max()), name


@pytest.mark.parametrize("attn_res", MODES, ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_fewer_bytes_are_kept(attn_res, use_reentrant):
    ids = tiny.token_ids(2, 64)
    model = tiny.attn_res_model(attn_res, layers=8).train()
    plain = saved_bytes(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert saved_bytes(model, ids) < 0.5 * plain


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_outputs_stay_differentiable_under_checkpointing(use_reentrant):
    """A loss on depth weights and hidden states gives the same gradients with checkpointing."""
    ids = tiny.token_ids()
    model = tiny.trained_model({"mode": "block", "sublayers_per_block": 3}).train()

    def found():
        model.zero_grad()
        out = model(ids, labels=ids, output_depth_weights=True, output_hidden_states=True)
        extra = sum(w.square().sum() for w in out.depth_weights) + sum(
            h.square().mean() for h in out.hidden_states
        )
        (out.loss + extra).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = found()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    for gradient, wanted in zip(found(), expected, strict=True):
        assert (gradient - wanted).abs().max() <= 1e-12 * max(1.0, wanted.abs().max())


def test_config_driven_checkpointing_reaches_our_layers():
    config = tiny.attn_res_config({"mode": "full"})
    config.gradient_checkpointing = True
    model = tiny.ar.Qwen3_5AttnResForCausalLM(config)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.is_gradient_checkpointing


def test_every_parameter_gets_a_gradient():
    """Case M7 in one process: also with zero queries, and also the queries of short reads."""
    for attn_res in tiny.MODES:
        found = gradients(tiny.attn_res_model(attn_res).train(), tiny.token_ids())
        assert all(gradient is not None for gradient in found.values())
