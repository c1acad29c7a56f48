"""Builds the compiled CPU kernel; everything else is in pyproject.toml.

The kernel is plain C++ and needs no PyTorch. Where it can't be compiled the installation still succeeds:
`depth_attention` then uses its PyTorch backend, and `attnres info` says why.
"""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "src/attention_residuals/depth_attention/cpu"
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fvisibility=hidden"]
FLAGS += ["-Wno-ignored-attributes", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
PARTS = ("kernel_body.h", "kernel_types.h", "tensor_view.h", "instruction_set.cpp")
# name, float lanes, compiler flags
INSTRUCTION_SETS = [("baseline", 4, [])]
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS += [
        ("avx2", 8, ["-mavx2", "-mfma", "-mf16c"]),
        (
            "avx512",
            16,
            ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
        ),
    ]


class BuildKernel(build_ext):
    """Compiles `instruction_set.cpp` once for each instruction set and links the objects together."""

    def build_extension(self, ext):
        extra = os.environ.get("ATTNRES_KERNEL_FLAGS", "").split()  # e.g. -fsanitize=address
        ext.extra_compile_args = [*FLAGS, *extra]
        ext.extra_link_args = [*ext.extra_link_args, *extra]
        ext.extra_objects = []
        for name, lanes, flags in INSTRUCTION_SETS:
            ext.extra_objects += self.compiler.compile(
                [f"{FOLDER}/instruction_set.cpp"],
                output_dir=str(Path(self.build_temp) / name),
                macros=[("INSTRUCTION_SET", name), ("WIDTH", str(lanes))],
                include_dirs=[FOLDER],
                extra_postargs=[*ext.extra_compile_args, *flags],
                depends=ext.depends,
            )
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "attention_residuals.depth_attention.cpu._kernel",
            [f"{FOLDER}/kernel.cpp"],
            depends=[f"{FOLDER}/{name}" for name in PARTS],
            libraries=["dl"] if platform.system() == "Linux" else [],
            py_limited_api=True,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
