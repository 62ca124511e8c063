"""Forbid to import what a GPU machine need not have, from the import of this file on.

A plugin of pytest (``-p benchmarks.gpu.absent``), and imported by rehearsals.
"""

import sys

from benchmarks.gpu.part import ABSENT

# Python takes None for a module that cannot be found.
sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
