"""Saves in the background: the copies of what is saved, and the save in flight.

Read first: pending_save.py.
"""
