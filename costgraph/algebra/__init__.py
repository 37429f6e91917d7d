"""Symbolic algebra: exact polynomials in sizes, Max and Min, and validity conditions."""
