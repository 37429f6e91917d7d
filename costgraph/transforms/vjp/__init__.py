"""Vector-Jacobian rules: the ops that each op kind adds for its gradient."""

from collections.abc import Mapping
from types import MappingProxyType

from ...ir.graph import OpKind
from ...ops.collectives import (
    LocalShard,
    Merge,
    Pack,
    Receive,
    Send,
    Unshard,
)
from ...ops.experts import Dispatch
from ...ops.kv_cache import Append
from ...ops.layout import StopGradient
from ...ops.opaque import CustomCall
from ...ops.reduce import PoolBackward
from ...ops.updates import FusedUpdate, Unscale
from . import rules

__all__ = ["NOT_DIFFERENTIABLE", "rules"]

#: Op kinds without a body and without a rule, with the reason.
NOT_DIFFERENTIABLE: Mapping[type[OpKind], str] = MappingProxyType(
    {
        PoolBackward: "a gradient already: second derivatives of pooling are not supported",
        CustomCall: "a recorded call: torch runs its backward pass, which a trace can record as well",
        FusedUpdate: "part of an optimizer step",
        Pack: "part of a per-rank graph: a graph is differentiated before it is sharded",
        Receive: "part of a pipeline stage: a graph is differentiated before it is split",
        Send: "part of a pipeline stage: a graph is differentiated before it is split",
        Unshard: "part of a per-rank graph: a graph is differentiated before it is sharded",
        LocalShard: "part of a per-rank graph: a graph is differentiated before it is sharded",
        Dispatch: "returns only integers",
        Merge: "part of a per-rank graph: a graph is differentiated before it is sharded",
        StopGradient: "stops gradients, so its rule is never called",
        Append: "part of an inference step",
        Unscale: "part of an optimizer step",
    }
)
