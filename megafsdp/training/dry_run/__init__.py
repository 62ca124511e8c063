"""`megafsdp train --dry-run`: bytes, collectives and files of a run, without running it.

The engine's part is fsdp/estimate; this sub-package adds optimizer states, the host and the report.

Read first: dry_run.py.
"""
