"""Questions about a graph, each a free function that returns a formula or, once all is bound, a number."""
