from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from attention_residuals.errors import UserError
from attention_residuals.training.documents import Documents


def read(*sources: object, text_field: str = "text") -> list[str]:
    return list(Documents([str(source) for source in sources], text_field))


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("one\r\ntwo\ttabs 😀 中文\n".encode())
    assert read(file) == ["one\r\ntwo\ttabs 😀 中文\n"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    rows: list[Any] = [{"text": "one\u2028still one"}, {"text": "two", "other": 1}, "three", {"text": "  "}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert read(file) == ["one\u2028still one", "two", "three"]


def test_json_list(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"body": "one"}, {"body": "two"}]')
    assert read(file, text_field="body") == ["one", "two"]


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]}).to_parquet(str(file))
    assert read(file) == ["one", "two"]
    with pytest.raises(
        UserError, match=r"no field 'body' but fields \['n', 'text'\]; name it with --text-field"
    ):
        read(file, text_field="body")


def test_folder_is_searched_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, text in {"z.md": "z", "b/a.py": "a", "image.png": "no", ".hidden/c.txt": "no"}.items():
        (tmp_path / name).write_text(text)
    assert read(tmp_path) == ["a", "z"]
    assert read(tmp_path / "z.md", tmp_path / "b") == ["z", "a"]


def test_documents_can_be_read_twice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    documents = Documents([str(tmp_path)])
    assert list(documents) == list(documents) == ["one"]


def test_default_is_the_speeches() -> None:
    speeches = read()
    assert len(speeches) > 200
    assert any("state of the Union" in text for text in speeches)


def test_a_data_set_name_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, name: str | None, split: str) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return [{"text": "one"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("owner/name", "owner/name:small") == ["one", "one"]
    assert asked == [("owner/name", None, "train"), ("owner/name", "small", "train")]


def test_a_data_set_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise ConnectionError("no network\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"neither a file nor a data set that could be loaded: no network$"):
        read("owner/name")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt does not exist; check the path"),
        ("no/such/file", None, "does not exist; check the path"),
        ("a.png", b"x", "unsupported kind; supported are .*jsonl"),
        ("latin.txt", "é".encode("latin-1"), r"not UTF-8 \(byte 0 is 0xe9\)"),
        ("bad.jsonl", b'{"text": "one"}\n{"text": \n', "line 2 is not JSON"),
        ("field.jsonl", b'{"body": "one"}\n', r"line 1 has no field 'text' but fields \['body'\]"),
        ("number.jsonl", b'{"text": 1}\n', "field 'text' must be text, got int"),
        ("list.jsonl", b"[1]\n", "has no field 'text' but a list"),
        ("bad.parquet", b"not parquet", "cannot be read as Parquet"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(UserError, match="holds no file of a supported kind"):
        read(tmp_path)
