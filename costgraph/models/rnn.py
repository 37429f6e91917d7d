"""LSTM and GRU language models: an embedding, L recurrent layers of the same width, a head with a bias.

Sizes: Zaremba et al. 2014 (arXiv 1409.2329), section 4.1, on the Penn Treebank (V = 10,000): 200 units a layer without
regularization, 650 ("medium") and 1500 ("large") with dropout. Op order: `RNNModel` of pytorch/examples,
word_language_model, with torch.nn.LSTM or torch.nn.GRU; the GRU models have the same sizes.
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
        # torch applies dropout between layers, the model before the first and after the last
        return cg.dropout(layer(x, D, bias=bias), dropout)

    def stack(x: cg.Tensor) -> cg.Tensor:
        return cg.repeat(L, block, cg.dropout(x, dropout), name="layers")

    return decoder(name, dtype, stack, norm=None, tied=tied, head_bias=True, assume=())


def lstm(name: str, attention: str, dropout: float, dtype: str, *, bias: bool = True, tied: bool = False) -> cg.Graph:
    """Declare an LSTM language model: tokens (B, S) to logits (B, S, V); there is no attention."""
    return _model(name, dropout, dtype, cg.nn.lstm, bias=bias, tied=tied)


def gru(name: str, attention: str, dropout: float, dtype: str, *, bias: bool = True, tied: bool = False) -> cg.Graph:
    """Declare a GRU language model: tokens (B, S) to logits (B, S, V); there is no attention."""
    return _model(name, dropout, dtype, cg.nn.gru, bias=bias, tied=tied)


_WIDTHS = {"small": 200, "medium": 650, "large": 1500}


def _presets(cell: str) -> dict[str, Preset]:
    return {f"{cell}-ptb-{size}": Preset({"D": D, "L": 2, "V": 10000}) for size, D in _WIDTHS.items()}


FAMILIES = (Family(lstm, _presets("lstm")), Family(gru, _presets("gru")))
