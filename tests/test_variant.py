import re
from pathlib import Path

import pytest

from attention_residuals import AttnResConfig
from attention_residuals.variant import ReadVariant
from variant_cases import VARIANTS


def test_the_default_is_the_papers_read():
    assert ReadVariant().changed_fields() == {}
    assert ReadVariant().beyond_kernels is None
    assert ReadVariant().parameter_shapes(6, 3) == {"query": (6,), "key_weight": (6,)}
    assert AttnResConfig().variant == ReadVariant()


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_fields_survive_the_config(fields):
    config = AttnResConfig(num_blocks=3, **fields)
    assert config.variant == ReadVariant(**fields)
    assert config.changed_fields() == fields == ReadVariant(**fields).changed_fields()
    assert AttnResConfig.from_dict(config.to_dict()) == config


def test_only_a_key_norm_without_weight_needs_no_pytorch():
    assert ReadVariant(key_norm="plain").beyond_kernels is None
    assert ReadVariant(key_norm="plain", heads=4).beyond_kernels == "heads=4"
    assert ReadVariant(key_norm="none").beyond_kernels == "key_norm='none'"
    assert ReadVariant(query_rank=3, recency_bias=True).beyond_kernels == "query_rank=3, recency_bias=True"


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({"key_norm": "plain"}, {"query": (8,)}),
        ({"key_norm": "none", "recency_bias": True}, {"query": (8,), "recency_bias": (1,)}),
        ({"query_rank": 6, "heads": 2}, {"query": (6,), "key_weight": (6,)}),
        ({"weights": "input_query"}, {"query_matrix": (8, 8), "key_weight": (8,)}),
        ({"weights": "input_query", "query_rank": 3}, {"query_matrix": (3, 8), "key_weight": (3,)}),
        ({"weights": "scalars", "heads": 4}, {"source_scores": (5, 4)}),
        (
            {"weights": "scalars", "heads": 2, "recency_bias": True},
            {"source_scores": (5, 2), "recency_bias": (2,)},
        ),
        ({"weights": "uniform"}, {}),
    ],
    ids=str,
)
def test_parameter_shapes(fields, shapes):
    assert ReadVariant(**fields).parameter_shapes(8, 5) == shapes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "gru"}, r"weights must be one of query, input_query, scalars, uniform, got 'gru'"),
        ({"activation": "relu"}, r"activation must be one of softmax, sigmoid, linear, got 'relu'"),
        ({"key_norm": True}, r"key_norm must be one of weight, plain, none, got True"),
        ({"values": "raw"}, r"values must be one of plain, normalised, normalised_blocks, got 'raw'"),
        ({"heads": 0}, r"heads must be at least 1, got 0; the paper has heads=1"),
        ({"query_rank": 0}, r"query_rank must be at least 1, got 0; None scores all channels"),
        ({"weights": "scalars", "key_norm": "none"}, r"key_norm has no effect with weights='scalars'"),
        ({"weights": "scalars", "query_rank": 2}, r"query_rank has no effect .* got query_rank=2; leave it"),
        ({"weights": "uniform", "heads": 2}, r"heads has no effect with weights='uniform'"),
        ({"weights": "uniform", "activation": "sigmoid"}, r"activation has no effect"),
        ({"weights": "uniform", "recency_bias": True}, r"recency_bias has no effect"),
    ],
    ids=str,
)
def test_broken_rules_say_rule_value_and_remedy(fields, message):
    for make in (ReadVariant, AttnResConfig):
        with pytest.raises(ValueError, match=message):
            make(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 2.0}, r"heads must be an int, got 2.0 of type float"),
        ({"heads": None}, r"heads must be an int, got None; the paper has heads=1"),
        ({"query_rank": True}, r"query_rank must be an int, got True of type bool"),
        ({"recency_bias": 1}, r"recency_bias must be a bool, got int"),
    ],
    ids=str,
)
def test_wrong_types_are_refused(fields, message):
    with pytest.raises(TypeError, match=message):
        ReadVariant(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, r"heads must divide the width, got heads=3 and 8; take a divisor"),
        ({"heads": 4, "query_rank": 6}, r"heads must divide query_rank, got heads=4 and 6; take a divisor"),
        ({"query_rank": 9}, r"query_rank must be at most the width 8, got 9; leave it out"),
        ({"weights": "scalars"}, r"weights='scalars' needs num_sources"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_width_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ReadVariant(**fields).parameter_shapes(8, None)


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).parents[1] / "docs" / "variants.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, page.name, "exec"), {})
    said = capsys.readouterr().out
    assert said == "computes the paper's read only, not weights='input_query', heads=4\n"
