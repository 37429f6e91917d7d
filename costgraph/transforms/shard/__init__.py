"""Sharding: build the per-rank graph from the graph of all devices."""
