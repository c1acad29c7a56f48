"""attnres convert, and the page about it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny_model import byte_tokenizer, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForCausalLM

from attention_residuals.conversion import verify
from attention_residuals.models.auto import plain_config

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def short_verification(monkeypatch):
    monkeypatch.setattr(verify, "NEW_TOKENS", 2)
    monkeypatch.setattr(verify, "MOST_TOKENS", 32)


@pytest.fixture
def plain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(plain_config(tiny_config())).save_pretrained("plain")
    byte_tokenizer().save_pretrained("plain")
    capsys.readouterr()  # a progress bar
    return Path("plain")


def settings(folder: str) -> dict:
    return {
        key: value for key, value in AutoConfig.from_pretrained(folder).attn_res.items() if value is not None
    }


def assert_mistake(outcome, *words):
    status, out, err = outcome
    assert status == 2 and out == "" and err.startswith("attnres: ") and err.count("\n") == 1, outcome
    for word in words:
        assert word in err


def test_it_prints_figures_and_the_folder(attnres, plain):
    status, out, err = attnres("convert", plain, "ours")
    assert (status, err) == (0, "")
    assert "added 512 parameters" in out and "greedy continuation: 2 of 2 tokens agree" in out
    assert re.search(r"verified in float32 \(text, 32 tokens\): outputs change by \d\.\de-0[67] of", out)
    assert out.splitlines()[-1] == "ours"
    assert settings("ours")["num_blocks"] == 8 and settings("ours")["read_scale"] == "sum"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--mode", "full"], {"mode": "full"}),
        (["--num-blocks", 2], {"mode": "block", "num_blocks": 2}),
        (["--mode", "block", "--sublayers-per-block", 3], {"mode": "block", "sublayers_per_block": 3}),
        (["--variant", "activation=sigmoid", "--variant", "heads=2"], {"activation": "sigmoid", "heads": 2}),
    ],
)
def test_options_divide_the_depth(attnres, plain, options, expected):
    assert attnres("convert", plain, "ours", "--no-verify", *options)[0] == 0
    assert expected.items() <= settings("ours").items()


def test_a_converted_folder_is_an_ordinary_model_folder(attnres, plain):
    attnres("convert", plain, "ours", "--no-verify")
    status, out, err = attnres("generate", "ours", "--prompt", "def ", "--max-new-tokens", 3, "--greedy")
    assert (status, err) == (0, "") and out.startswith("def ")
    assert attnres("inspect", "ours", "--prompt", "def ")[0] == 0


def test_back_and_text(attnres, plain):
    Path("text.txt").write_text("some words", encoding="utf-8")
    assert "(text, 10 tokens)" in attnres("convert", plain, "ours", "--text", "text.txt")[1]
    status, out, err = attnres("convert", "ours", "again", "--back", "--no-verify")
    assert (status, err) == (0, "") and "removed 512 parameters" in out
    names = {path.name for path in plain.iterdir()}
    assert {path.name for path in Path("again").iterdir()} == names
    assert all((plain / name).read_bytes() == Path("again", name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain"], ["OUT"]),
        (["missing", "ours"], ["missing is no folder", "hf download"]),
        (["plain", "plain"], ["another folder than IN"]),
        (["plain", "ours", "--mode", "standard"], ["has no reads"]),
        (["plain", "ours", "--mode", "parallel"], ["mode must be one of"]),
        (["plain", "ours", "--num-blocks", "0"], ["num_blocks must be at least 1"]),
        (
            ["plain", "ours", "--variant", "sigmoid"],
            ["--variant needs NAME=VALUE, such as activation=sigmoid"],
        ),
        (["plain", "ours", "--variant", "window=2"], ["window must be None to keep"]),
        (["plain", "ours", "--variant", "hats=2"], ["unknown fields ['hats']"]),
        (["plain", "ours", "--back", "--variant", "heads=2"], ["--heads has no use with --back"]),
        (["plain", "ours", "--num-blocks", "2", "--sublayers-per-block", "2"], ["not both"]),
        (["plain", "ours", "--back"], ["--back"]),
        (["plain", "ours", "--back", "--num-blocks", "2"], ["--num-blocks has no use with --back"]),
        (["plain", "ours", "--text", "missing.txt"], ["missing.txt"]),
        (["plain", "ours", "--text", "plain/config.json", "--no-verify"], ["--no-verify"]),
    ],
)
def test_mistakes(attnres, plain, arguments, words):
    assert_mistake(attnres("convert", *arguments), *words)
    assert [path.name for path in Path().iterdir()] == ["plain"]


def test_a_failed_verification_is_a_failure(attnres, plain, monkeypatch):
    monkeypatch.setattr(verify, "MOST_CHANGE", 0.0)
    monkeypatch.setattr(verify, "TIMES_ROUNDING", 0.0)
    assert_mistake(attnres("convert", plain, "ours"), "verification failed", "nothing was written")
    assert not Path("ours").exists()


def test_ctrl_c_leaves_nothing(attnres, plain, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("attention_residuals.conversion.folder.compare", interrupt)
    assert attnres("convert", plain, "ours") == (130, "", "attnres: interrupted\n")
    assert [path.name for path in Path().iterdir()] == ["plain"]


def test_the_page_is_run(attnres, plain):
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for command in commands.splitlines():
        name, *arguments = shlex.split(command)
        assert name == "attnres"
        assert attnres(*arguments)[0] == 0, command
    for file in plain.iterdir():
        assert (Path("again") / file.name).read_bytes() == file.read_bytes()
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example, "docs/converting.md", "exec"), {})
    assert json.loads(Path("converted", "config.json").read_text())["attn_res"]["num_blocks"] == 4
    assert type(AutoModelForCausalLM.from_pretrained("converted")).__name__ == "Qwen3_5AttnResForCausalLM"
