"""Updates of optimizers that the library declares itself: the same ops say what torch's kernel for them costs.

A declaration is a small graph on symbols, built once; its FLOPs are then bound to the sizes of a call.
"""

from __future__ import annotations

from functools import cache

from ....algebra.polynomial import ONE, total
from ....algebra.symbols import symbol
from ....analysis.costs import costs
from ....graph.graph import Graph
from ....ops.reduce import reduce
from ....optimizers import Optimizer
from ....transforms.training import training_step
from ..call import Counts

__all__ = ["update"]

_SIZE = "size"


@cache
def update(optimizer: Optimizer) -> Counts:
    """Return the FLOPs of a fused update of one element."""
    sizes = (symbol(_SIZE),)
    with Graph("update") as g:
        g.output(reduce(g.param("p", sizes), "s -> ", "sum"))
    found = [r for r in costs(training_step(g, optimizer=optimizer)).rows if r.direction == "compute"]
    steps = [r for r in found if r.phase == "optimizer" and r.amount.names() == {_SIZE}]
    pointwise, hard = (
        total(r.amount for r in steps if r.kind == kind).bind({_SIZE: ONE}) for kind in ("pointwise", "transcendental")
    )
    return Counts(pointwise=pointwise, transcendental=hard)
