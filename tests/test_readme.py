"""What the README shows is run: its Python, its commands, and that its tree names files that exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from attention_residuals.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("attnres ")]


@pytest.mark.parametrize("example", blocks("python"))
def test_python_examples_run(example):
    exec(compile(example, "README.md", "exec"), {})


def test_commands_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def main():\n    import os\n    return os.name\n\n" * 300, encoding="utf-8")
    commands = [
        line for block in blocks("bash") for line in block.splitlines() if line.startswith("attnres ")
    ]
    assert len(commands) >= 4
    for command in commands:
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command)[1:])
        assert stop.value.code == 0, (command, capsys.readouterr().err)
    assert Path("run/report/report.html").is_file()


def test_the_run_folder_is_a_model_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three four five\n" * 400, encoding="utf-8")
    train = next(command for command in COMMANDS if command.startswith("attnres train"))
    with pytest.raises(SystemExit):
        main(shlex.split(train)[1:])
    from transformers import AutoModelForCausalLM

    import attention_residuals as ar

    model = AutoModelForCausalLM.from_pretrained("run")
    assert isinstance(model, ar.Qwen3_5AttnResForCausalLM)
    assert model.config.attn_res["num_blocks"] == 4


def test_the_make_targets_exist():
    targets = re.findall(r"^make ([\w-]+)", "\n".join(blocks("bash")), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_tree_names_what_exists():
    tree = README.split("## Where things are")[1].split("```")[1]
    folders = {
        0: ROOT,
        2: ROOT / "src/attention_residuals",
        4: ROOT / "src/attention_residuals/depth_attention",
    }
    named = re.findall(r"^( *)(\S+)  +\S", tree, re.MULTILINE)
    assert len(named) > 15
    for indent, name in named:
        if len(indent) in folders:
            assert (folders[len(indent)] / name).exists(), name


def test_the_figures_are_those_of_the_results():
    sys.path.insert(0, str(ROOT))
    from benchmarks import readme_table

    assert readme_table.section() == readme_table.render().strip()
    assert "commit" in readme_table.section()
