"""The compiled kernel runs on PyTorch's threads: same bits every time, and nothing else gets slower."""

import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from depth_cases import assert_within_contract, make_case, run

from attention_residuals import depth_attention

COUNTS = [1, 2, 4]
linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
SIZES = [(4, 65, (700,)), (9, 1000, (67,)), (33, 127, (31,)), (2, 7168, (5,)), (3, 48, (2,))]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("n, width, tokens", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_at_every_run(count, n, width, tokens, dtype, threads, kernel):
    threads(count)
    assert torch.get_num_threads() == count
    case = make_case(n, width, tokens=tokens, dtype=dtype, norm=True)
    first = run(case, "cpu")
    for _ in range(5):
        for name, found in run(case, "cpu").items():
            assert torch.equal(found, first[name]), name


@pytest.mark.parametrize("n, width, tokens", SIZES)
def test_tokens_do_not_depend_on_the_number_of_threads(n, width, tokens, threads, kernel):
    """Sums over tokens may; each is right at every count."""
    case = make_case(n, width, tokens=tokens, norm=True)
    results = []
    for count in (*COUNTS, 3, 7):
        threads(count)
        results.append(run(case, "cpu"))
        assert_within_contract(case, "cpu")
    for other in results[1:]:
        for name, want in results[0].items():
            if name in ("output", "weights") or name.startswith("d source"):
                assert torch.equal(other[name], want), name


def test_more_threads_than_tokens(threads, kernel):
    threads(4)
    for tokens in (1, 2, 3):
        assert_within_contract(make_case(9, 7168, tokens=(tokens,), norm=True), "cpu")


def test_several_callers_at_once(threads, kernel):
    """The kernel lets go of Python's lock; callers in other threads don't share its buffers."""
    threads(2)
    cases = [make_case(5, width, tokens=(300,), norm=True) for width in (64, 65, 127, 200)]
    expected = [run(case, "cpu") for case in cases]
    found = [[] for _ in cases]

    def work(i):
        for _ in range(10):
            found[i].append(run(cases[i], "cpu"))

    callers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for want, results in zip(expected, found, strict=True):
        assert len(results) == 10
        for result in results:
            # A caller's own number of threads may differ, so sums over tokens may be split elsewhere.
            for name in want:
                torch.testing.assert_close(result[name], want[name], rtol=1e-4, atol=1e-4)
                if name == "output":
                    assert torch.equal(result[name], want[name])


def _in_child(queue):
    torch.set_num_threads(1)  # as a DataLoader's worker does
    torch.manual_seed(1)
    sources = torch.randn(5, 700, 65)
    queue.put(depth_attention(sources, torch.ones(65), backend="cpu").sum().item())


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_process(threads, kernel):
    threads(2)
    depth_attention(torch.randn(5, 700, 65), torch.ones(65), backend="cpu")  # the parent's threads exist now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    torch.manual_seed(1)
    expected = depth_attention(torch.randn(5, 700, 65), torch.ones(65), backend="cpu").sum().item()
    assert found == pytest.approx(expected, rel=1e-6)


THREADS_PROGRAM = """
import os, sys, torch
from attention_residuals import depth_attention
torch.set_num_threads(3)
def count(): return len(os.listdir("/proc/self/task"))
def call(tokens):
    sources = [torch.ones(tokens, 256, requires_grad=True) for _ in range(4)]
    depth_attention(sources, torch.ones(256), backend="cpu").backward(torch.ones(tokens, 256))
before = count()
call(1)
small = count() - before
call(2000)
large = count() - before
torch.ones(512, 512) @ torch.ones(512, 512)
after = count() - before
print(small, large, after)
"""


@linux
def test_small_calls_stay_in_the_calling_thread_and_the_pool_is_pytorchs(kernel):
    """Counts the threads of a fresh process: none for a small call, two more for a large one, and a product
    of matrices then brings no others."""
    output = subprocess.run(
        [sys.executable, "-c", THREADS_PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
    ).stdout
    small, large, after = map(int, output.split())
    assert small <= 1  # autograd may start one of its own
    assert large - small == 2
    assert after == large


def _pairs(first, second, repetitions):
    """Times of the product of matrices after each of two calls, taken in turn."""
    a, b = torch.randn(384, 384), torch.randn(384, 384)
    times = ([], [])
    for i in range(repetitions):
        for which in (0, 1) if i % 2 else (1, 0):
            (first, second)[which]()
            start = time.perf_counter()
            torch.mm(a, b)
            times[which].append(time.perf_counter() - start)
    return times


def _plain_mixture(sources):
    """Reads the same sources and writes one result, as the kernel does."""
    h = sources[0] * 0.5
    for source in sources[1:]:
        h = torch.add(h, source, alpha=0.1)
    return h


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_matrix_product_after_the_kernel_is_as_fast_as_after_pytorch(count, threads, kernel):
    """At most 2% between medians of 200 pairs; the median of five rounds, since a shared machine is noisy."""
    threads(count)
    sources, query = [torch.randn(512, 512) for _ in range(8)], torch.randn(512)
    ratios = []
    for _ in range(5):
        ours, plain = _pairs(
            lambda: depth_attention(sources, query, backend="cpu"), lambda: _plain_mixture(sources), 200
        )
        ratios.append(statistics.median(ours) / statistics.median(plain))
    print("after the kernel / after PyTorch:", *(f"{ratio:.3f}" for ratio in ratios))
    assert statistics.median(ratios) <= 1.02, ratios
