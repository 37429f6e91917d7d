"""Copying a graph in other number formats: casts in front of ops, formats of bodies and of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...dtypes import DTYPES, DType, promote
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.scopes import building
from ...graph.tensor import Storage, Tensor
from ...ops.blocks import Kernel
from ...ops.foreign import exact
from ...ops.index import Scatter
from ...ops.keep import Keep
from ...ops.layout import contiguous_copy
from ...ops.moves import Concat
from ...ops.pointwise import FUNCTIONS, Pointwise
from ..rewrite import Rewriter
from .autocast import FALLBACK, casts_inside, family, word
from .formats import Carries, Records, common, is_float
from .policy import Policy

__all__ = ["Retyper"]

#: Families of kernels that take means and variances.
_NORMS = ("norm", "batch_norm")


class Retyper(Rewriter):
    """Copies a graph op by op, each in the formats that its operands have by then."""

    def __init__(self, policy: Policy, old: Graph, carries: Carries) -> None:
        super().__init__()
        self.policy, self.carries = policy, carries
        self.default = old.dtype
        self.base = old.dtype if policy.compute is None else DTYPES[policy.compute]
        self.given: dict[Tensor, DType] = {}
        """Format that an input of a body, of the old graph, is taken in."""
        self.records = Records(policy, self.default, self.base, self.given)
        self.sources: dict[Tensor, Tensor] = {}
        """What an input of a body stands for outside, where it is one and the same in all iterations."""
        self.slices: dict[Tensor, Tensor] = {}
        """Parameter whose storage for one iteration an input of a body is."""
        self.cached: dict[tuple[Tensor, DType], Any] = {}
        """Casts of parameters, made once."""
        self.scoped: set[Tensor] = set()
        """What ops and parameters of a scope with a format of its own hand out."""
        self.exact = exact(old) | _made_in_a_format(old)
        """Ops that integers alone decide, and those whose format a program states, which keep their formats."""
        self.kernels: list[Op] = []
        """Kernels, those around first, whose body is copied with no look at the policy."""

    # -- sources -------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy an input, parameter, buffer or cache; what is in the default format follows the policy."""
        made = super().source(old, new, suffix)
        if old.dtype == self.default and is_float(old):
            scope = self.policy.scope_format(old.name)
            if old.role == "param":
                params = self.policy.params
                wanted = scope or (old.dtype if params is None else DTYPES[params])
            else:
                wanted = scope or self.base
            _give_format(made, wanted)
            if scope is not None:
                self.scoped.add(made)
        return made

    def leaf(self, t: Tensor) -> Tensor:
        """Return the tensor that one stands for where it was declared or made."""
        while t in self.sources:
            t = self.sources[t]
        return t

    def param(self, t: Tensor) -> Tensor | None:
        """Return the parameter that a tensor is, None if it is something else or a view of one."""
        leaf = self.leaf(t)
        declared = self.slices.get(leaf, leaf)
        return leaf if declared.role == "param" and declared.producer is None else None

    # -- casts ---------------------------------------------------------------------------------------------------

    def cast(self, t: Tensor, wanted: DType, graph: Graph, name: str) -> Tensor:
        """Add a cast in front of what is added next."""
        made: Tensor = graph.add_op(Pointwise(function=FUNCTIONS["cast"], dtype=wanted), [t], name).results[0]
        return made

    def once(self, t: Tensor, key: DType, make: Callable[[Graph, Tensor, str], Any]) -> Any:
        """Return what stands for a parameter, made once where it lives."""
        leaf = self.leaf(t)
        if (leaf, key) not in self.cached:
            name = self.slices.get(leaf, leaf).name
            self.cached[leaf, key] = make(leaf.graph, leaf, name)
        return self.cached[leaf, key]

    def converted(self, t: Tensor, wanted: DType, op: Op, new: Graph) -> Tensor:
        """Return a tensor in another format."""
        if self._is_kept(t, wanted, op) and not new.fused:
            made: Tensor = self.once(
                t, wanted, lambda graph, leaf, name: self.cast(leaf, wanted, graph, f"{name}.cast")
            )
            return made
        return self.cast(t, wanted, new, f"{op.scope}/cast" if op.scope else "cast")

    def _is_kept(self, t: Tensor, wanted: DType, op: Op) -> bool:
        leaf = self.param(t)
        if leaf is None:
            return False
        if self.policy.autocast is None or self.policy.scope_format(op.name) is not None:
            return True
        # torch caches what it makes narrower, of leaves that want a gradient
        return self.slices.get(leaf, leaf).requires_grad and wanted.bits < leaf.dtype.bits

    # -- ops -----------------------------------------------------------------------------------------------------

    def listed(self, op: Op) -> DType | None:
        """Return the format that autocast runs an op in, None if it has none of its own."""
        table = self.policy.autocast
        if table is None or op.kind.overwrites():  # torch casts for no op that writes into its operand
            return None
        name = word(op)
        keys = [name, FALLBACK.get(name, "")]
        if op.body is not None:
            keys.insert(0, op.body.name)
        found = next((table[k] for k in keys if k in table), None)
        return None if found is None else DTYPES[found]

    def wanted(self, op: Op, old: Tensor, t: Tensor) -> DType | None:
        """Return the format that an op takes an operand in, None for the one that it has."""
        if not is_float(t):
            return None
        follows = old.dtype == self.default
        scope = self.policy.scope_format(op.name)
        if scope is not None:
            return scope if follows else None
        if self.policy.autocast is not None:
            return None if t.dtype.name == "fp64" else self.listed(op)
        return self.base if follows and (self.param(t) is not None or t in self.scoped) else None

    def operands(self, op: Op, new: Graph) -> list[Tensor]:
        """Return what stands for the operands of an op, in the formats that it takes."""
        tensors = [self.tensors[t] for t in op.operands]
        if self.kernels:
            return tensors
        done: dict[Tensor, Tensor] = {}
        for i, (old, t) in enumerate(zip(op.operands, tensors, strict=True)):
            wanted = None if i == 0 and op.kind.overwrites() else self.wanted(op, old, t)
            if wanted is not None and wanted != t.dtype:
                if t not in done:
                    done[t] = self.converted(t, wanted, op, new)
                tensors[i] = done[t]
        return tensors

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if op in self.exact:
            self.copy(op, new, suffix)
        elif op.loop is not None:
            self._loop(op, op.loop, new)
        elif isinstance(op.kind, Kernel):
            self._kernel(op, op.kind, new)
        elif isinstance(op.kind, Keep) and op.kind.asked is not None:
            self._asked(op, op.kind, op.kind.asked, new)
        else:
            self._plain(op, new)
        if self.policy.scope_format(op.name) is not None and not self.kernels:
            self.scoped.update(self.tensors[t] for t in op.results)

    def _plain(self, op: Op, new: Graph) -> None:
        inside = self._inside(op, new)
        if inside is not None:
            self._with_casts(op, new, [self.tensors[t] for t in op.operands], inside)
            return
        operands = self.operands(op, new)
        if self._is_idle(op, operands[0] if operands else None):
            self.tensors[op.results[0]] = operands[0]
            return
        if isinstance(op.kind, Concat | Scatter) and len({t.dtype for t in operands if is_float(t)}) > 1:
            own = operands[0].dtype if op.kind.overwrites() else common(operands)
            if casts_inside(self.policy.autocast_device, word(op), own.name) and not new.fused:
                self._with_casts(op, new, operands, own)
                return
            operands = [self.converted(t, own, op, new) if is_float(t) and t.dtype != own else t for t in operands]
        self.add(op, self.records.of(op, operands), operands, new)

    def _asked(self, op: Op, kind: Keep, asked: DType, new: Graph) -> None:
        """Cast to the format that a program asks for: under autocast nobody knows which one follows from another."""
        (t,) = (self.tensors[t] for t in op.operands)
        follows = not kind.fixed and asked == self.default
        wanted = asked if not follows else self.base if self.policy.autocast is None else t.dtype
        if wanted == t.dtype:
            self.add(op, replace(kind, asked=wanted), [t], new)
        else:
            self.add(op, Pointwise(function=FUNCTIONS["cast"], dtype=wanted), [t], new)

    def _inside(self, op: Op, new: Graph) -> DType | None:
        """Return the format that a kernel of torch converts to as it reads, None where it takes what it is given."""
        if self.kernels or new.fused or self.policy.scope_format(op.name) is not None:
            return None
        listed = self.listed(op)
        given = self.tensors[op.operands[0]] if op.operands else None
        if listed is None or given is None or not is_float(given) or given.dtype.bits >= listed.bits:
            return None
        return listed if casts_inside(self.policy.autocast_device, word(op), given.dtype.name) else None

    def _with_casts(self, op: Op, new: Graph, operands: Sequence[Tensor], wanted: DType) -> None:
        """Add an op and the casts of its operands as one kernel."""
        body = new.start_body(word(op), fused=True)
        read = [body.adopt(t) for t in operands]  # in their order
        inner = [self.cast(t, wanted, body, f"{op.name}/cast") if t.dtype != wanted else t for t in read]
        made = body.add_op(self.records.of(op, inner), inner, f"{op.name}/{word(op)}", op.phase)
        body.outputs += made.results
        self.add(op, Kernel(body=body, backward="ops"), body.captured, new)

    def _is_idle(self, op: Op, t: Tensor | None) -> bool:
        """Whether a cast has nothing left to do. What a body hands out keeps a storage of its own."""
        if word(op) != "cast" or t is None:
            return False
        kind = self.records.of(op, [t])
        if not isinstance(kind, Pointwise) or kind.dtype != t.dtype:
            return False
        handed = op.graph.parent is not None and op.results[0] in op.graph.outputs
        return not handed or (t.role == "activation" and not t.is_view and op.graph.fused)

    # -- bodies --------------------------------------------------------------------------------------------------

    def _kernel(self, op: Op, kind: Kernel, new: Graph) -> None:
        known = family(kind.body) is not None
        inside = self._inside(op, new)
        operands = [self.tensors[t] for t in op.operands]
        whole = bool(
            self.kernels
            or known
            or self.listed(op)
            or self.policy.autocast is None
            or self.policy.scope_format(op.name)
        )
        # other kernels are what a compiler makes of ops that autocast has looked at one by one
        if whole:
            operands = operands if inside is not None else self.operands(op, new)
            self.kernels.append(op)
        body, operands = self._body(op, new, operands, inside)
        if whole:
            self.kernels.pop()
        if known and inside is None:
            self._like_the_first(op, kind.body, body)
        self.add(op, replace(kind, body=body), operands, new)

    def _like_the_first(self, op: Op, old: Graph, body: Graph) -> None:
        """Hand out the format of the first operand where the old kernel did, as torch's kernels do.

        What follows are sums and statistics as the kernel has them, those of attention in fp32 at least. Norms on a CPU
        hand them out in the format of all that they are given, where that is one.
        """
        first, wanted, name = old.formals[0].dtype, self.given[old.formals[0]], family(old)
        alike = all(self.given[f] == wanted for f in old.formals if f.dtype == first)
        on_a_cpu = alike and op.call is not None and not op.call.rule and name in _NORMS
        for i, before in enumerate(old.outputs):
            t = body.outputs[i]
            asked = wanted if not i or on_a_cpu else promote(t.dtype, DTYPES["fp32"]) if name == "attention" else None
            if asked is not None and before.dtype == first and t.dtype != asked and is_float(t):
                body.outputs[i] = self.cast(t, asked, body, f"{t.name}.cast")

    def _body(
        self, op: Op, new: Graph, operands: Sequence[Tensor], inside: DType | None = None
    ) -> tuple[Graph, list[Tensor]]:
        """Copy a body for operands in other formats; return it and the operands that it has in the end."""
        old, loop = op.body, op.loop
        assert old is not None
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        wide = _statistics(op, operands[0]) if old.fused and operands else None
        body = new.start_body(old.name, fused=old.fused)
        for i, (f, t, before) in enumerate(zip(old.formals, operands, op.operands, strict=True)):
            made = self.formal(f, body)
            _give_format(made, t.dtype)
            if f in slices:
                self._slice(made, t, before)
            elif f not in carries:
                made.strides, made.offset = t.strides, t.offset  # a cast lies dense in memory
                self.sources[made] = t
            self.tensors[f], self.given[f] = made, inside if inside is not None and is_float(t) else t.dtype
            calculated = wide if i == 0 and wide is not None else self.given[f]
            if calculated != t.dtype:
                self.tensors[f] = self.cast(made, calculated, body, f"{op.name}/cast")
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        return body, self._used(old, body, operands, {*carries, *slices})

    def _slice(self, made: Tensor, t: Tensor, before: Tensor) -> None:
        if t.strides != before.strides:
            made.strides = t.strides[1:]
        declared = self.slices.get(self.leaf(t), self.leaf(t))
        if declared.role == "param" and declared.storage.pieces and declared.producer is None:
            self.slices[made] = declared

    def _used(self, old: Graph, body: Graph, operands: Sequence[Tensor], fixed: set[Tensor]) -> list[Tensor]:
        """Drop inputs of a body that only their casts outside are read for now, and add those casts."""
        kept, formals = list[Tensor](), list[Tensor]()
        for f, made, t in zip(old.formals, body.formals, operands, strict=False):
            idle = f not in fixed and not any(body.successors(made)) and made not in body.outputs
            if idle and (any(old.successors(f)) or f in old.outputs):
                body.remove_node(made)
            else:
                kept.append(t)
                formals.append(made)
        body.formals[:] = formals + body.formals[len(operands) :]
        return [*kept, *body.captured]

    def _loop(self, op: Op, loop: Loop, new: Graph) -> None:
        operands = [self.tensors[t] for t in op.operands]
        for i in range(len(loop.starts)):
            settled = self.carries.settled.get((op, i))
            if settled is not None and settled != operands[i].dtype:
                operands[i] = self.cast(operands[i], settled, new, f"{op.name}/cast")
        body, operands = self._body(op, new, operands)
        for i in range(len(loop.starts)):
            entry, after = operands[i].dtype, body.outputs[i]
            if after.dtype != entry:
                self.carries.settle(op, i, entry, after.dtype)
                after = self.cast(after, entry, body, f"{op.name}/cast")
            with building(body):
                body.outputs[i] = contiguous_copy(after)
        self.add(op, replace(loop.kind, body=body), operands, new)


def _made_in_a_format(graph: Graph) -> set[Op]:
    """Return the ops that make numbers of nothing, or of integers, in a format that a program states."""
    asking = (op for op in graph.walk() if isinstance(op.kind, Keep) and op.kind.fixed)
    makers = (t.producer for op in asking for t in op.operands)
    return {m for m in makers if m is not None and not any(map(is_float, m.operands))}


def _statistics(op: Op, x: Tensor) -> DType | None:
    """Return the format that a kernel takes means and variances in, None for that of its operand: fp32 at least."""
    assert op.body is not None
    if not is_float(x) or family(op.body) not in _NORMS:
        return None
    return promote(x.dtype, DTYPES["fp32"])


def _give_format(t: Tensor, wanted: DType) -> None:
    t.dtype = wanted
    t.storage = Storage(t.name, t.sizes, wanted, t.role, t.storage.pieces)
