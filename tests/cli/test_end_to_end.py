"""generate, inspect and write_report on a tiny model with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import save_tiny_model

from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.report import report_on, write_report
from attention_residuals.analysis.summary import summarise


def test_inspect_prints_a_table_and_the_paths(attnres: Callable, model_dir: Path) -> None:
    status, out, err = attnres("inspect", model_dir, "--prompt", "import os")
    assert (status, err) == (0, "")
    for name in ("layer 0 delta net", "layer 3 attention", "layer 3 mlp", "final", "embedding", "9 tokens"):
        assert name in out
    written = [
        model_dir / "report" / name for name in ("depth_map.png", "entropy_and_norms.png", "report.html")
    ]
    assert [Path(line) for line in out.splitlines()[-3:]] == written
    assert all(path.stat().st_size > 1000 for path in written)
    assert sorted(path.name for path in (model_dir / "report").iterdir()) == sorted(p.name for p in written)


def test_inspect_reads_a_file_up_to_max_tokens(attnres: Callable, model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("The quick brown fox. " * 50)
    status, out, _ = attnres(
        "inspect", model_dir, "--data", data, "--max-tokens", 40, "--output-dir", tmp_path / "out"
    )
    assert status == 0 and "40 tokens" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="token"') == 40 and "<dd>40</dd>" in page


def test_inspect_shows_the_loss_curve_of_a_run(attnres: Callable, model_dir: Path) -> None:
    (model_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "eval_loss": 4.0}\n')
    status, out, _ = attnres("inspect", model_dir, "--prompt", "a")
    assert status == 0 and "training.png" in out
    assert (model_dir / "report" / "report.html").read_text().count("data:image/png") == 2


def test_write_report_gives_the_page(model_dir: Path, tmp_path: Path) -> None:
    page = write_report(model_dir, tmp_path / "deep" / "report", prompt="import os <b>")
    assert page == tmp_path / "deep" / "report" / "report.html"
    text = page.read_text(encoding="utf-8")
    tokens = re.findall(r'class="token".*?>(.*?)</span>', text)
    assert "".join(tokens) == "import os &lt;b&gt;"
    assert "qwen3_5_attn_res" in text and "num_blocks 4" in text
    assert not re.search(r"\b(src|href)=\"(?!data:)", text)


@pytest.mark.parametrize("attn_res", [{"mode": "full"}, {"mode": "block", "sublayers_per_block": 3}])
def test_other_modes_are_inspected_too(tmp_path: Path, attn_res: dict[str, object]) -> None:
    loaded = load_model(save_tiny_model(tmp_path / "run", **attn_res))
    report = report_on(loaded.model, encode(loaded, "abc"), tmp_path / "out", tokens="abc", name="run")
    expected = list(range(1, 10)) if attn_res["mode"] == "full" else [1, 2, 2, 2, 3, 3, 3, 4, 4]
    assert report.summary.num_sources.tolist() == expected


def test_summary_agrees_with_the_models_own_depth_weights(model_dir: Path) -> None:
    loaded = load_model(model_dir)
    input_ids = encode(loaded, "some text")
    summary = summarise(record_forward(loaded.model, input_ids))
    with torch.no_grad():
        weights = loaded.model(input_ids, output_depth_weights=True).depth_weights
    for read, weight in enumerate(weights):
        row = summary.depth_map[read]
        np.testing.assert_allclose(row[~np.isnan(row)], weight.double().mean(dim=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(np.nansum(summary.depth_map, axis=1), 1.0, rtol=1e-5)
    assert summary.entropy[-1] < np.log(5)  # the queries are not zero


def test_generate_streams_prompt_and_continuation(attnres: Callable, model_dir: Path) -> None:
    status, out, err = attnres("generate", model_dir, "--prompt", "def ", "--max-new-tokens", 5, "--greedy")
    assert (status, err) == (0, "")
    assert out.startswith("def ") and len(out) > len("def \n") and out.endswith("\n")
    again = attnres("generate", model_dir, "--prompt", "def ", "--max-new-tokens", 5, "--greedy")
    assert again == (status, out, err)


def test_the_same_seed_gives_the_same_sample(attnres: Callable, model_dir: Path) -> None:
    def sample(seed: int) -> str:
        return attnres("generate", model_dir, "--prompt", "def ", "--max-new-tokens", 20, "--seed", seed)[1]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_generate_takes_sampling_options_and_dtype(attnres: Callable, model_dir: Path) -> None:
    options = ("--temperature", 0.5, "--top-p", 0.9, "--top-k", 4, "--device", "cpu", "--dtype", "bfloat16")
    status, out, err = attnres("generate", model_dir, "--prompt", "x", "--max-new-tokens", 2, *options)
    assert (status, err) == (0, "") and out.startswith("x")


def test_ctrl_c_while_generating_ends_the_line_and_exits_130(
    attnres: Callable, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.generation.GenerationMixin.generate", interrupt)
    status, out, err = attnres("generate", model_dir, "--prompt", "def ")
    assert status == 130 and err == "attnres: interrupted\n" and out.endswith("\n")


def test_the_documented_example_runs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "looking.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert model_dir.name == "run"
    monkeypatch.chdir(model_dir.parent)
    exec(compile(example, "docs/looking.md", "exec"), {})
    assert (model_dir.parent / "look" / "report.html").is_file()
