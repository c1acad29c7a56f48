"""Ablations against reads that are computed by hand without the source."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_reads import BLOCK, VOCABULARY, choosing_model, token_ids

import attention_residuals as ar
from attention_residuals.analysis.ablation import ablate_sources, without_source
from attention_residuals.analysis.source_columns import column_names, source_columns
from attention_residuals.models.attach import reads_in_order
from attention_residuals.models.mixins import family_of

SETTINGS = (
    ("Llama", {"mode": "full"}),
    ("Qwen3_5", {"mode": "block", "sublayers_per_block": 3}),
    ("Llama", {"mode": "block", "num_blocks": 2, "read_scale": "sum"}),
    ("Llama", {"mode": "full", "window": 3}),
    ("Qwen3_5", {"mode": "block", "sublayers_per_block": 2, "window": 1}),
)


def read_module(model, read: int) -> ar.DepthRead:
    return reads_in_order(model.model, family_of(model.config))[read]


def loss_by_hand(model, ids: torch.Tensor, read: int, source: int, *, renormalised: bool) -> float:
    """The loss where one read's source has weight zero, by the equation of the read written out."""
    module, place = read_module(model, read), source_columns(model.model.depth_plan, read).index(source)

    def by_hand(sources, norm_weight=None, norm_eps=1e-6, norm_offset=0.0):
        v_NBTD = torch.stack(list(sources))
        rms = (v_NBTD.square().mean(-1, keepdim=True) + module.eps).sqrt()
        alpha = torch.softmax((v_NBTD / rms * module.key_weight * module.query).sum(-1), 0)
        alpha[place] = 0
        if renormalised:
            alpha = alpha / alpha.sum(0)
        h = (alpha[..., None] * v_NBTD).sum(0)
        return h / (h.square().mean(-1, keepdim=True) + norm_eps).sqrt() * (norm_offset + norm_weight)

    module.forward = by_hand
    try:
        with torch.no_grad():
            return model(ids, labels=ids, use_cache=False).loss.item()
    finally:
        del module.forward


@pytest.mark.parametrize(("family", "attn_res"), SETTINGS)
def test_every_change_is_that_of_the_read_without_the_source(family, attn_res) -> None:
    model, ids = choosing_model(family, **attn_res), token_ids()
    found = ablate_sources(model, ids)
    plan = model.model.depth_plan
    with torch.no_grad():
        assert found.loss == model(ids, labels=ids, use_cache=False).loss.item()
    assert found.read_names[-1] == "final" and found.source_names == column_names(plan)
    assert np.isnan(found.loss_change[0]).all()
    for read in range(1, plan.num_reads):
        seen = source_columns(plan, read)
        assert np.flatnonzero(~np.isnan(found.loss_change[read])).tolist() == list(seen)
        for source in seen:
            expected = loss_by_hand(model, ids, read, source, renormalised=True) - found.loss
            assert found.loss_change[read, source] == pytest.approx(expected, abs=2e-5)  # a float32 loss
    assert np.nanmax(np.abs(found.loss_change)) > 1e-2


def test_leaving_the_others_weights_as_they_are_makes_no_difference() -> None:
    model, ids = choosing_model(), token_ids()
    found = ablate_sources(model, ids, reads=[4])
    for source in range(3):
        kept = loss_by_hand(model, ids, 4, source, renormalised=False) - found.loss
        assert found.loss_change[4, source] == pytest.approx(kept, abs=1e-4)


def test_the_two_phase_schedule_gives_the_same_map_and_is_put_back() -> None:
    expected = ablate_sources(choosing_model(mode="full"), token_ids())
    model = choosing_model(mode="full", read_schedule="two_phase")
    groups = model.model.read_groups
    assert any(group.two_phase for group in groups)
    found = ablate_sources(model, token_ids())
    np.testing.assert_allclose(found.loss_change, expected.loss_change, atol=1e-9)
    assert model.model.read_groups is groups


def test_labels_say_which_tokens_count() -> None:
    model, ids = choosing_model(), token_ids()
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    found = ablate_sources(model, ids, labels=labels, reads=[8])
    with torch.no_grad():
        logits = model(ids).logits[:, -2]
        with without_source(model, 8, 1):
            changed = model(ids).logits[:, -2]
    loss = torch.nn.functional.cross_entropy
    assert found.loss == pytest.approx(loss(logits, ids[:, -1]).item())
    assert found.loss_change[8, 1] == pytest.approx((loss(changed, ids[:, -1]) - found.loss).item())
    assert np.isnan(found.loss_change[:8]).all()


def test_padding_that_the_mask_hides_changes_nothing() -> None:
    model, ids = choosing_model(), token_ids(batch=1)
    padded = torch.cat([ids, ids[:, :3]], dim=1)
    mask = torch.ones_like(padded)
    mask[:, -3:] = 0
    labels = padded.masked_fill(mask == 0, -100)
    found = ablate_sources(model, padded, labels=labels, reads=[5], attention_mask=mask)
    expected = ablate_sources(model, ids, reads=[5])
    np.testing.assert_allclose(found.loss_change, expected.loss_change, atol=1e-9)


