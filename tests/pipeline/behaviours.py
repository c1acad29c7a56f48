"""What a pipeline does beside one exact step; each function runs in both processes of a group of two."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import itertools
import traceback
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, compare_gradients, make_batch, make_model, plan_of
from float64 import all_in_float64

from attention_residuals.pipeline import Pipeline, stage
from attention_residuals.pipeline.block_cache import BlockCache

INTERLEAVED = Case(schedule="interleaved_1f1b", layers=(1, 2, 1, 2), microbatches=4)
ZBV = dataclasses.replace(INTERLEAVED, schedule="zbv_zero_bubble", cache=False)


def make_pipeline(case: Case, world: int = 2, **kwargs: Any) -> tuple[Pipeline, Any]:
    """A pipeline and the whole model that it came from."""
    model = make_model(case)
    whole = copy.deepcopy(model)
    plan = plan_of(case, model, world)
    made = Pipeline(model, plan, schedule=case.schedule, num_microbatches=case.microbatches, **kwargs)
    return made, whole


def assert_step_is_exact(pipeline: Pipeline, whole: Any, case: Case) -> None:
    batch = make_batch(case)
    expected = whole(**batch).loss
    expected.backward()
    loss = pipeline.step(**batch)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    error, _ = compare_gradients(pipeline, whole)
    assert error < 1e-12


def zero_grad(pipeline: Pipeline, whole: Any) -> None:
    for parameter in (*pipeline.parameters(), *whole.parameters()):
        parameter.grad = None


def eval_then_train_then_eval(rank: int) -> None:
    for case in (INTERLEAVED, ZBV, dataclasses.replace(ZBV, schedule="dual_pipe_v")):
        pipeline, whole = make_pipeline(case)
        batch = make_batch(case)
        for _ in range(2):
            loss, logits = pipeline.eval(**batch), pipeline.eval(batch["input_ids"])
            with torch.no_grad():
                expected = whole(**batch)
            torch.testing.assert_close(loss, expected.loss, rtol=1e-13, atol=0)
            if rank == pipeline.plan.rank_of(3):
                torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-13)
            else:
                assert logits is None
            assert pipeline.kept_blocks == 0
            assert_step_is_exact(pipeline, whole, case)
            zero_grad(pipeline, whole)


def nothing_of_a_step_stays(rank: int) -> None:
    """Neither kept nor received nor made blocks outlive the step, without help of the garbage collector."""
    pipeline, _ = make_pipeline(INTERLEAVED)
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_streams(patch)
        sizes = watch_cache(patch)
        pipeline.step(**make_batch(INTERLEAVED))
    assert max(sizes) > 0
    assert len(seen) > 20
    assert not [ref for ref in seen if ref() is not None]


def blocks_go_with_their_microbatch(rank: int) -> None:
    """As many are kept at once for 16 microbatches as for 8."""
    peaks = []
    for microbatches in (8, 16):
        case = dataclasses.replace(INTERLEAVED, microbatches=microbatches, rows=16, tokens=2)
        pipeline, _ = make_pipeline(case)
        with pytest.MonkeyPatch.context() as patch:
            sizes = watch_cache(patch)
            pipeline.step(**make_batch(case))
        peaks.append(max(sizes))
    assert peaks[0] == peaks[1]


def an_exception_leaves_nothing(rank: int) -> None:
    """One rank fails in the middle, the other waits in vain; both go on in a new group."""
    case = dataclasses.replace(INTERLEAVED, tied=True)
    short = datetime.timedelta(seconds=4)
    pipeline, whole = make_pipeline(case, group=dist.new_group([0, 1], timeout=short))
    assert_step_is_exact(pipeline, whole, case)
    zero_grad(pipeline, whole)
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_streams(patch)
        failing = fail_at_call(pipeline.models[-1].base_model.norm, 2) if rank == 1 else None
        with pytest.raises(RuntimeError) as caught:
            pipeline.step(**make_batch(case))
        if failing is not None:
            assert "on purpose" in str(caught.value.__cause__)
            failing.remove()
        del caught
    assert seen
    assert pipeline.kept_blocks == 0
    zero_grad(pipeline, whole)
    dist.barrier()
    again = Pipeline(
        pipeline.models,
        pipeline.plan,
        schedule=case.schedule,
        num_microbatches=4,
        group=dist.new_group([0, 1]),
    )
    assert_step_is_exact(again, whole, case)
    assert not [ref for ref in seen if ref() is not None]


def a_rank_alone(rank: int) -> None:
    """Groups of one rank; after an exception the same pipeline goes on."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    case = Case(
        schedule="interleaved_1f1b", layers=(2, 3, 1), microbatches=4, sublayers_per_block=2, tied=True
    )
    pipeline, whole = make_pipeline(case, 1, group=groups[rank])
    assert_step_is_exact(pipeline, whole, case)
    zero_grad(pipeline, whole)
    failing = fail_at_call(pipeline.models[1].base_model, 2)
    with pytest.raises(RuntimeError):
        pipeline.step(**make_batch(case))
    failing.remove()
    zero_grad(pipeline, whole)
    assert_step_is_exact(pipeline, whole, case)
    assert set(pipeline.sent_bytes.values()) == {(0, 0)}


def gradients_add_up_over_steps(rank: int) -> None:
    """A tied weight's as well, whose two copies exchange theirs in each step."""
    case = Case(tied=True)
    pipeline, whole = make_pipeline(case)
    for seed in range(3):
        batch = make_batch(case, seed)
        whole(**batch).loss.backward()
        pipeline.step(**batch)
    error, _ = compare_gradients(pipeline, whole)
    assert error < 1e-12


