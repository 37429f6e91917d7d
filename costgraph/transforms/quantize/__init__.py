"""A graph with weights, activations or caches in formats of few bits."""
