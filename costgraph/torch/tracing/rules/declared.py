"""Kernels that the library declares itself: the same body of ops says what torch's kernel for it costs.

A declaration is a small graph on symbols, built once; its FLOPs are then bound to the sizes of a call. So the layer
norm of a traced module costs what `costgraph.layer_norm` costs, its backward pass what the library derives for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

from ....algebra.polynomial import ONE, Poly, total
from ....algebra.symbols import symbol
from ....analysis.costs import costs
from ....analysis.table import CostRow
from ....graph.graph import Graph
from ....graph.scopes import scope
from ....graph.tensor import Tensor
from ....nn.norms import layer_norm, rms_norm
from ....nn.softmax import log_softmax, softmax
from ....ops.pointwise import pointwise
from ....ops.reduce import reduce
from ....optimizers import Optimizer
from ....transforms.backward.backward import backward
from ....transforms.training import training_step
from ..call import Counts

__all__ = ["norm_backward", "norm_forward", "softmax_backward", "softmax_forward", "update"]

_ROWS, _SIZE = "rows", "size"
_SOFTMAX = {"softmax": softmax, "log_softmax": log_softmax}


def _sum_of(graph: Graph, phase: str) -> Counts:
    """Return the FLOPs of a phase of a declared graph, without what makes a loss of its result."""
    found = [r for r in costs(graph).rows if r.direction == "compute" and r.phase == phase and r.scope != "loss"]
    return _by_kind(found)


def _by_kind(rows: Sequence[CostRow]) -> Counts:
    return Counts(
        pointwise=total(r.amount for r in rows if r.kind == "pointwise"),
        transcendental=total(r.amount for r in rows if r.kind == "transcendental"),
    )


def _rows(make: Callable[[Tensor], Tensor], wanted: Collection[str] = ("x",)) -> Graph:
    """Declare a kernel of rows, and a loss behind it of which the named operands want a gradient."""
    sizes = (symbol(_ROWS), symbol(_SIZE))
    with Graph("kernel") as g:
        made = make(g.input("x", sizes, grad=True))
        for t in g.tensors:
            t.requires_grad = t.requires_grad and t.name.rpartition("/")[2] in wanted
        with scope("loss"):
            product = pointwise("mul", made, g.input("weights", sizes))
            g.output(reduce(product, "r s -> ", "sum"))
    return g


def _bound(counts: Counts, **sizes: Poly) -> Counts:
    return Counts(pointwise=counts.pointwise.bind(sizes), transcendental=counts.transcendental.bind(sizes))


# -- softmax -----------------------------------------------------------------------------------------------------


@cache
def _softmax(name: str, phase: str) -> Counts:
    g = _rows(_SOFTMAX[name])
    return _sum_of(backward(g) if phase == "backward" else g, phase)


def softmax_forward(name: str, rows: Poly, size: Poly) -> Counts:
    """Return the FLOPs of `softmax` or `log_softmax` of that many rows."""
    return _bound(_softmax(name, "forward"), rows=rows, size=size)


def softmax_backward(name: str, rows: Poly, size: Poly) -> Counts:
    """Return the FLOPs of the gradient of `softmax` or `log_softmax`, from its result."""
    return _bound(_softmax(name, "backward"), rows=rows, size=size)


# -- norms -------------------------------------------------------------------------------------------------------


@cache
def _norm(phase: str, centred: bool, affine: bool, bias: bool, wanted: frozenset[str]) -> Counts:
    def make(x: Tensor) -> Tensor:
        return layer_norm(x, affine=affine, bias=bias) if centred else rms_norm(x, affine=affine)

    g = _rows(make, wanted)
    return _sum_of(backward(g) if phase == "backward" else g, phase)


def norm_forward(rows: Poly, size: Poly, *, centred: bool, affine: bool, bias: bool) -> Counts:
    """Return the FLOPs of a norm of that many rows: a layer norm where it is centred, else an RMS norm."""
    return _bound(_norm("forward", centred, affine, bias, frozenset()), rows=rows, size=size)


def norm_backward(
    rows: Poly, size: Poly, *, centred: bool, affine: bool, bias: bool, wanted: Collection[str]
) -> Counts:
    """Return the FLOPs of the gradients of a norm that are wanted: of `x`, `weight` and `bias`."""
    if not wanted:
        return Counts()
    return _bound(_norm("backward", centred, affine, bias, frozenset(wanted)), rows=rows, size=size)


# -- optimizers --------------------------------------------------------------------------------------------------


@cache
def update(optimizer: Optimizer) -> Counts:
    """Return the FLOPs of a fused update of one element."""
    sizes = (symbol(_SIZE),)
    with Graph("update") as g:
        g.output(reduce(g.param("p", sizes), "s -> ", "sum"))
    found = [r for r in costs(training_step(g, optimizer=optimizer)).rows if r.direction == "compute"]
    steps = [r for r in found if r.phase == "optimizer" and r.amount.names() == {_SIZE}]
    return _bound(_by_kind(steps), size=ONE)
