"""Costs of recurrent layers: gate matmuls at every step, and cells."""

from __future__ import annotations

from math import prod
from typing import Any

import sympy

from ....algebra.polynomial import ONE, Poly, poly, total
from ..call import Call, Counts, Spec
from ..onednn import PAGE, Lstm
from .table import (
    REDUCE,
    Rule,
    combined,
    contiguous_copy,
    per_element,
    rule,
    size,
    unsupported,
)

__all__: list[str] = []  # its rules are found in RULES

# torch's RNN modes
_RELU, _TANH, _LSTM, _GRU = 0, 1, 2, 3
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}

#: Cell steps per hidden unit: the sum of both matmuls, and the nonlinearity.
_CELL: dict[int, tuple[str, ...]] = {
    _RELU: ("add", "relu"),
    _TANH: ("add", "tanh"),
    # i, f, o = sigmoid(...); g = tanh(...); c = f*c + i*g; h = o*tanh(c)
    _LSTM: ("add",) * 4 + ("sigmoid",) * 3 + ("tanh", "mul", "mul", "add", "tanh", "mul"),
    # r, z = sigmoid(...); n = tanh(x + r*h); h = n + z*(h - n)
    _GRU: ("add",) * 3 + ("sigmoid",) * 2 + ("mul", "tanh", "sub", "mul", "add"),
}
#: Cell gradient steps per hidden unit.
_CELL_BACKWARD: dict[int, tuple[str, ...]] = {
    _RELU: ("threshold_backward",),
    _TANH: ("tanh_backward",),
    # tanh(c) again; do = dh*tanh(c), dc += dh*o*(1 - tanh(c)**2), di = dc*g, df = dc*c, dg = dc*i, dc*f; the gates'
    _LSTM: ("tanh", "mul", "mul", "tanh_backward", "add", "mul", "mul", "mul", "mul")
    + ("sigmoid_backward",) * 3
    + ("tanh_backward",),
    # dz = dh*(h - n), dn = dh*(1 - z), dr = dn*h', dh*z; the gates'
    _GRU: ("sub", "mul", "sub", "mul", "mul", "mul", "mul", "add") + ("sigmoid_backward",) * 2 + ("tanh_backward",),
}
#: A bias is an addition per gate.
_BIASES = 2


def _cell_counts(mode: int, count: Poly, steps: dict[int, tuple[str, ...]], biases: int) -> Counts:
    return per_element(count, *steps[mode], *("add",) * (biases * _GATES[mode]))


def _layer_counts(points: Poly, states: Poly, mode: int, biases: bool) -> Counts:
    """Return the cost for `points` multiply-adds in matmuls and cells for `states` hidden units."""
    return combined(Counts(matmul=2 * points), _cell_counts(mode, states, _CELL, _BIASES if biases else 0))


# -- oneDNN, one layer in one direction --------------------------------------------------------------------------


@rule("mkldnn_rnn_layer")
def layer(call: Call) -> Counts:
    """Count 2 per element of both weights at every step, and the cells."""
    positions, states = _positions(call, call["input"])
    weights: Poly = call["weight0"].numel + call["weight1"].numel
    layer = _lstm(call, call["weight0"])
    workspace = _bias_bytes(call) + (layer.forward(_pages) if _saves_for_backward(call) else layer.inference(_pages))
    flops = _layer_counts(positions * weights, states, int(call["mode"]), bool(call["has_biases"]))
    return combined(flops, Counts(workspace=poly(workspace)))


def _lstm(call: Call, weight: Spec) -> Lstm:
    """Return the layer's sizes; weight sizes are numbers."""
    steps, batch = (n.constant or n for n in call["input"].sizes[:2])
    return Lstm(steps, batch, int(weight.sizes[1].expr), int(call["hidden_size"]), int(weight.dtype.bytes))


def _pages(n: Any) -> Poly:
    return PAGE * poly(sympy.ceiling(poly(n).expr / PAGE))


def _bias_bytes(call: Call) -> Poly:
    """Return the bytes of the combined bias."""
    operand: Spec = call["input"]
    return size(call["hidden_size"]) * _GATES[int(call["mode"])] * operand.dtype.bytes


def _saves_for_backward(call: Call) -> bool:
    """Whether a layer saves tensors for the backward pass, in its fourth result."""
    return len(call.results) > 3 and bool(call.results[3].numel)


