"""From what was matched to a graph with a loop for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...algebra.polynomial import Poly
from ...errors import GraphError
from ...graph.changes import carry_facts
from ...graph.graph import Graph
from ...graph.op import Bodied, Op
from ...graph.placement import Placement, Sharding
from ...graph.scopes import iterations_of, opened
from ...graph.tensor import Tensor
from ...ops.blocks import Repeat
from ...ops.keep import Keep
from ...ops.pieces import Absent
from ..rewrite import Rewriter
from .around import Around, Outer, once
from .equal import layout
from .match import Match, Plan
from .values import After, Before, Family, Left, Made, Member, Owned, Shared, Value, View

__all__ = ["Folder"]


class Folder(Rewriter):
    """Copies a graph, with loops of so many blocks in place of runs, and what the rest of the graph reads of them."""

    keeps_suffixes = False

    def __init__(self, match: Match, around: Around, count: Poly) -> None:
        super().__init__()
        self.match, self.around, self.count = match, around, count
        self.families: dict[Family, Tensor] = {}
        """What stands for a family: one tensor, a storage for each block."""
        self.ends: dict[After, Tensor] = {}
        self.views: dict[View, Tensor] = {}
        self.first = {match.ops[plan.run.starts[0]]: plan for plan in match.plans}
        self.inside = self._inside()

    def _inside(self) -> dict[Owned, Plan]:
        """Return what is declared in the body of a loop: what nothing else reads."""
        readers: dict[Owned, list[Plan | None]] = {f: [] for f in dict.fromkeys(self.match.owners.values())}
        for plan in self.match.plans:
            for family in plan.slices:
                if isinstance(family, Owned):
                    readers[family].append(plan)
        around = [*self.around.reads.values(), self.around.outputs, self.around.gradients]
        for value in (v for values in around for v in values):
            if isinstance(value, Member) and isinstance(value.family, Owned):
                readers[value.family].append(None)
        home = {f: (found[0] if found else self.match.plans[0]) for f, found in readers.items() if len(found) < 2}
        return {f: plan for f, plan in home.items() if plan is not None and not f.members[0].storage.pieces}

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the new graph."""
        self.new = new = Graph(old.name if name is None else name, dtype=old.dtype)
        # a default of the count is of the loop that was here before, whatever its length
        defaults = {name: size for name, size in old.defaults.items() if name not in self.count.names()}
        layers = frozenset(scope for scope in old.layers if not iterations_of(scope))
        carry_facts(old, new, defaults=defaults, layers=layers)
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(self.outer(v) for v in self.around.outputs))
            new.gradients = {self.outer(t): self.outer(g) for t, g in self.around.gradients.items()}
        if old.sharding is not None:
            new.sharding = self.laid(old, old.sharding)
        return new.freeze()

    def laid(self, old: Graph, sharding: Sharding) -> Sharding:
        """Return where the tensors of the new graph lie: as those of each block, whose number is an axis of its own."""
        for family in dict.fromkeys(self.match.owners.values()):
            first, *others = family.members
            other = next((t for t in others if sharding.places[t.name] != sharding.places[first.name]), None)
            if other is not None:
                raise GraphError(
                    f"fold of graph {old.name!r}: {first.name!r} lies as {sharding.places[first.name]}, {other.name!r} "
                    f"as {sharding.places[other.name]}: expected blocks that lie alike on the mesh"
                )

        def place(t: Tensor, at: Placement) -> Placement:
            return at.with_dims([*[()] * (t.ndim - len(at.dims)), *at.dims])

        return replace(
            sharding,
            places={made.name: place(made, sharding.places[t.name]) for made, t in self.origins.items()},
            outputs=tuple(place(t, at) for t, at in zip(self.new.outputs, sharding.outputs, strict=True)),
            gradients={t.name: place(t, sharding.gradients[self.origins[t].name]) for t in self.new.gradients},
        )

    # -- outside of loops ----------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; those of which each block has one are declared together, here or in the body of a loop."""
        family = self.match.owners.get(old)
        if old.graph.parent is not None:
            return self.declare(old, new, old.sizes, old.storage.pieces)
        if family is None:
            return super().source(old, new, suffix)
        if family not in self.inside:
            self.owned(family, new)
        return None

    def owned(self, family: Family, new: Graph) -> Tensor:
        """Return what stands for what each block has, declared where the first of them or a loop needs it."""
        if isinstance(family, Owned) and family not in self.families:
            old = family.members[0]
            self.families[family] = self.declare(old, new, (self.count, *old.sizes), old.storage.pieces + 1)
        return self.families[family]

    def declare(self, old: Tensor, new: Graph, sizes: Sequence[Poly], pieces: int) -> Tensor:
        """Add what the blocks have of their own."""
        made = Tensor(
            new, new.unique(self.match.labels.plain(old.name)), tuple(sizes), old.dtype,
            role=old.role, requires_grad=old.requires_grad, pieces=pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(made)
        self.origins[made] = old
        return made

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op of a body, with a name that has no number of a block."""
        return self.again(op, [self.tensors[t] for t in op.operands], new, self.match.labels.plain(op.name))

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op: of the blocks, a loop where the first of them begins."""
        if op.graph.parent is not None:
            super().emit(op, new, suffix)
            return
        if op in self.first:
            self.loop(self.first[op], new)
        if op not in self.match.places:
            self.outside(op, new)

    def outer(self, value: Outer) -> Tensor:
        """Return the tensor for what is read outside."""
        if isinstance(value, After):
            return self.ends[value]
        if isinstance(value, Member):
            return self.owned(value.family, self.new)
        if isinstance(value, Shared):
            found: Tensor = self.tensors[value.tensor]
            return found
        if value not in self.views:
            assert isinstance(value.of, Shared | View)
            self.views[value] = self.viewed(value, self.outer(value.of), self.new)
        return self.views[value]

    def viewed(self, value: View, of: Tensor, new: Graph, phase: str = "forward") -> Tensor:
        """Make a view again."""
        plan = self.match.plans[value.run]
        op = self.match.ops[plan.run.starts[-1] + value.at]
        made = self.again(op, [of], new, self.match.labels.plain(op.name))
        made.phase = phase
        return made.results[0]

    def outside(self, op: Op, new: Graph) -> None:
        """Copy an op from outside of the blocks."""
        self.again(op, [self.outer(v) for v in once(self.around.reads[op])], new, op.name)

    def again(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        kind = op.kind
        if isinstance(kind, Bodied):
            kind = replace(kind, body=self.body(kind.body, new, ""))
        made = self.add(op, kind, operands, new, name)
        made.scope = self.match.labels.plain(op.scope)
        made.call = op.call if len(operands) == len(op.operands) else None
        for t, copy in zip(op.results, made.results, strict=True):
            held = isinstance(kind, Keep) and not op.graph.out_degree(t)  # something of all turns, maybe
            if not held and self.laid_out(t) != self.laid_out(copy):
                raise GraphError(
                    f"fold: {copy!r} of {made.name!r} lies otherwise in memory than {t!r}, expected the same"
                )
        return made

    def laid_out(self, t: Tensor) -> tuple[object, ...]:
        """Return how a tensor lies in memory, as a copy has to."""
        return layout(t)

    # -- loops ---------------------------------------------------------------------------------------------------

    def name_of(self, plan: Plan) -> str:
        """Return a name for the loop of a run."""
        return self.match.labels.scope or "blocks"  # those of a module that is itself a list

    def loop(self, plan: Plan, new: Graph) -> None:
        """Add the loop for a run."""
        scope = self.name_of(plan)
        body = new.start_body(scope.rpartition("/")[2], fused=False)
        inner = _Inner(self, plan, body)
        inner.fill_body()
        operands = [self.start(plan, c, new) for c in inner.carries] + [self.owned(f, new) for f in inner.slices]
        kind = Repeat(
            body=body, count=self.count, carries=len(inner.carries), xs=len(inner.slices), saved=len(plan.saved),
            reverse=plan.run.step < 0,
        )  # fmt: skip
        name = scope if plan.run.phase == "forward" else f"{scope}.{plan.run.phase}"
        op = new.add_op(kind, (*operands, *body.captured), name, self.match.ops[plan.run.starts[0]].phase)
        body.owner = op
        results = iter(op.results)
        self.ends |= {After(plan.number, c): next(results) for c in inner.carries}
        self.families |= {Left(plan.number, v): next(results) for v in plan.saved}

    def start(self, plan: Plan, carry: Before, new: Graph) -> Tensor:
        """Return what a carry starts from: nothing where no turn reads that."""
        t = carry.starts[0]
        if t is not None:
            return self.outer(self.around.starts[plan.number, t])
        like = self.match.typical(plan, carry)
        nothing = Absent(sizes=like.sizes, dtype=like.dtype, pieces=like.storage.pieces)
        return new.add_op(nothing, [], "absent", self.match.ops[plan.run.starts[0]].phase).results[0]


class _Inner:
    """The body of one loop."""

    def __init__(self, folder: Folder, plan: Plan, body: Graph) -> None:
        self.folder, self.plan, self.body = folder, plan, body
        self.values: dict[Value, Tensor] = {}
        self.carries = list(plan.carries)
        self.slices = [f for f in plan.slices if not (isinstance(f, Owned) and folder.inside.get(f) is plan)]
        match = folder.match
        for i, value in enumerate(self.carries):
            self.values[value] = self.formal(match.typical(plan, value), f"carry{i}")
        for i, family in enumerate(self.slices):
            self.values[Member(family)] = self.formal(match.typical(plan, family), f"x{i}")
        for owned, home in folder.inside.items():
            if home is plan:
                t = owned.members[-1]
                self.values[Member(owned)] = folder.declare(t, body, t.sizes, 0)

    def formal(self, like: Tensor, name: str) -> Tensor:
        """Add an input of the body that lies in memory as a tensor of the blocks does."""
        made = self.body.formal(like, f"{self.body.name}.{name}", like.sizes, like.strides)
        made.offset, made.domain = like.offset, like.domain
        return made

    def fill_body(self) -> None:
        """Add the ops of one turn, and what the turns hand on and leave behind."""
        match, plan = self.folder.match, self.plan
        start = plan.run.starts[-1]
        for at, op in enumerate(match.ops[start : start + plan.run.length]):
            operands = [self.tensor(v) for v in plan.reads[at]]
            made = self.folder.again(op, operands, self.body, match.labels.plain(op.name))
            self.values |= {Made(at, i): t for i, t in enumerate(made.results)}
        handed = [self.tensor(c.nearer) for c in self.carries]
        self.body.outputs += [*handed, *map(self.tensor, plan.saved)]

    def tensor(self, value: Value) -> Tensor:
        """Return what stands for a value."""
        if value not in self.values:
            if isinstance(value, Shared):
                self.values[value] = self.body.adopt(self.folder.tensors[value.tensor])
            elif isinstance(value, View):
                of, phase = self.tensor(value.of), self.plan.run.phase
                self.values[value] = self.folder.viewed(value, of, self.body, phase)
            else:
                raise AssertionError(value)
        return self.values[value]
