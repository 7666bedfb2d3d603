"""Builds the native library with the package, and tags the wheel for the platform but for every Python 3.

All else is in pyproject.toml. The library has a plain C interface and is loaded by ctypes, so it does not depend on
the Python that built it: the tag is py3-none-<platform>. An editable install compiles into the source tree, which is
where a checkout's library lies anyway.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402  (tools is no package)


def describe_commit() -> str:
    """The commit that a wheel is built from, or an empty string outside a checkout or without git."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class BuildWithNative(build_py):
    """Compiles the library before the package's files are listed, and records the commit in a built package."""

    def run(self) -> None:
        build_native.build()
        if not self.editable_mode:  # an earlier build may have left modules there that no longer exist
            shutil.rmtree(Path(self.build_lib) / "strata", ignore_errors=True)
        super().run()
        commit = describe_commit()
        if commit and not self.editable_mode:
            (Path(self.build_lib) / "strata" / "_commit.txt").write_text(commit + "\n")


class NativeDistribution(Distribution):
    """Holds compiled code, although none of it is a Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """One wheel serves every Python 3 of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=NativeDistribution,
    cmdclass={"bdist_wheel": AnyPythonWheel, "build_py": BuildWithNative},
)
