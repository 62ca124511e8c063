"""The README works as written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers

import megafsdp
from tests.checkpoint.sharding import differences
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
_TOKENS = torch.arange(24).reshape(2, 12)


def python_blocks(text: str) -> list[str]:
    """Return the Python code blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _run_loop(block: str, directory: str, seed: int) -> dict[str, object]:
    """Run the block; return the step and weights it begins with, those it leaves, and logits."""
    os.chdir(directory)
    torch.manual_seed(seed)
    names: dict[str, Any] = {}
    lines = block.splitlines(keepends=True)
    after_load = next(i for i, line in enumerate(lines) if line.startswith("for step"))
    exec(compile("".join(lines[:after_load]), "README.md", "exec"), names)
    loaded = megafsdp.full_state_dict(names["model"])
    exec(compile("".join(lines[after_load:]), "README.md", "exec"), names)
    model = names["model"]
    with torch.no_grad():
        logits = model(_TOKENS)
    first = names["done"] or 0
    left = megafsdp.full_state_dict(model)
    return {"first": first, "loaded": loaded, "last": names["step"], "left": left, "logits": logits}


def test_the_loop_goes_on_from_2_ranks_to_1_to_3_and_to_transformers(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Each start holds what the one before left, tensor by tensor; transformers reads it."""
    (block,) = python_blocks((ROOT / "README.md").read_text())
    before: dict[str, object] = {}
    for turn, num_ranks in enumerate((2, 1, 3)):
        results = ranks(num_ranks).run(_run_loop, block, str(tmp_path), turn)
        assert [result["first"] for result in results] == [5 * turn] * num_ranks
        for result in results if turn else ():
            assert differences(before, result["loaded"]) == []
        assert differences(results[0]["loaded"], results[0]["left"]) != []
        before = results[0]["left"]
        exported = tmp_path / f"exported-{results[0]['last']}"
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
        with torch.no_grad():
            logits = theirs(_TOKENS).logits
        for result in results:
            # The two add up in another order; logits are of size 1.
            torch.testing.assert_close(logits, result["logits"], rtol=0, atol=1e-5)


def test_paths_named_in_the_readme_exist() -> None:
    """Every file or folder that README and docs/status.md name is there; pictures are small."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "status.md").read_text()
    pattern = r"(?:megafsdp|tests|docs|examples|benchmarks)/[\w/.-]*[\w/]"
    named = set(re.findall(pattern, text))
    assert len(named) > 10
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
    pictures = [ROOT / name for name in named if name.endswith(".png")]
    assert pictures and all(path.stat().st_size < 200_000 for path in pictures)
