"""Stage models one after the other in this process: names, holes, numbers, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import FIELDS, Case, make_batch, make_model, plan_of
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import attention_residuals as ar
from attention_residuals.pipeline import StagePlan, plan_stages, split_model
from attention_residuals.pipeline.pipeline import check_schedule
from attention_residuals.pipeline.stage_model import AbsentLayer, run_stage


def run_stages(models, plan, batch):
    """The logits, from stage to stage without processes."""
    stream = None
    for stage, model in enumerate(models):
        stream = run_stage(model, plan, stage, stream, batch)
    return stream


def all_stages(model, plan):
    parts = [split_model(model, plan, rank) for rank in range(plan.num_ranks)]
    return list(itertools.chain(*zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("family", "size", "layers"),
    [
        *((family, 3, (1, 2, 1, 2)) for family in sorted(FIELDS)),
        *itertools.product(["llama"], [0, 1, 2, 5, 100], [(1, 5), (1,) * 6]),
    ],
)
def test_logits_are_those_of_the_whole_model_to_the_bit(family, size, layers):
    case = Case(layers=layers, family=family, sublayers_per_block=size)
    model = make_model(case).float()
    plan = plan_of(case, model, 2)
    batch = {"input_ids": make_batch(case)["input_ids"]}
    with torch.no_grad():
        assert torch.equal(run_stages(all_stages(model, plan), plan, batch), model(**batch).logits)


def test_every_stage_hands_on_what_the_plan_says():
    case = Case(layers=(1, 2, 1, 2), sublayers_per_block=3)
    model = make_model(case)
    plan = plan_of(case, model, 2)
    stream = None
    for stage, part in enumerate(all_stages(model, plan)[:-1]):
        stream = run_stage(part, plan, stage, stream, {"input_ids": make_batch(case)["input_ids"]})
        assert len(stream.blocks) == plan.blocks_after(stage)
        assert (stream.partial is not None) == plan.partial_after(stage)


def test_each_parameter_is_on_one_stage_and_shared_with_the_model():
    case = Case(layers=(1, 2, 1, 2), family="qwen3_5_text")
    model = make_model(case)
    names = dict(model.named_parameters())
    found = [dict(part.named_parameters()) for part in all_stages(model, plan_of(case, model, 2))]
    assert sum(map(len, found)) == len(names)
    assert all(names[name] is parameter for part in found for name, parameter in part.items())


def test_the_model_stays_whole():
    case = Case()
    model = make_model(case)
    batch = make_batch(case)
    before = model(**batch).loss
    split_model(model, plan_of(case, model, 2), 0)
    assert not any(isinstance(module, AbsentLayer) for module in model.modules())
    assert torch.equal(model(**batch).loss, before)


def test_a_rank_makes_its_stages_alone():
    """From the meta device: nobody ever holds the whole model."""
    case = Case(layers=(1, 2, 1, 2), family="qwen3_5_text")
    whole = make_model(case).float()
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    plan = plan_of(case, empty, 2)
    stages = all_stages(empty, plan)
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.initialize_weights()
        state = whole.state_dict()
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    batch = {"input_ids": make_batch(case)["input_ids"]}
    with torch.no_grad():
        assert torch.equal(run_stages(stages, plan, batch), whole(**batch).logits)


def test_models_that_cant_be_split():
    plain = LlamaForCausalLM(LlamaConfig(**FIELDS["llama"], num_hidden_layers=2))
    with pytest.raises(TypeError, match=r"convert\(\)"):
        plan_stages(plain, 2)
    config = ar.LlamaAttnResConfig(**FIELDS["llama"], num_hidden_layers=2)
    classifier = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(TypeError, match="causal language"):
        split_model(classifier, plan_stages(classifier, 2), 0)
    vision = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    classifier = ar.convert(ViTForImageClassification(vision))
    with pytest.raises(TypeError, match="causal language"):
        split_model(classifier, plan_stages(classifier, 2), 0)
    two_phase = ar.LlamaAttnResConfig(
        **FIELDS["llama"], num_hidden_layers=2, attn_res={"read_schedule": "two_phase"}
    )
    model = ar.LlamaAttnResForCausalLM(two_phase)
    with pytest.raises(ValueError, match="two_phase"):
        split_model(model, plan_stages(model, 2), 0)


def test_a_plan_of_another_model():
    model, other = make_model(Case()), make_model(Case(layers=(2, 3)))
    with pytest.raises(ValueError, match="must be the model's"):
        split_model(model, plan_stages(other, 2), 0)


def test_a_model_whose_routers_have_a_loss():
    model = make_model(Case())
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        split_model(model, plan_stages(model, 2), 0)


def test_a_part_that_no_stage_would_own():
    model = make_model(Case())
    model.model.projection = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"projection\.weight"):
        split_model(model, plan_stages(model, 2), 0)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"])
def test_zero_bubble_with_cache_is_refused(schedule):
    model = make_model(Case())
    plan = plan_stages(model, 2, virtual_stages=2, cache=True)
    with pytest.raises(ValueError, match="cached blocks"):
        check_schedule(schedule, plan, 4)


def test_microbatches_of_a_v():
    plan = plan_stages(make_model(Case()), 2, virtual_stages=2, cache=False, placement="v")
    check_schedule("zbv_zero_bubble", plan, 1)
    with pytest.raises(
        ValueError, match="dual_pipe_v needs at least as many microbatches as stages, got 3 and 4"
    ):
        check_schedule("dual_pipe_v", plan, 3)


@pytest.mark.parametrize(
    ("schedule", "virtual", "microbatches", "message"),
    [
        ("1f2b", 1, 2, "schedule must be one of gpipe"),
        ("gpipe", 2, 2, "one stage per rank"),
        ("1f1b", 1, 1, "as many microbatches as stages"),
        ("gpipe", 1, 0, "at least 1"),
        ("zbv_zero_bubble", 2, 4, "placement='v'"),
    ],
)
def test_schedules_that_dont_fit_the_plan(schedule, virtual, microbatches, message):
    plan = plan_stages(make_model(Case()), 2, virtual_stages=virtual, cache=False)
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule, plan, microbatches)


def test_a_v_has_no_cache():
    depth = make_model(Case()).base_model.depth_plan
    plan = StagePlan(depth=depth, layers=(1, 2, 1, 2), num_ranks=2, cache=False, placement="v")
    assert [plan.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert plan.stages_of(0) == (0, 3)
    sizes = {"rows": 2, "tokens": 3, "width": 4, "itemsize": 2}
    assert plan.hop_bytes(2, **sizes) == 0
    assert plan.hop_bytes(3, **sizes) == plan.hop_tensors(3) * 2 * 3 * 4 * 2
    with pytest.raises(ValueError, match="placement"):
        StagePlan(depth=depth, layers=(1, 2, 1, 2), num_ranks=2, placement="v")
