"""The wheel: built without PyTorch, holds the kernel, runs on old machines, installs without a compiler."""

import platform
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from source_tree import copy_source, empty_environment, run, see_site_packages

from attention_residuals import available_backends

pytestmark = pytest.mark.slow
PIP = ("-m", "pip", "--disable-pip-version-check")
FRESH = ("--no-deps", "--no-build-isolation", "--no-index")
NO_COMPILER = {"CC": "/no/such/cc", "CXX": "/no/such/c++"}
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the sets are those of x86-64")

PROGRAM = """
import torch, attention_residuals as ar
print(ar.__file__)
print(ar.available_backends("cpu", torch.float32)["cpu"])
sources = [torch.randn(2, 3, 5, requires_grad=True) for _ in range(3)]
for backend in ("auto", "auto", "cpu"):
    ar.depth_attention(sources, torch.randn(5), backend=backend).sum().backward()
print("done")
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """Python of an environment that has setuptools and no PyTorch."""
    python = empty_environment(tmp_path_factory.mktemp("builder"), "setuptools", "_distutils_hack")
    assert run(python, "-c", "import torch", check=False).returncode != 0
    return python


@pytest.fixture(scope="module")
def built(builder, tmp_path_factory):
    """The source tree that a wheel was built in, and the wheel."""
    source = copy_source(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("wheel")
    run(builder, *PIP, "wheel", source, *FRESH, "-w", out)
    (wheel,) = out.glob("*.whl")
    return source, wheel


@needs_compiler
def test_the_kernel_is_compiled_here():
    """Else every other test of it would be skipped in silence."""
    assert available_backends("cpu")["cpu"] is None


@needs_compiler
def test_contents_of_the_wheel(built):
    _, wheel = built
    assert re.fullmatch(r"attention_residuals-[\d.]+-cp3\d+-abi3-[a-z0-9_]+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "attention_residuals/depth_attention/cpu/_kernel.abi3.so" in names
    assert "attention_residuals/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "build/", "benchmarks/"))]
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert readme.splitlines()[0] in text
    assert "Requires-Dist: fla-core" in text


@needs_compiler
def test_a_wheel_from_the_source_distribution_has_the_kernel(builder, built, tmp_path):
    """Headers too must be in it."""
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    source = copy_source(tmp_path / "source")
    run(builder, "-c", build, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    run(builder, *PIP, "wheel", archive, *FRESH, "-w", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) == set(zipfile.ZipFile(built[1]).namelist())


@needs_compiler
def test_the_wheel_runs_in_an_empty_environment(built, tmp_path):
    python = empty_environment(tmp_path)
    run(python, *PIP, "install", built[1], "--no-deps", "--no-index")
    see_site_packages(python)
    done = run(python, "-c", PROGRAM, cwd=tmp_path)
    where, reason, last = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert (reason, last) == ("None", "done")
    assert "PyTorch backend" not in done.stderr


@pytest.mark.parametrize("editable", [False, True])
def test_without_a_compiler(editable, tmp_path):
    """The installation succeeds, "auto" runs and says why once, and "cpu" raises."""
    source = copy_source(tmp_path / "source")
    python = empty_environment(tmp_path / "environment", "setuptools", "_distutils_hack")
    run(python, *PIP, "install", *["-e"] * editable, source, *FRESH, **NO_COMPILER)
    see_site_packages(python)
    done = run(python, "-c", PROGRAM, cwd=tmp_path, check=False)
    assert done.returncode != 0
    where, reason = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert "is not compiled" in reason
    assert done.stderr.count("attention_residuals uses its PyTorch backend, since its CPU kernel") == 1
    assert "ValueError: backend='cpu' can't run here: it is not compiled" in done.stderr


def objects(built, name):
    (found,) = built[0].glob(f"build/temp*/{name}/**/instruction_set.o")
    return found


WIDE = re.compile(r"%[yz]mm\d|\tv[a-z0-9]+ .*%xmm")  # AVX encodes even 128-bit instructions with a v in front


def instructions(path):
    return run("objdump", "-d", "--no-show-raw-insn", path).stdout.splitlines()


@x86
@needs_compiler
@pytest.mark.skipif(not shutil.which("objdump"), reason="there is no objdump")
def test_code_for_old_machines_has_no_avx(built):
    """The baseline kernel and the code that chooses; in the other objects the check does see AVX."""
    (binding,) = built[0].glob("build/temp*/src/**/kernel.o")
    for path in (objects(built, "baseline"), binding):
        lines = instructions(path)
        assert len(lines) > 100
        assert not [line for line in lines if WIDE.search(line)]
    for name in ("avx2", "avx512"):
        assert [line for line in instructions(objects(built, name)) if WIDE.search(line)]


@x86
@needs_compiler
@pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm")
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_objects_for_new_machines_lend_no_function_to_the_others(built, name):
    """A weak symbol (an inline function, a template) of this object may become everybody's at link time."""
    symbols = [line.split()[-2:] for line in run("nm", "-C", objects(built, name)).stdout.splitlines()]
    assert not [symbol for kind, symbol in symbols if kind in "WwVvu"]
    assert [symbol for kind, symbol in symbols if kind in "BDRT"] == [f"kernels_{name}"]
