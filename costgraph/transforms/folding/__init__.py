"""Equal blocks of a graph found, compared and put into loops: the parts of `costgraph.fold`."""
