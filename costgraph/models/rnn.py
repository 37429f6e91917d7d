"""LSTM and GRU language models: an embedding, L recurrent layers as wide as it, a head with a bias.

Sizes: Zaremba et al. 2014 (arXiv 1409.2329), section 4.1, on the Penn Treebank (V = 10,000): 200 units a layer without
regularisation, 650 ("medium") and 1500 ("large") with dropout. Order of ops: `RNNModel` of pytorch/examples,
word_language_model, which has torch.nn.LSTM or torch.nn.GRU between the two; the GRU models are the same with GRU.
"""

from __future__ import annotations

from collections.abc import Callable

import costgraph as cg

from .decoder import decoder
from .family import Family, Preset

_Layer = Callable[..., cg.Tensor]


def _model(name: str, dropout: float, dtype: str, layer: _Layer, *, bias: bool, tied: bool) -> cg.Graph:
    D, L = cg.dims("D L")

    def block(x: cg.Tensor) -> cg.Tensor:
        # torch drops out between layers, the model before the first and behind the last
        return cg.dropout(layer(x, D, bias=bias), dropout)

    def stack(x: cg.Tensor) -> cg.Tensor:
        return cg.repeat(L, block, cg.dropout(x, dropout), name="layers")

    return decoder(name, dtype, stack, norm=None, tied=tied, head_bias=True, assume=())


def lstm(name: str, attention: str, dropout: float, dtype: str, *, bias: bool = True, tied: bool = False) -> cg.Graph:
    """Declare an LSTM language model: tokens (B, S) to logits (B, S, V); it has no attention."""
    return _model(name, dropout, dtype, cg.nn.lstm, bias=bias, tied=tied)


def gru(name: str, attention: str, dropout: float, dtype: str, *, bias: bool = True, tied: bool = False) -> cg.Graph:
    """Declare a GRU language model: tokens (B, S) to logits (B, S, V); it has no attention."""
    return _model(name, dropout, dtype, cg.nn.gru, bias=bias, tied=tied)


_WIDTHS = {"small": 200, "medium": 650, "large": 1500}


def _presets(cell: str) -> dict[str, Preset]:
    return {f"{cell}-ptb-{size}": Preset({"D": D, "L": 2, "V": 10000}) for size, D in _WIDTHS.items()}


FAMILIES = (Family(lstm, _presets("lstm")), Family(gru, _presets("gru")))
