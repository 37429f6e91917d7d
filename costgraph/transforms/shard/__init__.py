"""Sharding: from the graph of all devices to the graph of one rank."""
