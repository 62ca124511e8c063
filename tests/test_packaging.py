"""The package's metadata agree with the pages, the code and the pins; sources are complete."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megafsdp

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "packaging.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def _read_metadata(checkout: Path, folder: Path) -> Path:
    """Let setuptools write a checkout's metadata into a folder; return where they are."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)],
        cwd=checkout,
        env=os.environ | {"MEGAFSDP_CUDA": "0"},
        check=True,
        capture_output=True,
    )
    return folder / "megafsdp.egg-info"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    """Return the metadata that an index gets."""
    written = _read_metadata(ROOT, tmp_path_factory.mktemp("metadata"))
    return email.parser.Parser().parsestr((written / "PKG-INFO").read_text())


@pytest.fixture(scope="module")
def check_packages() -> dict[str, Any]:
    """Return the names of scripts/check_packages.py."""
    return runpy.run_path(str(ROOT / "scripts" / "check_packages.py"))


def _requirements(metadata: email.message.Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def _pins() -> dict[str, list[Requirement]]:
    """Return the lines of constraints.txt by package."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def _first_column(title: str) -> list[str]:
    """Return the first cells of the table below a heading of the page."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `?([^|`]+?)`? \|", section, re.MULTILINE)[1:]


def test_the_source_package_has_every_tracked_file_and_no_leftover(
    check_packages: dict[str, Any], tmp_path: Path
) -> None:
    """What builds, runs and tests leave in a checkout stays out."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of git")
    checkout = tmp_path / "checkout"
    tracked = check_packages["copy_checkout"](checkout)
    assert {"MANIFEST.in", ".ci/run", "tests/__init__.py", "megafsdp/csrc/bindings.cpp"} <= tracked
    leftovers = ["megafsdp/_csrc.so", "tests/__pycache__/x.cpython-311.pyc", "runs/x/metrics.jsonl"]
    leftovers += ["examples/runs/x/checkpoints/latest", "tests/.hypothesis/x", "docs/wandb/x/y.log"]
    leftovers += [".venv/lib/x.py", "build/lib/megafsdp/x.py", "examples/.ruff_cache/x"]
    for name in leftovers:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    (tmp_path / "written").mkdir()
    written = _read_metadata(checkout, tmp_path / "written")
    names = set((written / "SOURCES.txt").read_text().splitlines())
    assert {name for name in names if "megafsdp.egg-info/" not in name} == tracked


def test_packages_name_where_the_clone_came_from(
    check_packages: dict[str, Any], tmp_path: Path
) -> None:
    """Metadata of a clone lead to its origin, and a source package keeps them without its git."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of git")
    checkout = tmp_path / "checkout"
    check_packages["copy_checkout"](checkout)

    def read_urls() -> list[str]:
        (tmp_path / "written").mkdir(exist_ok=True)
        written = _read_metadata(checkout, tmp_path / "written") / "PKG-INFO"
        parsed = email.parser.Parser().parsestr(written.read_text())
        return sorted(parsed.get_all("Project-URL", []))

    def set_origin(remote: str) -> None:
        git = ["git", "-C", str(checkout), "config", "remote.origin.url", remote]
        subprocess.run(git, check=True)

    set_origin("/a/folder")
    assert read_urls() == []
    set_origin("git@example.org:a/b.git")
    address = "https://example.org/a/b"
    expected = [f"Issues, {address}/issues", f"Repository, {address}"]
    assert read_urls() == expected
    shutil.copy(tmp_path / "written" / "megafsdp.egg-info" / "PKG-INFO", checkout)
    shutil.rmtree(checkout / ".git")
    assert read_urls() == expected
    (checkout / "PKG-INFO").unlink()
    assert read_urls() == []


def test_the_version_is_that_of_the_package(metadata: email.message.Message) -> None:
    """One place has the version, and the changelog's newest section is not newer."""
    assert metadata["Version"] == megafsdp.__version__
    assert f"## {megafsdp.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_classifiers_name_the_versions_that_were_run(metadata: email.message.Message) -> None:
    """Each has a row on the page, none is older than what may install the package."""
    classifiers = metadata.get_all("Classifier", [])
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    named = [found[1] for line in classifiers if (found := re.fullmatch(pattern, line))]
    assert named == _first_column("Versions") != []
    oldest = int(metadata["Requires-Python"].removeprefix(">=3."))
    assert all(int(version.removeprefix("3.")) >= oldest for version in named)
    assert f'target-version = "py3{oldest}"' in PROJECT
    assert f'python_version = "3.{oldest}"' in PROJECT


