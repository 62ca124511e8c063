"""Saves in the background: copies of what is saved, and the save under way.

Read first: pending_save.py.
"""
