"""What a run is about to do, for every family that can be trained."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from attention_residuals.config import AttnResConfig
from attention_residuals.models.auto import causal_lm_class, our_config
from attention_residuals.models.families import FAMILIES
from attention_residuals.training.model import LANGUAGE_FAMILIES
from attention_residuals.training.summary import depth_plan_of, memory_estimate

SETTINGS = AttnResConfig(mode="block", sublayers_per_block=3)


def test_only_language_models_are_trained():
    assert set(FAMILIES) - set(LANGUAGE_FAMILIES) == {"vit"}


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_plan_and_memory_of_every_family(family):
    plain = AutoConfig.for_model(family)
    plain.num_hidden_layers = 4
    if getattr(plain, "layer_types", None) and family != "mamba":
        plain.layer_types = plain.layer_types[:4]
    config = our_config(plain, SETTINGS)
    with torch.device("meta"):
        model = causal_lm_class(config)(config)
    assert depth_plan_of(config) == model.base_model.depth_plan
    memory = memory_estimate(config, [], rows=2, context=64, gradient_checkpointing=False)
    assert memory["activations"] > 2 * 64 * 4 * config.hidden_size
