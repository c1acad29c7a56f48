from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attention_residuals.errors import UserError
from attention_residuals.training.data import RunOrder, TokenBlocks, TokenData, make_token_data
from attention_residuals.training.tokenizer import train_bpe

TEXTS = [f"document {number} " + "word " * (20 + number) for number in range(40)]
TOKENIZER = train_bpe(TEXTS, 300)


def data_of(texts: list[str] = TEXTS, **changes: Any) -> TokenData:
    options: dict[str, Any] = {"context": 16, "default_context": 128, "validation_fraction": 0.1, "seed": 0}
    return make_token_data(texts, TOKENIZER, **{**options, **changes})


def documents_in(blocks: TokenBlocks | None) -> list[str]:
    assert blocks is not None
    text = TOKENIZER.decode(blocks.tokens)
    return text.split(TOKENIZER.eos_token)[:-1]


def test_documents_are_split_whole_and_separated() -> None:
    data = data_of()
    train, validation = documents_in(data.train), documents_in(data.validation)
    assert sorted(train + validation) == sorted(TEXTS)
    assert data.num_documents == 40
    assert data.num_tokens == len(data.train.tokens) + len(data.validation.tokens)  # type: ignore[union-attr]
    assert 0.05 < len(data.validation.tokens) / data.num_tokens < 0.2  # type: ignore[union-attr]


def test_rows_are_contiguous_text() -> None:
    blocks = data_of().train
    rows = [blocks[index]["input_ids"] for index in range(len(blocks))]
    assert all(row.shape == (16,) and row.dtype == torch.int64 for row in rows)
    assert torch.cat(rows).tolist() == blocks.tokens[: 16 * len(blocks)].tolist()
    assert blocks[0]["labels"].equal(rows[0])
    assert len(blocks.limited(2)) == 2
    with pytest.raises(IndexError, match="block must be between 0 and"):
        blocks[len(blocks)]


def test_same_seed_same_split() -> None:
    assert data_of().fingerprint == data_of().fingerprint
    assert data_of(seed=1).fingerprint != data_of().fingerprint
    assert data_of(TEXTS[1:]).fingerprint != data_of().fingerprint


def test_one_document_is_split_at_its_tail() -> None:
    text = "".join(TEXTS)
    data = data_of([text])
    assert documents_in(data.validation) == [] or text.endswith(documents_in(data.validation)[-1])
    together = np.concatenate([data.train.tokens, data.validation.tokens])  # type: ignore[union-attr]
    assert TOKENIZER.decode(together) == text + TOKENIZER.eos_token


def test_no_validation_when_not_asked_for() -> None:
    data = data_of(validation_fraction=0.0)
    assert data.validation is None
    assert len(data.train.tokens) == data.num_tokens


def test_default_context_fits_short_data() -> None:
    data = data_of(TEXTS[:6], context=None)
    assert data.train.context == 32
    assert data.validation is not None and len(data.train) >= 2
    assert data.notes == (
        f"context shortened from 128 to 32 tokens, because the data holds {data.num_tokens}",
    )
    assert data_of(context=None).train.context == 128
    assert data_of(context=None).notes == ()


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([], {}, "the data holds no text"),
        (["short"], {"context": None}, "holds only .* tokens; at least 32 are needed"),
        (TEXTS, {"context": 4096}, "--context 4096 is longer than the data allows: the data holds .* tokens"),
    ],
)
def test_too_little_data(texts: list[str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data_of(texts, **changes)


def test_longest_context_that_is_named_works() -> None:
    num_tokens = data_of().num_tokens
    data = data_of(context=num_tokens // 2)
    assert len(data.train) == 1 and data.validation is not None


def test_order_of_a_run() -> None:
    order = list(RunOrder(5, 13, seed=3))
    assert [sorted(order[start : start + 5]) for start in (0, 5)] == [[0, 1, 2, 3, 4]] * 2
    assert order[:5] != order[5:10]
    assert list(RunOrder(5, 8, seed=3)) == order[:8], "a shorter run is the start of a longer one"
    assert list(RunOrder(5, 13, seed=4)) != order
    assert len(RunOrder(5, 13, seed=3)) == 13
    torch.manual_seed(99)
    assert list(RunOrder(5, 13, seed=3)) == order, "no global generator takes part"
