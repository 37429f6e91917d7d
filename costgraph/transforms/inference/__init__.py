"""Prefill and decode: the graph of a pass, replayed with a cache."""
