"""torchft on two replicas of this machine: the program of docs/integrations/torchft.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ecosystem.test_pages import PAGES
from tests.end_to_end.test_readme import ROOT, python_blocks

pytest.importorskip("torchft", reason="ecosystem: torchft is not installed")
from torchft.coordination import LighthouseServer

from megafsdp.integrations.torchft import average_over_replicas

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

DEATH_STEP = 8
# Runs the page's program with a pause after each step. The first life of a replica ends at a step;
# the second sets the last step, five after its first, for both replicas. Saves what they end with.
DRIVER = """
import os, sys, time
from pathlib import Path
page, out, end, life = *map(Path, sys.argv[1:4]), sys.argv[4]
text = page.read_text().replace("< 100:", "< last_step():")
text = text.replace("replicated.step()", "replicated.step(); after_step(manager)")
seen = set()

def last_step():
    return int(end.read_text()) if end.exists() else 10**9

def after_step(manager):
    seen.add(manager.num_participants())
    if life == "first" and manager.current_step() == DEATH_STEP:
        os._exit(3)
    if life == "second" and names["rank"] == 0 and not end.exists():
        end.with_suffix(".new").write_text(str(manager.current_step() + 5))
        end.with_suffix(".new").rename(end)
    time.sleep(0.2)

names = {"after_step": after_step, "last_step": last_step}
exec(compile(text, page, "exec"), names)
model, optimizer = names["model"], names["optimizer"]
full = {name: value.full_tensor() for name, value in model.state_dict().items()}
states = [optimizer.state[each]["exp_avg"].full_tensor() for each in model.parameters()]
if names["rank"] == 0:
    names["torch"].save((seen, full, states), out)
names["torch"].distributed.barrier()
os._exit(0)
""".replace("DEATH_STEP", str(DEATH_STEP))


def _start(program: Path, replica: int, life: str, lighthouse: str) -> subprocess.Popen[bytes]:
    out, end = program.with_name(f"{replica}.pt"), program.with_name("end")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = [program.with_name("page.py"), out, end, life]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": str(replica)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with program.with_name(f"{replica}.log").open("ab") as log:
        return subprocess.Popen(
            [*launcher, "--nproc-per-node", "2", program, *map(str, arguments)],
            env=environment,
            stdout=log,
            stderr=log,
        )


@pytest.mark.timeout(400)
def test_a_replica_that_died_comes_back_with_the_state_of_the_other(tmp_path: Path) -> None:
    """No step is lost, and both replicas end with the same bits of weights and moments."""
    (block,) = python_blocks((PAGES / "torchft.md").read_text(encoding="utf-8"))
    (tmp_path / "page.py").write_text(block)
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000)
    lives = ("only", "first")
    started = [_start(program, k, lives[k], lighthouse.address()) for k in (0, 1)]
    try:
        assert started[1].wait(150) != 0, "it died as it should"
        started.append(_start(program, 1, "second", lighthouse.address()))
        codes = [started[k].wait(150) for k in (0, 2)]
    finally:
        for process in started:
            # The launcher ends its ranks.
            process.terminate()
            process.wait(60)
        lighthouse.shutdown()
    logs = [(tmp_path / f"{k}.log").read_text(errors="replace")[-3000:] for k in (0, 1)]
    assert codes == [0, 0], logs
    (seen, full, states), (_, *other) = (torch.load(tmp_path / f"{k}.pt") for k in (0, 1))
    assert seen == {1, 2}, "alone for a while"
    for name, value in full.items():
        assert torch.equal(value, other[0][name]), name
    assert all(map(torch.equal, states, other[1]))


def test_a_model_without_units_is_refused() -> None:
    """Nothing would be averaged."""
    with pytest.raises(ValueError, match="a model with units, got Linear"):
        average_over_replicas(torch.nn.Linear(2, 2), None)
