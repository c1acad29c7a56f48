"""Weights, gradients and moments under FSDP2, against PyTorch's memory tracker on one of four ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import attention_residuals as ar
from attention_residuals.config import AttnResConfig
from attention_residuals.models.families import FAMILIES
from attention_residuals.planner.layout import Layout
from attention_residuals.planner.plain_model import describe
from attention_residuals.planner.prediction import Planner
from attention_residuals.training.sharding import shard_layers

RANKS, BATCH, CONTEXT = 4, 2, 64


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def tracked_peak(model, mesh):
    """Bytes by category at the peak of the second step."""
    shard_layers(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = FSDPMemTracker(model, optimizer)
    ids = torch.randint(0, model.config.vocab_size, (BATCH, CONTEXT))
    tracker.track_inputs((ids,))
    with tracker:
        for step in range(2):
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(kind, "value", kind)): size for kind, size in found.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_and_what_is_gathered(mesh, tied):
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    settings = AttnResConfig(num_blocks=4, read_scale="sum")
    plain = LlamaForCausalLM(config)
    described = describe("llama", plain, FAMILIES["llama"])
    (predicted,), (whole,) = (
        Planner(described, Layout(batch=BATCH, context=CONTEXT, **shared)).predict(settings).memory
        for shared in ({"data_parallel": RANKS, "fsdp": True}, {})
    )
    found = tracked_peak(ar.convert(plain, settings), mesh)
    weights = found["Sharded Param"] + found["Unsharded Param"] + found["All Gather"]
    assert predicted.weights == pytest.approx(weights, rel=0.02)
    assert predicted.optimizer == pytest.approx(found["OptState"], rel=0.02)
    gradients = found["Sharded Grad"] + found["Unsharded Grad"] + found["Reduce Scatter"]
    assert gradients <= predicted.gradients
    assert predicted.total < whole.total
