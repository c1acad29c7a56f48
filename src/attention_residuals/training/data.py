"""Documents to token blocks: rows of `context` tokens for training and for validation."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from attention_residuals.errors import UserError

DOCUMENTS_PER_CALL = 64  # how many documents the tokenizer receives at once
SHORTEST_CONTEXT = 8


class TokenBlocks(Dataset):
    """Contiguous text in rows: block i holds tokens [i * context, (i + 1) * context).

    A row may hold the end of one document and the start of the next, separated by the end-of-text token,
    as is usual in pretraining. The tail that fills no row is left out.

    Attributes:
        tokens: int32 [n], the documents one after the other.
        context: row length, in tokens.
    """

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`: `input_ids` and `labels`, both int64 [context]; the model shifts the labels."""
        if not 0 <= index < len(self):
            raise IndexError(f"block must be between 0 and {len(self) - 1}, got {index}")
        row = self.tokens[index * self.context : (index + 1) * self.context]
        ids = torch.from_numpy(row.astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def limited(self, num_blocks: int) -> TokenBlocks:
        """At most `num_blocks` rows, from the start."""
        return TokenBlocks(self.tokens[: num_blocks * self.context], self.context)


class RunOrder(Sampler[int]):
    """The block indices of a whole run, in order: one permutation of the blocks after the other.

    The order depends on `seed` alone, not on any generator's state, and a shorter run's order is the
    start of a longer one's. So a resumed run finds its place by skipping.

    Args:
        num_blocks: blocks to draw from.
        num_draws: length of the order.
        seed: of the permutations.
    """

    def __init__(self, num_blocks: int, num_draws: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self.num_draws = num_draws
        self.seed = seed

    def __len__(self) -> int:
        return self.num_draws

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._endless(), self.num_draws)

    def _endless(self) -> Iterator[int]:
        for epoch in itertools.count():
            yield from np.random.default_rng((self.seed, epoch)).permutation(self.num_blocks).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenData:
    """What a run trains on.

    Attributes:
        train, validation: the rows; `validation` is None where no tokens were kept for it.
        num_documents: documents read.
        num_tokens: tokens of all documents, one end-of-text token each included.
        fingerprint: SHA-256 of the tokens, their split and the context.
        notes: what was adapted to the data, in sentences.
    """

    train: TokenBlocks
    validation: TokenBlocks | None
    num_documents: int
    num_tokens: int
    fingerprint: str
    notes: tuple[str, ...] = ()


def make_token_data(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    default_context: int,
    validation_fraction: float,
    seed: int,
    name: str = "the data",
) -> TokenData:
    """Tokenize `documents`, split them into training and validation, and cut both into rows.

    Args:
        context: row length in tokens; None takes `default_context`, or less where the data is short.
        validation_fraction: share of the tokens kept for validation; 0 keeps none.
        name: what the errors call the data.

    Raises:
        UserError: there is no text, or too little of it for `context`.
    """
    arrays = list(_encode(documents, tokenizer))
    if not arrays:
        raise UserError(f"--data {name} holds no text")
    num_tokens = sum(map(len, arrays))
    row, notes = _fit_context(context, default_context, num_tokens, validation_fraction, name)
    train, validation = _split(arrays, row, validation_fraction, seed)
    digest = hashlib.sha256(f"{row} {len(train)} {len(validation)} ".encode())
    digest.update(train.tobytes())
    digest.update(validation.tobytes())
    return TokenData(
        train=TokenBlocks(train, row),
        validation=TokenBlocks(validation, row) if len(validation) >= row else None,
        num_documents=len(arrays),
        num_tokens=num_tokens,
        fingerprint=digest.hexdigest(),
        notes=notes,
    )


def _encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Each document's tokens with an end-of-text token behind, int32 [n]."""
    end = tokenizer.eos_token_id
    stream = iter(documents)
    while texts := list(itertools.islice(stream, DOCUMENTS_PER_CALL)):
        for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
            yield np.asarray([*ids, end], dtype=np.int32)


def _fit_context(
    context: int | None, default_context: int, num_tokens: int, validation_fraction: float, name: str
) -> tuple[int, tuple[str, ...]]:
    """The row length in tokens, and a sentence where it is shorter than the default."""
    rows_needed = 2 if validation_fraction else 1  # one to train on, one to validate on
    longest = num_tokens // rows_needed
    if context is not None:
        if context > longest:
            raise UserError(
                f"--context {context} is longer than the data allows: {name} holds {num_tokens} tokens and "
                f"{rows_needed} rows are needed; give at most {longest}, or more data"
            )
        return context, ()
    # a quarter leaves three rows to train on beside the one to validate on
    if (available := num_tokens // 4) >= default_context:
        return default_context, ()
    if available < SHORTEST_CONTEXT:
        raise UserError(
            f"--data {name} holds only {num_tokens} tokens; at least {4 * SHORTEST_CONTEXT} are needed"
        )
    fitted = 1 << (available.bit_length() - 1)
    return fitted, (
        f"context shortened from {default_context} to {fitted} tokens, because {name} holds {num_tokens}",
    )


def _split(arrays: list[np.ndarray], row: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens, int32 each.

    Whole documents go to validation, in an order that depends on `seed`, until they hold the share asked
    for. Where that would leave no row to either side (one document, or a few long ones), the tail of the
    text is kept instead.
    """
    total = sum(map(len, arrays))
    if not fraction:
        return np.concatenate(arrays), np.empty(0, dtype=np.int32)
    wanted = min(max(round(total * fraction), row), total - row)
    chosen: list[int] = []
    held = 0
    for index in np.random.default_rng(seed).permutation(len(arrays)).tolist():
        if held >= wanted:
            break
        # a document that overshoots by far would take the training text away
        if held + len(arrays[index]) <= max(2 * wanted, row) and total - held - len(arrays[index]) >= row:
            chosen.append(index)
            held += len(arrays[index])
    if held < row:
        everything = np.concatenate(arrays)
        return everything[: total - wanted], everything[total - wanted :]
    kept = set(chosen)
    train = np.concatenate([array for index, array in enumerate(arrays) if index not in kept])
    return train, np.concatenate([arrays[index] for index in sorted(kept)])
