"""SPMD partitioner: build the per-rank graph and insert resharding collectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Any

from ...algebra.polynomial import ONE, Poly, poly
from ...algebra.symbols import is_name, shown
from ...errors import CostGraphError, GraphError, PatternError, ShapeError, UnsupportedError
from ...ir.graph import (
    Factors,
    Graph,
    Loop,
    Mesh,
    Op,
    Placement,
    Sharding,
    Split,
    Tensor,
    is_pass,
    need_flag,
    positive,
    tidy,
)
from ...ir.strides import contiguous
from ...notation.validation import Rule
from ...ops.collectives import need_of_all
from ...ops.elementwise import Pointwise
from ...ops.fill import DenseFactory
from ...ops.grouped import GroupedMatmul, GroupedOuter
from ...ops.index import Scatter
from ...ops.layout import Expand, Rearrange, Slice
from ...ops.loops import Empty, Kernel, Stacked
from ...ops.updates import ZeroGrad
from .choice import Choice, PlacedOperand, choose, of_keys, of_rank, queries, restricted
from .cutting import Cutting
from .fsdp_policy import FullyShard
from .grad_reduction import Buckets, PeeledLastMicroBatch, in_buckets
from .kernels import before, common
from .partial_sums import added, adds, becoming, late, made_of, pending_of, targets
from .placed_tensors import RequestedPlacements, UnplacedSource, WiderError, in_rings, repeated

__all__ = [
    "Sharder",
    "groups",
    "mesh",
    "shard",
]


# -- partitioner -------------------------------------------------------------------------------------------------------

#: Kinds whose result is the parameter they read, in another form.
_SAME = (Rearrange, Slice, Pointwise)


class Sharder(Cutting):
    """Copies ops with local sizes, and redistributes operands to the placements that sharding rules require."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the per-rank graph."""
        self.own = made_of(old, adds, _SAME)  # sums over tokens: their placement is that of the weight
        return super().run(old, name)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add the local form of an op, and redistribute gradients to their placements."""
        inside = self.piece is not None
        if not inside:
            if self.put_off(op):
                self.after(op, new)
                return
            self.before(op, new)
        # a stack is allocated before its slices are written
        if isinstance(op.kind, Empty) or (op.results[:1] and op.results[0] in self.stated.stacks):
            self.stack(op, new)
        elif isinstance(op.kind, DenseFactory) or self.is_expanded(op):
            self.tensors[op.results[0]] = UnplacedSource(op)
        elif self.narrow(op):
            pass
        elif isinstance(op.kind, Stacked):
            self.stacked(op, new)
        elif op.loop is not None:
            self.loop(op, new)
        elif isinstance(op.kind, Kernel):
            self.kernel(op, new)
        else:
            self.plain(op, new)
        # gradients accumulated over micro-batches are reduced after the loop
        behind = op.loop is not None and is_pass(op.loop.body)
        phase = "backward" if behind else op.phase
        if behind:
            self.names |= {self.tensors[g]: f"{p.name}.grad" for p, g in op.graph.gradients.items() if g in op.results}
        for t in op.results:
            home = self.homes.get(self.tensors[t]) if self.piece is None else None
            if home is not None and t not in self.own:
                self.tensors[t] = self.moved_to(self.tensors[t], home, new, op.phase)
            if t not in self.wanted or isinstance(self.tensors[t], UnplacedSource) or self.unfinished(t):
                continue
            if self.goal(t) is not None:
                self.tensors[t] = self.settled(t, new, phase) if t in self.finals else self.tensors[t]
            elif behind or not self.defer(t):
                self.tensors[t] = self.slices_moved_to(self.tensors[t], self.wanted[t], new, phase)
                if t in self.finals and t.storage.bytes == t.numel * t.element_bytes():
                    self.reduced[t.storage] = self.tensors[t]
        if not inside:
            self.after(op, new)

    def is_expanded(self, op: Op) -> bool:
        """Whether an op expands a scalar, or maps an expanded scalar elementwise: each rank computes its part alone."""
        if self.piece is not None or op.kind.overwrites() or op.results[0] in self.wanted:
            return False
        given = [self.tensors[t] for t in op.operands]
        later = [isinstance(x, UnplacedSource) for x in given]
        if any(not d and (x.ndim or self.at[x].pending) for x, d in zip(given, later, strict=True)):
            return False
        if isinstance(op.kind, Expand):
            return op.operands[0].ndim == 0
        same = all(t.sizes == op.results[0].sizes for t in op.operands if t.ndim)
        return (
            isinstance(op.kind, Pointwise)
            and same
            and any(d and not isinstance(x.op.kind, DenseFactory) for x, d in zip(given, later, strict=True))
        )

    def plain(self, op: Op, new: Graph) -> None:
        """Add the local form of an op that has no body."""
        if self.is_summed(op):
            return
        self.note_term(op)
        if isinstance(op.kind, ZeroGrad):
            self.clear(op.operands[0], new, op.phase)
        axis = self.routed(op, new)
        before = [self.tensors[t] for t in op.operands]
        rule = op.kind.placed(op)
        if rule is not None:
            rule = self.rows.rule(op, restricted(rule, op, [g.at for g in self.given(op)]), before, axis)
        choice = self.whole(op) if rule is None else choose(rule, self.given(op), self.mesh, self.asked(op, rule))
        choice = self.rows.counted(op, choice)
        self.moved += [
            f"{op.name!r}: {op.operands[i].name!r} put together along {axis}: {why}"
            for i, axis, why in choice.moved
            if rule is None or axis not in queries(op, rule, choice)  # keys are all-gathered for its queries
        ]
        wanted = [*zip(op.operands, choice.operands, strict=True)]
        # deferred operands are created last: others may split the current kernel, and they belong behind the split
        order = sorted(range(len(wanted)), key=lambda i: isinstance(self.tensors[op.operands[i]], UnplacedSource))
        found = {i: self.value(wanted[i][0], new, wanted[i][1], op.phase) for i in order}
        operands = [found[i] for i in range(len(wanted))]
        for old, t in zip(op.operands, operands, strict=True):
            self.read.setdefault(old, []).append(t)
        if axis and isinstance(op.kind, GroupedMatmul | GroupedOuter):
            operands[2] = self.merge(self.rows.own[before[2]].routing, axis, new, op.phase).results[0]
        self.need_in_place(op, operands, choice.operands)
        kind = op.kind if rule is None else rule.local(choice.extents, choice.ranks)
        kind = kind if rule is None else of_rank(kind, rule, choice, self.mesh)
        made = self.in_product(op, kind, operands, new) or self.add(op, kind, operands, self.here(new))
        for t, place in zip(made.results, choice.results, strict=True):
            self.at[t] = place
        if rule is not None and op.phase == "backward":
            home = of_keys(rule, choice, [t in self.params for t in operands])
            self.homes |= {} if home is None else {made.results[0]: home}
        self.rows.note(op, rule, choice, before, made.results, axis)
        self.note_scattered(op, operands, made.results[0])
        scaled = not any(t.ndim for t in operands[1:]) and op.phase != "optimizer"  # as with quantized weights
        if isinstance(op.kind, _SAME) and operands[0] in self.params and (len(operands) == 1 or scaled):
            self.params |= dict.fromkeys(made.results, self.params[operands[0]])
        for i, t in zip(op.kind.overwrites(), op.results, strict=False):
            self.note_part(op.operands[i], operands[i], t)

    def given(self, op: Op) -> list[PlacedOperand]:
        """Return the operands with their placements."""
        out = []
        for t in op.operands:
            found = self.tensors[t]
            if isinstance(found, UnplacedSource):
                out.append(PlacedOperand(None, zero=found.zero))
                continue
            param = found in self.params
            # an optimizer updates each rank's shard
            read = param and op.phase != "optimizer" and not self.apart
            stated = found in self.fixed or t in self.stated.places
            gathered = self.params[found] if read else ()
            out.append(
                PlacedOperand(
                    self.at[found], gathered, stays=param, name=t.name, stated=stated, repeated=repeated(found)
                )
            )
        return out

    def asked(self, op: Op, rule: Split) -> dict[str, str]:
        """Return the preferred name of the rule for each mesh axis, from gradients and stated placements."""
        made = op.results[0]
        behind = becoming(made, self.wanted, _SAME)
        # a weight gradient is summed over tokens: redistribute the other operand rather than gather tokens
        tokens = {} if behind is None else common(rule, [g.at for g in self.given(op)])
        place, axes = self.stated.places.get(made), None
        if behind is not None:
            kept = behind[-1].results[0] if behind else made
            place, axes = self.kept_at(self.wanted[kept], behind), self.staying[kept]
        given = [self.tensors[t] for t in op.operands]
        lie = [self.at[t] for t in given if isinstance(t, Tensor)]
        if place is None and any(at.pending for at in lie):
            place = self.met(made)
        elif place is None and isinstance(op.kind, Scatter) and len(lie) < len(given):
            # a scatter into zeros: prefer mesh axes that split none of the values
            place, axes = self.met(made), frozenset(self.mesh).difference(*(at.axes for at in lie))
        if place is None:
            return tokens
        axes = place.axes if axes is None else axes
        return tokens | {
            axis: names[0]
            for names, dim in zip(rule.results[0], place.dims, strict=True)
            for axis in axes
            if axis in dim and names
        }

    def kept_at(self, place: Placement, behind: Sequence[Op]) -> Placement | None:
        """Return a tensor's placement from that of the gradient it becomes."""
        found: Placement | None = place
        for op in reversed(behind):
            rule = op.kind.placed(op)
            found = None if rule is None or found is None else before(rule, found, self.mesh)
        return found

    def met(self, t: Tensor) -> Placement | None:
        """Return the placement of the tensor that an old one, or an elementwise function of it, is combined with."""
        while True:
            if t in self.met_by:
                return self.met_by[t]
            readers = list(t.graph.successors(t))
            if not readers and t.graph.fused and t in t.graph.outputs and t.graph.owner is not None:
                t = t.graph.owner.results[t.graph.outputs.index(t)]  # an output of a kernel
                continue
            if not readers:
                return None
            others = [self.tensors.get(o) for o in readers[0].operands if o is not t and o.sizes == t.sizes]
            found = [self.at[o] for o in others if isinstance(o, Tensor) and not self.at[o].pending]
            alone = len(readers[0].operands) == 1 and readers[0].results[0].sizes == t.sizes
            if found or not alone or readers[0].loop is not None:
                return found[0] if found else None
            t = readers[0].results[0]

    def whole(self, op: Op) -> Choice:
        """Replicate every operand of an op that has no sharding rule."""
        self.moved += [
            f"{op.name!r}: {t.name!r} put together along {axis}: {op.kind.name} has no rule of placement"
            for t in op.operands
            if not isinstance(self.tensors[t], UnplacedSource)
            for axis in self.mesh
            if axis in {*self.at[self.tensors[t]].axes, *self.at[self.tensors[t]].pending}
        ]
        operands = [Placement(((),) * t.ndim) for t in op.operands]
        return Choice(list(operands), [Placement(((),) * t.ndim) for t in op.results], {}, {}, {})

    def need_in_place(self, op: Op, operands: Sequence[Tensor], places: Sequence[Placement | None]) -> None:
        """Raise an error for an in-place write to a redistributed copy."""
        for i in op.kind.overwrites():
            old = self.tensors[op.operands[i]]
            kept = op.operands[i].storage.role != "activation"  # it outlives this op
            if not kept and isinstance(old, Tensor) and self.at[operands[i]] != self.at[old]:
                self.note_made(op.operands[i], places[i])
            if kept and isinstance(old, Tensor) and operands[i].storage is not old.storage:
                raise UnsupportedError(
                    f"shard: {op.name!r} writes into {old.name!r}, which lies as {self.at[old]} and is wanted as "
                    f"{self.at[operands[i]]}: expected one placement"
                )

    # -- bodies ------------------------------------------------------------------------------------------------------

    def loop(self, op: Op, new: Graph) -> None:
        """Copy a loop; a carry has the placement that an iteration leaves it with."""
        loop = op.loop
        assert loop is not None
        starts: list[Placement | None] = []
        for i, (f, t, last) in enumerate(zip(loop.carries, loop.starts, loop.lasts, strict=True)):
            now = self.tensors[t]
            place = self.stated.places.get(f)
            if place is None and isinstance(now, UnplacedSource):
                place = self.wanted.get(last)
            elif place is None:
                place = self.at[now].without(
                    () if late(loop, i, self.stated.reduce_each) else self.at[now].pending, self.mesh
                )
            starts.append(place)
        host, around = self.here(new), self.piece
        self.piece = None  # a loop inside a kernel is not split: collectives stay inside
        while True:
            state = self.state()
            try:
                with host.whole():
                    self.iterations(op, host, starts)
                break
            except WiderError as wider:
                if wider.loop is not op:
                    raise
                starts = [wider.starts.get(i, place) for i, place in enumerate(starts)]
                vars(self).update(state)  # undo this attempt
        self.piece = around

    def state(self) -> dict[str, Any]:
        """Return all that is known so far, by attribute, as it is before an attempt."""
        return {
            name: copy(value) if isinstance(value, set | list)
            else {k: copy(v) if isinstance(v, set | list) else v for k, v in value.items()} if isinstance(value, dict)
            else value
            for name, value in vars(self).items()
        }  # fmt: skip

    def iterations(self, op: Op, new: Graph, starts: Sequence[Placement | None]) -> None:
        """Add the loop with its carries at given placements."""
        loop = op.loop
        assert loop is not None
        places = [Placement(((),) * t.ndim) if p is None else p for p, t in zip(starts, loop.starts, strict=True)]
        begun = [self.value(t, new, p, op.phase) for t, p in zip(loop.starts, places, strict=True)]
        begun = [self.dense(t, new, op.phase) for t in begun]
        sums = {a.read: a for a in added(loop)}
        xs = [self.summed(t, new, op.phase, sliced=True, parts=t in sums or t in self.whole_pass) for t in loop.xs]
        xs = self.as_kept(loop, xs)
        shared = [self.summed(t, new, op.phase) for t in loop.shared]
        body = new.start_body(loop.body.name, fused=False)
        self.enter(loop, begun, xs, shared, body)
        self.undecided |= {
            self.tensors[f]: (op, i)
            for i, (f, t, place) in enumerate(zip(loop.carries, loop.starts, starts, strict=True))
            if place is None and isinstance(found := self.tensors[t], UnplacedSource) and not found.zero
        }
        self.met_by |= {t: place for t, place in zip(loop.nexts, starts, strict=True) if place is not None}
        self.fill(loop.body, body)
        # these are independent of each other: restart once for all of them
        if parts := {i: at for i, place in enumerate(places) if (at := self.parts_of_sums(i, op, place)) is not None}:
            raise WiderError(op, parts)
        for i, t in enumerate(loop.nexts):
            self.hand_on(i, t, body, op, places[i])
        self.tensors |= {t: self.inside[t] for t in loop.saved if t in self.inside}
        # residuals are operands of ops in the forward pass
        self.tensors |= {t: self.held[made] for t in loop.saved if (made := self.value(t, body)) in self.held}
        lasts = {a.last for a in sums.values() if self.at[self.tensors[a.slice]].pending} | self.whole_pass
        for t in (*loop.ys, *loop.saved):
            made = self.summed(t, body, op.phase, parts=t in lasts)
            # a rank's slice of a replicated tensor is a view of the whole: save only a copy of the slice
            part = made.is_view and not t.is_view
            self.tensors[t] = self.copied(made, body, f"{made.name}.contiguous", op.phase) if part else made
        outputs = [self.tensors[t] for t in loop.body.outputs]
        for r, inner, stacked in self.finished(op, body, [begun, xs, shared], outputs, new):
            self.stands_for(r, inner)
            if stacked:
                self.at[r] = self.at[inner].with_dims([(), *self.at[inner].dims])

    def summed(self, old: Tensor, graph: Graph, phase: str, *, sliced: bool = False, parts: bool = False) -> Tensor:
        """Return the new tensor of an old one with partial sums reduced, and gathered along the sliced axis."""
        t = self.handed(old, self.value(old, graph))
        at = self.at[t]
        if at.pending and not parts and not sliced:  # reuse an earlier reduction
            known = (
                made for (of, want, g, _), made in self.copies.items() if of is t and g is graph and not want.pending
            )
            t = next(known, t)
            at = self.at[t]
        first = at.dims[0] if sliced else ()
        gone = {*(() if parts or t in self.rows.own else at.pending), *(f for f in first if isinstance(f, str))}
        self.moved += [f"{old.name!r} put together along {f}: iterations read it in slices" for f in first if f in gone]
        return self.moved_to(t, at.without(gone, self.mesh), graph, phase)

    def enter(
        self, loop: Loop, begun: Sequence[Tensor], xs: Sequence[Tensor], shared: Sequence[Tensor], body: Graph
    ) -> None:
        """Add a body's formals, and note the placements of gradients that are computed inside it."""
        for f, outer in zip(loop.carries, begun, strict=True):
            made = self.stand_for(f, outer, body, outer.sizes, contiguous(outer.sizes), self.at[outer])
            self.carried.add(made.storage)
        for f, outer in zip(loop.slices, xs, strict=True):
            at = self.at[outer].with_dims(self.at[outer].dims[1:])
            self.stand_for(f, outer, body, outer.sizes[1:], outer.strides[1:], at, lead=1)
        for f, outer in zip(loop.captured, shared, strict=True):
            made = self.stand_for(f, outer, body, outer.sizes, outer.strides, self.at[outer])
            made.offset = outer.offset
        kept = {o: r for r, o in zip(loop.op.results, loop.body.outputs, strict=True) if self.buffer(r) is not None}
        for o, r in kept.items():
            goal = self.goal(o)
            if r in self.wanted and goal is not None:
                self.aim(o, goal, self.staying[r])
        for r, o in zip((*loop.stacks, *loop.pieces), (*loop.ys, *loop.saved), strict=True):
            if r in self.wanted and o not in kept:
                self.aim(o, self.wanted[r].with_dims(self.wanted[r].dims[1:]), self.staying[r])
        for i, (r, o) in enumerate(zip(loop.lasts, loop.nexts, strict=True)):
            if o in kept:
                continue
            if r in self.wanted and not late(loop, i, self.stated.reduce_each):
                self.aim(o, self.wanted[r], self.staying[r])
            elif r in self.wanted and is_pass(loop.body) and self.at[begun[i]].pending:
                self.aim(o, self.at[begun[i]], self.staying[r])

    def aim(self, t: Tensor, place: Placement, staying: frozenset[str]) -> None:
        """Note the placement of a gradient that is computed inside a body."""
        found = targets(t.graph, {t: place}) if self.buffer(t) is None else targets(t.graph, {t: place}, adds)
        self.wanted |= found
        self.staying |= dict.fromkeys(found, staying)

    def parts_of_sums(self, i: int, op: Op, place: Placement) -> Placement | None:
        """Return the initial placement of a carry that is reduced after the loop; None if it has it already."""
        loop, zero = op.loop, self.tensors[op.operands[i]]
        assert loop is not None
        made = isinstance(self.tensors[loop.nexts[i]], Tensor) and isinstance(zero, UnplacedSource) and zero.zero
        if place.pending or not made or not late(loop, i, self.stated.reduce_each):
            return None
        natural = pending_of(loop, i, self.tensors, self.at)
        if natural is None:
            return None
        want = self.wanted.get(loop.lasts[i], natural).without(natural.pending, self.mesh)
        return replace(want, partial=natural.partial) if want.axes >= natural.axes else natural

    def hand_on(self, i: int, t: Tensor, body: Graph, op: Op, place: Placement) -> None:
        """Redistribute a carry to its placement in the next iteration, or restart the loop with another one."""
        found = self.tensors[t]
        if isinstance(found, UnplacedSource):
            self.tensors[t] = self.value(t, body, place, op.phase)
            return
        loop = op.loop
        assert loop is not None
        after = self.at[found].without(self.at[found].pending, self.mesh)
        more = after.axes - place.axes
        if more and t not in self.stated.places and loop.carries[i] not in self.stated.places:
            dims = [d if not place.dims[j] else place.dims[j] for j, d in enumerate(after.dims)]
            wider = Placement(tuple(dims))
            if wider != place and len(wider.axes) == sum(len([f for f in d if isinstance(f, str)]) for d in dims):
                raise WiderError(op, {i: wider})
        if t not in self.stated.places and loop.carries[i] not in self.stated.places and t not in self.wanted:
            self.tell(op, t, after, place, "the next iteration has it otherwise")
        self.tensors[t] = self.dense(self.moved_to(found, place, body, op.phase), body, op.phase)

    def stand_for(
        self, f: Tensor, outer: Tensor, body: Graph, sizes: tuple[Poly, ...], strides: tuple[Poly, ...],
        place: Placement, lead: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add a formal of a loop body."""
        pieces = max(outer.storage.pieces - lead, 0)
        made = body.formal(outer, f.name, sizes, strides, pieces)
        made.domain = None if f.domain is None or outer.domain is None else (outer.domain[0], *f.domain[1:])
        self.stands_for(made, outer)
        self.names[made] = self.names.get(outer, outer.name)
        self.tensors[f], self.at[made] = made, place
        return made


# -- shard -------------------------------------------------------------------------------------------------------------

#: Placements by tensor name or name pattern.
Placements = Annotated[
    Mapping[str, str],
    Rule(
        "a mapping of names to placements such as 'd (f tp)'",
        lambda v: isinstance(v, Mapping) and all(isinstance(text, str) for pair in v.items() for text in pair),
    ),
]


def mesh(**axes: object) -> Mesh:
    """Arrange devices in a grid with named axes.

    Parameters
    ----------
    **axes : sympy.Expr, int or tuple of str
        Number of ranks by axis, outermost first: `mesh(dp=8, tp=cg.dims("T"))`. Neighbouring axes may have a joint
        name, `mesh(kv=2, replica=4, tp=("kv", "replica"))`. Placements may use it, and a collective along all of the
        axes is one collective.

    Returns
    -------
    Mesh
        The mesh, for use with `shard`.

    Raises
    ------
    GraphError, ShapeError
        If there is no axis, a number of ranks is not a positive integer, or axes with a joint name are not neighbours.

    Examples
    --------
    >>> import costgraph as cg
    >>> print(cg.mesh(dp=8, tp=cg.dims("T")))
    mesh(dp=8, tp=T)
    """
    if not axes or not all(map(is_name, axes)):
        raise GraphError(f"mesh: axes {shown(list(axes))}, expected a name and a number of ranks at least")
    joint = {name: n for name, n in axes.items() if isinstance(n, tuple)}
    sizes = {name: positive(f"mesh: {name}", n) for name, n in axes.items() if name not in joint}
    order = [*sizes]
    for name, parts in joint.items():
        at = order.index(parts[0]) if len(parts) > 1 and parts[0] in sizes else 0
        if not parts or tuple(order[at : at + len(parts)]) != parts or len(parts) < 2:
            raise GraphError(f"mesh: {name} is {shown(parts)}, expected neighbouring axes among {', '.join(order)}")
    return Mesh(tuple(sizes.items()), tuple(joint.items()))


# longer than 40 lines: each option is a parameter
def shard(
    graph: Graph,
    mesh: Mesh,
    placements: Placements,
    *,
    gather: str | Iterable[str] | FullyShard = (),
    gradients: Placements | None = None,
    exchange: str | Iterable[str] = (),
    ring: str | Iterable[str] = (),
    hold: str | Iterable[str] = (),
    reduce_each: bool = True,
    accumulation_fusion: bool = False,
    buckets: Buckets | None = None,
    strict: bool = False,
) -> Graph:
    """Turn the graph of a whole model into the graph of one rank, with local sizes and collectives as ops.

    Stated placements propagate through every op, forward and backward: the sharding rule of an op ties the axes of its
    operands to those of its results. Contracting a sharded axis leaves a partial sum, which is reduced before the first
    nonlinear op, to the placement of the other operands. You state placements of parameters, inputs, gradients and
    optimizer states; data, tensor and sequence parallelism and ZeRO follow.

    Parameters
    ----------
    graph : Graph
        A forward pass, training step or inference pass, declared or traced; it is not modified.
    mesh : Mesh
        The devices. An axis of one rank has no effect.
    placements : mapping of str to str
        Placements by tensor name, or by a pattern of sources such as `"layers/*/weight"`; later entries take
        precedence. A placement lists the axes as in einops, sharded ones in brackets with mesh axes: `"d (f tp)"`. Each
        rank has one contiguous block; with several mesh axes, the first one splits into the largest blocks. A leading
        number, `"d (2 f tp)"`, means two concatenated tensors that are sharded separately. State placements of
        parameters, inputs, buffers and optimizer states (`"*.exp_avg"`), and of intermediate tensors where there is a
        choice: sequence parallelism shards the carry of the layers along the sequence. Other sources are replicated.
    gather : str, iterable of str or FullyShard
        Mesh axes along which parameters are all-gathered before use and freed after it: ZeRO-3, or fully sharded data
        parallelism. A `FullyShard` sets the policy, by default that of torch's `fully_shard`. Along other axes,
        parameters stay sharded and activations are redistributed.
    gradients : mapping of str to str, optional
        Gradient placements by parameter name; by default the parameter's placement. Sharded gradients of
        replicated parameters are ZeRO-2.
    exchange : str or iterable of str
        Mesh axes that split heads inside an attention kernel and the sequence outside of it, by all-to-alls:
        DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). By default queries stay sharded, and keys and values
        are all-gathered.
    ring : str or iterable of str
        Mesh axes along which attention kernels pass keys and values, and the partial sums of their gradients, around a
        ring: ring attention (Liu et al. 2023, arXiv 2310.01889).
    hold : str or iterable of str
        Mesh axes along which all-gathered activations are saved for the backward pass, as autograd saves tensors that
        DTensor has redistributed. By default only the shard is saved and gathered again, as in Megatron's
        `LinearWithGradAccumulationAndAsyncCommunication` (megatron/core/tensor_parallel/layers.py).
    reduce_each : bool
        Whether the gradients of each micro-batch are reduced. If False, a rank accumulates its partial gradients
        (unsharded ones under `gather`) and reduces them after the last micro-batch, as with `no_sync` of torch's
        DistributedDataParallel. Units of a `FullyShard` are reduced within the last micro-batch, as with
        `set_requires_gradient_sync(False)` of `fully_shard`; in a pipeline, or if a step keeps gradient buffers, after
        it.
    accumulation_fusion : bool
        Whether matmuls accumulate gradients directly into gradient buffers that a step keeps, in one kernel:
        `gradient_accumulation_fusion` of Megatron-LM. Requires partial sums to be accumulated there. autograd receives
        one persistent dummy tensor for each shape and format: `get_dummy_wgrad` of TransformerEngine
        (pytorch/module/base.py).
    buckets : Buckets, optional
        Buckets for all-reduced gradients; by default each gradient is reduced by itself, as soon as it is complete.
    strict : bool
        Whether to raise an error if an op cannot keep the placement of an operand, or if operands conflict and one is
        redistributed. By default `graph.sharding.resharded` lists these cases. It does not list tensors that are
        redistributed for a parameter, or that lack the axis along which the op is sharded.

    Returns
    -------
    Graph
        The per-rank graph, for any analysis. `communication` lists its messages, and `sharding` the placements of
        its tensors. Symbolic mesh sizes are dimensions of the graph.

    Raises
    ------
    GraphError, PatternError, ShapeError
        If a name matches no tensor, a placement is malformed, or an axis cannot be split into equal parts.
    UnsupportedError
        If a collective would be needed where there can be none, a placement cannot be kept with `strict`, or gradients
        cannot be reduced in buckets.

    Notes
    -----
    Terms follow torch's DTensor (`torch/distributed/tensor/placement_types.py`): shard, replicate, partial.
    Divisibility by symbolic mesh sizes is a condition of the graph, checked when they are bound. Collectives return new
    tensors, as torch's functional collectives do, except in the buffers of units.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, T = cg.dims("B D F T")
    >>> with cg.Graph("mlp") as g:
    ...     h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f"))
    ...     g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    >>> s = cg.shard(g, cg.mesh(tp=T), {"up": "d (f tp)", "down": "(f tp) d"})
    >>> cg.matmul_flops(s), cg.param_count(s), [m.collective for m in cg.communication(s)]
    (4*B*D*F/T, 2*D*F/T, ['all_reduce'])
    """
    need_of_all("shard", graph)
    need_flag("shard", reduce_each=reduce_each, accumulation_fusion=accumulation_fusion, strict=strict)
    used = _used(mesh)
    policy = gather if isinstance(gather, FullyShard) else FullyShard(gather)
    if not reduce_each:
        _need_parts(policy, graph)
    gathered, exchanged = _axes("gather", policy.axes, used, mesh), _axes("exchange", exchange, used, mesh)
    around, held = _axes("ring", ring, used, mesh), _axes("hold", hold, used, mesh)
    reduced = _axes("buckets", buckets.axes, used, mesh) if buckets is not None else frozenset[str]()
    places = _found(graph, used, mesh, placements)
    asked = _found(graph, used, mesh, gradients or {})
    # micro-batches interleave with those of other pipeline stages, so none is peeled
    if gathered and policy.by_unit and not reduce_each and graph.waiting is None:
        apart = PeeledLastMicroBatch()
        graph = apart.run(graph)
        places, asked = apart.said(places), apart.said(asked)
    whole = {t: Placement(((),) * t.ndim) for t in graph.gradients}
    resident = _resident(graph, policy)
    stated = RequestedPlacements(
        mesh=used,
        places=places,
        gradients={g: asked.get(t, places.get(t, whole[t])) for t, g in graph.gradients.items()},
        staying={
            g: places.get(t, whole[t]).axes - gathered | places.get(t, whole[t]).axes & resident.get(t, frozenset())
            for t, g in graph.gradients.items()
        },
        gathered=gathered,
        resident=resident,
        policy=policy if gathered else None,
        exchanged=exchanged,
        held=held,
        reduce_each=reduce_each,
        fused=accumulation_fusion,
    )
    made = _placed(graph, stated, strict=strict)
    made = in_rings(made, around) if around else made
    return made if buckets is None or not reduced else in_buckets(made, buckets, reduced)


def _resident(graph: Graph, policy: FullyShard) -> dict[Tensor, frozenset[str]]:
    """Return the parameters that stay sharded along some of the gathered axes, and these axes."""
    out: dict[Tensor, frozenset[str]] = {}
    assert not isinstance(policy.resident, Mapping)
    for pattern, axes in policy.resident:
        found = [t for t in graph.params if t.name == pattern or fnmatchcase(t.name, pattern)]
        if not found:
            raise GraphError(
                f"FullyShard: resident {shown(pattern)} is no parameter of graph {graph.name!r}, expected a name or a "
                f"pattern"
            )
        out |= {t: out.get(t, frozenset()) | frozenset(axes) for t in found}
    return out


def _need_parts(policy: FullyShard, graph: Graph) -> None:
    """Raise an error if partial gradients would be accumulated in another format than they are reduced in."""
    odd = next((g for g in graph.gradients.values() if policy.reduce_dtype not in (None, g.dtype.name)), None)
    if odd is not None:
        raise UnsupportedError(
            f"shard: reduce_each=False beside reduce_dtype={policy.reduce_dtype!r}, expected gradients that are "
            f"reduced in the format in which they are added up, {odd.dtype.name}"
        )


def _axes(what: str, given: str | Iterable[str], used: Mesh, mesh: Mesh) -> frozenset[str]:
    """Return the named mesh axes, without those of one rank."""
    axes = frozenset([given] if isinstance(given, str) else given)
    odd = sorted(axes - {*mesh}, key=str)
    if odd:
        raise GraphError(f"shard: {what} along {shown(odd[0])}, expected axes of {mesh}")
    return axes & {*used}


def _used(mesh: Mesh) -> Mesh:
    """Return a mesh without one-rank axes, except members of a joint axis."""
    joint = tuple((name, parts) for name, parts in mesh.joint if mesh[name] != ONE)
    kept = {a for _, parts in joint for a in parts}
    return Mesh(tuple((name, n) for name, n in mesh.axes if n != ONE or name in kept), joint)


def _placed(graph: Graph, stated: RequestedPlacements, *, strict: bool) -> Graph:
    """Return the graph of one rank, with its placements and unrequested redistributions."""
    sharder, made = _sharded(graph, stated)
    if strict and sharder.moved:
        raise UnsupportedError(f"shard: {sharder.moved[0]}, expected placements that every op can keep")
    at = sharder.at
    sources = [t for g in made.bodies() for t in g.tensors if t.producer is None and t.role != "formal"]
    made.sharding = Sharding(
        mesh=stated.mesh,
        places={t.name: at[t] for t in sources},
        outputs=tuple(at[t] for t in made.outputs),
        gradients={t.name: at[g] for t, g in made.gradients.items()},
        resharded=tuple(dict.fromkeys(sharder.moved)),
    )
    return made


def _sharded(graph: Graph, stated: RequestedPlacements) -> tuple[Sharder, Graph]:
    """Build the graph of one rank; repeat if stacks or gradient buffers turn out to have another placement.

    Their placements follow from the values written into them, which are known only afterwards.
    """
    while True:
        sharder = Sharder(stated)
        try:
            made = sharder.run(graph)
        except CostGraphError:
            if not sharder.stacks:  # else the error may come from a stack with a wrong placement
                raise
        terms = {} if stated.kept else sharder.terms
        if not sharder.stacks and not terms:
            return sharder, made
        stacks, kept = {**stated.stacks, **sharder.stacks}, {**stated.kept, **terms}
        products = stated.products or sharder.products
        stated = replace(stated, stacks=stacks, kept=kept, places={**stated.places, **kept}, products=products)


def _found(graph: Graph, used: Mesh, mesh: Mesh, stated: Placements) -> dict[Tensor, Placement]:
    """Return the placement of each tensor that is named."""
    named = {t.name: t for g in graph.bodies() for t in g.tensors if not g.fused}
    sources = [t for t in named.values() if t.producer is None and t.role != "formal"]
    out: dict[Tensor, Placement] = {}
    for key, text in stated.items():
        matched = [named[key]] if key in named else [t for t in sources if fnmatchcase(t.name, key)]
        if not matched:
            raise GraphError(f"shard: {shown(key)} is no tensor of graph {graph.name!r}, expected a name or a pattern")
        out |= {t: _read(t, text, used, mesh) for t in matched}
    return out


def _read(t: Tensor, text: str, used: Mesh, mesh: Mesh) -> Placement:
    """Parse a placement; leading axes whose positions are separate storages are not part of it."""
    pieces = t.storage.pieces
    place = f"shard: {text!r} of {t!r}"
    found = groups(text)
    if found is None or len(found) != t.ndim - pieces:
        raise PatternError(f"{place}: expected a place for each of {t.ndim - pieces} axes")
    out: list[Factors] = [()] * pieces
    seen: set[str] = set()
    for group, size in zip(found, t.sizes[pieces:], strict=True):
        blocks = int(group[0]) if group[0].isdigit() else 1
        names = [n for n in group[group[0].isdigit() and len(group) > 1 :] if n not in mesh]
        axes = [a for n in group if n in mesh for a in mesh.parts(n)]
        if len(names) != 1 or blocks < 1 or seen & {*axes} or len(axes) > len({*axes}):
            words = f"({' '.join(group)})" if len(group) > 1 else group[0]
            raise PatternError(f"{place}: {words}, expected a name and axes of {mesh}, each once")
        seen |= {*axes}
        part = size / prod((used[a] for a in axes if a in used), start=poly(blocks))
        if part.constant is not None and not isinstance(part.constant, int):
            raise ShapeError(
                f"{place}: ({' '.join(group)}) is {size} in parts of {part}, expected a size that the ranks divide"
            )
        out.append(tidy([poly(blocks), *(a for a in axes if a in used), part]))
    return Placement(tuple(out))


def groups(text: str) -> list[list[str]] | None:
    """Return the words of each axis, None if the text is not a placement."""
    if not re.fullmatch(r"(\s*(\w+|\((\s*\w+)+\s*\)))*\s*", text, re.ASCII):
        return None
    return [found.strip("()").split() for found in re.findall(r"\w+|\([^()]*\)", text)]
