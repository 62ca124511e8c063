"""Bridges to other libraries, one a file, each named after its library and about a page long.

They only translate, to the packages below; what is refused is in refusals.py. The package imports
none of them, and each needs its library: extra ``integrations`` has them all.
docs/integrations has the shortest program for each. Not here: models and file formats, which
``megafsdp.models`` and ``megafsdp.checkpoint`` know. Read first: transformers.py.
"""
