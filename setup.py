"""Build the native modules of megafsdp; all metadata but the addresses is in pyproject.toml.

``megafsdp._csrc`` needs a C++ compiler, ``megafsdp._cuda`` nvcc besides. Environment variables:

    MEGAFSDP_CUDA        auto (default): build _cuda where nvcc is found; 1: insist; 0: do not.
    MEGAFSDP_CUDA_ARCHS  architectures, by default those of 80;90;100f that nvcc knows; PTX of the
                         newest one without a letter is added for those that come later.
    NVCC, CUDA_HOME      where nvcc is, if it is not on the PATH.
    MAX_JOBS             compilers that run at once for a module, by default as many as cores.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import urlsplit

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError
from setuptools.modified import newer_group

CSRC = Path("megafsdp/csrc")
CUDA = CSRC / "cuda"
JOBS = "MAX_JOBS"
DEFAULT_ARCHS = ("80", "90", "100f")
# No -march: the instruction set is chosen at run time. No contraction: a fused multiply-add gives
# other bits than a processor or a torch fallback without it. Floating-point exception flags and
# errno are never read; keeping them right would stop the compiler from vectorising selects and
# roots.
COMPILE_ARGUMENTS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
COMPILE_ARGUMENTS += ["-pthread", "-Wall", "-Wextra"]
# With a static CUDA runtime the module can be imported without a driver and beside any torch.
NVCC_ARGUMENTS = ["--cudart=static", "-std=c++17", "-O3", "-fmad=false"]
NVCC_ARGUMENTS += ["--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class CudaExtension(Pybind11Extension):
    """A module whose bindings the C++ compiler compiles; nvcc compiles its kernels and links it."""

    def __init__(self, name: str, cuda_sources: list[str], **options: object) -> None:
        super().__init__(name, **options)
        self.cuda_sources = cuda_sources


class OptionalBuildExt(build_ext):
    """Build each extension, or say in one line what is lost without it."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; if the machine cannot, the package works without it."""
        try:
            if isinstance(ext, CudaExtension):
                self.build_cuda(ext)
            else:
                super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            if not ext.optional:
                raise
            reason = textwrap.shorten(str(error), 200)
            print(f"megafsdp: no {ext.name} ({reason}); its torch fallbacks are slower")

    def build_cuda(self, ext: CudaExtension) -> None:
        """Compile and link; nvcc finds the toolkit's files itself, as it may be a wrapper."""
        target = Path(self.get_ext_fullpath(ext.name))
        inputs = [*ext.sources, *ext.cuda_sources, *ext.depends]
        has_choice = "MEGAFSDP_CUDA_ARCHS" in os.environ
        if not (self.force or has_choice or newer_group(inputs, str(target), "newer")):
            return
        nvcc, codes = find_nvcc(), code_arguments(cuda_archs())
        objects = self.compiler.compile(
            ext.sources,
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )
        commands = []
        for source in ext.cuda_sources:
            objects.append(str(Path(self.build_temp, source).with_suffix(".cu.o")))
            Path(objects[-1]).parent.mkdir(parents=True, exist_ok=True)
            commands.append([nvcc, *NVCC_ARGUMENTS, *codes, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor(int(os.environ.get(JOBS) or os.cpu_count() or 1)) as pool:
            list(pool.map(run, commands))
        target.parent.mkdir(parents=True, exist_ok=True)
        run([nvcc, "-shared", "--cudart=static", *objects, "-o", str(target)])


def run(command: list[str]) -> None:
    """Run a compiler.

    Raises:
        CompileError: The compiler failed; the error has its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    if done.stderr:
        print(done.stderr)


def find_nvcc() -> str:
    """Return the path of nvcc.

    Raises:
        CompileError: There is no nvcc.
    """
    home = os.environ.get("CUDA_HOME")
    for candidate in (os.environ.get("NVCC"), home and f"{home}/bin/nvcc", "nvcc"):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise CompileError("found no nvcc by NVCC, CUDA_HOME or PATH")


def cuda_archs() -> str:
    """Return the architectures to compile for, separated by semicolons.

    By default those that this nvcc knows: an unknown one would fail the whole build.
    """
    if chosen := os.environ.get("MEGAFSDP_CUDA_ARCHS"):
        return chosen
    try:
        usable = [arch for arch in DEFAULT_ARCHS if knows_arch(find_nvcc(), arch)]
    except (CompileError, OSError):
        usable = []
    return ";".join(usable or DEFAULT_ARCHS)


def knows_arch(nvcc: str, arch: str) -> bool:
    """Return whether nvcc compiles for an architecture; its own list lacks those with letters."""
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, "--dryrun", code, "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def code_arguments(archs: str) -> list[str]:
    """Return nvcc's arguments for architectures such as ``90`` and ``100f``.

    Raises:
        CompileError: One is neither a number nor a number with a letter.
    """
    names = archs.split(";")
    if wrong := [name for name in names if not name.rstrip("af").isdigit()]:
        raise CompileError(f"MEGAFSDP_CUDA_ARCHS: expected such as 80;90;100f, got {wrong[0]!r}")
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    # PTX with a letter runs on its own architecture only.
    if base := max((name for name in names if name.isdigit()), key=int, default=None):
        codes.append(f"-gencode=arch=compute_{base},code=compute_{base}")
    return codes


def extensions() -> list[Extension]:
    """Return the extension modules, one for each toolchain.

    Raises:
        ValueError: ``MEGAFSDP_CUDA`` is neither auto, 1 nor 0.
    """
    depends = ["setup.py", *sorted(str(path) for path in CSRC.glob("**/*.h"))]
    # Optional, so that steps after the build do not insist on a file that was not built.
    modules: list[Extension] = [
        Pybind11Extension(
            "megafsdp._csrc",
            sorted(str(path) for path in CSRC.glob("**/*.cpp") if CUDA not in path.parents),
            depends=depends,
            extra_compile_args=COMPILE_ARGUMENTS,
            extra_link_args=["-pthread"],
            cxx_std=17,
            optional=True,
        )
    ]
    choice = os.environ.get("MEGAFSDP_CUDA", "auto")
    if choice not in ("auto", "1", "0"):
        raise ValueError(f"MEGAFSDP_CUDA: expected auto, 1 or 0, got {choice!r}")
    if choice != "0":
        modules.append(
            CudaExtension(
                "megafsdp._cuda",
                cuda_sources=sorted(str(path) for path in CUDA.glob("*.cu")),
                sources=sorted(str(path) for path in CUDA.glob("*.cpp")),
                depends=depends,
                define_macros=[("MEGAFSDP_CUDA_ARCHS", f'"{cuda_archs()}"')],
                extra_compile_args=COMPILE_ARGUMENTS,
                cxx_std=17,
                optional=choice == "auto",
            )
        )
    return modules


def project_urls(root: Path) -> dict[str, str]:
    """Return the project's addresses for the package's metadata, by their labels.

    A source package has them in its PKG-INFO; a clone takes its remote. A clone of a folder and
    files without git have no addresses.
    """
    if (info := root / "PKG-INFO").exists():
        lines = HeaderParser().parsestr(info.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    # Without a .git here, git would answer for a folder above.
    if not (root / ".git").exists() or not shutil.which("git"):
        return {}
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    remote = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    address = web_address(remote)
    return {"Repository": address, "Issues": f"{address}/issues"} if address else {}


def web_address(remote: str) -> str | None:
    """Return a git remote's address for browsers, without credentials; None if it has none."""
    if "://" not in remote:
        host, _, path = remote.partition(":")
        remote = f"ssh://{host}/{path}"
    parts = urlsplit(remote)
    host = parts.hostname or ""
    # A folder has no host, and a host without a dot is a name in ssh's own configuration.
    if parts.scheme not in ("https", "http", "ssh", "git") or not re.fullmatch(
        r"[\w-]+(\.[\w-]+)+", host
    ):
        return None
    is_web = parts.scheme.startswith("http")
    if is_web and parts.port:
        host += f":{parts.port}"
    path = parts.path.rstrip("/").removesuffix(".git")
    return f"{parts.scheme if is_web else 'https'}://{host}{path}"


if __name__ == "__main__":
    with ParallelCompile(JOBS):
        setup(
            ext_modules=extensions(),
            cmdclass={"build_ext": OptionalBuildExt},
            project_urls=project_urls(Path(__file__).resolve().parent),
        )
