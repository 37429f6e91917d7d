"""The part of multi-head attention that torch runs as one op in inference."""

from __future__ import annotations

from ..call import Call, Counts, Spec
from .amounts import each, together
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


@rule("_transform_bias_rescale_qkv")
def heads(call: Call) -> Counts:
    """Count a bias for each element of queries, keys and values, and the scale of the queries."""
    qkv: Spec = call["qkv"]
    return together(each(qkv.numel, "add"), each(qkv.numel / 3, "mul"))
