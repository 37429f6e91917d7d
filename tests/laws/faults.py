"""Deliberate faults, three or more for each rule family: a description and the faulty replacement."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from types import MappingProxyType

from costgraph.algebra import polynomial
from costgraph.algebra.polynomial import ONE, ZERO
from costgraph.analysis import (
    costs,
    liveness,
    memory,
    params,
)
from costgraph.analysis import (
    costs as traffic,
)
from costgraph.ir import graph as domain
from costgraph.ops import (
    access_footprint,
    rules,
)
from costgraph.ops import layout as layout_ops
from costgraph.ops.registry import KINDS
from costgraph.ops.rules import Flops
from costgraph.transforms import reverse_mode

#: The key is the function's name in the package.
pointwise_ops = import_module("costgraph.ops.elementwise")
FAULTS: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    family: str
    what: str
    where: tuple
    """rule of an op kind, or attribute of a module or class"""
    broken: object
    kinds: tuple[str, ...]
    """op kinds in graphs that must expose the fault, or another strategy"""


def fault(family, what, where, kinds):
    """Register a faulty replacement for the function at `where`; it gets the original as its first argument."""

    def register(function):
        FAULTS.append(Fault(family, what, where, function, kinds))
        return function

    return register


@contextmanager
def broken(found: Fault):
    """Inject the fault, and restore the original afterwards."""
    owner, name = found.where
    rule = isinstance(owner, str)
    owner = KINDS[owner] if rule else owner
    right, own = getattr(owner, name), name in vars(owner)

    def wrong(*args, **kwargs):
        if rule:  # rules are called with the record and its op
            kind, *args = args
            return found.broken(lambda *args: right(kind, *args), *args, **kwargs)
        return found.broken(right, *args, **kwargs)

    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, right) if own else delattr(owner, name)


def extents_without_last(op):
    extents = dict(list(op.kind.extents.items())[:-1])
    return prod(extents.values(), start=ONE)


# -- FLOPs ---------------------------------------------------------------------------------------------------------

CONTRACTIONS = "FLOPs of contractions"


@fault(CONTRACTIONS, "a multiply and an add count as one", ("einsum", "flops"), ("einsum",))
def _(right, op):
    found = right(op)
    return Flops(found.matmul / 2, found.full / 2, found.pointwise)


@fault(CONTRACTIONS, "the last axis is left out", ("einsum", "flops"), ("einsum",))
def _(right, op):
    points = extents_without_last(op)
    return Flops(matmul=2 * points, full=2 * points) if right(op).matmul else Flops(pointwise=points)


@fault(CONTRACTIONS, "a domain is ignored", ("einsum", "flops"), ("einsum",))
def _(right, op):
    found = right(op)
    return Flops(found.full, found.full, found.pointwise)


ELEMENTWISE = "FLOPs of elementwise functions"


@fault(ELEMENTWISE, "elements of the first operand instead of the result", ("pointwise", "flops"), ("pointwise",))
def _(right, op):
    function, count = op.kind.function, access_footprint.points(op.operands[0])
    return Flops(pointwise=count * function.flops, transcendental=count * function.transcendentals)


@fault(ELEMENTWISE, "transcendentals are left out", ("pointwise", "flops"), ("pointwise",))
def _(right, op):
    return Flops(pointwise=right(op).pointwise)


@fault(ELEMENTWISE, "a domain is ignored", ("pointwise", "flops"), ("einsum",))
def _(right, op):
    function, count = op.kind.function, op.results[0].numel
    return Flops(pointwise=count * function.flops, transcendental=count * function.transcendentals)


REDUCTIONS = "FLOPs of reductions, windows and updates"


@fault(REDUCTIONS, "elements of the result instead of those that are reduced", ("reduce", "flops"), ("reduce",))
def _(right, op):
    return Flops(pointwise=op.results[0].numel)


@fault(REDUCTIONS, "the window is left out", ("pool", "flops"), ("pool",))
def _(right, op):
    return Flops(pointwise=op.results[0].numel)


@fault(REDUCTIONS, "elements of the target instead of the updates", ("scatter", "flops"), ("scatter",))
def _(right, op):
    return Flops(pointwise=op.operands[0].numel) if right(op).pointwise else Flops()


# -- bytes ---------------------------------------------------------------------------------------------------------

WHOLE = "bytes of operands read whole"


@fault(WHOLE, "an expanded operand is read at its full size", ("pointwise", "reads"), ("pointwise",))
def _(right, op):
    return tuple(t.numel for t in op.operands)


@fault(WHOLE, "an operand that stands twice is read twice", (rules, "once"), ("pointwise", "einsum"))
def _(right, op, amounts):
    return tuple(amounts)


@fault(WHOLE, "the last operand is left out", ("concat", "reads"), ("concat",))
def _(right, op):
    return (*right(op)[:-1], ZERO)


INDEXED = "bytes of operands reached by an index"


@fault(INDEXED, "padding is read", (rules, "_reached_positions"), ("pool", "einsum"))
def _(right, index, extents, size):
    return right(index, extents, size) - 2 * index.offset


@fault(INDEXED, "an axis is missing", ("einsum", "reads"), ("einsum",))
def _(right, op):
    first = op.operands[0]
    return (right(op)[0] / first.sizes[0] if first.ndim else ONE, *right(op)[1:])


@fault(INDEXED, "keys that no query sees are read", (domain.Domain, "keys_used"), ("einsum", "kernel"))
def _(right, self, queries, keys, *known):
    return keys


LOOKUPS = "bytes of lookups and updates"


@fault(LOOKUPS, "the whole table is read", ("gather", "reads"), ("gather",))
def _(right, op):
    return op.operands[0].numel, right(op)[1]


@fault(LOOKUPS, "the indices are left out", ("gather", "reads"), ("gather",))
def _(right, op):
    return right(op)[0], ZERO


@fault(LOOKUPS, "an update in place writes the whole target", ("scatter", "writes"), ("scatter",))
def _(right, op):
    return (op.operands[0].touched,)


COPIES = "bytes of views and copies"


@fault(COPIES, "a view is written", ("rearrange", "writes"), ("rearrange",))
def _(right, op):
    return rules.all_results(op.kind, op)


@fault(COPIES, "a copy is read alone", ("rearrange", "writes"), ("rearrange",))
def _(right, op):
    return (ZERO,)


@fault(COPIES, "a slice is read", ("slice", "reads"), ("slice",))
def _(right, op):
    return (op.results[0].touched,)


RESULTS = "bytes of results"


@fault(RESULTS, "the second result is left out", ("dropout", "writes"), ("dropout",))
def _(right, op):
    return right(op)[:1]


@fault(RESULTS, "an axis is missing", ("reduce", "writes"), ("reduce",))
def _(right, op):
    first = op.results[0]
    return (first.numel / first.sizes[0],) if first.ndim else right(op)


@fault(RESULTS, "a factor of two", ("einsum", "writes"), ("einsum",))
def _(right, op):
    return tuple(2 * p for p in right(op))


KERNELS = "bytes of kernels"


@fault(KERNELS, "an operand is read whole where a part is read", ("kernel", "reads"), ("kernel",))
def _(right, op):
    return rules.whole(op.kind, op)


@fault(KERNELS, "what is passed inside reaches memory", (costs, "executions"), ("kernel",))
def _(right, graph, times=ONE, *, moves=True):
    yield from ((op, n, True) for op, n, _ in right(graph, times, moves=moves))


@fault(KERNELS, "the last operand is left out", ("kernel", "reads"), ("kernel",))
def _(right, op):
    return (*right(op)[:-1], ZERO)


FUSED = "the fused bound"


@fault(FUSED, "an output counts twice", (traffic, "_outputs"), ("pointwise",))
def _(right, graph):
    yield from list(right(graph)) * 2


@fault(FUSED, "a table is read whole", (traffic, "elements_read"), ("gather",))
def _(right, graph, tensor):
    return tensor.storage.elements


@fault(FUSED, "elements take eight bytes", (traffic.Tensor, "element_bytes"), ("pointwise",))
def _(right, self):
    return polynomial.poly(8)


# -- domains -------------------------------------------------------------------------------------------------------

DOMAINS = "domains"


@fault(DOMAINS, "the diagonal is left out", (domain, "_triangle"), ("einsum", "kernel"))
def _(right, n):
    return n * (n - 1) / 2


@fault(DOMAINS, "a window is one wider", (domain.Domain, "_rows"), ("einsum", "kernel"))
def _(right, self, n):
    wider = domain.Domain(self.causal, None if self.window is None else self.window + 1)
    return right(wider, n)


@fault(DOMAINS, "queries are aligned at the first keys", (domain.Domain, "points"), ("einsum", "kernel"))
def _(right, self, queries, keys, *known):
    return right(self, queries, queries) if self.causal else right(self, queries, keys)


# -- layout --------------------------------------------------------------------------------------------------------

LAYOUT = "views and copies"


@fault(LAYOUT, "every reshape is a copy", (layout_ops, "view"), ("rearrange",))
def _(right, sizes, strides, new):
    return right(sizes, strides, new) if sizes == new else None


@fault(LAYOUT, "every reshape is a view", (layout_ops, "view"), ("rearrange",))
def _(right, sizes, strides, new):
    return right(sizes, strides, new) or _dense(new)


def _dense(sizes):
    out = [ONE]
    for n in reversed(sizes[1:]):
        out.append(out[-1] * n)
    return tuple(reversed(out)) if sizes else ()


@fault(LAYOUT, "elementwise results forget the order of the axes", (pointwise_ops, "elementwise"), ("rearrange",))
def _(right, sizes, operands):
    return _dense(sizes)


# -- memory --------------------------------------------------------------------------------------------------------

LIFETIMES = "lifetimes"


@fault(LIFETIMES, "the last read does not keep a storage alive", (memory, "play"), ("pointwise", "einsum"))
def _(right, graph, *args):
    program = right(graph, *args)
    for life in program.lives:
        life.dies = life.born if life.dies is not None else None
    return program


@fault(LIFETIMES, "outputs die like anything else", (memory, "play"), ("pointwise",))
def _(right, graph, *args):
    program = right(graph, *args)
    for life in program.lives:
        life.dies = life.born if life.role == "output" else life.dies
    return program


@fault(LIFETIMES, "a result is born after its op has run", (memory, "play"), ("pointwise",))
def _(right, graph, *args):
    program = right(graph, *args)
    for life in program.lives:
        if life.born is not None and (life.dies is None or life.dies > life.born):
            life.born = min(life.born + 1, len(program.steps) - 1)
    return program


@fault(LIFETIMES, "workspace is left out", (liveness, "Step"), ("kernel", "opaque"))
def _(right, op, where, workspace):
    return right(op, where, ZERO)


# -- loops ---------------------------------------------------------------------------------------------------------

LOOPS = "loops"


@fault(LOOPS, "the body counts once", (costs, "situations"), ("repeat",))
def _(right, op):
    return [(aliases, ONE) for aliases, _ in right(op)[:1]]


@fault(LOOPS, "parameters of a body count once", (params, "repeated_bodies"), ("repeat",))
def _(right, graph, times=ONE):
    yield from ((g, ONE) for g, _ in right(graph, times))


@fault(LOOPS, "two iterations stand for all", (liveness, "copies_needed"), ("repeat",))
def _(right, op):
    return 2


@fault(LOOPS, "a tensor under two names is read twice in the first iteration", (costs, "situations"), ("nested",))
def _(right, loop):
    return [(MappingProxyType({}), loop.count)]


# -- training ------------------------------------------------------------------------------------------------------

TRAINING = "training"
LOSSES = ("training",)


@fault(TRAINING, "a second contribution to a gradient is dropped", (reverse_mode.ReverseMode, "add"), LOSSES)
def _(right, self, before, grad):
    return before


@fault(
    TRAINING, "storages of iterations that are not played count once too few", (liveness, "UnplayedIterations"), LOSSES
)
def _(right, start, depth):
    rest = right(start, depth)
    family = rest.family

    def fewer(*args, **kwargs):
        count = rest.count
        rest.count = count - 1 if count else count
        try:
            return family(*args, **kwargs)
        finally:
            rest.count = count

    rest.family = fewer
    return rest


@fault(TRAINING, "the first term of a sum is added to something", (costs, "_iterations"), LOSSES)
def _(right, op, times, moves, undefined):
    yield from right(op, times, moves, {})


# -- algebra -------------------------------------------------------------------------------------------------------

ALGEBRA = "the algebra"


@fault(ALGEBRA, "pruning drops the last candidate", (memory, "prune"), ("pointwise", "einsum"))
def _(right, candidates, *args, **kwargs):
    found = right(candidates, *args, **kwargs)
    return found[:-1] if len(found) > 1 else found


@fault(ALGEBRA, "a sum drops a term", (costs, "total"), ("pointwise", "einsum"))
def _(right, parts):
    kept = list(parts)
    return right(kept[:-1] if len(kept) > 1 else kept)


@fault(ALGEBRA, "binding forgets a symbol", (polynomial.Poly, "bind"), ("pointwise", "einsum"))
def _(right, self, values):
    found = right(self, values)
    return found if found == self or not self.names() <= values.keys() else found + 1
