"""The compiled kernel under each instruction set that this machine has."""

import os

import pytest
import torch

from attention_residuals import available_backends

INSTRUCTION_SETS = ["baseline", "avx2", "avx512"]


@pytest.fixture
def kernel():
    """The compiled module; skips where it isn't compiled (test_build.py fails there if a compiler exists)."""
    if reason := available_backends("cpu", torch.float32)["cpu"]:
        pytest.skip(f"the kernel {reason}")
    from attention_residuals.depth_attention.cpu import _kernel

    return _kernel


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request, kernel):
    """Every call of backend "cpu" runs with it."""
    before = kernel.instruction_set()
    try:
        kernel.use_instruction_set(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    assert kernel.instruction_set() == request.param
    yield request.param
    kernel.use_instruction_set(before)


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads; one again afterwards."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    yield torch.set_num_threads
    torch.set_num_threads(1)
