"""Run the console entry as ``python -m megafsdp``."""

import sys

from megafsdp.training.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
