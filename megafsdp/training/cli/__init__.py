"""The command line: `megafsdp train`, `prep`, `report`, `doctor`, `ckpt`.

Read first: main.py.
"""
