"""The variants of a read that the tests go through: fields of `ReadVariant`, by name."""

VARIANTS = {
    "input-dependent query": {"weights": "input_query"},
    "input-independent weights": {"weights": "scalars"},
    "sigmoid": {"activation": "sigmoid"},
    "no key norm": {"key_norm": "none"},
    "key norm without weight": {"key_norm": "plain"},
    "heads": {"heads": 2},
    "uniform": {"weights": "uniform"},
    "static weights": {"weights": "scalars", "activation": "linear"},
    "sliced query": {"query_rank": 4},
    "normalised values": {"values": "normalised", "key_norm": "plain"},
    "normalised blocks": {"values": "normalised_blocks"},
    "recency bias": {"recency_bias": True},
    "linear": {"activation": "linear"},
    "scalars of heads, sigmoid, recency": {
        "weights": "scalars",
        "heads": 4,
        "activation": "sigmoid",
        "recency_bias": True,
    },
    "sliced input query of heads": {
        "weights": "input_query",
        "query_rank": 4,
        "heads": 2,
        "values": "normalised",
        "recency_bias": True,
    },
}
