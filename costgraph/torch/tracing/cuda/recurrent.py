"""Recurrent layers on a GPU: all layers and steps in one call of cuDNN, cells in one kernel behind their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from .table import Here, rule, source

__all__: list[str] = []  # its rules are found in RULES

aten = torch.ops.aten
LAYERS = source(
    "recurrent: cuDNN", "aten/src/ATen/native/RNN.cpp, lstm; aten/src/ATen/native/cudnn/RNN.cpp, _cudnn_impl"
)
CELL = source("recurrent: cell in one kernel", "aten/src/ATen/native/RNN.cpp, LSTMCell, GRUCell")
_FORMATS = (torch.float64, torch.float32, torch.float16)  # cudnn_is_acceptable
# torch's numbers of modes
_RELU, _TANH, _LSTM, _GRU = range(4)


def _layers(
    here: Here, mode: int, x: Any, state: Any, memory: Any, weights: Sequence[torch.Tensor], flags: Sequence[Any]
) -> Any:
    if x.dtype not in _FORMATS or not torch.backends.cudnn.enabled:
        raise UnsupportedError(f"a recurrent layer of {x.dtype}, expected one that cuDNN takes: fp32, fp16 or fp64")
    biased, count, dropout, train, both, batch_first = flags
    size, projected = state.shape[2], 0
    if memory is not None and memory.shape[2] != size:
        size, projected = memory.shape[2], size
    each = (4 if biased else 2) + bool(projected)
    # the weights lie behind one another: what they lie in is no memory besides
    sizes: tuple[Any, ...] = (mode, size, projected, count, batch_first, dropout, train, both, [], None)
    with here.by(LAYERS, f"{str(x.dtype).removeprefix('torch.')}"):
        return aten._cudnn_rnn(x, list(weights), each, x.new_empty(0), state, memory, *sizes)[:3]


def _need_padded(has_biases: object) -> None:
    """Raise where another list of arguments has something else in that place."""
    if not isinstance(has_biases, bool):
        raise UnsupportedError("a packed sequence, whose lengths are data, expected a padded batch")


@rule(torch.lstm)
def lstm(here: Here, input: Any, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
    """Call cuDNN."""
    _need_padded(has_biases)
    state, memory = hx
    return tuple(_layers(here, _LSTM, input, state, memory, params, (has_biases, *rest)))


def _of_one_state(mode: int) -> Callable[..., Any]:
    def layers(here: Here, input: Any, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
        _need_padded(has_biases)
        return tuple(_layers(here, mode, input, hx, None, params, (has_biases, *rest))[:2])

    return layers


for _function, _mode in ((torch.rnn_relu, _RELU), (torch.rnn_tanh, _TANH), (torch.gru, _GRU)):
    rule(_function)(_of_one_state(_mode))


# -- cells -------------------------------------------------------------------------------------------------------


@rule(torch.lstm_cell)
def lstm_cell(here: Here, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Make both products, then the cell with its biases."""
    h, c = hx
    gates = input @ w_ih.t(), h @ w_hh.t()
    with here.by(CELL, "an LSTM's"):
        return tuple(aten._thnn_fused_lstm_cell(*gates, c, b_ih, b_hh)[:2])


@rule(torch.gru_cell)
def gru_cell(here: Here, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Make both products, then the cell with its biases."""
    gates = input @ w_ih.t(), hx @ w_hh.t()
    with here.by(CELL, "a GRU's"):
        return aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
