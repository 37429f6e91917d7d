"""Costs of softmax variants, batch-norm aliases and weight norm."""

from __future__ import annotations

from dataclasses import replace

from ..call import Call, Counts
from .counts import counts_of
from .table import (
    REDUCE,
    combined,
    per_element,
    rule,
)

__all__: list[str] = []  # its rules are found in RULES


@rule("_safe_softmax")
def safe_softmax(call: Call) -> Counts:
    """Count a softmax, and finding and zeroing rows of minus infinity."""
    return combined(_softmax(call, call["dim"]), per_element(call["self"].numel, "eq", REDUCE, "where"))


@rule("_masked_softmax")
def masked_softmax(call: Call) -> Counts:
    """Count the mask and a softmax."""
    dim = call.get("dim")
    return combined(per_element(call["self"].numel, "masked_fill"), _softmax(call, -1 if dim is None else dim))


def _softmax(call: Call, dim: int) -> Counts:
    return counts_of(Call("_softmax", "", False, {"self": call["self"], "dim": dim}, call.results))


@rule("cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
      "_batch_norm_no_update", "_batch_norm_with_update_functional",
      "_native_batch_norm_legit_functional")  # fmt: skip
def batch_norm(call: Call) -> Counts:
    """Count as `native_batch_norm`."""
    arguments = {"training": "with_update" in call.name, "momentum": 0.1, "eps": call.get("epsilon"), **call.arguments}
    return replace(counts_of(replace(call, name="native_batch_norm", arguments=arguments)), reads=None)


@rule("cudnn_batch_norm_backward", "batch_norm_backward", "miopen_batch_norm_backward")
def batch_norm_backward(call: Call) -> Counts:
    """Count as `native_batch_norm_backward`."""
    names = {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon", "train": "update"}
    arguments = {ours: call.arguments[theirs] for ours, theirs in names.items() if theirs in call.arguments}
    arguments = {"train": True, "output_mask": (True, True, True), **arguments, **call.arguments}
    return replace(counts_of(replace(call, name="native_batch_norm_backward", arguments=arguments)), reads=None)


# -- weight norm -------------------------------------------------------------------------------------------------


@rule("_weight_norm_interface")
def weight_norm(call: Call) -> Counts:
    """Count the norm of each row, and the scale by g / norm."""
    rows = call["g"].numel
    return combined(per_element(call["v"].numel, "square", REDUCE, "mul"), per_element(rows, "sqrt", "div"))


@rule("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Counts:
    """Count g / norm * (gradient - v * d / norm**2) and d / norm, with d the row sum of gradient * v."""
    rows = call["saved_g"].numel
    return combined(
        per_element(call["saved_v"].numel, "mul", REDUCE, "mul", "sub", "mul"),
        per_element(rows, "div", "div", "square", "div"),
    )
