"""Every wait and reference is shown by a run on the stand-in: without it the run fails."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.stand_in import test_engine, test_offload, test_saves
from tests.stand_in.device import Order
from tests.stand_in.mutations import MUTATIONS, ROOT

KINDS = {"offload": test_offload, "saves": test_saves, "engine": test_engine}
FOLDERS = sorted({mutation.path.split("/")[0] for mutation in MUTATIONS})


def test_every_mutation_is_of_the_code_as_it_is() -> None:
    """Its text stands in the file once, and a case of ours must show it."""
    assert len(MUTATIONS) >= 25
    for mutation in MUTATIONS:
        text = (ROOT / "megafsdp" / mutation.path).read_text()
        assert mutation.apply(text) != text
        kind, name, order = mutation.shown_by
        assert name in KINDS[kind].CASES and order in Order.__members__
    changes = Counter((m.path, m.old, m.new) for m in MUTATIONS)
    assert max(changes.values()) == 1


@pytest.mark.matrix("waits")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("folder", FOLDERS)
def test_without_a_wait_a_run_fails(folder: str) -> None:
    """One change after another in a copy of the package."""
    command = [sys.executable, "-m", "tests.stand_in.mutations", f"{folder}/"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
