"""Recurrent layers with symbols for sizes: torch's own functions ask for sizes as numbers before any op runs.

They follow torch's functions for a CPU call by call (`native/RNN.cpp`, `native/mkldnn/RNN.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .counted import Loops
from .products import in_place

__all__ = ["RECURRENT", "gru_cell", "lstm_cell"]

aten = torch.ops.aten
# torch's number of the mode
_LSTM = 2

#: One tensor, or an LSTM's pair of them.
State = Any
#: Weights and biases of one layer in one direction.
Weights = Sequence[torch.Tensor]
#: Input, state before, weights, whether there are biases, whether it goes back in time, and what lives until the other
#: direction has run -> outputs and last state.
Layer = Callable[[torch.Tensor, State, Weights, bool, bool, dict[Any, Any]], tuple[torch.Tensor, State]]


class _Given(NamedTuple):
    """What torch's functions of recurrent layers are given, in their order."""

    input: torch.Tensor
    hx: Any
    params: Sequence[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def steps(self) -> torch.Tensor:
        """What the layers are given, step by step."""
        return self.input.transpose(0, 1) if self.batch_first else self.input

    @property
    def sizes(self) -> tuple[int, int, float]:
        """Layers, directions and dropout."""
        return self.num_layers, 1 + self.bidirectional, self.dropout if self.train else 0.0

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make as it is handed out."""
        return x.transpose(0, 1) if self.batch_first else x


def _lstm(turns: Loops, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run an LSTM, each layer as one op of oneDNN unless its state is projected."""
    given = _Given(*args)
    projected = given.hx[0].shape[2] != given.hx[1].shape[2]
    fused = torch._C._get_mkldnn_enabled() and not projected and given.input.dtype == torch.float32
    states = list(zip(*(t.contiguous() if fused else t for t in given.hx), strict=True))
    layer, x = _fused if fused else _steps(_lstm_cell, turns), given.steps
    x, last = _stacked(layer, x.contiguous() if fused else x, states, given.params, given.has_biases, given.sizes)
    made, kept = (torch.stack(each) for each in zip(*last, strict=True))
    return given.laid(x), made, kept


def _one_state(cell: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return torch's function of a layer whose state is one tensor, run step by step."""

    def layers(turns: Loops, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = _Given(*args)
        states = given.hx.unbind(0)
        x, last = _stacked(_steps(cell, turns), given.steps, states, given.params, given.has_biases, given.sizes)
        return given.laid(x), torch.stack(last)

    return layers


def _stacked(
    layer: Layer, x: torch.Tensor, states: Sequence[State], params: Weights, biased: bool, sizes: tuple[int, int, float]
) -> tuple[torch.Tensor, list[State]]:
    """Run layers one after another, the directions of each beside each other, with dropout between them."""
    layers, sides, dropout = sizes
    each = len(params) // (layers * sides)
    last: list[State] = []
    outs: dict[int, torch.Tensor] = {}
    for i in range(layers):
        held: dict[Any, Any] = {}
        for side in range(sides):
            k = i * sides + side
            outs[side], state = layer(x, states[k], params[k * each : (k + 1) * each], biased, side > 0, held)
            last.append(state)
            del state
        x = outs[0] if sides == 1 else torch.cat(list(outs.values()), -1)
        if layer is not _fused:  # whose outputs live until those of the next layer take their places
            outs.clear()
        del held
        if dropout and i < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x, last


def _fused(
    x: torch.Tensor, state: State, weights: Weights, biased: bool, back: bool, held: dict[Any, Any]
) -> tuple[torch.Tensor, State]:
    biases = weights[2:] if biased else [torch.zeros(w.shape) for w in weights]
    flags: tuple[Any, ...] = (back, [], _LSTM, state[0].shape[-1], 1, biased, False, False, False)
    out, made, kept, _ = aten.mkldnn_rnn_layer(x, *weights[:2], *biases, *state, *flags)
    return out, (made, kept)


def _steps(cell: Callable[..., State], turns: Loops) -> Layer:
    def layer(
        x: torch.Tensor, state: State, weights: Weights, biased: bool, back: bool, held: dict[Any, Any]
    ) -> tuple[torch.Tensor, State]:
        bias = weights[2:4] if biased else (None, None)
        project = weights[-1] if len(weights) % 2 else None
        outs = held[back] = []
        # those of the other direction live until these are there
        inputs = in_place(x, weights[0], bias[0])
        inputs = held["inputs"] = functional.linear(x, weights[0], bias[0]) if inputs is None else inputs
        parts = turns.parts(inputs)
        steps = inputs.unbind(0) if parts is None else parts
        for step in reversed(steps) if back else steps:
            state = cell(step, state, weights[1], bias[1], project)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outs[::-1] if back else outs), state

    return layer


def _gru_cell(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, _: None) -> torch.Tensor:
    size = h.shape[1]
    ours = aten.unsafe_split(x, size, 1)
    before = aten.unsafe_split(functional.linear(h, weight, bias), size, 1)
    reset = before[0].add_(ours[0]).sigmoid_()
    update = before[1].add_(ours[1]).sigmoid_()
    new = ours[2].add(before[2].mul_(reset)).tanh_()
    made: torch.Tensor = (h - new).mul_(update).add_(new)
    return made


def gru_cell(
    x: torch.Tensor, h: torch.Tensor, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> torch.Tensor:
    """Run one step of a GRU."""
    return _gru_cell(functional.linear(x, w_ih, b_ih), h, w_hh, b_hh, None)


def _simple(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cell(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, _: None) -> torch.Tensor:
        return nonlinearity(functional.linear(h, weight, bias).add_(x))

    return cell


def lstm_cell(x: torch.Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> State:
    """Run one step of an LSTM."""
    h, c = hx
    return _gated(functional.linear(h, w_hh, b_hh).add_(functional.linear(x, w_ih, b_ih)), c)


def _lstm_cell(x: torch.Tensor, state: State, weight: torch.Tensor, bias: Any, project: Any) -> State:
    h, c = _gated(functional.linear(state[0], weight, bias).add_(x), state[1])
    return h if project is None else h @ project.T, c


def _gated(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = aten.unsafe_split(gates, c.shape[1], 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    c = (f * c).add_(i * g)
    return o * c.tanh(), c


#: By function of torch, called with what counts steps and with tensors of a batch; what is packed has lengths of data.
RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _one_state(_gru_cell),
    torch.rnn_tanh: _one_state(_simple(torch.tanh)),
    torch.rnn_relu: _one_state(_simple(torch.relu)),
}
