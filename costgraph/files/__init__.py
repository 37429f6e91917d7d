"""Saved graphs and checkpoint headers.

Start with these names:

- `graphs`: `load`, `save`
- `checkpoints`: `read_weights`, `Weights`, `read_gguf`
"""
