"""What ranks of benchmarks are forked from in tests: all is imported, and no garbage any more.

Python's collector passes over what is frozen; cases call it before each block.
"""

import gc

import benchmarks.__main__  # noqa: F401  It imports every case.

gc.collect()
gc.freeze()
