"""Build the native module ``megafsdp._csrc``; all metadata stands in pyproject.toml."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

CSRC = Path("megafsdp/csrc")
# No -march: the instruction set is chosen at run time. No contraction: a fused multiply-add gives
# other bits than a processor or a torch fallback without it. Nobody reads the floating-point
# exception flags, and keeping them right would forbid the compiler to vectorise selects; nor
# errno, which would keep it from vectorising roots.
COMPILE_ARGUMENTS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
COMPILE_ARGUMENTS += ["-pthread", "-Wall", "-Wextra"]


class OptionalBuildExt(build_ext):
    """Build each extension, or say in one line what is lost without it."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; a machine that cannot gets a package that works without it."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            reason = textwrap.shorten(str(error), 100)
            print(f"megafsdp: no {ext.name} ({reason}); its torch fallbacks are slower")


def extensions() -> list[Extension]:
    """Return the extension modules, one for each toolchain."""
    return [
        Pybind11Extension(
            "megafsdp._csrc",
            sorted(str(path) for path in CSRC.glob("**/*.cpp")),
            depends=sorted(str(path) for path in CSRC.glob("**/*.h")),
            extra_compile_args=COMPILE_ARGUMENTS,
            extra_link_args=["-pthread"],
            cxx_std=17,
            # Whoever installs the built files must not insist on this one.
            optional=True,
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})
