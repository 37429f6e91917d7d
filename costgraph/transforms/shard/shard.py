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
from ...ops.experts import GroupedMatmul, GroupedOuter
from ...ops.fill import DenseFactory
from ...ops.index import Scatter
from ...ops.layout import Expand, Rearrange, Slice
from ...ops.loops import Empty, Kernel, Stacked
from ...ops.updates import ZeroGrad
from .choice import Choice, PlacedOperand, RankOrderedRows, choose, key_placement, local_kind, queries, restricted
from .cutting import Cutting
from .fsdp_policy import FullyShard
from .grad_reduction import Buckets, PeeledLastMicroBatch, in_buckets
from .kernels import operand_placement, shared_contraction
from .partial_sums import (
    accumulated_stacks,
    adds,
    chain_to_gradient,
    pending_of,
    reduced_after_loop,
    targets,
    weight_gradients,
)
from .placed_tensors import RequestedPlacements, UnplacedSource, WiderError, expanded_axes, in_rings

__all__ = [
    "Sharder",
    "groups",
    "mesh",
    "shard",
]


# -- partitioner -------------------------------------------------------------------------------------------------------

#: Kinds whose result is the parameter they read, in another form.
_SAME = (Rearrange, Slice, Pointwise)


def _copied(value: Any) -> Any:
    """Copy collections, including those in dicts and in the notes on rank-local rows."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, RankOrderedRows):
        duplicate = copy(value)
        vars(duplicate).update(_copied(vars(value)))
        return duplicate
    return copy(value) if isinstance(value, set | list) else value


class Sharder(Cutting):
    """Copies ops with local sizes, and redistributes operands to the placements that sharding rules require."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the per-rank graph."""
        self.weight_grads = weight_gradients(
            old, adds, _SAME
        )  # sums over tokens: their placement is that of the weight
        return super().run(old, name)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add the local form of an op, and redistribute gradients to their placements."""
        in_kernel = self.open_kernel is not None
        if not in_kernel:
            if self.wait_for_grads(op):
                self.after(op, new)
                return
            self.before(op, new)
        # a stack is allocated before its slices are written
        if isinstance(op.kind, Empty) or (op.results[:1] and op.results[0] in self.requested.stacks):
            self.stack(op, new)
        elif isinstance(op.kind, DenseFactory) or self.is_expanded(op):
            self.tensors[op.results[0]] = UnplacedSource(op)
        elif self.reduce_before_cast(op):
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
        over_micro_batches = op.loop is not None and is_pass(op.loop.body)
        phase = "backward" if over_micro_batches else op.phase
        if over_micro_batches:
            self.names |= {self.tensors[g]: f"{p.name}.grad" for p, g in op.graph.gradients.items() if g in op.results}
        for t in op.results:
            natural = self.natural.get(self.tensors[t]) if self.open_kernel is None else None
            if natural is not None and t not in self.weight_grads:
                self.tensors[t] = self.moved_to(self.tensors[t], natural, new, op.phase)
            if t not in self.grad_placements or isinstance(self.tensors[t], UnplacedSource) or self.unfinished(t):
                continue
            if self.buffer_placement(t) is not None:
                self.tensors[t] = self.reduce_buffer(t, new, phase) if t in self.param_of_grad else self.tensors[t]
            elif over_micro_batches or not self.defer(t):
                self.tensors[t] = self.slices_moved_to(self.tensors[t], self.grad_placements[t], new, phase)
                if t in self.param_of_grad and t.storage.bytes == t.numel * t.element_bytes():
                    self.reduced[t.storage] = self.tensors[t]
        if not in_kernel:
            self.after(op, new)

    def is_expanded(self, op: Op) -> bool:
        """Whether an op expands a scalar, or maps an expanded scalar elementwise: each rank computes its part alone."""
        if self.open_kernel is not None or op.kind.overwrites() or op.results[0] in self.grad_placements:
            return False
        operands = [self.tensors[t] for t in op.operands]
        deferred = [isinstance(x, UnplacedSource) for x in operands]
        if any(not d and (x.ndim or self.placements[x].pending) for x, d in zip(operands, deferred, strict=True)):
            return False
        if isinstance(op.kind, Expand):
            return op.operands[0].ndim == 0
        same = all(t.sizes == op.results[0].sizes for t in op.operands if t.ndim)
        return (
            isinstance(op.kind, Pointwise)
            and same
            and any(d and not isinstance(x.op.kind, DenseFactory) for x, d in zip(operands, deferred, strict=True))
        )

    def plain(self, op: Op, new: Graph) -> None:
        """Add the local form of an op that has no body."""
        if self.is_summed(op):
            return
        self.note_term(op)
        if isinstance(op.kind, ZeroGrad):
            self.clear(op.operands[0], new, op.phase)
        axis = self.routed(op, new)
        inputs = [self.tensors[t] for t in op.operands]
        rule = op.kind.placed(op)
        if rule is not None:
            rule = self.rows.rule(
                op, restricted(rule, op, [g.placement for g in self.placed_operands(op)]), inputs, axis
            )
        choice = (
            self.replicate_operands(op)
            if rule is None
            else choose(rule, self.placed_operands(op), self.mesh, self.preferred_names(op, rule))
        )
        choice = self.rows.counted(op, choice)
        self.resharded += [
            f"{op.name!r}: {op.operands[i].name!r} is redistributed along {axis}: {why}"
            for i, axis, why in choice.moved
            if rule is None or axis not in queries(op, rule, choice)  # keys are all-gathered for its queries
        ]
        required = [*zip(op.operands, choice.operands, strict=True)]
        # deferred operands are created last: others may split the current kernel, and they belong behind the split
        order = sorted(range(len(required)), key=lambda i: isinstance(self.tensors[op.operands[i]], UnplacedSource))
        redistributed = {i: self.value(required[i][0], new, required[i][1], op.phase) for i in order}
        operands = [redistributed[i] for i in range(len(required))]
        for old, t in zip(op.operands, operands, strict=True):
            self.read.setdefault(old, []).append(t)
        if axis and isinstance(op.kind, GroupedMatmul | GroupedOuter):
            operands[2] = self.merge(self.rows.indices[inputs[2]].routing, axis, new, op.phase).results[0]
        self.need_in_place(op, operands, choice.operands)
        kind = op.kind if rule is None else rule.local(choice.extents, choice.ranks)
        kind = kind if rule is None else local_kind(kind, rule, choice, self.mesh)
        local_op = self.in_product(op, kind, operands, new) or self.add(op, kind, operands, self.current_graph(new))
        for t, placement in zip(local_op.results, choice.results, strict=True):
            self.placements[t] = placement
        if rule is not None and op.phase == "backward":
            natural = key_placement(rule, choice, [t in self.params for t in operands])
            self.natural |= {} if natural is None else {local_op.results[0]: natural}
        self.rows.note(op, rule, choice, inputs, local_op.results, axis)
        self.note_scattered(op, operands, local_op.results[0])
        scaled = not any(t.ndim for t in operands[1:]) and op.phase != "optimizer"  # as with quantized weights
        if isinstance(op.kind, _SAME) and operands[0] in self.params and (len(operands) == 1 or scaled):
            self.params |= dict.fromkeys(local_op.results, self.params[operands[0]])
        for i, t in zip(op.kind.overwrites(), op.results, strict=False):
            self.note_partial_write(op.operands[i], operands[i], t)

    def placed_operands(self, op: Op) -> list[PlacedOperand]:
        """Return the operands with their placements."""
        out = []
        for t in op.operands:
            local = self.tensors[t]
            if isinstance(local, UnplacedSource):
                out.append(PlacedOperand(None, zero=local.zero))
                continue
            param = local in self.params
            # an optimizer updates each rank's shard
            read = param and op.phase != "optimizer" and not self.use_shards
            fixed = local in self.fixed or t in self.requested.placements
            gathered = self.params[local] if read else ()
            out.append(
                PlacedOperand(
                    self.placements[local],
                    gathered,
                    is_param=param,
                    name=t.name,
                    stated=fixed,
                    repeated=expanded_axes(local),
                )
            )
        return out

    def preferred_names(self, op: Op, rule: Split) -> dict[str, str]:
        """Return the preferred name of the rule for each mesh axis, from gradients and stated placements."""
        result = op.results[0]
        chain = chain_to_gradient(result, self.grad_placements, _SAME)
        # a weight gradient is summed over tokens: redistribute the other operand rather than gather tokens
        tokens = {} if chain is None else shared_contraction(rule, [g.placement for g in self.placed_operands(op)])
        placement, axes = self.requested.placements.get(result), None
        if chain is not None:
            grad = chain[-1].results[0] if chain else result
            placement, axes = self.placement_before(self.grad_placements[grad], chain), self.param_axes[grad]
        operands = [self.tensors[t] for t in op.operands]
        placements = [self.placements[t] for t in operands if isinstance(t, Tensor)]
        if placement is None and any(p.pending for p in placements):
            placement = self.partner_placement(result)
        elif placement is None and isinstance(op.kind, Scatter) and len(placements) < len(operands):
            # a scatter into zeros: prefer mesh axes that split none of the values
            placement, axes = (
                self.partner_placement(result),
                frozenset(self.mesh).difference(*(p.axes for p in placements)),
            )
        if placement is None:
            return tokens
        axes = placement.axes if axes is None else axes
        return tokens | {
            axis: names[0]
            for names, dim in zip(rule.results[0], placement.dims, strict=True)
            for axis in axes
            if axis in dim and names
        }

    def placement_before(self, placement: Placement, chain: Sequence[Op]) -> Placement | None:
        """Return a tensor's placement from that of the gradient it becomes."""
        current: Placement | None = placement
        for op in reversed(chain):
            rule = op.kind.placed(op)
            current = None if rule is None or current is None else operand_placement(rule, current, self.mesh)
        return current

    def partner_placement(self, t: Tensor) -> Placement | None:
        """Return the placement of the tensor that an old one, or an elementwise function of it, is combined with."""
        while True:
            if t in self.carry_placements:
                return self.carry_placements[t]
            readers = list(t.graph.successors(t))
            if not readers and t.graph.fused and t in t.graph.outputs and t.graph.owner is not None:
                t = t.graph.owner.results[t.graph.outputs.index(t)]  # an output of a kernel
                continue
            if not readers:
                return None
            others = [self.tensors.get(o) for o in readers[0].operands if o is not t and o.sizes == t.sizes]
            placements = [
                self.placements[o] for o in others if isinstance(o, Tensor) and not self.placements[o].pending
            ]
            alone = len(readers[0].operands) == 1 and readers[0].results[0].sizes == t.sizes
            if placements or not alone or readers[0].loop is not None:
                return placements[0] if placements else None
            t = readers[0].results[0]

    def replicate_operands(self, op: Op) -> Choice:
        """Replicate every operand of an op that has no sharding rule."""
        self.resharded += [
            f"{op.name!r}: {t.name!r} is redistributed along {axis}: {op.kind.name} has no sharding rule"
            for t in op.operands
            if not isinstance(self.tensors[t], UnplacedSource)
            for axis in self.mesh
            if axis in {*self.placements[self.tensors[t]].axes, *self.placements[self.tensors[t]].pending}
        ]
        operands = [Placement(((),) * t.ndim) for t in op.operands]
        return Choice(list(operands), [Placement(((),) * t.ndim) for t in op.results], {}, {}, {})

    def need_in_place(self, op: Op, operands: Sequence[Tensor], placements: Sequence[Placement | None]) -> None:
        """Raise an error for an in-place write to a redistributed copy."""
        for i in op.kind.overwrites():
            old = self.tensors[op.operands[i]]
            persistent = op.operands[i].storage.role != "activation"  # it outlives this op
            if not persistent and isinstance(old, Tensor) and self.placements[operands[i]] != self.placements[old]:
                self.inherit_placement(op.operands[i], placements[i])
            if persistent and isinstance(old, Tensor) and operands[i].storage is not old.storage:
                raise UnsupportedError(
                    f"shard: {op.name!r} writes into {old.name!r}, which is placed as {self.placements[old]} but "
                    f"needed as {self.placements[operands[i]]}; expected the same placement"
                )

    # -- bodies ------------------------------------------------------------------------------------------------------

    def loop(self, op: Op, new: Graph) -> None:
        """Copy a loop; a carry has the placement that an iteration leaves it with."""
        loop = op.loop
        assert loop is not None
        starts: list[Placement | None] = []
        for i, (f, t, last) in enumerate(zip(loop.carries, loop.starts, loop.lasts, strict=True)):
            start = self.tensors[t]
            placement = self.requested.placements.get(f)
            if placement is None and isinstance(start, UnplacedSource):
                decided = None if start.zero else self.decided_carries.get(f)
                placement = self.grad_placements.get(last, decided)
            elif placement is None:
                placement = self.placements[start].without(
                    ()
                    if reduced_after_loop(loop, i, self.requested.reduce_every_microbatch)
                    else self.placements[start].pending,
                    self.mesh,
                )
            starts.append(placement)
        host, outer_kernel = self.current_graph(new), self.open_kernel
        self.open_kernel = None  # a loop inside a kernel is not split: collectives stay inside
        while True:
            state = self.snapshot()
            try:
                with host.transaction():
                    self.iterations(op, host, starts)
                break
            except WiderError as wider:
                if wider.loop is not op:
                    raise
                starts = [wider.starts.get(i, placement) for i, placement in enumerate(starts)]
                vars(self).update(state)  # undo this attempt
        self.open_kernel = outer_kernel
        self.decided_carries |= {f: p for f, p in zip(loop.carries, starts, strict=True) if p is not None}

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the attributes, to restore after a failed attempt.

        Decided carries stay: with partial sums as gradients, a loop cannot start with replicated carries again.
        """
        return {name: _copied(value) for name, value in vars(self).items() if name != "decided_carries"}

    def iterations(self, op: Op, new: Graph, starts: Sequence[Placement | None]) -> None:
        """Add the loop with its carries at given placements."""
        loop = op.loop
        assert loop is not None
        carry_placements = [
            Placement(((),) * t.ndim) if p is None else p for p, t in zip(starts, loop.starts, strict=True)
        ]
        carried = [self.value(t, new, p, op.phase) for t, p in zip(loop.starts, carry_placements, strict=True)]
        carried = [self.dense(t, new, op.phase) for t in carried]
        sums = {a.read: a for a in accumulated_stacks(loop)}
        xs = [
            self.without_partials(t, new, op.phase, sliced=True, parts=t in sums or t in self.per_iteration)
            for t in loop.xs
        ]
        xs = self.with_unsharded(loop, xs)
        shared = [self.without_partials(t, new, op.phase) for t in loop.shared]
        body = new.start_body(loop.body.name, fused=False)
        self.enter(loop, carried, xs, shared, body)
        self.undecided |= {
            self.tensors[f]: (op, i)
            for i, (f, t, placement) in enumerate(zip(loop.carries, loop.starts, starts, strict=True))
            if placement is None and isinstance(start := self.tensors[t], UnplacedSource) and not start.zero
        }
        self.carry_placements |= {
            t: placement for t, placement in zip(loop.nexts, starts, strict=True) if placement is not None
        }
        self.fill(loop.body, body)
        # these are independent of each other: restart once for all of them
        if parts := {
            i: partial
            for i, placement in enumerate(carry_placements)
            if (partial := self.partial_start(i, op, placement)) is not None
        }:
            raise WiderError(op, parts)
        for i, t in enumerate(loop.nexts):
            self.finish_carry(i, t, body, op, carry_placements[i])
        self.tensors |= {t: self.by_heads[t] for t in loop.saved if t in self.by_heads}
        # residuals are operands of ops in the forward pass
        self.tensors |= {
            t: self.saved_gathers[local] for t in loop.saved if (local := self.value(t, body)) in self.saved_gathers
        }
        lasts = {a.last for a in sums.values() if self.placements[self.tensors[a.slice]].pending} | self.per_iteration
        for t in (*loop.ys, *loop.saved):
            local = self.without_partials(t, body, op.phase, parts=t in lasts)
            # a rank's slice of a replicated tensor is a view of the whole: save only a copy of the slice
            part = local.is_view and not t.is_view
            self.tensors[t] = self.copied(local, body, f"{local.name}.contiguous", op.phase) if part else local
        outputs = [self.tensors[t] for t in loop.body.outputs]
        for r, inner, stacked in self.add_loop(op, body, [carried, xs, shared], outputs, new):
            self.note_alias(r, inner)
            if stacked:
                self.placements[r] = self.placements[inner].with_dims([(), *self.placements[inner].dims])

    def without_partials(
        self, old: Tensor, graph: Graph, phase: str, *, sliced: bool = False, parts: bool = False
    ) -> Tensor:
        """Return the new tensor of an old one with partial sums reduced, and gathered along the sliced axis."""
        t = self.saved_tensor(old, self.value(old, graph))
        placement = self.placements[t]
        if placement.pending and not parts and not sliced:  # reuse an earlier reduction
            reduced = (
                copy for (of, want, g, _), copy in self.copies.items() if of is t and g is graph and not want.pending
            )
            t = next(reduced, t)
            placement = self.placements[t]
        first = placement.dims[0] if sliced else ()
        removed = {
            *(() if parts or t in self.rows.indices else placement.pending),
            *(f for f in first if isinstance(f, str)),
        }
        self.resharded += [
            f"{old.name!r} is redistributed along {f}: iterations read it in slices" for f in first if f in removed
        ]
        return self.moved_to(t, placement.without(removed, self.mesh), graph, phase)

    def enter(
        self, loop: Loop, carried: Sequence[Tensor], xs: Sequence[Tensor], shared: Sequence[Tensor], body: Graph
    ) -> None:
        """Add a body's formals, and note the placements of gradients that are computed inside it."""
        for f, outer in zip(loop.carries, carried, strict=True):
            formal = self.add_formal(f, outer, body, outer.sizes, contiguous(outer.sizes), self.placements[outer])
            self.carried.add(formal.storage)
        for f, outer in zip(loop.slices, xs, strict=True):
            placement = self.placements[outer].with_dims(self.placements[outer].dims[1:])
            self.add_formal(f, outer, body, outer.sizes[1:], outer.strides[1:], placement, lead=1)
        for f, outer in zip(loop.captured, shared, strict=True):
            formal = self.add_formal(f, outer, body, outer.sizes, outer.strides, self.placements[outer])
            formal.offset = outer.offset
        buffers = {o: r for r, o in zip(loop.op.results, loop.body.outputs, strict=True) if self.buffer(r) is not None}
        for o, r in buffers.items():
            goal = self.buffer_placement(o)
            if r in self.grad_placements and goal is not None:
                self.set_target(o, goal, self.param_axes[r])
        for r, o in zip((*loop.stacks, *loop.pieces), (*loop.ys, *loop.saved), strict=True):
            if r in self.grad_placements and o not in buffers:
                self.set_target(
                    o, self.grad_placements[r].with_dims(self.grad_placements[r].dims[1:]), self.param_axes[r]
                )
        for i, (r, o) in enumerate(zip(loop.lasts, loop.nexts, strict=True)):
            if o in buffers:
                continue
            if r in self.grad_placements and not reduced_after_loop(loop, i, self.requested.reduce_every_microbatch):
                self.set_target(o, self.grad_placements[r], self.param_axes[r])
            elif r in self.grad_placements and is_pass(loop.body) and self.placements[carried[i]].pending:
                self.set_target(o, self.placements[carried[i]], self.param_axes[r])

    def set_target(self, t: Tensor, placement: Placement, param_axes: frozenset[str]) -> None:
        """Note the placement of a gradient that is computed inside a body."""
        terms = targets(t.graph, {t: placement}) if self.buffer(t) is None else targets(t.graph, {t: placement}, adds)
        self.grad_placements |= terms
        self.param_axes |= dict.fromkeys(terms, param_axes)

    def partial_start(self, i: int, op: Op, placement: Placement) -> Placement | None:
        """Return the initial placement of a carry that is reduced after the loop; None if it has it already."""
        loop, zero = op.loop, self.tensors[op.operands[i]]
        assert loop is not None
        from_zero = isinstance(self.tensors[loop.nexts[i]], Tensor) and isinstance(zero, UnplacedSource) and zero.zero
        if (
            placement.pending
            or not from_zero
            or not reduced_after_loop(loop, i, self.requested.reduce_every_microbatch)
        ):
            return None
        natural = pending_of(loop, i, self.tensors, self.placements)
        if natural is None:
            return None
        want = self.grad_placements.get(loop.lasts[i], natural).without(natural.pending, self.mesh)
        return replace(want, partial=natural.partial) if want.axes >= natural.axes else natural

    def finish_carry(self, i: int, t: Tensor, body: Graph, op: Op, placement: Placement) -> None:
        """Redistribute a carry to its placement in the next iteration, or restart the loop with another one."""
        local = self.tensors[t]
        if isinstance(local, UnplacedSource):
            self.tensors[t] = self.value(t, body, placement, op.phase)
            return
        loop = op.loop
        assert loop is not None
        after = self.placements[local].without(self.placements[local].pending, self.mesh)
        extra = after.axes - placement.axes
        if extra and t not in self.requested.placements and loop.carries[i] not in self.requested.placements:
            # a split dimension may be split further: the first reader of an undecided carry may have gathered it
            coarser = after.without(extra, self.mesh)
            triples = zip(placement.dims, after.dims, coarser.dims, strict=True)
            dims = [d if not current or rest == current else current for current, d, rest in triples]
            wider = Placement(tuple(dims))
            if wider != placement and len(wider.axes) == sum(len([f for f in d if isinstance(f, str)]) for d in dims):
                raise WiderError(op, {i: wider})
        if (
            t not in self.requested.placements
            and loop.carries[i] not in self.requested.placements
            and t not in self.grad_placements
        ):
            self.note_resharded(op, t, after, placement, "the next iteration reads it with another placement")
        self.tensors[t] = self.dense(self.moved_to(local, placement, body, op.phase), body, op.phase)

    def add_formal(
        self, f: Tensor, outer: Tensor, body: Graph, sizes: tuple[Poly, ...], strides: tuple[Poly, ...],
        placement: Placement, lead: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add a formal of a loop body."""
        pieces = max(outer.storage.pieces - lead, 0)
        formal = body.formal(outer, f.name, sizes, strides, pieces)
        formal.domain = None if f.domain is None or outer.domain is None else (outer.domain[0], *f.domain[1:])
        self.note_alias(formal, outer)
        self.names[formal] = self.names.get(outer, outer.name)
        self.tensors[f], self.placements[formal] = formal, placement
        return formal


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
        raise GraphError(f"mesh: axes {shown(list(axes))}, expected at least one name with a number of ranks")
    joint = {name: n for name, n in axes.items() if isinstance(n, tuple)}
    sizes = {name: positive(f"mesh: {name}", n) for name, n in axes.items() if name not in joint}
    order = [*sizes]
    for name, parts in joint.items():
        start = order.index(parts[0]) if len(parts) > 1 and parts[0] in sizes else 0
        if not parts or tuple(order[start : start + len(parts)]) != parts or len(parts) < 2:
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
    keep_gathered: str | Iterable[str] = (),
    reduce_every_microbatch: bool = True,
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
    keep_gathered : str or iterable of str
        Mesh axes along which all-gathered activations are saved for the backward pass, as autograd saves tensors that
        DTensor has redistributed. By default only the shard is saved and gathered again, as in Megatron's
        `LinearWithGradAccumulationAndAsyncCommunication` (megatron/core/tensor_parallel/layers.py).
    reduce_every_microbatch : bool
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
    need_flag(
        "shard", reduce_every_microbatch=reduce_every_microbatch, accumulation_fusion=accumulation_fusion, strict=strict
    )
    used = _without_trivial_axes(mesh)
    policy = gather if isinstance(gather, FullyShard) else FullyShard(gather)
    if not reduce_every_microbatch:
        _need_reduce_dtype(policy, graph)
    gathered, exchanged = _axes("gather", policy.axes, used, mesh), _axes("exchange", exchange, used, mesh)
    ring_axes, saved_axes = _axes("ring", ring, used, mesh), _axes("keep_gathered", keep_gathered, used, mesh)
    bucket_axes = _axes("buckets", buckets.axes, used, mesh) if buckets is not None else frozenset[str]()
    tensor_placements = _matched(graph, used, mesh, placements)
    grad_placements = _matched(graph, used, mesh, gradients or {})
    # micro-batches interleave with those of other pipeline stages, so none is peeled
    if gathered and policy.by_unit and not reduce_every_microbatch and graph.waiting is None:
        peeled = PeeledLastMicroBatch()
        graph = peeled.run(graph)
        tensor_placements, grad_placements = peeled.translated(tensor_placements), peeled.translated(grad_placements)
    replicated = {t: Placement(((),) * t.ndim) for t in graph.gradients}
    resident = _resident(graph, policy)
    request = RequestedPlacements(
        mesh=used,
        placements=tensor_placements,
        gradients={
            g: grad_placements.get(t, tensor_placements.get(t, replicated[t])) for t, g in graph.gradients.items()
        },
        param_axes={
            g: tensor_placements.get(t, replicated[t]).axes - gathered
            | tensor_placements.get(t, replicated[t]).axes & resident.get(t, frozenset())
            for t, g in graph.gradients.items()
        },
        gathered=gathered,
        resident=resident,
        policy=policy if gathered else None,
        exchanged=exchanged,
        saved=saved_axes,
        reduce_every_microbatch=reduce_every_microbatch,
        fused=accumulation_fusion,
    )
    local = _local_graph(graph, request, strict=strict)
    local = in_rings(local, ring_axes) if ring_axes else local
    return local if buckets is None or not bucket_axes else in_buckets(local, buckets, bucket_axes)


def _resident(graph: Graph, policy: FullyShard) -> dict[Tensor, frozenset[str]]:
    """Return the parameters that stay sharded along some of the gathered axes, and these axes."""
    out: dict[Tensor, frozenset[str]] = {}
    assert not isinstance(policy.resident, Mapping)
    for pattern, axes in policy.resident:
        matched = [t for t in graph.params if t.name == pattern or fnmatchcase(t.name, pattern)]
        if not matched:
            raise GraphError(
                f"FullyShard: resident: {shown(pattern)} matches no parameter of graph {graph.name!r}; expected a name "
                f"or a pattern"
            )
        out |= {t: out.get(t, frozenset()) | frozenset(axes) for t in matched}
    return out


def _need_reduce_dtype(policy: FullyShard, graph: Graph) -> None:
    """Raise an error if partial gradients would be accumulated in another format than they are reduced in."""
    mismatched = next((g for g in graph.gradients.values() if policy.reduce_dtype not in (None, g.dtype.name)), None)
    if mismatched is not None:
        raise UnsupportedError(
            f"shard: reduce_every_microbatch=False with reduce_dtype={policy.reduce_dtype!r}; expected gradients to be "
            f"reduced in the format in which they are accumulated, {mismatched.dtype.name}"
        )


def _axes(option: str, names: str | Iterable[str], used: Mesh, mesh: Mesh) -> frozenset[str]:
    """Return the named mesh axes, without those of one rank."""
    axes = frozenset([names] if isinstance(names, str) else names)
    unknown = sorted(axes - {*mesh}, key=str)
    if unknown:
        raise GraphError(f"shard: {option}: unknown axis {shown(unknown[0])}, expected axes of {mesh}")
    return axes & {*used}


def _without_trivial_axes(mesh: Mesh) -> Mesh:
    """Return a mesh without one-rank axes, except members of a joint axis."""
    joint = tuple((name, parts) for name, parts in mesh.joint if mesh[name] != ONE)
    members = {a for _, parts in joint for a in parts}
    return Mesh(tuple((name, n) for name, n in mesh.axes if n != ONE or name in members), joint)


def _local_graph(graph: Graph, request: RequestedPlacements, *, strict: bool) -> Graph:
    """Return the graph of one rank, with its placements and unrequested redistributions."""
    sharder, local = _partitioned(graph, request)
    if strict and sharder.resharded:
        raise UnsupportedError(f"shard: {sharder.resharded[0]}, expected placements that every op can keep")
    placements = sharder.placements
    sources = [t for g in local.bodies() for t in g.tensors if t.producer is None and t.role != "formal"]
    local.sharding = Sharding(
        mesh=request.mesh,
        places={t.name: placements[t] for t in sources},
        outputs=tuple(placements[t] for t in local.outputs),
        gradients={t.name: placements[g] for t, g in local.gradients.items()},
        resharded=tuple(dict.fromkeys(sharder.resharded)),
    )
    return local


def _partitioned(graph: Graph, request: RequestedPlacements) -> tuple[Sharder, Graph]:
    """Build the graph of one rank; repeat if stacks or gradient buffers turn out to have another placement.

    Their placements follow from the values written into them, which are known only afterwards.
    """
    while True:
        sharder = Sharder(request)
        try:
            local = sharder.run(graph)
        except CostGraphError:
            if not sharder.stacks:  # else the error may come from a stack with a wrong placement
                raise
        terms = {} if request.buffers else sharder.terms
        if not sharder.stacks and not terms:
            return sharder, local
        stacks, buffers = {**request.stacks, **sharder.stacks}, {**request.buffers, **terms}
        products = request.products or sharder.products
        request = replace(
            request,
            stacks=stacks,
            buffers=buffers,
            placements={**request.placements, **buffers},
            products=products,
            carries=sharder.decided_carries,
        )


def _matched(graph: Graph, used: Mesh, mesh: Mesh, requested: Placements) -> dict[Tensor, Placement]:
    """Return the placement of each tensor that is named."""
    named = {t.name: t for g in graph.bodies() for t in g.tensors if not g.fused}
    sources = [t for t in named.values() if t.producer is None and t.role != "formal"]
    out: dict[Tensor, Placement] = {}
    for key, text in requested.items():
        matched = [named[key]] if key in named else [t for t in sources if fnmatchcase(t.name, key)]
        if not matched:
            raise GraphError(
                f"shard: {shown(key)} matches no tensor of graph {graph.name!r}; expected a name or a pattern"
            )
        out |= {t: _read(t, text, used, mesh) for t in matched}
    return out


def _read(t: Tensor, text: str, used: Mesh, mesh: Mesh) -> Placement:
    """Parse a placement; leading axes whose positions are separate storages are not part of it."""
    pieces = t.storage.pieces
    where = f"shard: {text!r} of {t!r}"
    axis_groups = groups(text)
    if axis_groups is None or len(axis_groups) != t.ndim - pieces:
        raise PatternError(f"{where}: expected an entry for each of {t.ndim - pieces} axes")
    out: list[Factors] = [()] * pieces
    used_axes: set[str] = set()
    for group, size in zip(axis_groups, t.sizes[pieces:], strict=True):
        blocks = int(group[0]) if group[0].isdigit() else 1
        names = [n for n in group[group[0].isdigit() and len(group) > 1 :] if n not in mesh]
        axes = [a for n in group if n in mesh for a in mesh.parts(n)]
        if len(names) != 1 or blocks < 1 or used_axes & {*axes} or len(axes) > len({*axes}):
            words = f"({' '.join(group)})" if len(group) > 1 else group[0]
            raise PatternError(f"{where}: {words}, expected one name and axes of {mesh}, each at most once")
        used_axes |= {*axes}
        part = size / prod((used[a] for a in axes if a in used), start=poly(blocks))
        if part.constant is not None and not isinstance(part.constant, int):
            raise ShapeError(
                f"{where}: ({' '.join(group)}) splits size {size} into parts of {part}; expected a size that the ranks "
                f"divide"
            )
        out.append(tidy([poly(blocks), *(a for a in axes if a in used), part]))
    return Placement(tuple(out))


def groups(text: str) -> list[list[str]] | None:
    """Return the words of each axis, None if the text is not a placement."""
    if not re.fullmatch(r"(\s*(\w+|\((\s*\w+)+\s*\)))*\s*", text, re.ASCII):
        return None
    return [group.strip("()").split() for group in re.findall(r"\w+|\([^()]*\)", text)]
