"""The mathematics of the tables, on made-up runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from typing import Any

import pytest

from attention_residuals.comparison.results import (
    RunRecord,
    check_control,
    order_fingerprint,
    records_at,
    summarise_arms,
    write_tables,
)
from attention_residuals.errors import UserError


def made_up(arm: str, seed: int, loss: float | None, *, rate: float | None = None, **more: Any) -> RunRecord:
    done: dict[str, Any] = {"status": "missing", "reason": "it has not been started"}
    if loss is not None:
        done = {
            "status": "finished",
            "loss": loss,
            "tokens": 100,
            "tokens_per_second": 50.0 + seed,
            "seconds": 2.0,
            "parameters": 12 if arm == "full" else 10,
            "read_parameters": 2 if arm == "full" else 0,
            "peak_learning_rate": rate or 0.004,
            "data": f"data of {seed}",
            "order": f"order of {seed}",
        }
    name = f"{arm}-{rate}-{seed}"
    return RunRecord(
        **{"name": name, "arm": arm, "size": "tiny", "seed": seed, "learning_rate": rate, **done, **more}
    )


def test_mean_and_standard_error():
    (result,) = summarise_arms([made_up("full", seed, loss) for seed, loss in enumerate((1.0, 2.0, 6.0))])
    assert result.best.loss.value == pytest.approx(3.0)
    # squared deviations 4 + 1 + 9 over n - 1 = 2 is 7, over n = 3
    assert result.best.loss.error == pytest.approx(math.sqrt(7 / 3))
    assert (result.tokens_per_second, result.seconds, result.parameters) == (51.0, 2.0, 12)
    assert result.difference is None


def test_one_seed_has_no_standard_error():
    (result,) = summarise_arms([made_up("full", 0, 1.0)])
    assert result.best.loss.value == 1.0 and math.isnan(result.best.loss.error)


def test_differences_are_taken_seed_by_seed():
    losses = {"baseline": (1.0, 2.0, 4.0), "full": (0.9, 1.8, 3.7)}
    records = [made_up(arm, seed, loss) for arm, values in losses.items() for seed, loss in enumerate(values)]
    baseline, full = summarise_arms(records)
    assert baseline.difference is None
    assert full.difference.by_seed == pytest.approx({0: -0.1, 1: -0.2, 2: -0.3})
    assert full.difference.value == pytest.approx(-0.2)
    # far below the spread over seeds: this is what pairing is for
    assert full.difference.error == pytest.approx(0.1 / math.sqrt(3))
    assert full.best.loss.error > 0.8


def test_a_missing_run_leaves_its_pair_out():
    records = [made_up("baseline", 0, 1.0), made_up("baseline", 1, None), made_up("baseline", 2, 3.0)]
    records += [made_up("full", 0, 0.5), made_up("full", 1, 1.5), made_up("full", 2, None)]
    baseline, full = summarise_arms(records)
    assert (baseline.best.missing, full.best.missing) == ((1,), (2,))
    assert full.difference.by_seed == {0: -0.5} and math.isnan(full.difference.error)


def test_an_arm_without_a_finished_run():
    _, full = summarise_arms([made_up("baseline", 0, 1.0), made_up("full", 0, None)])
    assert full.best.missing == (0,) and math.isnan(full.best.loss.value)
    assert full.difference.by_seed == {} and full.parameters is None and math.isnan(full.seconds)


def test_the_best_rate_misses_the_fewest_seeds_and_then_has_the_lowest_loss():
    records = [made_up("full", seed, loss, rate=1e-3) for seed, loss in enumerate((2.0, 3.0))]
    records += [made_up("full", seed, loss, rate=2e-3) for seed, loss in enumerate((1.0, 3.5))]
    records += [made_up("full", 0, 0.1, rate=1e-1), made_up("full", 1, None, rate=1e-1)]  # one diverged
    (result,) = summarise_arms(records)
    assert [rate.learning_rate for rate in result.rates] == [1e-3, 2e-3, 1e-1]
    assert result.best.learning_rate == 2e-3 and result.best.loss.value == 2.25
    assert {record.loss for record in records_at(records, result)} == {1.0, 3.5}


def test_each_arm_is_compared_at_its_own_best_rate():
    records = [made_up("baseline", 0, loss, rate=rate) for rate, loss in ((1e-3, 1.0), (2e-3, 2.0))]
    records += [made_up("full", 0, loss, rate=rate) for rate, loss in ((1e-3, 4.0), (2e-3, 0.7))]
    _, full = summarise_arms(records)
    assert full.difference.value == pytest.approx(-0.3)


def test_sizes_have_baselines_of_their_own():
    records = [made_up("baseline", 0, 1.0), made_up("full", 0, 0.5)]
    records += [dataclasses.replace(record, size="small", loss=record.loss + 2) for record in records]
    results = summarise_arms(records)
    assert [(result.size, result.arm) for result in results] == [
        ("tiny", "baseline"),
        ("tiny", "full"),
        ("small", "baseline"),
        ("small", "full"),
    ]
    assert results[3].difference.value == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "other"}, "the data must be the same"),
        ({"order": "other"}, "the data order must be the same"),
        ({"tokens": 99}, "the number of tokens must be the same"),
        ({"parameters": 13}, "the model without reads must be the same"),
    ],
)
def test_arms_that_differ_elsewhere_are_refused(change, words):
    records = [made_up("baseline", 0, 1.0), made_up("full", 0, 1.0)]
    check_control([*records, made_up("full", 1, 1.0)])  # another seed has other data
    with pytest.raises(UserError, match=words):
        check_control([records[0], dataclasses.replace(records[1], **change)])


def test_the_order_fingerprint_follows_all_that_the_order_depends_on():
    def stored(data: str, seed: int, rows: int, steps: int) -> dict[str, Any]:
        return {
            "data": {"fingerprint": data},
            "seed": seed,
            "schedule": {"batch_size": rows, "processes": 1},
            "settings": {"gradient_accumulation": 2},
            "max_steps": steps,
        }

    base = ("a", 0, 4, 10)
    others = [("b", 0, 4, 10), ("a", 1, 4, 10), ("a", 0, 5, 10), ("a", 0, 4, 11)]
    assert order_fingerprint(stored(*base)) == order_fingerprint(stored(*base))
    assert len({order_fingerprint(stored(*facts)) for facts in (base, *others)}) == 5


def test_tables(tmp_path):
    records = [made_up("baseline", 0, 1.5), made_up("full", 0, None)]
    lines, sheet = write_tables(records, tmp_path)
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [(row["arm"], row["status"], row["loss"]) for row in rows] == [
        ("baseline", "finished", 1.5),
        ("full", "missing", None),
    ]
    with sheet.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["loss"] for row in table] == ["1.5", ""] and list(table[0]) == list(rows[0])
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "results.csv"}
