"""Gradients of a graph, derived op by op."""
