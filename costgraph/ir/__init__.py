"""Intermediate representation: tensors, ops, loops and the graph that holds them.

Start with these names:

- `graph`: `Graph`, `Tensor`, `Op`, `OpKind`, `Loop`, `Storage`, `Domain`, `Placement`, `current_graph`, `scope`
- `strides`: `Sizes`, `numel`
"""
