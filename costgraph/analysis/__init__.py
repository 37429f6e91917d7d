"""Analyses of a graph: free functions that return formulas, or numbers once all sizes are bound."""
