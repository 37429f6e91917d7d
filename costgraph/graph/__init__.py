"""The graph: tensors, ops, the sizes and strides that they have, and the changes that are made to them."""
