"""LSTM and GRU language models: an embedding, L recurrent layers as wide as it, a head with a bias.

Sizes: Zaremba et al. 2014 (arXiv 1409.2329), section 4.1, on the Penn Treebank (V = 10,000): 200 units a layer without
regularisation, 650 ("medium") and 1500 ("large") with dropout. Order of ops: `RNNModel` of pytorch/examples,
word_language_model, which has torch.nn.LSTM or torch.nn.GRU between the two; the GRU models are the same with GRU.
"""

from __future__ import annotations

from collections.abc import Callable

import costgraph as cg

from .family import Family, Preset

_Layer = Callable[..., cg.Tensor]


def _model(name: str, dropout: float, dtype: str, layer: _Layer, *, bias: bool, tied: bool) -> cg.Graph:
    B, S, D, L, V = cg.dims("B S D L V")

    def block(x: cg.Tensor) -> cg.Tensor:
        # torch drops out between layers, the model before the first and behind the last
        return cg.dropout(layer(x, D, bias=bias), dropout)

    with cg.Graph(name, dtype=dtype) as g:
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        x = cg.repeat(L, block, cg.dropout(cg.embedding(tokens, table), dropout), name="layers")
        if tied:
            g.output(cg.nn.tied_head(x, table) + g.param("head/bias", (V,)))
        else:
            g.output(cg.linear(x, "b s d -> b s v", v=V, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


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
