"""Vector-Jacobian rules: what each op kind adds to a graph when its gradient is taken."""

from collections.abc import Mapping
from types import MappingProxyType

from ...graph.op import OpKind
from ...ops.cached import Append
from ...ops.collectives import Around, Part
from ...ops.foreign import Foreign
from ...ops.grouped import Dispatch
from ...ops.hops import Receive, Send
from ...ops.keep import StopGradient
from ...ops.merge import Merge
from ...ops.pack import Pack
from ...ops.pooling import Unpool
from ...ops.updates import FusedUpdate, Unscale
from . import contraction, elementwise, grouped, lookups, reductions, shapes, spectra, stated, windows

__all__ = [
    "NOT_DIFFERENTIABLE", "contraction", "elementwise", "grouped", "lookups", "reductions", "shapes", "spectra",
    "stated", "windows",
]  # fmt: skip

#: Op kinds without a body that have no rule, and why.
NOT_DIFFERENTIABLE: Mapping[type[OpKind], str] = MappingProxyType(
    {
        Unpool: "a gradient already: of gradients of gradients of windows nothing is stated",
        Foreign: "a call that was recorded: torch runs its backward pass, which a trace can record as well",
        FusedUpdate: "part of an optimizer step",
        Pack: "of the graph of one rank: a graph is differentiated before it is sharded",
        Receive: "of one stage of a pipeline: a graph is differentiated before it is cut",
        Send: "of one stage of a pipeline: a graph is differentiated before it is cut",
        Around: "of the graph of one rank: a graph is differentiated before it is sharded",
        Part: "of the graph of one rank: a graph is differentiated before it is sharded",
        Dispatch: "makes integers alone",
        Merge: "of the graph of one rank: a graph is differentiated before it is sharded",
        StopGradient: "lets no gradient pass: nothing asks for its rule",
        Append: "part of a step of inference",
        Unscale: "part of an optimizer step",
    }
)
