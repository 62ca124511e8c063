"""Count the instructions that a GPU issues for an element of Adam, from the kernels' machine code.

``python -m benchmarks.gpu.instructions [--arch 90]`` compiles csrc/cuda/adam.cu and prints the
counts for each kernel, with its registers a thread. It needs no GPU, but nvcc, and cuobjdump and
nvdisasm on the PATH or from ``pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm``.

The count is of the shortest path around the loop over tiles that includes the stores of a vector:
one segment a tile, no decay in the gradient, no cast of the weight, no slow path of a root or
quotient. Instructions that their predicate turns off count, since they are issued.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "megafsdp" / "csrc" / "cuda" / "adam.cu"
_KERNEL = re.compile(r"adam_kernel<(?:\w+::)*(\w+)<.*?>,\s*([\w ,]+)>\(")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*(.*?)\s*;")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel.

    Attributes:
        address: Offset in bytes from the kernel's start.
        predicate: Turns the instruction off if false; empty without one.
        name: Its name with modifiers, such as ``STG.E.128``.
        operands: As printed.
    """

    address: int
    predicate: str
    name: str
    operands: str

    @property
    def target(self) -> int:
        """Return the address that a branch names last."""
        return int(self.operands.split()[-1], 16)


def main() -> None:
    """Print a row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="90")
    arch = parser.parse_args().arch
    print(f"sm_{arch}: subnormal numbers, grad, state, weight: instructions an element, registers")
    for name, code in sorted(kernels_of(disassemble(arch)).items()):
        registers = max(int(n) for i in code for n in re.findall(r"\bR(\d+)", i.operands)) + 1
        numel = vector_numel(name)
        print(f"{name}: {len(hot_path(code)) / numel:.1f}, {registers}")


def disassemble(arch: str) -> str:
    """Compile the kernels for an architecture; return their machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adam.cubin"
        options = ["-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{arch}", "-cubin"]
        subprocess.run([os.environ.get("NVCC", "nvcc"), *options, _SOURCE, "-o", path], check=True)
        # cuobjdump calls nvdisasm, which pip puts beside it.
        folders = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")
        search = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
        tool = shutil.which("cuobjdump", path=search)
        if tool is None:
            raise SystemExit("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        environment = os.environ | {"PATH": search}
        printed = subprocess.check_output([tool, "-sass", path], env=environment, text=True)
    return subprocess.check_output(["c++filt"], input=printed, text=True)


def kernels_of(printed: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel, by names such as ``Flushing float float float``."""
    kernels: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    for line in printed.splitlines():
        if "Function :" in line:
            name = _KERNEL.search(line)
            code = []
            if name is not None:
                types = name[2].replace("unsigned short", "uint16").replace(",", "")
                kernels[f"{name[1]} {types}"] = code
        elif (match := _LINE.match(line)) is not None:
            code.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
    return kernels


def vector_numel(name: str) -> int:
    """Return the elements of a thread's vector, as csrc/cuda/adam_tile.h chooses them."""
    return 4 if "float" in name else 8


def hot_path(code: list[Instruction]) -> list[Instruction]:
    """Return the shortest path from the first store of a vector around the loop back to it."""
    by_address = {instruction.address: instruction for instruction in code}
    # The first store is always made; that of a cast, which comes last, is not.
    start = next(i.address for i in code if i.name.startswith(("STG.E.128", "STG.E.64")))
    came_from: dict[int, int] = {}
    reached = [start]
    for address in reached:
        for successor in _successors(by_address[address], code):
            if successor in by_address and successor not in came_from:
                came_from[successor] = address
                reached.append(successor)
    # Breadth first: the first path that reaches an instruction is the shortest.
    path = [start]
    while (address := came_from[path[-1]]) != start:
        path.append(address)
    return [by_address[address] for address in path[::-1]]


def _successors(instruction: Instruction, code: list[Instruction]) -> list[int]:
    following = instruction.address + 16
    name = instruction.name.split(".")[0]
    is_conditional = bool(instruction.predicate) or instruction.operands.startswith(
        ("P", "!P", "U")
    )
    if name in ("EXIT", "RET", "CALL"):
        return [following] if is_conditional else []
    if name == "BRA":
        return [instruction.target, *([following] if is_conditional else [])]
    if name == "BSYNC":
        # Threads continue together at the target of the last BSSY of this barrier before here.
        barrier = instruction.operands.split()[0]
        marks = [i for i in code if i.name.startswith("BSSY") and i.operands.startswith(barrier)]
        before = [i for i in marks if i.address < instruction.address]
        targets = {i.target for i in marks}
        met = following if following in targets else before[-1].target
        return [met, *([following] if is_conditional else [])]
    return [following]


if __name__ == "__main__":
    main()
