import dataclasses
import json

import pytest

from attention_residuals import AttnResConfig


def test_defaults_are_eight_blocks_of_the_paper():
    config = AttnResConfig()
    assert config.to_dict() == {
        "mode": "block",
        "num_blocks": 8,
        "sublayers_per_block": None,
        "read_scale": "mean",
        "eps": 1e-6,
        "read_schedule": "auto",
        "window": None,
        "weights": "query",
        "activation": "softmax",
        "key_norm": "weight",
        "heads": 1,
        "query_rank": None,
        "values": "plain",
        "recency_bias": False,
    }


@pytest.mark.parametrize("mode", ["standard", "full"])
def test_other_modes_have_no_block_count(mode):
    assert AttnResConfig(mode=mode).num_blocks is None


def test_sublayers_per_block_replaces_num_blocks():
    config = AttnResConfig(sublayers_per_block=3)
    assert (config.num_blocks, config.sublayers_per_block) == (None, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "standard"},
        {"mode": "full", "read_scale": "sum"},
        {"mode": "block"},
        {"mode": "block", "num_blocks": 3, "eps": 1e-5},
        {"mode": "full", "read_schedule": "two_phase"},
        {"mode": "block", "sublayers_per_block": 5, "read_scale": "sum"},
        {"mode": "full", "window": 3, "heads": 2},
    ],
)
def test_json_round_trip(fields):
    config = AttnResConfig(**fields)
    assert AttnResConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_passes_a_config_through():
    config = AttnResConfig(mode="full")
    assert AttnResConfig.from_dict(config) is config


def test_is_frozen_hashable_and_keyword_only():
    config = AttnResConfig(num_blocks=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 5
    assert hash(config) == hash(AttnResConfig(num_blocks=4))
    with pytest.raises(TypeError):
        AttnResConfig("full")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "blocks"}, r"mode must be one of standard, full, block, got 'blocks'"),
        ({"read_scale": "max"}, r"read_scale must be 'mean' .* or 'sum' .*, got 'max'"),
        ({"sublayers_per_block": 0}, r"sublayers_per_block must be at least 1, got 0; use mode='full'"),
        ({"num_blocks": -1}, r"num_blocks must be at least 1, got -1; use mode='full'"),
        (
            {"num_blocks": 2, "sublayers_per_block": 3},
            r"not both; got num_blocks=2 and sublayers_per_block=3",
        ),
        ({"mode": "full", "num_blocks": 2}, r"num_blocks belongs to mode='block'.*mode='full'"),
        ({"mode": "standard", "sublayers_per_block": 2}, r"belongs to mode='block'.*mode='standard'"),
        ({"window": 0}, r"window must be at least 1, got 0; None lets a read see all sources"),
        ({"mode": "standard", "window": 2}, r"window changes reads, which mode='standard' has not"),
        ({"mode": "standard", "heads": 2}, r"heads changes reads, which mode='standard' has not.*heads=2"),
        ({"read_schedule": "two_phase", "window": 2}, r"the paper's reads only, got window=2; use read_sch"),
        ({"read_schedule": "two_phase", "key_norm": "plain"}, r"paper's reads only, got key_norm='plain'"),
        ({"eps": 0.0}, r"eps must be a finite number above 0, got 0.0; the default is 1e-6"),
        ({"eps": -1e-6}, r"eps must be a finite number above 0"),
        ({"eps": float("nan")}, r"eps must be a finite number above 0, got nan"),
        ({"eps": float("inf")}, r"eps must be a finite number above 0, got inf"),
    ],
)
def test_broken_rules_say_rule_value_and_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        AttnResConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 2.0}, r"num_blocks must be an int, got 2.0 of type float"),
        ({"num_blocks": True}, r"num_blocks must be an int, got True of type bool"),
        ({"sublayers_per_block": "3"}, r"sublayers_per_block must be an int, got '3' of type str"),
        ({"window": 2.5}, r"window must be an int, got 2.5 of type float"),
        ({"eps": "1e-6"}, r"eps must be a number, got str"),
        ({"eps": True}, r"eps must be a number, got bool"),
    ],
)
def test_wrong_types_are_refused(fields, message):
    with pytest.raises(TypeError, match=message):
        AttnResConfig(**fields)


def test_from_dict_names_unknown_fields_and_wrong_types():
    with pytest.raises(TypeError, match=r"unknown fields \['block_size'\]; known are .*sublayers_per_block"):
        AttnResConfig.from_dict({"block_size": 4})
    with pytest.raises(
        TypeError, match=r"attn_res must be an AttnResConfig or a dict of its fields, got list"
    ):
        AttnResConfig.from_dict([("mode", "full")])
