"""Over 2 and 4 processes: loss and every gradient are those of one, in float64; bytes are those planned."""

from __future__ import annotations

import itertools

import pytest
from cases import Case, Finding, run_cases
from processes import run_in_processes

TWO = (
    Case(schedule="gpipe", microbatches=1),
    Case(schedule="gpipe", layers=(2, 4), microbatches=3, family="qwen3_5_text", rows=3),
    Case(microbatches=3, sublayers_per_block=1, padded=True, family="qwen3_5_text"),
    Case(microbatches=4, sublayers_per_block=0),
    Case(schedule="interleaved_1f1b", layers=(1, 2, 1, 2), microbatches=4, family="qwen3_5_text"),
    Case(schedule="interleaved_1f1b", layers=(1, 2, 1, 2), microbatches=4, cache=False),
    Case(schedule="interleaved_1f1b", layers=(1, 1, 1, 1, 1, 1), sublayers_per_block=4, checkpointing=True),
    Case(schedule="interleaved_1f1b", layers=(2, 1, 1, 2), sublayers_per_block=0, microbatches=1),
    Case(schedule="looped_bfs", layers=(1, 2, 2, 1), sublayers_per_block=2, microbatches=3, tokens=5),
    Case(schedule="looped_bfs", layers=(1, 1, 2, 1), sublayers_per_block=1, tied=True),
    Case(tied=True, sublayers_per_block=12, family="gemma2"),
    Case(schedule="looped_bfs", layers=(1, 1, 1, 1), frozen="embedding", microbatches=1),
    Case(layers=(1, 3), frozen="all but reads", sublayers_per_block=12),
    Case(schedule="interleaved_1f1b", layers=(1, 1, 1, 1), sublayers_per_block=1, window=1, padded=True),
    Case(schedule="gpipe", layers=(2, 2), sublayers_per_block=1, window=1, family="gpt2"),
    Case(layers=(2, 2), family="mamba", sublayers_per_block=1),
    Case(schedule="interleaved_zero_bubble", cache=False, microbatches=3, family="qwen3_5_text"),
    Case(
        schedule="interleaved_zero_bubble",
        layers=(1, 2, 1, 2),
        cache=False,
        microbatches=4,
        checkpointing=True,
    ),
    Case(schedule="zbv_zero_bubble", layers=(1, 2, 1, 2), cache=False, microbatches=4, frozen="embedding"),
    Case(schedule="dual_pipe_v", layers=(1, 2, 1, 2), cache=False, microbatches=4, tied=True),
)
FOUR = (
    Case(layers=(1, 2, 1, 1), microbatches=4, family="qwen3_5_text"),
    Case(schedule="gpipe", layers=(1, 1, 1, 1), sublayers_per_block=1, microbatches=1),
    Case(
        schedule="interleaved_1f1b",
        layers=(1, 1, 1, 1, 2, 1, 1, 1),
        sublayers_per_block=3,
        microbatches=4,
        tied=True,
    ),
    Case(schedule="looped_bfs", layers=(1,) * 8, sublayers_per_block=1, microbatches=3),
    Case(
        schedule="interleaved_zero_bubble",
        layers=(1,) * 8,
        sublayers_per_block=2,
        cache=False,
        microbatches=4,
    ),
)


def _every_case(world: int) -> tuple[Case, ...]:
    """Every schedule, block size and split that go together."""
    one = ((2,) * world, (1, 3) * (world // 2))
    two = ((1,) * 2 * world, (2, 1, 1, 2) * (world // 2))
    cases = []
    for size, microbatches in itertools.product((0, 1, 3, 4, 100), (1, 4)):
        shape = {"sublayers_per_block": size, "microbatches": microbatches, "rows": 4, "tokens": 3}
        for layers in one:
            cases.append(Case(schedule="gpipe", layers=layers, **shape))
            if microbatches >= world:
                cases.append(Case(schedule="1f1b", layers=layers, **shape))
        for layers, schedule in itertools.product(two, ("interleaved_1f1b", "looped_bfs")):
            cases += [Case(schedule=schedule, layers=layers, cache=cache, **shape) for cache in (True, False)]
        for layers in (*one, *two):
            cases.append(Case(schedule="interleaved_zero_bubble", layers=layers, cache=False, **shape))
        if microbatches >= 2 * world:
            for layers, schedule in itertools.product(two, ("zbv_zero_bubble", "dual_pipe_v")):
                cases.append(Case(schedule=schedule, layers=layers, cache=False, **shape))
    return tuple(cases)


def _check(findings: list[Finding], case: Case) -> None:
    for finding in findings:
        assert finding.loss_error < 1e-13
        assert finding.gradient_error < 1e-12
        assert finding.left == 0
        assert finding.seen == finding.counted == finding.planned
    have = set().union(*(finding.names for finding in findings))
    assert have - {"lm_head.weight"} == findings[0].all_names - {"lm_head.weight"}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    return run_in_processes(run_cases, 2, tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory):
    return run_in_processes(run_cases, 4, tmp_path_factory.mktemp("four"), 4, FOUR)


@pytest.mark.parametrize("number", range(len(TWO)), ids=[case.name for case in TWO])
def test_two_processes(found_by_two, number):
    _check([findings[number] for findings in found_by_two], TWO[number])


@pytest.mark.parametrize("number", range(len(FOUR)), ids=[case.name for case in FOUR])
def test_four_processes(found_by_four, number):
    _check([findings[number] for findings in found_by_four], FOUR[number])


def test_tensors_are_as_many_as_in_the_papers_formulas(found_by_four):
    """P = 4, V = 2: measured bytes over the bytes of one tensor, the embedding's hops taken away."""
    ranks, virtual = 4, 2
    stages = ranks * virtual
    paper_cached = ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2
    kept_although_made = (virtual - 1) * ranks
    expected = {
        "looped_bfs": (paper_cached - kept_although_made) * 2 + ranks - 1,  # two blocks a stage
        "interleaved_zero_bubble": stages * (stages - 1) // 2 + stages - 1,
    }
    for number, case in enumerate(FOUR):
        if case.schedule in expected:
            sent = sum(findings[number].seen for findings in found_by_four)
            one = 2 * case.rows * case.tokens * 16 * 8  # forward and back
            assert sent == expected.pop(case.schedule) * one
    assert not expected


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_block_size_and_split(world, tmp_path):
    cases = _every_case(world)
    found = run_in_processes(run_cases, world, tmp_path, world, cases, seconds=1500)
    for number, case in enumerate(cases):
        try:
            _check([findings[number] for findings in found], case)
        except AssertionError as error:
            raise AssertionError(case.name) from error
