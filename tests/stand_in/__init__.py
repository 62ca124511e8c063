"""A stand-in for a device with streams, and what runs on it.

Read first: device.py. connect.py makes megafsdp use it; runs.py trains on the host and on the
stand-in, and compares; mutations.py lists waits that these runs need.
"""
