"""Mistakes a user can mend: one line that starts with "attnres: ", exit status 2, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

from attention_residuals.cli.generate import sampling_settings
from attention_residuals.cli.inspect import read_text
from attention_residuals.errors import UserError


def assert_mistake(outcome: tuple[int, str, str], *words: str) -> None:
    status, out, err = outcome
    assert status == 2, err
    assert out == ""
    assert err.startswith("attnres: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("generate", "run", "--prompt", "a", "--tempature", "1"), "--tempature"),
        (("genrate", "run"), "genrate"),
        (("--nonsense",), "--nonsense"),
        (("generate", "--prompt", "a"), "MODEL"),
        (("generate", "run"), "--prompt"),
        (("generate", "run", "--prompt"), "--prompt"),
        (("generate", "run", "--prompt", "a", "--max-new-tokens", "many"), "attnres generate --help"),
        (("generate", "run", "--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("generate", "run", "--prompt", "a", "--top-p", "1.5"), "--top-p"),
        (("generate", "run", "--prompt", "a", "--temperature", "0"), "--greedy"),
        (("generate", "run", "--prompt", "a", "--greedy", "--top-k", "3"), "--top-k"),
        (("inspect", "run"), "neither"),
        (("inspect", "run", "--prompt", "a", "--data", "b"), "both"),
        (("inspect", "run", "--data", "missing.txt"), "missing.txt"),
        (("inspect", "missing", "--prompt", "a"), "missing"),
        (("generate", "missing", "--prompt", "a"), "missing does not exist"),
        (("info", "extra"), "extra"),
    ],
)
def test_wrong_words(attnres: Callable, args: tuple[str, ...], word: str) -> None:
    assert_mistake(attnres(*args), word)


@pytest.mark.parametrize("command", ["generate", "inspect"])
class TestModelFolder:
    def test_a_file(self, attnres: Callable, tmp_path: Path, command: str) -> None:
        (tmp_path / "model.bin").write_bytes(b"x")
        assert_mistake(attnres(command, tmp_path / "model.bin", "--prompt", "a"), "is a file")

    def test_without_config(self, attnres: Callable, tmp_path: Path, command: str) -> None:
        assert_mistake(attnres(command, tmp_path, "--prompt", "a"), "no config.json")
        checkpoint = tmp_path / "checkpoints" / "checkpoint-6"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        assert_mistake(attnres(command, tmp_path, "--prompt", "a"), "no config.json", str(checkpoint))

    def test_damaged_config(self, attnres: Callable, model_dir: Path, command: str) -> None:
        (model_dir / "config.json").write_text('{"model_type": ')
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "config.json")

    def test_unknown_architecture(self, attnres: Callable, model_dir: Path, command: str) -> None:
        edit_config(model_dir, model_type="perceptron")
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "perceptron")

    def test_bad_settings(self, attnres: Callable, model_dir: Path, command: str) -> None:
        edit_config(model_dir, attn_res={"mode": "block", "num_blocks": 0})
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "num_blocks must be at least 1")

    def test_no_weights(self, attnres: Callable, model_dir: Path, command: str) -> None:
        (model_dir / "model.safetensors").unlink()
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "no weights")

    @pytest.mark.parametrize("size", [0, 5, 100, -1000])
    def test_truncated_weights(self, attnres: Callable, model_dir: Path, command: str, size: int) -> None:
        weights = model_dir / "model.safetensors"
        os.truncate(weights, size if size >= 0 else weights.stat().st_size + size)
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "damaged")

    def test_weights_of_another_width(self, attnres: Callable, model_dir: Path, command: str) -> None:
        edit_config(model_dir, hidden_size=16)
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), str(model_dir))

    def test_weights_of_fewer_layers(self, attnres: Callable, model_dir: Path, command: str) -> None:
        edit_config(model_dir, num_hidden_layers=8, layer_types=None)
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "lack")

    def test_reads_that_the_config_does_not_know(
        self, attnres: Callable, model_dir: Path, command: str
    ) -> None:
        edit_config(model_dir, attn_res={"mode": "standard"})
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "unknown")

    def test_no_tokenizer(self, attnres: Callable, model_dir: Path, command: str) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model_dir / name).unlink()
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "tokenizer")

    def test_damaged_tokenizer(self, attnres: Callable, model_dir: Path, command: str) -> None:
        (model_dir / "tokenizer.json").write_text("{")
        assert_mistake(attnres(command, model_dir, "--prompt", "a"), "tokenizer")

    def test_empty_prompt(self, attnres: Callable, model_dir: Path, command: str) -> None:
        assert_mistake(attnres(command, model_dir, "--prompt", ""), "empty")

    def test_unknown_device_and_dtype(self, attnres: Callable, model_dir: Path, command: str) -> None:
        assert_mistake(attnres(command, model_dir, "--prompt", "a", "--device", "abacus"), "abacus")
        assert_mistake(attnres(command, model_dir, "--prompt", "a", "--dtype", "int8"), "int8")


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_standard_mode_has_nothing_to_inspect(attnres: Callable, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "run", mode="standard")
    assert_mistake(attnres("inspect", folder, "--prompt", "a"), "standard")
    assert not (folder / "report").exists()


def test_inspect_refuses_data_that_is_no_text(attnres: Callable, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    assert_mistake(attnres("inspect", model_dir, "--data", tmp_path / "empty.txt"), "no text")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert_mistake(attnres("inspect", model_dir, "--data", tmp_path / "bytes.txt"), "UTF-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert_mistake(attnres("inspect", model_dir, "--data", tmp_path / "picture.png"), "unsupported")


def test_inspect_says_when_it_cannot_write(attnres: Callable, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    assert_mistake(
        attnres("inspect", model_dir, "--prompt", "a", "--output-dir", tmp_path / "taken"),
        "cannot be written",
    )
    assert (tmp_path / "taken").read_text() == "a file"


def test_inspect_without_matplotlib_names_the_extra(model_dir: Path) -> None:
    blocked = "import sys; sys.modules['matplotlib'] = None; "
    start = "from attention_residuals.cli.main import main; main(sys.argv[1:])"
    outcome = run_python("-c", blocked + start, "inspect", str(model_dir), "--prompt", "a")
    assert_mistake(outcome, "attention_residuals[report]")


def test_mistakes_in_a_real_process(tmp_path: Path) -> None:
    start = "from attention_residuals.cli.main import main; main()"
    assert_mistake(run_python("-c", start, "generate", str(tmp_path / "missing"), "--prompt", "a"), "missing")
    status, out, err = run_python("-c", start, "--version")
    assert (status, err) == (0, "") and out.startswith("attnres ")


def run_python(*args: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    start = "from attention_residuals.cli.main import main; main(['--help'])"
    with subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_sampling_settings() -> None:
    greedy = sampling_settings(greedy=True, temperature=None, top_p=None, top_k=None)
    assert greedy["do_sample"] is False
    defaults = sampling_settings(greedy=False, temperature=None, top_p=None, top_k=None)
    assert defaults == {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    with pytest.raises(UserError, match="--top-k must be at least 0"):
        sampling_settings(greedy=False, temperature=None, top_p=None, top_k=-1)


def test_read_text_cuts_long_files(tmp_path: Path) -> None:
    data = tmp_path / "long.txt"
    data.write_text("word " * 100_000)
    assert len(read_text(None, data, "text", 10)) == 640


def test_read_text_joins_the_documents_of_json_lines(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"body": "one"}\n{"body": "two"}\n')
    assert read_text(None, data, "body", 100) == "one\n\ntwo"