def test_extras_have_one_row_each_in_their_order(metadata: email.message.Message) -> None:
    """The page has the extras of pyproject.toml, and errors and pages name no others."""
    extras = metadata.get_all("Provides-Extra", [])
    assert extras == _first_column("Extras")
    texts = [path.read_text() for path in (ROOT / "megafsdp").rglob("*.py")]
    texts += [path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
    named = re.findall(r"(?:megafsdp|'\.)\[([a-z,]+)\]", "\n".join(texts))
    assert len(named) > 10
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


def test_every_requirement_has_a_pin_that_it_allows(metadata: email.message.Message) -> None:
    """Set-up installs what constraints.txt names, for the package, its extras and its build."""
    (build,) = re.findall(r"^requires = \[(.*)\]$", PROJECT, re.MULTILINE)
    requirements = [*_requirements(metadata), *map(Requirement, re.findall(r'"(.*?)"', build))]
    assert len(requirements) > 30
    pins = _pins()
    for requirement in requirements:
        if requirement.name != "megafsdp":
            for pin in pins[canonicalize_name(requirement.name)]:
                (version,) = pin.specifier
                assert requirement.specifier.contains(version.version), f"{requirement}: {pin}"


def test_every_place_names_the_same_torch(metadata: email.message.Message) -> None:
    """Set-up reuses the versions that the package allows; wheels are tried with the pinned one."""
    (torch,) = (r for r in _requirements(metadata) if r.name == "torch")
    bounds = {s.operator: s.version.replace(".", ", ") for s in torch.specifier}
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    assert f"({bounds['>=']}) <= " in script and f" < ({bounds['<']})" in script
    (pin,) = _pins()["torch"]
    assert f'"pip install torch{pin.specifier}"' in PROJECT


def test_a_wheel_of_other_files_is_refused(check_packages: dict[str, Any], tmp_path: Path) -> None:
    """Modules and data of the package and the kernels asked for are in a wheel, and no more."""
    check: Callable[..., None] = check_packages["check_files_of_wheel"]
    names = ["megafsdp/__init__.py", "megafsdp/py.typed", "megafsdp/training/pictures/page.js"]
    for name in [*names, "megafsdp/csrc/bindings.cpp"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    wheel = tmp_path / "x.whl"

    def pack(*names: str) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (*names, "megafsdp-1.dist-info/licenses/LICENSE"):
                archive.writestr(name, "")

    csrc, cuda = "megafsdp/_csrc.so", "megafsdp/_cuda.so"
    pack(*names, csrc)
    check(wheel, tmp_path, has_cuda=False)
    with pytest.raises(AssertionError, match="_cuda"):
        check(wheel, tmp_path, has_cuda=True)
    for wrong in ((*names, csrc, cuda), names[1:], (*names, csrc, "megafsdp/csrc/bindings.cpp")):
        pack(*wrong)
        with pytest.raises(AssertionError, match="expected"):
            check(wheel, tmp_path, has_cuda=False)


def test_a_release_that_is_not_prepared_says_what_is_missing(
    check_packages: dict[str, Any], tmp_path: Path
) -> None:
    """An address, a section of the version, no fragments and no changes: a line for each."""
    missing: Callable[[Path], list[str]] = check_packages["missing_for_release"]
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "megafsdp").mkdir()
    (tmp_path / "megafsdp" / "__init__.py").write_text('__version__ = "1.2"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.1\n")
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").touch()
    fragment = tmp_path / "changelog.d" / "added-x.md"
    fragment.touch()
    found = missing(tmp_path)
    starts = ("git: a remote", "CHANGELOG.md: a section 1.2", "changelog.d: 1 frag", "git: changes")
    assert len(found) == 4
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start)
    subprocess.run([*git, "config", "remote.origin.url", "https://example.org/b"], check=True)
    (tmp_path / "CHANGELOG.md").write_text("## 1.2\n")
    fragment.unlink()
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "Release"], check=True)
    assert missing(tmp_path) == []
