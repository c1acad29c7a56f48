"""From files and flags to a plan, without training anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_comparison import tiny_settings

from attention_residuals.comparison.settings import parse_arm, read_settings
from attention_residuals.errors import UserError


@pytest.mark.parametrize(
    ("arm", "fields"),
    [
        ("baseline", {"mode": "standard"}),
        ("full", {"mode": "full"}),
        ("block:8", {"mode": "block", "num_blocks": 8}),
        ("sublayers:3", {"mode": "block", "sublayers_per_block": 3}),
        ({"name": "sum", "mode": "full", "read_scale": "sum"}, {"mode": "full", "read_scale": "sum"}),
    ],
)
def test_arms(arm, fields):
    assert parse_arm(arm).fields == fields


def test_the_plan_is_every_combination_and_gives_each_arm_its_first_seed_first():
    settings = read_settings(
        None,
        {
            "arms": ["baseline", "block:8"],
            "seeds": [0, 1],
            "sizes": ["tiny", "small"],
            "learning_rates": [1e-3],
            "train": {"max_steps": 7, "data": "text.txt", "warmup": 3},
            "output_dir": "out",
        },
    )
    plan = settings.plan()
    assert [run.name for run in plan[:4]] == [
        "tiny-baseline-lr-0.001-seed-0",
        "tiny-block-8-lr-0.001-seed-0",
        "tiny-baseline-lr-0.001-seed-1",
        "tiny-block-8-lr-0.001-seed-1",
    ]
    assert len({run.name for run in plan}) == len(plan) == 8
    run = plan[1].settings
    assert (run.preset, run.mode, run.num_blocks, run.seed, run.learning_rate) == (
        "tiny",
        "block",
        8,
        0,
        1e-3,
    )
    assert (run.max_steps, run.data, run.warmup) == (7, ("text.txt",), 3.0)
    assert run.output_dir == "out/runs/tiny-block-8-lr-0.001-seed-0"


def test_arms_of_a_seed_differ_in_their_arm_alone():
    arms = ["baseline", {"name": "muon", "mode": "full", "optimizer": "muon", "read_lr_factor": 2}]
    first, second = read_settings(None, {"arms": arms}).plan()
    changed = {
        name for name, value in first.settings.to_dict().items() if second.settings.to_dict()[name] != value
    }
    assert changed == {"mode", "optimizer", "read_lr_factor", "output_dir"}


def test_flags_stand_in_the_place_of_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(
        'arms = ["baseline", "full"]\nseeds = [0, 1, 2]\n[train]\nmax_steps = 5\ncontext = 32\n',
        encoding="utf-8",
    )
    settings = read_settings(file, {"seeds": [4], "train": {"max_steps": 9}})
    assert settings.seeds == (4,) and [arm.name for arm in settings.arms] == ["baseline", "full"]
    assert settings.train == {"max_steps": 9, "context": 32}


def test_a_size_is_a_preset_a_file_or_a_folder(tmp_path):
    model = tmp_path / "plain"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    file = tiny_settings(tmp_path).sizes[0].model
    plan = read_settings(None, {"arms": ["full"], "sizes": ["small", file, str(model)]}).plan()
    assert [run.size for run in plan] == ["small", "shape", "plain"]
    assert plan[1].settings.model_config == file and plan[2].settings.from_checkpoint == str(model)


def test_a_size_may_have_training_options_of_its_own():
    sizes = ["tiny", {"model": "small", "max_steps": 9, "learning_rate": 1e-3}]
    given = {"arms": ["full"], "sizes": sizes, "train": {"max_steps": 5, "context": 32}}
    tiny, small = (run.settings for run in read_settings(None, given).plan())
    assert (tiny.preset, tiny.max_steps, tiny.learning_rate) == ("tiny", 5, None)
    assert (small.preset, small.max_steps, small.learning_rate, small.context) == ("small", 9, 1e-3, 32)
    swept = read_settings(None, {**given, "learning_rates": [2e-3]}).plan()
    assert {run.settings.learning_rate for run in swept} == {2e-3}


def test_an_arm_may_have_reads_of_another_kind():
    arm = {"name": "sigmoid", "mode": "full", "variant": {"activation": "sigmoid", "window": 4}}
    (run,) = read_settings(None, {"arms": [arm]}).plan()
    assert run.settings.attn_res_fields() == {"mode": "full", "activation": "sigmoid", "window": 4}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing to compare; give --arms"),
        ({"arms": []}, "arms must name at least one"),
        ({"arms": ["blocks"]}, "an arm must be baseline, full, block:8"),
        ({"arms": ["block:many"]}, "got 'block:many'"),
        ({"arms": ["full", "full"]}, "arms must differ from each other, but full appears twice"),
        ({"arms": [{"mode": "full"}]}, "must have a name"),
        ({"arms": [{"name": "fast", "learning_rate": 1.0}]}, "arms may differ in mode"),
        ({"arms": ["block:0"]}, "num_blocks must be at least 1, got 0"),
        ({"arms": ["full"], "seeds": ["one"]}, "seeds must be a list of int, got 'one'"),
        ({"arms": ["full"], "sizes": ["huge"]}, "got 'huge', which does not exist"),
        ({"arms": ["full"], "learning_rates": [-1.0]}, "--learning-rate must be a finite number above 0"),
        ({"arms": ["full"], "sizes": [{"max_steps": 3}]}, "a size's table must have a model"),
        ({"arms": ["full"], "sizes": [{"model": "tiny", "seed": 3}]}, "give it as seeds instead"),
        ({"arms": ["full"], "sizes": [{"model": "tiny", "steps": 3}]}, "has no option 'steps'"),
        ({"arms": ["full"], "train": {"variant": {"heads": 2}}}, "give it as arms instead"),
        ({"arms": [{"name": "a", "variant": {"hats": 2}}]}, "unknown fields ['hats']"),
        ({"arms": [{"name": "a", "variant": {"heads": 0}}]}, "heads must be at least 1, got 0"),
        ({"arms": [{"name": "a", "variant": {"mode": "full"}}]}, "mode has an option of its own"),
        ({"arms": [{"name": "a", "variant": "sigmoid"}]}, "variant must be of type table"),
        ({"arms": ["full"], "output_dir": 3}, "output_dir must be the name of a folder"),
        ({"arms": ["full"], "train": {"mode": "full"}}, "give it as arms instead"),
        ({"arms": ["full"], "train": {"seed": 1}}, "give it as seeds instead"),
        ({"arms": ["full"], "train": {"steps": 3}}, "attnres train has no option 'steps'"),
        ({"arms": ["full"], "train": {"max_steps": "many"}}, "max_steps must be of type int, got 'many'"),
        ({"arms": ["full"], "train": {"bf16": 1}}, "bf16 must be of type bool"),
        ({"arms": ["full"], "train": {"data": 3}}, "data must be of type list of str"),
        ({"arms": ["full"], "train": {"validation_fraction": 0}}, "validation_fraction must be above 0"),
    ],
)
def test_mistakes(given, words):
    with pytest.raises(UserError) as error:
        read_settings(None, given).plan()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("arms = [", "is not TOML"),
        ("arms = ['full']\nmax_steps = 3", "holds max_steps; known are arms"),
        ("arms = ['full']\ntrain = 3", "[train] must be a table"),
    ],
)
def test_mistakes_in_a_file(tmp_path, content, words):
    file = tmp_path / "settings.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_settings(file, {})
    assert words in str(error.value)


def test_a_missing_file():
    with pytest.raises(UserError, match=r"missing\.toml cannot be read: No such file"):
        read_settings(Path("missing.toml"), {})
