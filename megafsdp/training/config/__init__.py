"""The configuration: sections, their parsing from YAML and options, and their checks.

Read first: sections.py.
"""
