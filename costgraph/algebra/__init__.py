"""Symbolic algebra: exact polynomials in sizes, Max and Min, and validity conditions. It knows no graph.

Start with these names:

- `symbols`: `dims`
- `polynomial`: `Poly`, `poly`, `total`
- `extremum`: `Max`, `Min`
- `dominance`: `Relations`, `prune`
- `conditions`: `Validity`
- `solving`: `solve`
"""
