"""A copy of the project to build in, and processes that see this one's PyTorch but not this one's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
SITE_PACKAGES = sysconfig.get_path("purelib")


def copy_source(to: Path) -> Path:
    """What a source distribution needs: nothing compiled, so that a build can't take over an old object."""
    unwanted = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", to / "src", ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def run(
    *command: object, cwd: Path | None = None, check: bool = True, **env: str
) -> subprocess.CompletedProcess:
    """Output is kept as text; a failure shows it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def build_in_place(source: Path, **env: str) -> Path:
    """Compiles the kernel into a copied source tree; gives the compiled file."""
    build = ("setup.py", "build_ext", "--inplace", "--force")
    run(sys.executable, *build, cwd=source, PYTHONPATH=SITE_PACKAGES, **env)
    (compiled,) = source.glob("src/attention_residuals/depth_attention/cpu/_kernel*.so")
    return compiled


def empty_environment(folder: Path, *packages: str) -> Path:
    """Python of a new virtual environment: nothing but pip, and links to some of this one's packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    target = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    # Python 3.11 and older bring an old one along.
    run(python, "-m", "pip", "uninstall", "-y", "setuptools")
    for package in packages:
        for path in Path(SITE_PACKAGES).glob(f"{package}*"):
            (target / path.name).symlink_to(path)
    return python


def see_site_packages(python: Path) -> None:
    """Adds this environment's packages behind the new one's, without those that it has in editable form."""
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(target) / "others.pth").write_text(SITE_PACKAGES + "\n")
