"""The command line: `megafsdp train`, `prep`, `generate`, `doctor`, `ckpt`.

Read first: main.py.
"""
