"""Make packages that a GPU machine need not have impossible to import, once this is imported.

This is a plugin of pytest (``-p benchmarks.gpu.absent``); rehearsals import it too.
"""

import sys

from benchmarks.gpu.part import ABSENT

# None in sys.modules makes an import fail.
sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
