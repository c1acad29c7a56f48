"""The next-token loss of a language model without its logits: head and cross entropy in chunks of tokens.

    loss = mean over the labelled tokens of (log sum exp(W h) - (W h)[label])

All logits at once are [B, T, vocabulary] in float32, several times over. PyTorch's `linear_cross_entropy`
makes those of a few tokens at a time, and the gradients of h and W with them. It gets float32, since its loss
of 16-bit input is a sum in 16 bits (10.31 instead of 11.15 over 2,048 tokens, torch 2.13).
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

IGNORED = -100  # label of a token that doesn't count, as in transformers
# Logits made at a time, 64 MiB in float32. PyTorch's own choice is a few tokens, whose products with the
# head's weight take about twice as long on a CPU (docs/training.md).
CHUNK_LOGITS = 1 << 24


def why_not() -> str | None:
    """None where this PyTorch can compute the chunked loss, else the reason."""
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return (
        f"the chunked loss needs torch.nn.functional.linear_cross_entropy, which PyTorch {torch.__version__} "
        "doesn't have; install PyTorch 2.13 or newer"
    )


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of `hidden_states @ weight.T + bias` against `labels`, without making all logits.

    Args:
        hidden_states: [..., D], any float dtype; computed in float32 (float64 for float64).
        weight: the head's weight [vocabulary, D].
        labels: token ids [...]; -100 doesn't count. They are not shifted here.
        bias: the head's bias [vocabulary], or None.
        reduction: "mean" over the labels that count, or "sum".

    Returns:
        The loss, a scalar in nats; its gradient can be taken once.

    Raises:
        RuntimeError: this PyTorch is too old.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    tokens = max(1, CHUNK_LOGITS // weight.shape[0])
    with torch.autocast(hidden_states.device.type, enabled=False):
        return F.linear_cross_entropy(
            hidden_states.flatten(0, -2).to(dtype),
            weight.to(dtype),
            labels.flatten(),
            linear_bias=None if bias is None else bias.to(dtype),
            reduction=reduction,
            ignore_index=IGNORED,
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tokens, chunking_method=None),
        )


def use_chunked_loss(model: Any) -> None:
    """Let a language model compute the loss of `labels=` in chunks; its output then has no logits.

    Calls without `labels`, generation among them, are what they were. Changes `model` in place, before
    anything wraps it (PEFT, DDP). Saved models are not affected.

    Args:
        model: a causal language model whose logits are its head's output.

    Raises:
        RuntimeError: this PyTorch is too old.
        ValueError: the model's logits are not a linear function of its last hidden state (softcapped ones).
    """
    if reason := why_not():
        raise RuntimeError(reason)
    _check_logits_are_linear(model)
    plain = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(*args, **kwargs)
        return _loss_output(self, args, labels, **kwargs)

    model.forward = types.MethodType(forward, model)


def _loss_output(
    model: Any,
    args: tuple[Any, ...],
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    output_router_logits: bool | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    if output_router_logits or getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "the chunked loss leaves out the experts' balancing loss; set output_router_logits=False, or use "
            "the model's own loss"
        )
    kwargs.pop("logits_to_keep", None)
    outputs = model.base_model(*args, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    head = model.get_output_embeddings()
    loss = chunked_cross_entropy(
        outputs[0].to(head.weight.device),
        head.weight,
        shift_labels.to(head.weight.device),
        bias=head.bias,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return CausalLMOutputWithPast(loss=loss if num_items_in_batch is None else loss / num_items_in_batch)


@torch.no_grad()
def _check_logits_are_linear(model: Any) -> None:
    """Compare the model's logits of one vector with its head's output, to the bit."""
    embedding = model.get_input_embeddings().weight  # padding's row is zeros, which no softcap changes
    ramp = torch.linspace(-1, 1, embedding.shape[-1], dtype=embedding.dtype, device=embedding.device)
    one = {"inputs_embeds": ramp[None, None], "use_cache": False}
    was_training = model.training
    model.eval()  # no dropout between the two
    try:
        hidden = model.base_model(**one)[0]
        linear = torch.equal(model.get_output_embeddings()(hidden), model(**one).logits)
    finally:
        model.train(was_training)
    if not linear:
        raise ValueError(
            f"{type(model).__name__} changes its logits after the head (a softcap or a scale), which the "
            "chunked loss can't follow; use the model's own loss"
        )
