"""A stand-in for a device with streams, and runs on it. Read first: device.py."""
