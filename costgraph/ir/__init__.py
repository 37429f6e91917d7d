"""Intermediate representation: tensors, ops, loops and the graph that holds them."""
