"""docs/tutorial.md works as written, from the model to the exported file."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megafsdp.training.cli.main import main
from tests.ranks import Ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
_BLOCK = re.compile(r'^```(?:python|text) title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLOCKS = dict(_BLOCK.findall(PAGE))


def _write_programs(folder: Path) -> None:
    for name, text in BLOCKS.items():
        if name.endswith(".py"):
            (folder / name).write_text(text)


def _run_program(name: str, folder: str) -> str:
    """Run a program of the page in its folder, as Python would; return what it printed."""
    os.chdir(folder)
    printed = io.StringIO()
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(name)
    finally:
        sys.path.remove(folder)
        # The next program of another folder has a model of its own.
        sys.modules.pop("model", None)
    return printed.getvalue()


def _losses(text: str) -> dict[int, float]:
    found = re.findall(r"^step (\d+)  loss ([\d.]+)$", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def _rows(text: str) -> list[str]:
    return sorted(re.findall(r"^rank \d.*$", text, re.MULTILINE))


def _losses_of_one_process(folder: Path, num_steps: int) -> dict[int, float]:
    """Train the page's model in plain torch, without interruption."""
    names = runpy.run_path(str(folder / "model.py"))
    torch.manual_seed(0)
    model: nn.Module = names["ByteModel"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = {}
    for step in range(1, num_steps + 1):
        rows: Tensor = names["batch"](step)
        loss = names["loss_of"](model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def test_the_tutorial_goes_from_2_ranks_to_3_and_to_plain_torch(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses are those of one process that was never interrupted; output is the page's."""
    _write_programs(tmp_path)
    losses = {}
    for num_ranks in (2, 3):
        printed = ranks(num_ranks).run(_run_program, "train.py", str(tmp_path))
        shown = BLOCKS[f"output on {num_ranks} ranks"]
        assert _rows("".join(printed)) == _rows(shown)
        assert list(_losses(printed[0])) == list(_losses(shown))
        losses |= _losses(printed[0])
        # Libraries and processors round apart, and steps of Adam multiply that: weights that differ
        # by 1e-5 change the last step's loss by 1e-3 of it at this learning rate.
        torch.testing.assert_close(_losses(printed[0]), _losses(shown), rtol=0.01, atol=1e-3)
    expected = _losses_of_one_process(tmp_path, 60)
    # Printed with three decimals; sums of three ranks are of another order.
    expected = {step: expected[step] for step in losses}
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=1e-3)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^megafsdp (ckpt .*)$", PAGE, re.MULTILINE)
    assert [main(command.split()) for command in commands] == [0]
    capsys.readouterr()
    assert _run_program("use.py", str(tmp_path)) == BLOCKS["output of the exported model"]


def test_every_block_of_the_tutorial_is_run() -> None:
    """A program has a name, under which the test above runs it."""
    assert PAGE.count("```python") == len([name for name in BLOCKS if name.endswith(".py")]) == 3