def copies_of_a_tied_weight_begin_equal(rank: int) -> None:
    case = Case(tied=True)
    model = make_model(case)
    plan = plan_of(case, model, 2)
    first = model.get_input_embeddings().weight.detach().clone()
    if rank == 1:
        torch.nn.init.zeros_(model.get_input_embeddings().weight)
    pipeline = Pipeline(model, plan, num_microbatches=2)
    name = "lm_head.weight" if rank else "model.embed_tokens.weight"
    assert torch.equal(dict(pipeline.named_parameters())[name], first)


def clips_to_the_whole_models_norm(rank: int) -> None:
    for case in (INTERLEAVED, Case(tied=True)):
        pipeline, whole = make_pipeline(case)
        assert_step_is_exact(pipeline, whole, case)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        torch.testing.assert_close(pipeline.clip_grad_norm_(0.01), expected, rtol=1e-12, atol=0)
        error, _ = compare_gradients(pipeline, whole)
        assert error < 1e-12


def state_dicts_make_up_the_whole(rank: int) -> None:
    for tied in (False, True):
        pipeline, whole = make_pipeline(dataclasses.replace(INTERLEAVED, tied=tied))
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, pipeline.state_dict())
        expected = whole.state_dict()
        assert parts[0].keys() | parts[1].keys() == expected.keys()
        for name, tensor in itertools.chain(*(part.items() for part in parts)):
            assert torch.equal(tensor, expected[name])
        doubled = {name: tensor * 2 for name, tensor in expected.items()}
        pipeline.load_state_dict(doubled)
        assert all(torch.equal(tensor, doubled[name]) for name, tensor in pipeline.state_dict().items())
        with pytest.raises(KeyError):
            pipeline.load_state_dict({})


def bfloat16_is_as_good_as_in_one_process(rank: int) -> None:
    """Against float64, the error of both relative to the gradient."""
    case = INTERLEAVED
    exact = make_model(case).double()
    plain, model = make_model(case, torch.bfloat16), make_model(case, torch.bfloat16)
    exact.load_state_dict({name: tensor.double() for name, tensor in plain.state_dict().items()})
    pipeline = Pipeline(model, plan_of(case, model, 2), schedule=case.schedule, num_microbatches=4)
    batch = make_batch(case)
    exact(**batch).loss.backward()
    plain(**batch).loss.backward()
    pipeline.step(**batch)
    truth, theirs = dict(exact.named_parameters()), dict(plain.named_parameters())
    assert all(p.grad.dtype == torch.bfloat16 for p in pipeline.parameters())
    errors = torch.zeros(2, dtype=torch.float64)
    for name, parameter in pipeline.named_parameters():
        for i, grad in enumerate((parameter.grad, theirs[name].grad)):
            errors[i] += (grad.double() - truth[name].grad).square().sum()
    dist.all_reduce(errors)
    assert errors[0].sqrt() < 2 * errors[1].sqrt()


def refuses_inputs_that_dont_fit(rank: int) -> None:
    """And loses nothing by it."""
    case = dataclasses.replace(INTERLEAVED, tied=True)
    pipeline, whole = make_pipeline(case)
    assert_step_is_exact(pipeline, whole, case)
    batch = make_batch(case)
    with pytest.raises(ValueError, match="one row per microbatch, got 3 rows"):
        pipeline.step(batch["input_ids"][:3], batch["labels"][:3])
    with pytest.raises(ValueError, match="labels must be"):
        pipeline.step(batch["input_ids"], batch["labels"][:, :3])
    with pytest.raises(ValueError, match="process group has 2"):
        make_pipeline(Case(layers=(2, 2, 2), microbatches=3), 3)
    error, _ = compare_gradients(pipeline, whole)
    assert error < 1e-12


def watch_streams(patch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to every tensor of the stream that enters or leaves a stage."""
    seen: list[weakref.ref[torch.Tensor]] = []
    plain = stage.run_stage

    def run(model: Any, plan: Any, number: int, stream: Any, inputs: Any) -> Any:
        left = plain(model, plan, number, stream, inputs)
        for state in (stream, left):
            if isinstance(state, torch.Tensor):
                seen.append(weakref.ref(state))
            elif state is not None:
                seen.extend(weakref.ref(source) for source in state.sources)
        return left

    patch.setattr(stage, "run_stage", run)
    return seen


def watch_cache(patch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks are kept whenever some more have been."""
    sizes: list[int] = []
    plain = BlockCache.keep

    def keep(self: BlockCache, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        sizes.append(len(self))

    patch.setattr(BlockCache, "keep", keep)
    return sizes


def fail_at_call(module: torch.nn.Module, call: int) -> Any:
    """A hook that raises when the module is called for the `call`-th time."""
    calls = itertools.count(1)

    def hook(*args: Any) -> None:
        if next(calls) == call:
            raise RuntimeError("on purpose")

    return module.register_forward_pre_hook(hook)


BEHAVIOURS = (
    eval_then_train_then_eval,
    nothing_of_a_step_stays,
    blocks_go_with_their_microbatch,
    a_rank_alone,
    gradients_add_up_over_steps,
    copies_of_a_tied_weight_begin_equal,
    clips_to_the_whole_models_norm,
    state_dicts_make_up_the_whole,
    bfloat16_is_as_good_as_in_one_process,
    refuses_inputs_that_dont_fit,
    an_exception_leaves_nothing,
)


def run_behaviours(rank: int) -> dict[str, str | None]:
    """By name: the traceback of what failed, None for the others."""
    found: dict[str, str | None] = {}
    with all_in_float64():
        for behaviour in BEHAVIOURS:
            try:
                behaviour(rank)
                found[behaviour.__name__] = None
            except Exception:
                found[behaviour.__name__] = traceback.format_exc()
    return found
