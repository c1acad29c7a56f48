"""DepthPlan against a simulation that moves lists of sublayer numbers through the depth of a model."""

import itertools

import pytest

from attention_residuals import AttnResConfig, DepthPlan


def simulate(num_sublayers, block_length):
    """Per read, the sublayers inside each source (0 is the embedding); and where blocks closed."""
    finished, partial, reads, closes = [[0]], [], [], []
    for sublayer in range(1, num_sublayers + 1):
        reads.append([*finished, partial] if partial else list(finished))
        partial = [*partial, sublayer]
        full = len(partial) == block_length
        closes.append(full or sublayer == num_sublayers)
        if full:
            finished, partial = [*finished, partial], []
    reads.append([*finished, partial] if partial else list(finished))
    return reads, closes


def check(plan, block_length):
    reads, closes = simulate(plan.num_sublayers, block_length)
    assert plan.num_reads == len(reads)
    assert [plan.num_sources(read) for read in range(plan.num_reads)] == [len(sources) for sources in reads]
    assert [plan.closes_block(sublayer) for sublayer in range(plan.num_sublayers)] == closes
    assert plan.sublayers_per_block == block_length
    assert plan.num_blocks == sum(closes)
    for read, sources in enumerate(reads):
        names = plan.source_names(read)
        assert len(names) == len(sources)
        assert names[0] == "embedding"
        final = read == plan.num_sublayers
        open_block = len(sources) > 1 and len(sources[-1]) < block_length and not final
        assert plan.has_partial(read) == open_block == (names[-1] == "partial")
        assert plan.num_finished_blocks(read) == len(sources) - 1 - open_block
        assert sorted(itertools.chain(*sources)) == list(range(read + 1))  # none lost, none twice


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("block_length", range(1, 7))
def test_sublayers_per_block(layers, block_length):
    check(DepthPlan(2 * layers, AttnResConfig(sublayers_per_block=block_length)), block_length)


@pytest.mark.parametrize("num_sublayers", [1, 2, 7, 16, 26, 48])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 50])
def test_num_blocks_rounds_the_length_up(num_sublayers, num_blocks):
    plan = DepthPlan(num_sublayers, AttnResConfig(num_blocks=num_blocks))
    length = next(n for n in range(1, num_sublayers + 1) if n * num_blocks >= num_sublayers)
    check(plan, length)
    assert plan.num_blocks <= num_blocks


@pytest.mark.parametrize("num_sublayers", [1, 2, 13])
def test_full_is_one_sublayer_a_block(num_sublayers):
    plan = DepthPlan(num_sublayers, AttnResConfig(mode="full"))
    check(plan, 1)
    assert [plan.num_sources(read) for read in range(plan.num_reads)] == list(range(1, num_sublayers + 2))


@pytest.mark.parametrize("num_sublayers", [1, 2, 13])
def test_standard_has_the_stream_as_its_one_source(num_sublayers):
    plan = DepthPlan(num_sublayers, AttnResConfig(mode="standard"))
    assert plan.num_reads == num_sublayers + 1
    for read in range(plan.num_reads):
        assert plan.num_sources(read) == 1
        assert plan.source_names(read) == ("residual stream",)
        assert not plan.has_partial(read)
        assert plan.num_finished_blocks(read) == 0
    assert not any(plan.closes_block(sublayer) for sublayer in range(num_sublayers))


def test_ten_layers_with_four_a_block():
    plan = DepthPlan(20, AttnResConfig(sublayers_per_block=8))
    assert plan.num_blocks == 3
    assert [s for s in range(20) if plan.closes_block(s)] == [7, 15, 19]
    assert plan.source_names(20) == ("embedding", "block 1", "block 2", "block 3")
    assert plan.source_names(16) == ("embedding", "block 1", "block 2")
    assert plan.source_names(17) == ("embedding", "block 1", "block 2", "partial")


def test_kimi_k3_has_eight_stored_rows_and_nine_sources():
    plan = DepthPlan(2 * 93, AttnResConfig(sublayers_per_block=2 * 12, eps=1e-5))
    assert plan.num_reads == 187
    stored = max(1 + plan.num_finished_blocks(read) for read in range(plan.num_sublayers))
    assert stored == 8
    assert max(plan.num_sources(read) for read in range(plan.num_reads)) == 9
    assert plan.num_sources(186) == 9


def test_source_names():
    block = DepthPlan(5, AttnResConfig(sublayers_per_block=2))
    assert [block.source_names(read) for read in range(6)] == [
        ("embedding",),
        ("embedding", "partial"),
        ("embedding", "block 1"),
        ("embedding", "block 1", "partial"),
        ("embedding", "block 1", "block 2"),
        ("embedding", "block 1", "block 2", "block 3"),
    ]
    full = DepthPlan(2, AttnResConfig(mode="full"))
    assert full.source_names(2) == ("embedding", "sublayer 1", "sublayer 2")


@pytest.mark.parametrize("num_sublayers", [0, -3])
def test_needs_a_sublayer(num_sublayers):
    with pytest.raises(
        ValueError, match=rf"num_sublayers must be at least 1, got {num_sublayers}; a decoder"
    ):
        DepthPlan(num_sublayers, AttnResConfig())


@pytest.mark.parametrize("num_sublayers", [2.0, "2", True])
def test_num_sublayers_is_an_int(num_sublayers):
    with pytest.raises(TypeError, match=r"num_sublayers must be an int, got (float|str|bool)"):
        DepthPlan(num_sublayers, AttnResConfig())


@pytest.mark.parametrize("method", ["num_sources", "source_names", "has_partial", "num_finished_blocks"])
@pytest.mark.parametrize("mode", ["standard", "full", "block"])
@pytest.mark.parametrize("read", [-1, 7])
def test_reads_outside_the_model(method, mode, read):
    plan = DepthPlan(6, AttnResConfig(mode=mode))
    with pytest.raises(IndexError, match=rf"read must be between 0 and 6, got {read}"):
        getattr(plan, method)(read)


@pytest.mark.parametrize("mode", ["standard", "full", "block"])
@pytest.mark.parametrize("sublayer", [-1, 6])
def test_sublayers_outside_the_model(mode, sublayer):
    plan = DepthPlan(6, AttnResConfig(mode=mode))
    with pytest.raises(IndexError, match=rf"sublayer must be between 0 and 5, got {sublayer}"):
        plan.closes_block(sublayer)


@pytest.mark.parametrize("window", [1, 2, 3, 20])
@pytest.mark.parametrize("fields", [{"mode": "full"}, {"num_blocks": 3}, {"sublayers_per_block": 1}], ids=str)
def test_a_window_keeps_the_embedding_and_the_last_sources(fields, window):
    all_of_them, windowed = (
        DepthPlan(12, AttnResConfig(**fields, **more)) for more in ({}, {"window": window})
    )
    for read in range(13):
        embedding, *others = all_of_them.source_names(read)
        assert windowed.source_names(read) == (embedding, *others[max(0, len(others) - window) :])
        assert windowed.num_sources(read) == len(windowed.source_names(read))
        assert windowed.has_partial(read) == all_of_them.has_partial(read)
        assert windowed.num_finished_blocks(read) == all_of_them.num_finished_blocks(read)
    assert [windowed.closes_block(s) for s in range(12)] == [all_of_them.closes_block(s) for s in range(12)]
