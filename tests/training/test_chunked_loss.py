"""The chunked loss equals the model's own, gradients included, and never holds all logits (case Q6)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adapters import moe_model
from test_optimizer import model_of
from tiny_run import losses, quiet, text_of, tiny_settings
from torch.nn import functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM

from attention_residuals.errors import UserError
from attention_residuals.training.chunked_loss import chunked_cross_entropy, use_chunked_loss
from attention_residuals.training.run import train

# Peak memory beyond the start, loss and both gradients' norms: chunked first, since the peak only rises.
MEASURE = """
import json, torch
from torch.nn import functional as F
from attention_residuals.training.chunked_loss import chunked_cross_entropy
torch.set_num_threads(1)
hidden = torch.randn(2048, 64, requires_grad=True)
weight = torch.randn(50_000, 64).mul(0.1).requires_grad_()
labels = torch.randint(0, 50_000, (2048,))
def peak_kib():  # not ru_maxrss, which a process takes over from the one that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def measure(loss_of):
    hidden.grad = weight.grad = None
    start = peak_kib()
    loss = loss_of()
    loss.backward()
    mib = (peak_kib() - start) / 1024
    return mib, loss.item(), hidden.grad.norm().item(), weight.grad.norm().item()
print(json.dumps([
    measure(lambda: chunked_cross_entropy(hidden, weight, labels)),
    measure(lambda: F.cross_entropy(F.linear(hidden, weight), labels)),
]))
"""


def inputs(dtype: torch.dtype, vocabulary: int = 501) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(3, 43, 16, dtype=dtype)
    labels = torch.randint(0, vocabulary, (3, 43))
    labels[0, :7] = labels[2] = -100
    return hidden, torch.randn(vocabulary, 16).to(dtype), torch.randn(vocabulary).to(dtype), labels


def with_gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [loss, *torch.autograd.grad(loss, of)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradients(dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, bias, labels = inputs(dtype)
    of = [x.requires_grad_() for x in (hidden, weight, bias)]
    found = with_gradients(chunked_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction), *of)
    wide = [x.detach().double().requires_grad_() for x in of]
    logits = F.linear(wide[0], wide[1], wide[2]).flatten(0, 1)
    expected = with_gradients(F.cross_entropy(logits, labels.flatten(), reduction=reduction), *wide)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert [g.dtype for g in found[1:]] == [dtype] * 3
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    for value, wanted in zip(found, expected, strict=True):
        assert (value.double() - wanted).abs().max() <= rounding * wanted.abs().max()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    hidden.requires_grad_()
    chunked_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad is None
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(hidden.grad, *torch.autograd.grad(expected, hidden), rtol=1e-4, atol=1e-7)


def model_losses(model: Any, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.arange(40).reshape(2, 20) * 7 % 64
    labels = ids.clone()
    labels[0, :5] = -100
    model.zero_grad()
    output = model(input_ids=ids, labels=labels, use_cache=False, **more)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 50}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_s_loss_and_gradients(tied: bool, more: dict[str, int]) -> None:
    model = model_of("block", tie_word_embeddings=tied).double()
    expected, gradients = model_losses(model, **more)
    use_chunked_loss(model)
    found, chunked = model_losses(model, **more)
    assert found.logits is None and expected.logits is not None
    torch.testing.assert_close(found.loss, expected.loss.double(), rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-5, atol=1e-7)


def test_calls_without_labels_stay_what_they_were() -> None:
    model = model_of("block").eval()
    ids = torch.arange(12).reshape(2, 6)
    before, generated = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    use_chunked_loss(model)
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin.lm_head.weight)
    assert model(ids, labels=ids).loss != twin(ids, labels=ids).loss, "a copy computes its own loss"


def test_peak_memory() -> None:
    """50,000 words x 2,048 tokens are 391 MiB of float32 logits, and as much again for their gradients."""
    answer = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    (chunked, *found), (plain, *expected) = json.loads(answer.stdout)
    assert found == pytest.approx(expected, rel=1e-4)
    assert plain > 600
    assert chunked < 0.4 * plain


def test_softcapped_logits_are_refused() -> None:
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Gemma2ForCausalLM(config)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits after the head"):
        use_chunked_loss(model)
    assert model.training


def test_a_balancing_loss_of_experts_is_not_left_out_in_silence() -> None:
    model, ids = moe_model(), torch.arange(12).reshape(2, 6)
    use_chunked_loss(model)
    assert model(ids, labels=ids).loss.isfinite()
    with pytest.raises(ValueError, match="leaves out the experts' balancing loss; set output_router_logits"):
        model(ids, labels=ids, output_router_logits=True)


def test_an_older_pytorch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    with pytest.raises(
        RuntimeError, match=r"needs .*linear_cross_entropy, .* install PyTorch 2\.13 or newer"
    ):
        use_chunked_loss(model_of("block"))
    with pytest.raises(UserError, match="--chunked-loss can't be used: the chunked loss needs"):
        train(tiny_settings(tmp_path, chunked_loss=True), console=quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"gradient_accumulation": 2}, {"bf16": True}], ids=str)
def test_a_run_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr("attention_residuals.training.run._report", lambda *args: None)
    consoles = quiet(), quiet()
    train(tiny_settings(tmp_path, "plain", max_steps=3, **changes), console=consoles[0])
    train(tiny_settings(tmp_path, "chunked", max_steps=3, chunked_loss=True, **changes), console=consoles[1])
    lines = zip(losses(tmp_path / "plain"), losses(tmp_path / "chunked"), strict=True)
    tolerance = 2e-3 if "bf16" in changes else 1e-5
    for plain, chunked in lines:
        assert plain.keys() == chunked.keys()
        for name in plain.keys() & {"loss", "eval_loss"}:
            assert chunked[name] == pytest.approx(plain[name], rel=tolerance)
    assert text_of(consoles[0]) != text_of(consoles[1]), "the estimated memory is less"
