"""Sharding: build the per-rank graph from that of all devices."""
