"""The programs of the guide's pages run as they stand, on 2 ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from megafsdp import full_state_dict
from megafsdp.fsdp.fsdp_module import FSDPModule
from tests.end_to_end.test_readme import python_blocks
from tests.ranks import Ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in (DOCS / "how-to").glob("*.md"))
PAGES += ["from-deepspeed.md", "troubleshooting.md"]


def _run(page: str, directory: str) -> dict[str, Any]:
    """Run the blocks of a page as one program; return the weights of the model that it leaves."""
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "program"}
    for number, block in enumerate(python_blocks((DOCS / page).read_text())):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert isinstance(names.get("optimizer"), Optimizer | None)
    if not isinstance(model, FSDPModule):
        # One that torch has sharded.
        return {name: p.full_tensor().dequantize() for name, p in model.named_parameters()}
    return full_state_dict(model)


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(ranks: Ranks, page: str, tmp_path: Path) -> None:
    """One after the other, in the names of the ones before; both ranks end with equal weights."""
    first, second = ranks(2).run(_run, page, str(tmp_path))
    assert first.keys() == second.keys() and len(first) > 0
    assert all(value.equal(second[name]) for name, value in first.items())


def _run_troubles(directory: str) -> list[str]:
    """Run the programs of the page of troubles block by block; return the messages they meet."""
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "program"}
    messages = []
    for block in python_blocks((DOCS / "troubleshooting.md").read_text()):
        exec(compile(block, "troubleshooting.md", "exec"), names)
        messages.append(names["message"])
    return messages


def test_the_message_of_ranks_that_disagree_is_shown_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    """Word for word, on both ranks; the page breaks its lines."""
    text = " ".join((DOCS / "troubleshooting.md").read_text().split())
    for messages in ranks(2).run(_run_troubles, str(tmp_path)):
        assert f"RuntimeError: {messages[0]}" in text
