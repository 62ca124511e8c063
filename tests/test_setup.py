"""The options of setup.py, without building anything."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pybind11")
with warnings.catch_warnings():
    # setuptools replaces distutils, and says so where that was imported before.
    warnings.simplefilter("ignore")
    setuptools = pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of setup.py."""
    for name in ("MEGAFSDP_CUDA", "MEGAFSDP_CUDA_ARCHS", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


def test_modules_share_no_binding(setup_py: dict[str, Any]) -> None:
    """The module for CPUs takes nothing of cuda/, and the one for CUDA its bindings alone."""
    csrc, cuda = setup_py["extensions"]()
    assert csrc.sources and not any("cuda" in source for source in csrc.sources)
    folder = "megafsdp/csrc/cuda"
    assert cuda.sources == [f"{folder}/bindings.cpp", f"{folder}/quantize_bindings.cpp"]
    names = [Path(source).name for source in cuda.cuda_sources]
    assert names == ["adam.cu", "quantize.cu", "square_sum.cu"]
    assert csrc.optional and cuda.optional


@pytest.mark.parametrize(
    ("choice", "optional"), [("0", [True]), ("1", [True, False]), ("auto", [True, True])]
)
def test_cuda_is_left_out_tried_or_insisted_on(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch, choice: str, optional: list[bool]
) -> None:
    """MEGAFSDP_CUDA=0 builds no CUDA, 1 fails without it, auto does without."""
    monkeypatch.setenv("MEGAFSDP_CUDA", choice)
    assert [module.optional for module in setup_py["extensions"]()] == optional


def test_another_choice_is_refused(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt choice does not count as one."""
    monkeypatch.setenv("MEGAFSDP_CUDA", "yes")
    with pytest.raises(ValueError, match="auto, 1 or 0, got 'yes'"):
        setup_py["extensions"]()


def test_architectures_get_code_and_the_newest_base_ptx(setup_py: dict[str, Any]) -> None:
    """PTX is of the newest architecture without a letter; none if there is no such one."""
    codes = setup_py["code_arguments"]("80;90;100f")
    assert [code.rpartition("=")[2] for code in codes] == [
        "sm_80",
        "sm_90",
        "sm_100f",
        "compute_90",
    ]
    assert setup_py["code_arguments"]("90a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    with pytest.raises(setuptools.errors.CompileError, match=r"MEGAFSDP_CUDA_ARCHS.*'hopper'"):
        setup_py["code_arguments"]("90;hopper")


def test_missing_nvcc_is_told_from_one_that_fails(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVCC comes first, then CUDA_HOME, then the PATH; a command that fails carries its words."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(setuptools.errors.CompileError, match="found no nvcc"):
        setup_py["find_nvcc"]()
    monkeypatch.setenv("NVCC", "/bin/sh")
    assert setup_py["find_nvcc"]() == "/bin/sh"
    with pytest.raises(setuptools.errors.CompileError, match="this went wrong"):
        setup_py["run"](["/bin/sh", "-c", "echo this went wrong >&2; exit 1"])


def test_auto_says_in_one_line_what_is_lost(
    setup_py: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without nvcc a build goes on after a line, and stops where CUDA was insisted on."""
    monkeypatch.setenv("PATH", "/nowhere")
    _, cuda = setup_py["extensions"]()
    command = setup_py["OptionalBuildExt"](setuptools.Distribution({"ext_modules": [cuda]}))
    command.build_lib = str(tmp_path)
    command.ensure_finalized()
    command.build_extension(cuda)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no megafsdp._cuda (found no nvcc" in said
    cuda.optional = False
    with pytest.raises(setuptools.errors.CompileError, match="found no nvcc"):
        command.build_extension(cuda)


def test_by_default_only_architectures_that_nvcc_knows_are_compiled_for(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An older nvcc would refuse the whole build for one name; a choice is taken as it is."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\ncase "$*" in *100f*) exit 1;; esac\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    assert setup_py["cuda_archs"]() == "80;90"
    monkeypatch.setenv("MEGAFSDP_CUDA_ARCHS", "100f")
    assert setup_py["cuda_archs"]() == "100f"
    monkeypatch.delenv("MEGAFSDP_CUDA_ARCHS")
    monkeypatch.setenv("NVCC", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", "")
    assert setup_py["cuda_archs"]() == "80;90;100f"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/a/b.git", "https://example.org/a/b"),
        ("https://user:token@example.org/a/b/", "https://example.org/a/b"),
        ("http://git.example.org:8080/b.git", "http://git.example.org:8080/b"),
        ("ssh://git@example.org:22/a/b.git", "https://example.org/a/b"),
        ("git://example.org/b", "https://example.org/b"),
        ("git@example.org:a/c/b.git", "https://example.org/a/c/b"),
        ("example.org:b", "https://example.org/b"),
        ("work:a/b.git", None),
        ("file:///a/b.git", None),
        ("/home/a.b/c.git", None),
        ("../b.git", None),
        ("", None),
    ],
)
def test_a_remote_has_an_address_for_browsers(
    setup_py: dict[str, Any], remote: str, address: str | None
) -> None:
    """Without credentials and the port of another service; a folder has none, an alias neither."""
    assert setup_py["web_address"](remote) == address
