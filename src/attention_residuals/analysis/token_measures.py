"""From the depth weights of a read to one number per token: how many sources it mixes, and how near they are.

Shapes: N sources, the embedding first and the newest last; X stands for any axes of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def entropy(weights_NX: Floats) -> Floats:
    """Entropy of the depth weights in nats: 0 for one source, log N when uniform."""
    # a weight of zero adds nothing
    logs = np.log(weights_NX, out=np.zeros_like(weights_NX), where=weights_NX > 0)
    return np.maximum(-(weights_NX * logs).sum(axis=0), 0.0)


def effective_sources(weights_NX: Floats) -> Floats:
    """exp(entropy): how many sources a token really mixes, from 1 to N."""
    return np.exp(entropy(weights_NX))


def locality(weights_NX: Floats) -> Floats:
    """How near the weighed sources are: 1 for the newest alone, 0 for the embedding alone, 0.5 when uniform.

    The mean place i of the sources under the weights, over N - 1; NaN for a read with one source.
    """
    num_sources = len(weights_NX)
    if num_sources == 1:
        return np.full(weights_NX.shape[1:], np.nan)
    return np.tensordot(np.linspace(0.0, 1.0, num_sources), weights_NX, axes=1)


def embedding_weight(weights_NX: Floats) -> Floats:
    """The weight kept on the embedding, which every read sees as its first source."""
    return weights_NX[0]
