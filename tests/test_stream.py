import pickle

import pytest
import torch

from attention_residuals import AttnResConfig, DepthPlan, ResidualStream, depth_attention

CONFIGS = [
    AttnResConfig(mode="full"),
    *(AttnResConfig(sublayers_per_block=length) for length in (1, 2, 3, 4, 5, 12)),
    AttnResConfig(num_blocks=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("num_sublayers", [1, 2, 7, 12])
def test_sources_sum_to_the_standard_stream_at_every_read(config, num_sublayers):
    # Integers, so that any order of summation gives the same floats.
    outputs = torch.randint(1, 9, (num_sublayers + 1, 2, 3, 4)).float()
    plan = DepthPlan(num_sublayers, config)
    stream, standard = ResidualStream.start(outputs[0]), outputs[0]
    for read in range(plan.num_reads):
        assert len(stream.sources) == plan.num_sources(read)
        assert (stream.partial is not None) == plan.has_partial(read)
        assert torch.equal(torch.stack(stream.sources).sum(0), standard)
        assert torch.equal(stream.total(), standard)
        assert all(source.abs().min() > 0 for source in stream.sources)  # no zero tensor is a source
        assert torch.equal(stream.blocks[0], outputs[0])  # the embedding once, unchanged
        mixed = depth_attention(stream.sources, torch.zeros(4), read_scale="sum")
        assert torch.equal(mixed, standard)
        if read < num_sublayers:
            stream = stream.write(outputs[read + 1], closes_block=plan.closes_block(read))
            standard = standard + outputs[read + 1]


def test_write_leaves_the_old_stream_as_it_was():
    embedding, first, second = torch.randn(3, 2, 3, 4)
    start = ResidualStream.start(embedding)
    open_block = start.write(first, closes_block=False)
    before = [source.clone() for source in open_block.sources]
    closed = open_block.write(second, closes_block=True)
    assert start.sources == (embedding,)
    assert start.partial is None
    assert open_block.partial is first
    assert all(torch.equal(a, b) for a, b in zip(open_block.sources, before, strict=True))
    assert closed.partial is None
    assert torch.equal(closed.blocks[1], first + second)


def test_fields_cannot_be_set():
    stream = ResidualStream.start(torch.ones(1, 1, 2))
    with pytest.raises(AttributeError):
        stream.partial = torch.ones(1, 1, 2)
    assert isinstance(stream.blocks, tuple)


def test_gradients_reach_every_sublayer_output():
    outputs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    stream = ResidualStream.start(outputs[0])
    for i, output in enumerate(outputs[1:]):
        stream = stream.write(output, closes_block=i % 2 == 1)
    stream.total().sum().backward()
    assert all(torch.equal(output.grad, torch.ones_like(output)) for output in outputs)


def test_travels_as_a_pytree_and_a_pickle():
    stream = ResidualStream.start(torch.ones(1, 2)).write(torch.full((1, 2), 2.0), closes_block=False)
    doubled = torch.utils._pytree.tree_map(lambda x: 2 * x, stream)
    assert isinstance(doubled, ResidualStream)
    assert torch.equal(doubled.partial, torch.full((1, 2), 4.0))
    assert torch.equal(pickle.loads(pickle.dumps(stream)).total(), stream.total())


def test_shape_mismatch_names_both_shapes():
    stream = ResidualStream.start(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"stream's shape \(2, 3, 4\), got \(2, 1, 4\)"):
        stream.write(torch.ones(2, 1, 4), closes_block=False)
