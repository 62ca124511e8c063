"""The README works as written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import megafsdp
from megafsdp import checkpoint
from tests.checkpoint.sharding import differences
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
    block, *_ = python_blocks((ROOT / "README.md").read_text())
    for step, loss in ranks(2).run(_run_block, block, str(tmp_path)):
        assert step == 10
        assert loss < 0.1


def _run_checkpoints(blocks: list[str], directory: str, seed: int) -> dict[str, object]:
    """Run the blocks on checkpoints; return where they began, and what they leave."""
    os.chdir(directory)
    torch.manual_seed(seed)
    names: dict[str, Any] = {"megafsdp": megafsdp, "torch": torch, "nn": torch.nn}
    names["transformers"] = transformers
    lines = blocks[0].splitlines(keepends=True)
    after_load = next(i for i, line in enumerate(lines) if line.startswith("for step"))
    exec(compile("".join(lines[:after_load]), "README.md", "exec"), names)
    loaded = megafsdp.full_state_dict(names["model"])
    exec(compile("".join(lines[after_load:]), "README.md", "exec"), names)
    model = names["model"]
    found = {"first": names["done"] or 0, "loaded": loaded, "left": megafsdp.full_state_dict(model)}
    if len(blocks) > 1:
        exec(compile(blocks[1], "README.md", "exec"), names)
        tokens = torch.arange(24).reshape(2, 12)
        with torch.no_grad():
            ours, theirs = model(tokens), names["exported"].eval()(tokens).logits
        # The two add up in another order; logits are of size 1.
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    return found


def test_a_checkpoint_goes_from_2_ranks_to_1_to_3_and_to_transformers(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Each start holds what the one before left, tensor by tensor; the last one exports."""
    _, *blocks = python_blocks((ROOT / "README.md").read_text())
    assert len(blocks) == 2
    before: dict[str, object] = {}
    for turn, num_ranks in enumerate((2, 1, 3)):
        wanted = blocks if turn == 2 else blocks[:1]
        results = ranks(num_ranks).run(_run_checkpoints, wanted, str(tmp_path), turn)
        assert [result["first"] for result in results] == [5 * turn] * num_ranks
        for result in results if turn else ():
            assert differences(before, result["loaded"]) == []
        assert differences(results[0]["loaded"], results[0]["left"]) != []
        before = results[0]["left"]


def test_paths_named_in_the_readme_exist() -> None:
    """Every file or folder that README and docs/status.md name is there."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "status.md").read_text()
    pattern = r"(?:megafsdp|tests|docs|examples|benchmarks)/[\w/.-]*[\w/]"
    named = set(re.findall(pattern, text))
    assert len(named) > 10
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
