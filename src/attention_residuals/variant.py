"""ReadVariant: how a read differs from the paper's equation. The equations are in docs/variants.md."""

from __future__ import annotations

import dataclasses

WEIGHTS = ("query", "input_query", "scalars", "uniform")
ACTIVATIONS = ("softmax", "sigmoid", "linear")
KEY_NORMS = ("weight", "plain", "none")
VALUES = ("plain", "normalised", "normalised_blocks")


def require(rule: bool, message: str) -> None:
    """Raise ValueError with `message`, which says rule, value and remedy, unless `rule` holds."""
    if not rule:
        raise ValueError(message)


def check_count(name: str, value: int | None, remedy: str) -> None:
    """Raise unless `value` is None or an int of at least 1."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    require(value >= 1, f"{name} must be at least 1, got {value}; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadVariant:
    """What a read computes; the defaults are the paper's (arXiv 2603.15031). Validated once, immutable.

    Every parameter but the key weight starts at zero, so that training starts with equal depth weights.

    Args:
        weights: where scores come from. "query": a learned query [D]. "input_query": a query per token,
            a learned matrix times the newest source after an RMSNorm. "scalars": one learned score per
            source, the same for every token. "uniform": nothing, equal depth weights for ever.
        activation: from N scores to depth weights. "softmax"; "sigmoid", 2 sigmoid(score) / N; or "linear",
            (1 + score) / N, which with "scalars" is DenseFormer's static mixture.
        key_norm: "weight", an RMSNorm with a learned weight [D]; "plain", without; "none", keys as they are.
        heads: H groups of D / H neighbouring channels, each with depth weights of its own.
        query_rank: scores see only the last `query_rank` channels of a source (sliced LR-AttnRes), so that
            query and key weight have that length; None for all.
        values: what is mixed. "plain": the sources. "normalised": sources after an RMSNorm without weight,
            with scores divided by sqrt(D) (Inkling-2). "normalised_blocks": finished blocks after such a
            norm, the embedding and the open block's partial sum as they are.
        recency_bias: whether the newest source's score gets a learned number [H] added.

    Raises:
        ValueError: a value breaks its rule; the message names rule, value and remedy.
        TypeError: a value has the wrong type.
    """

    weights: str = "query"
    activation: str = "softmax"
    key_norm: str = "weight"
    heads: int = 1
    query_rank: int | None = None
    values: str = "plain"
    recency_bias: bool = False

    def __post_init__(self) -> None:
        choices = {"weights": WEIGHTS, "activation": ACTIVATIONS, "key_norm": KEY_NORMS, "values": VALUES}
        for name, known in choices.items():
            value = getattr(self, name)
            require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.heads is None:
            raise TypeError("heads must be an int, got None; the paper has heads=1")
        check_count("heads", self.heads, "the paper has heads=1")
        check_count("query_rank", self.query_rank, "None scores all channels")
        if not isinstance(self.recency_bias, bool):
            raise TypeError(f"recency_bias must be a bool, got {type(self.recency_bias).__name__}")
        keyless = ("key_norm", "query_rank")
        fixed = (*keyless, "activation", "heads", "recency_bias")
        for name in {"scalars": keyless, "uniform": fixed}.get(self.weights, ()):
            require(
                name not in self.changed_fields(),
                f"{name} has no effect with weights={self.weights!r}, got {name}={getattr(self, name)!r}; "
                "leave it out",
            )

    def changed_fields(self) -> dict[str, object]:
        """The fields of a read that differ from the paper's, with their values."""
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(ReadVariant)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def beyond_kernels(self) -> str | None:
        """What only plain PyTorch computes, e.g. "heads=4"; None where every backend can run the read."""
        changed = self.changed_fields()
        if self.key_norm == "plain":  # a key weight of ones, which the kernels have
            del changed["key_norm"]
        return ", ".join(f"{name}={value!r}" for name, value in changed.items()) or None

    def parameter_shapes(self, width: int, num_sources: int | None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a read's parameters, for sources of `width` D.

        Raises:
            ValueError: the width or the query doesn't divide into heads; a slice wider than the sources;
                one score per source without a number of sources.
        """
        rank = width if self.query_rank is None else self.query_rank
        require(
            rank <= width,
            f"query_rank must be at most the width {width}, got {rank}; leave it out to score all channels",
        )
        for name, size in (("the width", width), ("query_rank", rank)):
            require(
                size % self.heads == 0,
                f"heads must divide {name}, got heads={self.heads} and {size}; take a divisor",
            )
        shapes: dict[str, tuple[int, ...]] = {}
        if self.weights == "query":
            shapes["query"] = (rank,)
        elif self.weights == "input_query":
            shapes["query_matrix"] = (rank, width)
        elif self.weights == "scalars":
            if num_sources is None:
                raise ValueError("weights='scalars' needs num_sources, the number of sources of the read")
            shapes["source_scores"] = (num_sources, self.heads)
        if self.weights in ("query", "input_query") and self.key_norm == "weight":
            shapes["key_weight"] = (rank,)
        if self.recency_bias:
            shapes["recency_bias"] = (self.heads,)
        return shapes
