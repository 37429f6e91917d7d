"""Tensors of one rank: where each lies, what takes it elsewhere, and what is written in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.placement import Mesh, Placement
from ...graph.tensor import Storage, Tensor
from ...ops.collectives import Collective
from ...ops.fill import Fill
from ...ops.fresh import Fresh
from ...ops.pieces import Absent
from ..rewrite import Rewriter
from .convert import steps
from .kernels import Pieces
from .rows import Rows
from .targets import targets

__all__ = ["Later", "Placed", "Stated"]


@dataclass(frozen=True)
class Stated:
    """What is asked for: where sources and gradients lie, and what is gathered for its readers."""

    mesh: Mesh
    places: Mapping[Tensor, Placement]
    """Of sources of the old graph, and of other tensors whose placement is stated."""
    gradients: Mapping[Tensor, Placement]
    """Of gradients of the old graph."""
    staying: Mapping[Tensor, frozenset[str]]
    """Axes of the mesh that split what a gradient is of, while an op reads it."""
    gathered: frozenset[str]
    """Axes of the mesh along which parameters are put together where an op reads them."""


class Later:
    """What an op without operands makes, before it is known where a reader wants it."""

    def __init__(self, op: Op) -> None:
        self.op = op
        value = op.kind.value if isinstance(op.kind, Fill) else None
        self.zero = isinstance(op.kind, Absent) or value == 0


class Placed(Rewriter):
    """Copies tensors with the sizes of one rank; `at` says where each new one lies."""

    replays = False

    def __init__(self, stated: Stated) -> None:
        super().__init__()
        self.stated, self.mesh = stated, stated.mesh
        self.at: dict[Tensor, Placement] = {}
        self.params: set[Tensor] = set()
        """New tensors that are parameters, or stand for them."""
        self.copies: dict[tuple[Tensor, Placement, Graph, str], Tensor] = {}
        self.moved: list[str] = []
        """What was put together although nobody asked for it, in words."""
        self.wanted: dict[Tensor, Placement] = {}
        """Old tensors that are gradients, and where they are kept."""
        self.staying: dict[Tensor, frozenset[str]] = {}
        self.rows = Rows()
        """What of the new tensors is in an order of its rank."""
        self.carried: set[Storage] = set()
        """Storages that iterations hand on: the next one has what is written there as it is."""
        self.met_by: dict[Tensor, Placement] = {}
        """Old tensors that are carries of the next iteration, and where that has them."""
        self.piece: Pieces | None = None
        """The kernel that is being cut."""
        self.parts: dict[Storage, tuple[Tensor, Placement]] = {}
        """Storages that ranks have written their parts of: the last old tensor there, and where it should lie."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the graph of one rank."""
        self.wanted = targets(old, self.stated.gradients)
        self.staying = targets(old, self.stated.staying)
        return super().run(old, name)

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops, and put together what ranks have written in parts."""
        around, self.parts = self.parts, {}
        super().fill(old, new, suffix)
        for t, place in self.parts.values():
            self.put_together(t, place, new)
        self.parts = around
        if old.parent is None:
            for t in old.outputs:
                now = self.value(t, new)
                if now in self.rows.own or now in self.rows.ordered:
                    self.rows.refuse(now)
                self.tensors[t] = self.moved_to(
                    now, self.at[now].without(self.at[now].pending, self.mesh), new, "forward"
                )
            for g in old.gradients.values():
                self.tensors[g] = self.value(g, new)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Declare what a rank has of a source."""
        place = self.stated.places.get(old, Placement(((),) * old.ndim))
        tensor = Tensor(
            new, new.unique(old.name + suffix), place.local(old.sizes), old.dtype,
            role=old.role, requires_grad=old.requires_grad, pieces=old.storage.pieces,
        )  # fmt: skip
        new.add_node(tensor)
        self.at[tensor] = place
        if old.role == "param":
            self.params.add(tensor)
        return tensor

    def value(self, old: Tensor, new: Graph, want: Placement | None = None, phase: str = "forward") -> Tensor:
        """Return what stands for an old tensor, made now where it was not made yet, at the placement that is wanted."""
        found = self.tensors[old]
        if isinstance(found, Later):
            return self.made(found, old, new, want or Placement(((),) * old.ndim))
        return found if want is None else self.moved_to(found, want, new, phase)

    def here(self, new: Graph) -> Graph:
        """Return where ops go now: into the kernel that is being written, if there is one."""
        return new if self.piece is None else self.piece.graph()

    def made(self, later: Later, old: Tensor, new: Graph, want: Placement) -> Tensor:
        """Make what has no operands with the sizes of one rank."""
        if not later.zero:
            want = want.without(want.pending, self.mesh)
        kind = later.op.kind
        assert isinstance(kind, Fresh)
        op = self.here(new).add_op(replace(kind, sizes=want.local(old.sizes)), [], later.op.name, later.op.phase)
        op.scope = later.op.scope
        self.at[op.results[0]] = want
        return op.results[0]

    def moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Return a tensor at another placement; what readers of the same phase have asked for is there already."""
        have = self.at[t]
        if have == want:
            return t
        key = (t, want, new, "" if t in self.params else phase)
        if key in self.copies:
            return self.copies[key]
        made, param = t, t in self.params
        self.rows.need_kept(t, have.dims, want.dims)
        for kind, after, name in steps(have, want, self.mesh):
            made = self.step(kind, made, name, new, phase)
            self.at[made] = after
        assert self.at[made] == want, f"{t!r}: {have} -> {self.at[made]}, expected {want}"
        self.rows.stands_for(made, t)
        if param:
            self.params.add(made)
        self.copies[key] = made
        return made

    def stands_for(self, made: Tensor, t: Tensor) -> None:
        """Note that a new tensor is another one elsewhere in the graph."""
        self.at[made] = self.at[t]
        if t in self.params:
            self.params.add(made)
        self.rows.stands_for(made, t)

    def step(self, kind: OpKind, t: Tensor, name: str, new: Graph, phase: str) -> Tensor:
        """Add an op that moves a tensor; a kernel is cut where ranks have to meet."""
        graph = new if self.piece is None else self.piece.outside()
        base = t.name.removesuffix(".in")
        op = graph.add_op(kind, [t], f"{base}.{name}", phase)
        op.scope = base.rpartition("/")[0]
        return op.results[0]

    def note_part(self, before: Tensor, written: Tensor, after: Tensor) -> None:
        """Note what is written in parts although every rank has it whole."""
        storage = written.storage
        if storage in self.parts:
            self.parts[storage] = after, self.parts[storage][1]
            return
        found = self.tensors[before]
        own = storage.role == "activation" or storage in self.carried
        if isinstance(found, Tensor) and not own and self.at[written] != self.at[found]:
            self.parts[storage] = after, self.at[found]

    def put_together(self, old: Tensor, place: Placement, new: Graph) -> None:
        """Let ranks exchange their parts of what each of them keeps whole, in place."""
        t = self.tensors[old]
        for axis in reversed(list(self.mesh)):
            at = self.at[t]
            dim = at.dim(axis)
            if dim is None or place.dim(axis) is not None:
                continue
            kind = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=dim, inplace=True)
            assert old.producer is not None
            op = new.add_op(kind, [t], f"{t.name}.all_gather", old.producer.phase)
            op.scope = old.producer.scope
            (t,) = op.results
            self.at[t] = at.without([axis], self.mesh)
        self.tensors[old] = t
