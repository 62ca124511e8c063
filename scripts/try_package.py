"""Use an installed megafsdp from its command to a run on two ranks, away from any checkout.

``python scripts/try_package.py [--cuda]`` takes a minute, with the Python that has the package. It
ends with an error if the package was found anywhere else, came without its compiled kernels, or
does not train with them. ``--cuda`` also asks for the kernels for GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import megafsdp
from megafsdp._native import cuda_module, require_native_module

_TRAIN = "-m torch.distributed.run --standalone --nproc-per-node=2 -m megafsdp train"
_OPTIONS = (
    "--model.preset qwen3-toy --data.train [data/train] --data.sequence_length 32"
    " --train.global_batch_size 4 --train.steps 2 --run.directory"
)


def main(arguments: Sequence[str]) -> None:
    """Try everything; raise AssertionError if the package is not what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="expect the kernels for GPUs too")
    expects_cuda = parser.parse_args(arguments).cuda
    _check_modules(expects_cuda)
    with tempfile.TemporaryDirectory() as folder:
        _check_commands(Path(folder))
        _check_training(Path(folder))
    print(f"megafsdp {megafsdp.__version__} of {Path(megafsdp.__file__).parent} works")


def _check_modules(expects_cuda: bool) -> None:
    modules = [megafsdp, require_native_module()]
    cuda = cuda_module()
    assert not expects_cuda or cuda is not None, "expected megafsdp._cuda, got a package without"
    installed = Path(sysconfig.get_path("platlib")).resolve()
    for module in [*modules, cuda] if cuda else modules:
        path = Path(str(module.__file__)).resolve()
        assert installed in path.parents, f"expected {module.__name__} in {installed}, got {path}"


def _check_commands(folder: Path) -> None:
    command = str(Path(sysconfig.get_path("scripts"), "megafsdp"))
    version = _output([command, "--version"], folder)
    assert version.startswith(f"megafsdp {megafsdp.__version__} "), version
    findings = _output([command, "doctor"], folder)
    assert "megafsdp._csrc is built" in findings, findings
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    _output([command, "prep", "text.txt", "--output", "data", "--validation-every", "0"], folder)


def _check_training(folder: Path) -> None:
    train = [sys.executable, *_TRAIN.split(), *_OPTIONS.split()]
    said = _output([*train, "run"], folder)
    assert "step 2/2" in said and "saved step 2" in said, said
    # Only compiled code reads this variable, so a run that goes on has not called any.
    forced = _run([*train, "forced"], folder, MEGAFSDP_SIMD="absent")
    said = forced.stdout
    assert forced.returncode != 0 and "MEGAFSDP_SIMD" in said, (
        f"expected a run that calls the compiled kernels, got one that does not: {said}"
    )


def _output(command: Sequence[str], folder: Path) -> str:
    done = _run(command, folder)
    assert done.returncode == 0, f"expected {' '.join(command)} to work, got: {done.stdout}"
    return done.stdout


def _run(
    command: Sequence[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("MEGAFSDP_")
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=inherited | {"OMP_NUM_THREADS": "1"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
