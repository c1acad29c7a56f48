"""The experiments run from end to end at a small size."""

import json

import pytest
from experiments import reproduce, retrofit

from tiny_shapes import LLAMA_TO_TRAIN


@pytest.mark.slow
def test_retrofit(tmp_path, monkeypatch):
    """No jump at conversion, every figure there, and a second call trains nothing again."""
    for name, value in {
        "PLAIN_STEPS": 4,
        "STEPS": 4,
        "SEEDS": (0, 1),
        "RESULTS": tmp_path / "results",
    }.items():
        monkeypatch.setattr(retrofit, name, value)
    monkeypatch.setitem(retrofit.COMMON, "eval_every", 2)
    monkeypatch.setitem(retrofit.COMMON, "eval_blocks", 4)
    retrofit.main(tmp_path / "work")
    results = json.loads((tmp_path / "results/retrofit.json").read_text())
    starts = [results["arms"][arm][seed]["eval_loss"]["0"] for arm in retrofit.ARMS for seed in ("0", "1")]
    assert max(starts) - min(starts) < 1e-5
    assert set(results["gain_over_plain"]) == {"block", "full"}
    assert (tmp_path / "results/retrofit.png").stat().st_size > 0
    monkeypatch.setattr(retrofit, "train", None)
    retrofit.main(tmp_path / "work")


@pytest.mark.slow
def test_reproduce(tmp_path, monkeypatch):
    """Parts share their runs; tables, pictures and figures are there; a second call trains nothing again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one block, two sums\n" * 200, encoding="utf-8")
    sizes = []
    for width in (16, 24, 32):
        shape = {**LLAMA_TO_TRAIN, "hidden_size": width}
        (tmp_path / f"width-{width}.json").write_text(json.dumps(shape), encoding="utf-8")
        sizes.append(f"width-{width}.json")
    train = "[train]\ndata = 'text.txt'\nvocab_size = 300\nmax_steps = 2\ncontext = 16\neval_blocks = 2\n"
    arms = 'arms = ["baseline", "full"]\nseeds = [0, 1]\n'
    files = {"one": f"{arms}sizes = {sizes[:1]}\n{train}", "all": f"{arms}sizes = {sizes}\n{train}"}
    document = "\n".join(reproduce.BEGIN.format(part=p) + reproduce.END.format(part=p) for p in files)
    (tmp_path / "document.md").write_text(f"before\n{document}\nafter\n", encoding="utf-8")
    for part, content in files.items():
        (tmp_path / f"{part}.toml").write_text(content, encoding="utf-8")
    for name, value in {
        "PARTS": tuple(files),
        "FILES": tmp_path,
        "DOCUMENT": tmp_path / "document.md",
        "RESULTS": tmp_path / "results",
    }.items():
        monkeypatch.setattr(reproduce, name, value)
    reproduce.main(["--jobs", "1"])
    assert len(list((tmp_path / "build/reproduction/runs").iterdir())) == 3 * 2 * 2
    figures = json.loads((tmp_path / "results/reproduction.json").read_text())
    full = figures["one"]["sizes"]["width-16"]["full"]
    low, high = full["interval"]
    assert low < full["minus_first_arm"]["value"] < high
    assert figures["all"]["scaling"]["full"]["interval"] and "scaling" not in figures["one"]
    text = (tmp_path / "document.md").read_text()
    assert text.startswith("before") and text.endswith("after\n") and text.count("| full |") == 1 + 3 + 1
    assert (tmp_path / "results/reproduction/all/scaling.png").stat().st_size > 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.json")}
    reproduce.main(["--jobs", "1"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.json")}
    assert (tmp_path / "document.md").read_text() == text
