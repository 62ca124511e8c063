"""The command line: `megafsdp train`, `prep`, `doctor`, `ckpt`.

Read first: main.py.
"""
