"""Build the native module ``megafsdp._csrc``; all metadata stands in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

CSRC = Path("megafsdp/csrc")
# No -march: the instruction set is chosen at run time. No contraction: a fused multiply-add gives
# other bits than a processor or a torch fallback without it. Nobody reads the floating-point
# exception flags, and keeping them right would forbid the compiler to vectorise selects.
COMPILE_ARGUMENTS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra"]


class OptionalBuildExt(build_ext):
    """Build extensions, or say in one line what is lost."""

    def run(self) -> None:
        """Build all extensions; a machine that cannot gets a package that works without them."""
        try:
            super().run()
        except (BaseError, OSError) as error:
            reason = str(error).splitlines()[0]
            print(f"megafsdp: no native kernels ({reason}); the torch fallbacks are slower")


def extensions() -> list[Extension]:
    """Return the extension modules, one for each toolchain."""
    return [
        Pybind11Extension(
            "megafsdp._csrc",
            sorted(str(path) for path in CSRC.glob("**/*.cpp")),
            depends=sorted(str(path) for path in CSRC.glob("**/*.h")),
            extra_compile_args=COMPILE_ARGUMENTS,
            cxx_std=17,
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})