def _positions(call: Call, operand: Spec) -> tuple[Poly, Poly]:
    """Return steps times batch, and that times the hidden size."""
    positions = prod(operand.sizes[:-1], start=ONE)
    return positions, positions * size(call["hidden_size"])


@rule("mkldnn_rnn_layer_backward")
def layer_backward(call: Call) -> Counts:
    """Count the gradients of operand, state and both weights: twice the matmuls; cells; and the sum for the biases."""
    positions, states = _positions(call, call["input"])
    mode = int(call["mode"])
    weights: Poly = call["weight1"].numel + call["weight2"].numel
    bias = per_element(states * _GATES[mode], REDUCE) if call["has_biases"] else Counts()
    # unrequested gradients are zeros, others contiguous; biases are combined again, and their gradient is computed
    # twice
    inputs = zip(("output", "hx_", "cx_tmp"), ("grad_output", "grad_hy", "grad_cy"), strict=True)
    gradients = total(call[like].bytes if call.get(g) is None else contiguous_copy(call[g]) for like, g in inputs)
    workspace = _lstm(call, call["weight1"]).backward(_pages) + gradients + 2 * _bias_bytes(call)
    flops = Counts(matmul=4 * positions * weights, workspace=poly(workspace))
    return combined(flops, _cell_counts(mode, states, _CELL_BACKWARD, 0), bias)


# -- all layers --------------------------------------------------------------------------------------------------


def _all_layers(call: Call) -> tuple[int, Poly, Poly, Poly, bool]:
    """Return the mode, all multiply-adds, hidden units per layer and in total, and whether there are biases."""
    if call.get("batch_sizes"):
        raise unsupported(call, "the lengths of a packed sequence are data", "a padded batch")
    weights, mode = call["weight"], int(call["mode"])
    positions = prod(call["input"].sizes[:-1], start=ONE)
    matrices = [w for w in weights if len(w.sizes) == 2]
    state = positions * (weights[0].sizes[0] / _GATES[mode])
    count = int(call["num_layers"]) * (2 if call["bidirectional"] else 1)
    return mode, positions * total(w.numel for w in matrices), state, state * count, len(matrices) < len(weights)


@rule("_cudnn_rnn", "miopen_rnn")
def layers(call: Call) -> Counts:
    """Count all layers and directions, and dropout between layers: two per element."""
    mode, points, state, states, biased = _all_layers(call)
    sides = 2 if call["bidirectional"] else 1
    steps = ("mul", "mul") if call.get("dropout") and call.get("train") else ()
    between = per_element(state * (sides * (int(call["num_layers"]) - 1)), *steps)
    return combined(_layer_counts(points, states, mode, biased), between)


@rule("_cudnn_rnn_backward")
def layers_backward(call: Call) -> Counts:
    """Count twice the matmuls, and the gradients of the cells."""
    mode, points, _, states, biased = _all_layers(call)
    bias = per_element(states * _GATES[mode], REDUCE) if biased else Counts()
    return combined(Counts(matmul=4 * points), _cell_counts(mode, states, _CELL_BACKWARD, 0), bias)


# -- cells without their matmuls ---------------------------------------------------------------------------------


def _cell(mode: int, state: str) -> Rule:
    """Return the rule of a cell."""

    def apply(call: Call) -> Counts:
        return _cell_counts(
            mode, call[state].numel, _CELL, sum(call.get(f"{n}_bias") is not None for n in ("input", "hidden"))
        )

    return apply


def _cell_backward(mode: int, state: str, biases: int) -> Rule:
    """Return the rule of a cell's gradients, including the sums for its biases."""

    def apply(call: Call) -> Counts:
        count = call[state].numel
        bias = per_element(count * _GATES[mode] * biases, REDUCE) if call["has_bias"] else Counts()
        return combined(_cell_counts(mode, count, _CELL_BACKWARD, 0), bias)

    return apply


rule("_thnn_fused_lstm_cell")(_cell(_LSTM, "cx"))
rule("_thnn_fused_gru_cell")(_cell(_GRU, "hx"))
rule("_thnn_fused_lstm_cell_backward_impl")(_cell_backward(_LSTM, "cx", 1))
rule("_thnn_fused_gru_cell_backward")(_cell_backward(_GRU, "grad_hy", _BIASES))
