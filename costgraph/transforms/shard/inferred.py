"""Column and row parallelism, inferred from pairs of products with elementwise ops or attention heads between them.

A weight is split along the axis that its product makes where everything between it and the next products keeps that
axis, and these products sum it: column parallelism of the first, row parallelism of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from ...algebra.polynomial import ONE, Poly
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.placement import Split
from ...graph.strides import is_integral
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.keep import Keep
from ...ops.moves import Slice
from .names import is_known

__all__ = ["inferred", "replicated", "with_states"]

#: Weights that tensor parallelism keeps whole in any system: routers, and projections to a latent that is normalized.
_WHOLE = (
    "*router/weight",
    "*router/gate/weight",
    "*mlp/gate/weight",
    "*_a/weight",
    "*q_a_proj/weight",
    "*kv_a_proj_with_mqa/weight",
)

#: A tensor, and one of its axes.
_Axis = tuple[Tensor, int]


def replicated(graph: Graph, split: Collection[str], patterns: Collection[str]) -> list[str]:
    """Return the weight matrices that stay replicated and have no known name.

    `split` are names of split weights, `patterns` match weights with a stated placement. A projection to or from one
    feature, such as a gate or a value head, is a vector.
    """
    matrices = [t.name for t in _products(_Flat(graph)) if ONE not in t.sizes[t.storage.pieces :]]
    names = [n for n in matrices if n not in split and not is_known(n)]
    return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in (*_WHOLE, *patterns))]


def _products(flat: _Flat) -> dict[Tensor, tuple[Op, int]]:
    """Return the weight matrices, each with its product and its position among the operands."""
    found: dict[Tensor, tuple[Op, int]] = {}
    for op in flat.ops:
        for i, t in enumerate(op.operands):
            source = flat.source(t)
            matrix = isinstance(op.kind, Einsum) and source.role == "param" and source.ndim - source.storage.pieces == 2
            if matrix and len(op.operands) == 2:
                found.setdefault(source, (op, i))
    return found


def inferred(graph: Graph, placed: Collection[str], ranks: Poly) -> Iterator[tuple[str, str]]:
    """Yield placements of weights and biases without a known name, one pair of products after another."""
    flat, taken = _Flat(graph), {*placed}
    for weight, (op, i) in _products(flat).items():
        rule = op.kind.placed(op)
        if weight.name in taken or is_known(weight.name) or rule is None:
            continue
        labels = rule.operands[i] or ()
        kept = {n for result in rule.results for dim in result for n in dim}
        made = [n for names in labels for n in names if n in kept]
        group = _Group(flat, ranks)
        if len(made) == 1 and group.spread(op, rule, made[0]) and group.summed and taken.isdisjoint(group.names()):
            yield from group.placements()
            taken |= group.names()


class _Flat:
    """The ops of the forward pass, kernels opened, and the tensors that are aliases of each other."""

    def __init__(self, graph: Graph) -> None:
        self.ops: list[Op] = []
        self.same: dict[Tensor, Tensor] = {}
        """The outer tensor of a formal, or the inner tensor of a result."""
        self.users: dict[Tensor, list[Op]] = {}
        self.params: set[Tensor] = set()
        """Parameters that loops read."""
        self.ends: set[Tensor] = set()
        """Inputs, outputs and carries of graphs and loops."""
        for g in graph.bodies():
            if not g.fused:
                loop = None if g.owner is None else g.owner.loop
                left = g.outputs if loop is None else [*loop.nexts, *loop.ys]  # what is saved lies as it is
                self.ends |= {*left, *(f for f in g.formals if f.role != "param")}
                self.note(g)
        for op in self.ops:
            for t in dict.fromkeys(map(self.root, op.operands)):
                self.users.setdefault(t, []).append(op)
        self.ends = {*map(self.root, self.ends - self.params)}
        self.outputs = {*map(self.root, graph.outputs)} - {*self.users}
        self.by = {self.root(t): op for op in self.ops for t in op.results}

    def note(self, graph: Graph) -> None:
        for op in graph.ops:
            if op.loop is not None:
                loop = op.loop
                self.ends |= {*loop.starts, *op.results}
                pairs = [*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True)]
                found = {f: t for f, t in pairs if self.root(t).role == "param"}
                self.same |= found
                self.params |= {*found}
                continue
            if isinstance(op.kind, Slice) and op.results[0].role == "param" and op.results[0].storage.pieces:
                self.same[op.results[0]] = op.operands[0]  # some layers of a stack
                continue
            if op.phase != "forward" or isinstance(op.kind, Keep):
                continue
            if isinstance(op.kind, Kernel):
                body = op.kind.body
                self.same |= dict(zip(body.formals, op.operands, strict=False))
                self.same |= dict(zip(op.results, body.outputs, strict=False))
                self.note(body)
            else:
                self.ops.append(op)

    def root(self, t: Tensor) -> Tensor:
        while t in self.same:
            t = self.same[t]
        return t

    def source(self, t: Tensor) -> Tensor:
        """Return the parameter that a tensor is a view of, or itself."""
        t = self.root(t)
        while t.is_view and t.producer is not None and t.producer.operands:
            t = self.root(t.producer.operands[0])
        return t


class _Group:
    """Axes that must be sharded together."""

    def __init__(self, flat: _Flat, ranks: Poly) -> None:
        self.flat, self.ranks = flat, ranks
        self.axes: set[_Axis] = set()
        self.blocks: dict[Tensor, Poly] = {}
        """Tensors that are cut into slices of equal size, and the number of slices."""
        self.summed = False
        """Whether a product sums the axis."""
        self.left: list[Tensor] = []

    def names(self) -> set[str]:
        return {t.name for t, _ in self.axes if t.role == "param" and t.producer is None}

    def spread(self, op: Op, rule: Split, name: str) -> bool:
        """Shard a named axis of an op and every axis tied to it; False where one cannot be sharded."""
        if not self.split(op, rule, name):
            return False
        done: set[tuple[Op, int, _Axis]] = set()
        while self.left:
            t = self.left.pop()
            if t in self.flat.outputs:  # logits stay split, as those of a known head
                self.summed = True
                continue
            if t in self.flat.ends:
                return False
            near = [*self.flat.users.get(t, ()), *([self.flat.by[t]] if t in self.flat.by else [])]
            if t.role != "param" and t not in self.flat.by:
                return False
            for axis in [a for a in self.axes if a[0] is t]:
                for o in near:
                    if (o, 0, axis) not in done:
                        done.add((o, 0, axis))
                        if not self.through(o, t, axis[1]):
                            return False
        return True

    def through(self, op: Op, t: Tensor, dim: int) -> bool:
        """Shard an op along an axis of one of its tensors."""
        kind, rule = op.kind, op.kind.placed(op)
        if isinstance(kind, Slice) and kind.axis == dim:
            whole, part = op.operands[0].sizes[dim], op.results[0].sizes[dim]
            if not is_integral(whole / part) or not is_integral(kind.start / part):
                return False
            self.blocks[self.flat.root(op.operands[0])] = whole / part
            return self.add(op.operands[0], dim) and self.add(op.results[0], dim)
        if rule is None:
            return False
        tensors = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
        names = {
            name
            for o, labels in tensors
            if labels is not None and self.flat.root(o) is t and dim < len(labels)
            for name in [next((n for n in labels[dim] if rule.extents[n] != ONE), None)]
        }
        names.discard(None)
        return len(names) == 1 and self.split(op, rule, str(names.pop()))

    def split(self, op: Op, rule: Split, name: str) -> bool:
        """Shard a named axis of an op in all its tensors, as the outermost factor."""
        if name in rule.whole or any(name in dim for dim in (rule.fixed or ())):
            return False
        tensors = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
        made = any(name in dim for labels in rule.results for dim in labels)
        if not made:
            reads = [self.flat.source(t).role for t in op.operands]
            if not isinstance(op.kind, Einsum) or "param" not in reads:
                return False
            self.summed = True
        for t, labels in tensors:
            for i, dim in enumerate(labels or ()):
                if name in dim:
                    if next((n for n in dim if rule.extents[n] != ONE), None) != name or not self.divides(
                        rule.extents[name]
                    ):
                        return False
                    if not self.add(t, i):
                        return False
        return True

    def divides(self, size: Poly) -> bool:
        part = (size / self.ranks).constant
        return part is None or part == int(part)

    def add(self, t: Tensor, dim: int) -> bool:
        t = self.flat.root(t)
        if (t, dim) in self.axes:
            return True
        if any(o is t for o, _ in self.axes):  # two axes of one tensor
            return False
        self.axes.add((t, dim))
        self.left.append(t)
        return True

    def placements(self) -> Iterator[tuple[str, str]]:
        """Yield placements; a parameter that is cut into equal slices is sharded block by block."""
        blocks = {t.sizes[d]: n for t, n in self.blocks.items() for o, d in self.axes if o is t}
        params = [a for a in self.axes if a[0].role == "param" and a[0].producer is None]
        for t, dim in sorted(params, key=lambda a: a[0].name):
            words = [f"a{i}" for i in range(t.ndim - t.storage.pieces)]
            count = blocks.get(t.sizes[dim + t.storage.pieces])  # axes of a slice of a stack
            words[dim] = f"(a{dim} tp)" if count is None or count == ONE else f"({count} a{dim} tp)"
            yield t.name, " ".join(words)


def with_states(graph: Graph, split: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield placements of parameters and of gradients and state with their shape."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    sizes = {t.name: t.sizes[t.storage.pieces :] for t in sources if t.name in split}
    for t in sources:
        of = t.name.rpartition(".")[0] if t.role in ("state", "gradient") else t.name
        if of in split and sizes.get(of) == t.sizes[t.storage.pieces :]:
            yield t.name, split[of]
