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
from ...ops.grouped import Dispatch
from ...ops.keep_alive import StopGradient
from ...ops.kv_cache import Append
from ...ops.opaque import Foreign
from ...ops.pooling import Unpool
from ...ops.updates import FusedUpdate, Unscale
from . import rules

__all__ = ["NOT_DIFFERENTIABLE", "rules"]

#: Op kinds without a body and without a rule, with the reason.
NOT_DIFFERENTIABLE: Mapping[type[OpKind], str] = MappingProxyType(
    {
        Unpool: "a gradient already: of gradients of gradients of windows nothing is stated",
        Foreign: "a call that was recorded: torch runs its backward pass, which a trace can record as well",
        FusedUpdate: "part of an optimizer step",
        Pack: "of the graph of one rank: a graph is differentiated before it is sharded",
        Receive: "of one stage of a pipeline: a graph is differentiated before it is cut",
        Send: "of one stage of a pipeline: a graph is differentiated before it is cut",
        Unshard: "of the graph of one rank: a graph is differentiated before it is sharded",
        LocalShard: "of the graph of one rank: a graph is differentiated before it is sharded",
        Dispatch: "makes integers alone",
        Merge: "of the graph of one rank: a graph is differentiated before it is sharded",
        StopGradient: "lets no gradient pass: nothing asks for its rule",
        Append: "part of a step of inference",
        Unscale: "part of an optimizer step",
    }
)
