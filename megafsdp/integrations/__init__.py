"""Bridges to other libraries, one a file, each named after its library and about a page long.

They translate; what is translated to is in the rooms below, and what is refused in refusals.py.
None is imported by the package, and each needs its library: extra ``integrations`` has them all.
docs/integrations has the shortest program for each. Not here: models and file formats, which
``megafsdp.models`` and ``megafsdp.checkpoint`` know. Read first: transformers.py.
"""
