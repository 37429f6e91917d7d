"""Where a graph is cut into stages: loops over layers that each of them has a part of, and what is at either end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..algebra.polynomial import ONE, Poly, total
from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.loop import is_pass
from ..graph.op import Op
from ..graph.tensor import Tensor
from ..ops.keep import Keep
from ..ops.pieces import Accumulate
from ..ops.pointwise import Pointwise

__all__ = ["BACK", "Plan", "micro_batches", "planned"]

#: Phases of what goes back through the layers.
BACK = ("backward", "recompute")


@dataclass(frozen=True)
class Plan:
    """Where a step is cut."""

    home: Graph
    """Where the loops over layers stand: the step, or the body of its loop over micro-batches."""
    forward: Op
    backward: Op | None
    """None of a pass that has no gradients."""
    behind: frozenset[Op]
    """Ops that read what the last layer hands on, but for those that read gradients of what the first one was given."""
    before: Poly
    """How many layers of another kind stand before those that are cut: all are of the first stage."""
    ahead: frozenset[Op] = frozenset()
    """Ops that read these gradients."""
    sums: Mapping[Op, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Ops that add terms of both, of parameters that the first and the last stage have: a term of each."""
    added: frozenset[Op] = frozenset()
    """Ops that read these sums."""
    weights: frozenset[Op] = frozenset()
    """Loops over layers left to do for gradients of weights, where these come later, and what lives until then."""

    @property
    def loops(self) -> frozenset[Op]:
        """Loops over layers, of which every stage has its part."""
        return self.weights | ({self.forward} if self.backward is None else {self.forward, self.backward})


def _after(home: Graph, starts: Iterable[Tensor], stop: Op | None) -> frozenset[Op]:
    """Return the ops of a graph that depend on some tensors, not those behind a loop where these end."""
    reached, found = set(starts), set()
    for op in home.ops:
        if op is not stop and op.phase != "optimizer" and not reached.isdisjoint(op.operands):
            found.add(op)
            reached |= {*op.results}
    return frozenset(found)


def planned(graph: Graph) -> Plan:
    """Find where a graph is cut: around its last loop over layers, and the one that goes back through it if any."""
    both = [op.loop.body for op in graph.ops if op.loop is not None and is_pass(op.loop.body)]
    home = both[0] if both else graph
    loops = [op.loop for op in home.ops if op.loop is not None and op.loop.starts and op.phase != "optimizer"]
    pairs = [
        (f, b) for f in loops for b in loops
        if f.op.phase == "forward" and b.op.phase in BACK and not set(f.pieces).isdisjoint(b.xs)
    ]  # fmt: skip
    if loops and all(op.phase == "forward" for op in graph.walk()):
        *others, last = loops
        return Plan(home, last.op, None, _after(home, last.lasts, None), total(f.count for f in others))
    if not pairs or len(loops) != 2 * len(pairs):
        raise UnsupportedError(
            f"parallelize: pp of graph {graph.name!r}, which has {len(loops)} loops with carries, expected loops over "
            f"layers, in a step of training each with its backward pass"
        )
    forward, backward = pairs[-1]
    if len(backward.starts) > len(forward.starts):
        raise UnsupportedError(
            f"parallelize: pp of graph {graph.name!r}, whose layers share a parameter, expected layers with their own"
        )
    ahead = _after(home, backward.lasts, None)
    behind = _after(home, forward.lasts, backward.op) - ahead
    sums = dict(_sums(home, behind, ahead))
    added = _after(home, [t for op in sums for t in op.results], None)
    before = total(f.count for f, _ in pairs[:-1])
    late = {o for o in home.ops if o.loop is not None and not set(backward.pieces).isdisjoint(o.loop.xs)}
    late |= {o for o in home.ops if isinstance(o.kind, Keep) and o.operands[0].producer in late}
    return Plan(home, forward.op, backward.op, behind, before, ahead, sums, added, frozenset(late))


def _sums(home: Graph, behind: frozenset[Op], ahead: frozenset[Op]) -> Iterator[tuple[Op, tuple[Tensor, Tensor]]]:
    """Yield the ops that add what the last stage makes to what the first one makes."""
    for op in home.ops:
        late = [t for t in op.operands if t.producer in behind] if op in ahead else []
        if not late:
            continue
        adds = isinstance(op.kind, Accumulate) or (isinstance(op.kind, Pointwise) and op.kind.function.name == "add")
        early = [t for t in op.operands if t not in late]
        if not adds or len(late) != 1 or len(early) != 1:
            raise UnsupportedError(
                f"parallelize: pp: {op.name!r} of the first stage reads {late[0]!r} of the last one, expected sums of "
                f"gradients alone"
            )
        yield op, (late[0], early[0])


def micro_batches(graph: Graph) -> Poly:
    """Return how many micro-batches a step has."""
    return next((op.loop.count for op in graph.ops if op.loop is not None and is_pass(op.loop.body)), ONE)
