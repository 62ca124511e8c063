"""The command line: `megafsdp train`, `prep`, `generate`, `report`, `doctor`, `ckpt`.

Read first: main.py.
"""
