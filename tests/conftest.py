"""Every test runs offline, on one thread, from the same seed."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import random

import numpy
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
