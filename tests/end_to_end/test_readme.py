"""The README works as written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from megafsdp import checkpoint
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(text: str) -> list[str]:
    """Return the Python code blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _run_block(source: str, directory: str) -> tuple[int | None, float]:
    os.chdir(directory)
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    dist.barrier()
    return checkpoint.latest_step("runs/own"), loss.item()


def test_the_quick_start_loop_runs(ranks: Ranks, tmp_path: Path) -> None:
    """The block trains on 2 ranks and leaves the checkpoint it says."""
    (block,) = python_blocks((ROOT / "README.md").read_text())
    for step, loss in ranks(2).run(_run_block, block, str(tmp_path)):
        assert step == 10
        assert loss < 1.0


def test_paths_named_in_the_readme_exist() -> None:
    """Every file or folder in backquotes or in the status table is there."""
    text = (ROOT / "README.md").read_text()
    pattern = r"(?:megafsdp|tests|docs|examples|benchmarks)/[\w/.-]*[\w/]"
    named = set(re.findall(pattern, text))
    assert len(named) > 10
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