def test_a_recorded_ablation_shows_weight_zero() -> None:
    model, ids = choosing_model(), token_ids()
    with ar.record_depth_weights(model) as record, torch.no_grad(), without_source(model, 6, 1):
        model(ids)
    weights = record.weights[6]
    assert weights.shape == (3, 2, 9) and (weights[1] == 0).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(2, 9))


def test_everything_is_put_back_also_after_an_error() -> None:
    model, ids = choosing_model(), token_ids()
    model.train()
    model.model.norm.eval()  # a part that somebody holds in eval mode stays so
    states = [module.training for module in model.modules()]
    with torch.no_grad():
        expected = model(ids).logits
    ablate_sources(model, ids, reads=[3])
    with pytest.raises(IndexError), without_source(model, 3, 0):
        model(ids + VOCABULARY)
    assert [module.training for module in model.modules()] == states
    module = read_module(model, 3)
    assert not module._forward_hooks and not module._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("read", "source", "message"),
    [
        (9, 0, r"read must be from 0 to 8 \(the final read\), got 9"),
        (-1, 0, "read must be from 0"),
        (3, 2, "source must be from 0 to 1 at read 3, got 2"),
        (0, 0, "read 0 has one source only"),
    ],
)
def test_reads_and_sources_that_are_not_there(read: int, source: int, message: str) -> None:
    with pytest.raises(IndexError, match=message), without_source(choosing_model(), read, source):
        pass


def test_sources_outside_the_window_are_not_there() -> None:
    model = choosing_model(mode="full", window=2)
    message = "source must be 0 or from 4 to 5, which the read sees, at read 5, got 3"
    with pytest.raises(IndexError, match=message), without_source(model, 5, 3):
        pass


@pytest.mark.parametrize("source", [0, 1, 2])
def test_every_head_does_without_the_source(source: int) -> None:
    model, ids = choosing_model(**BLOCK, heads=2), token_ids()
    found = ablate_sources(model, ids, reads=[4])
    module = read_module(model, 4)
    whole = module._read_variant

    def without(sources, norm_weight, norm_eps):
        v = torch.stack([v for i, v in enumerate(sources) if i != source])
        key = v / (v.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.key_weight * module.query
        alpha = torch.softmax(key.unflatten(-1, (2, -1)).sum(-1), 0)
        h = (alpha[..., None] * v.unflatten(-1, (2, -1))).sum(0).flatten(-2)
        return h / (h.square().mean(-1, keepdim=True) + norm_eps).sqrt() * norm_weight, alpha.mean(-1)

    module._read_variant = without
    with torch.no_grad():
        expected = model(ids, labels=ids, use_cache=False).loss.item() - found.loss
    module._read_variant = whole
    assert found.loss_change[4, source] == pytest.approx(expected, abs=2e-5)


def test_learned_scores_go_with_their_sources() -> None:
    model, ids = choosing_model(**BLOCK, weights="scalars"), token_ids()
    found = ablate_sources(model, ids, reads=[4])
    scores = read_module(model, 4).source_scores
    assert isinstance(scores, torch.nn.Parameter)
    for source in range(3):
        with torch.no_grad():
            kept = scores[source].clone()
            scores[source] = -torch.inf
            changed = model(ids, labels=ids, use_cache=False).loss.item()
            scores[source] = kept
        assert found.loss_change[4, source] == pytest.approx(changed - found.loss, abs=2e-5)


def test_without_the_partial_sum_the_last_block_is_normalised_as_a_block() -> None:
    model, ids = choosing_model(**BLOCK, values="normalised_blocks"), token_ids()
    module = read_module(model, 4)
    assert module.has_partial
    received = []
    with ar.record_depth_weights(model), torch.no_grad(), without_source(model, 4, 2):
        hook = module.register_forward_hook(lambda m, args, _: received.append((args[0], m.has_partial)))
        model(ids)
        hook.remove()
    ((sources, has_partial),) = received
    assert len(sources) == 2 and not has_partial and module.has_partial


def test_a_loss_that_is_no_number_is_refused() -> None:
    ids = token_ids()
    with pytest.raises(ValueError, match="loss must be a finite number"):
        ablate_sources(choosing_model(), ids, labels=torch.full_like(ids, -100))


def test_a_model_without_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="standard"):
        ablate_sources(choosing_model(mode="standard"), token_ids())


def test_the_table_has_a_row_for_each_measured_source() -> None:
    found = ablate_sources(choosing_model(), token_ids(), reads=[0, 4])
    table = found.to_table()
    assert table["read"].tolist() == [4, 4, 4]
    assert table["source_name"].tolist() == ["embedding", "block 1", "block 2"]
    assert table["loss_change"].tolist() == found.loss_change[4, :3].tolist()
    assert table["read_name"].tolist() == ["layer 2 attention"] * 3
