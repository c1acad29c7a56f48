"""The experiments run from end to end at a small size."""

import json

import pytest
from experiments import retrofit


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
