"""The programs of docs/integrations run as they stand, on 2 ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp import FSDPModule, full_state_dict
from tests.ecosystem.launch import launcher_environment
from tests.end_to_end.test_readme import python_blocks
from tests.ranks import Ranks

for library in ("accelerate", "lightning", "peft", "trl"):
    pytest.importorskip(library, reason=f"ecosystem: {library} is not installed")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

PAGES = Path(__file__).resolve().parents[2] / "docs" / "integrations"
# What a program leaves: the name of its model, and a file that it has written.
PROGRAMS = {
    "transformers": ("trainer.model", "runs/trainer/last/model.safetensors"),
    "trl": ("trainer.model", "runs/sft/adapters/adapter_model.safetensors"),
    "accelerate": ("model", "runs/accelerate/optimizer_0/.metadata"),
    "lightning": ("trainer.lightning_module.model", "runs/lightning/.metadata"),
}


def _run(page: str, directory: str) -> dict[str, torch.Tensor]:
    os.chdir(directory)
    (block,) = python_blocks((PAGES / f"{page}.md").read_text())
    names: dict[str, Any] = {"__name__": "program"}
    with launcher_environment():
        exec(compile(block, f"{page}.md", "exec"), names)
    where, written = PROGRAMS[page]
    model = eval(where, names)
    assert isinstance(model, FSDPModule)
    # Rank 0 writes some of the files alone.
    dist.barrier()
    assert Path(written).is_file()
    return full_state_dict(model)


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_program_of_a_page_runs(ranks: Ranks, page: str, tmp_path: Path) -> None:
    """It trains a sharded model and saves it; both ranks have the same weights."""
    first, second = ranks(2).run(_run, page, str(tmp_path))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_every_page_is_tested() -> None:
    """The pages of Ray, torchft and torchtitan have tests of their own."""
    assert {path.stem for path in PAGES.glob("*.md")} == {*PROGRAMS, "ray", "torchft", "torchtitan"}
