"""Devices: units, and the facts of a device read from its file."""
