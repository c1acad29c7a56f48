"""No read or write past any buffer: the kernel built with AddressSanitizer, or run under valgrind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import SITE_PACKAGES, build_in_place, copy_source, run

pytestmark = pytest.mark.slow

# Memory of exactly the size that is used, so that the first byte past a row's end is found.
PROGRAM = """
import ctypes, itertools, sys, torch
from attention_residuals import depth_attention
from attention_residuals.depth_attention.cpu import _kernel
from attention_residuals.depth_attention.cpu.binding import read_plain_tensors, write_difference_norms
torch.set_num_threads(1)
print(_kernel.__file__)
seen = []

def call(n, width, tokens, dtype, norm, weights):
    sources = [torch.randn(tokens, width).to(dtype).requires_grad_() for _ in range(n)]
    vectors = [torch.randn(width, requires_grad=True) for _ in range(3)]
    out, alpha = depth_attention(sources, vectors[0], vectors[1], norm_weight=vectors[2] if norm else None,
                                 return_weights=True, backend="cpu")
    (out.float().sum() + (alpha[0].sum() if weights else 0)).backward()
    with torch.no_grad():
        norm_weight = vectors[2] if norm else None
        depth_attention(sources, vectors[0], vectors[1], norm_weight=norm_weight)
        memory = torch.empty(n, tokens), torch.empty(tokens)
        settings = (1e-6, 1.0, 1e-6, 0.0, "mean")
        assert read_plain_tensors(sources, *vectors[:2], norm_weight, *settings, *memory) is not None
        assert write_difference_norms(sources[0], sources[-1], memory[1])

def sweep(widths, counts):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for name in ("baseline", "avx2", "avx512"):
        try:
            _kernel.use_instruction_set(name)
        except ValueError:
            continue
        seen.append(name)
        for n, width, dtype in itertools.product(counts, widths, dtypes):
            for tokens, norm in ((1, False), (3, True), (5, False)):
                call(n, width, tokens, dtype, norm, weights=tokens != 5)

def past_the_end():
    '''A tensor that claims one row more than was allocated.'''
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    memory = (ctypes.c_float * 48).from_address(libc.malloc(ctypes.c_size_t(40 * 4)))
    source = torch.frombuffer(memory, dtype=torch.float32).view(6, 8)
    depth_attention([source, source], torch.ones(8), backend="cpu")

if sys.argv[1] == "sweep":
    sweep(eval(sys.argv[2]), eval(sys.argv[3]))
else:
    past_the_end()
print("clean", *seen)
"""
WIDTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 63, 65, 127, 129, 1000]
COUNTS = [1, 2, 5, 17, 33, 130]


def libasan():
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler:
        return None
    path = Path(run(compiler, "-print-file-name=libasan.so").stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs PROGRAM under whichever of the two tools is here; gives the finished process."""
    asan, valgrind = libasan(), shutil.which("valgrind")
    if not shutil.which("c++") or not (asan or valgrind):
        pytest.skip("neither libasan nor valgrind is here, or no C++ compiler")
    source = copy_source(tmp_path_factory.mktemp("sanitized"))
    flags = "-fsanitize=address -fno-omit-frame-pointer -O1" if asan else "-g"
    build_in_place(source, ATTNRES_KERNEL_FLAGS=flags)
    env = {
        "PYTHONPATH": f"{source / 'src'}:{SITE_PACKAGES}",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    if asan:  # Python and PyTorch let some memory live until the end, which isn't looked for here
        env |= {"LD_PRELOAD": str(asan), "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66"}
    tool = [] if asan else [valgrind, "--error-exitcode=66", "--undef-value-errors=no", "-q"]

    def start(*arguments: object) -> subprocess.CompletedProcess:
        done = run(*tool, sys.executable, "-c", PROGRAM, *arguments, check=False, **env)
        assert done.stdout.startswith(str(source)), done.stdout + done.stderr
        return done

    return start


def test_odd_shapes_are_clean(program):
    done = program("sweep", WIDTHS, COUNTS)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1].startswith("clean baseline")


def test_several_groups_of_sources_are_clean(program):
    done = program("sweep", [7168], [3, 49])
    assert done.returncode == 0, done.stderr[-5000:]


def test_a_read_past_the_end_is_found(program):
    """Guards the tests above: the tool sees what the kernel reads."""
    done = program("past the end")
    assert done.returncode == 66, done.stdout + done.stderr
    assert "heap-buffer-overflow" in done.stderr or "Invalid read" in done.stderr
