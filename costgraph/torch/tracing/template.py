"""What a call is in declared kinds: found once for each call of its sort, and put into the graph for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.dominance import Relations
from ...algebra.polynomial import ONE, ZERO, Poly
from ...algebra.symbols import shown
from ...errors import CostGraphError, UnsupportedError
from ...graph.graph import Graph
from ...graph.op import Bodied, Op, OpKind
from ...graph.scopes import here, opened, scope
from ...graph.strides import Sizes, contiguous
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.spectra import Fourier
from ...ops.stated import Opaque
from ...transforms.rewrite import Rewriter
from .call import Call, Spec
from .translations.table import Translation

__all__ = ["Template", "Wanted", "declared", "template_of"]


@dataclass(frozen=True)
class Wanted:
    """What the run made of a result."""

    spec: Spec
    of: int | None
    """operand whose storage it shares"""
    offset: Poly
    """first element within the storage"""
    place: int
    """among what the call returned, -1 of an operand that it wrote into and did not return"""


@dataclass(frozen=True)
class Template:
    """Declared ops that stand for a call."""

    body: Graph
    """the ops, on tensors that stand for operands"""
    operands: tuple[int, ...]
    """which operands of the call its inputs stand for"""
    results: tuple[Tensor, ...]
    """what stands for each result that is wanted"""
    kernel: Kernel | None
    """record of the kernel that they are, None where each op is one of its own"""

    def add(self, graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[list[Op], tuple[Tensor, ...]]:
        """Add the ops to a graph; returns them, and the results."""
        again = _Copier()
        given = [operands[i] for i in self.operands]
        again.tensors |= zip(self.body.formals, given, strict=True)
        if self.kernel is not None:
            op = _added(graph, replace(self.kernel, body=again.inside(self.body, graph, name)), given, name)
            return [op], op.results
        ops = []
        for inner in self.body.ops:
            kind = inner.kind
            if isinstance(kind, Bodied):
                kind = replace(kind, body=again.inside(kind.body, graph, name))
            op = _added(graph, kind, [again.tensors[t] for t in inner.operands], name)
            again.tensors |= zip(inner.results, op.results, strict=True)
            ops.append(op)
        return ops, tuple(again.tensors[t] for t in self.results)


class _Copier(Rewriter):
    """Copies ops to where the call stands: into its scope, and into its phase."""

    def inside(self, body: Graph, graph: Graph, name: str) -> Graph:
        """Copy the body of a kernel, whose name is a scope for what is inside."""
        with scope(name):
            return self.body(body, graph, "")

    def add(self, op: Op, kind: OpKind, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add an op under its own name."""
        made = super().add(op, kind, operands, new, name)
        made.scope, made.phase = "/".join(here().levels), here().phase
        return made


def _added(graph: Graph, kind: Any, operands: Sequence[Tensor], name: str) -> Op:
    op = graph.add_op(kind, operands, name)
    if op.body is not None:
        op.body.owner = op
    return op


def template_of(
    translation: Translation,
    call: Call,
    operands: Mapping[Any, int],
    tensors: Sequence[Tensor],
    wanted: Sequence[Wanted],
    workspace: Poly = ZERO,
    *,
    whole: bool = False,
) -> Template | None:
    """Return the declared ops of a call, as the run had it; None where it is not what they say.

    `operands` has the number of each operand, `tensors` what stands for them in the graph, and `wanted` what the run
    made. `workspace` is what torch's kernel takes beside operands and results, in bytes. `whole` says whether the ops
    are one, which keeps the call, even where each could be one of its own.
    """
    relations = tensors[0].graph.root.relations if tensors else None
    try:
        found = declared(translation, call, operands, tensors, relations)
    except CostGraphError:
        return None  # its rule says what it costs; where it has none, `counts_of` says why
    if found is None:
        return None
    body, inputs, returned = found
    places = {outer: i for i, outer in enumerate(inputs)}
    used = tuple(places[t] for t in body.captured)
    results = _results(returned, body, inputs, wanted)
    return None if results is None else _settled(body, used, results, wanted, workspace, whole)


def declared(
    translation: Translation,
    call: Call,
    operands: Mapping[Any, int],
    tensors: Sequence[Tensor | Spec],
    relations: Relations | None = None,
) -> tuple[Graph, list[Tensor], Tensor | Sequence[Tensor | None]] | None:
    """Return the declared ops of a call in a body, its inputs outside, and what it returns; None where it has none.

    CostGraphError if no kind takes such operands, as where only data explains shapes; UnsupportedError if the
    translation fails with an error that is not the library's: it did not foresee these arguments.
    """
    scratch = Graph("call")
    scratch.relations = scratch.relations if relations is None else relations
    inputs = [
        Tensor(scratch, f"x{i}", t.sizes, t.dtype, role="input", strides=t.strides) for i, t in enumerate(tensors)
    ]
    for t in inputs:
        scratch.add_node(t)
    body = scratch.start_body("call", fused=True)
    asked = replace(call, arguments={k: _given(v, operands, inputs) for k, v in call.arguments.items()})
    try:
        with opened(graph=body, levels=(), phase="forward"):
            returned = translation(asked)
    except CostGraphError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"aten::{call.name}.{call.overload}: its translation failed with {type(error).__name__}: "
            f"{shown(str(error), 300)}; expected one that takes such a call, or returns None"
        ) from error
    return None if returned is None else (body, inputs, returned)


def _given(value: Any, operands: Mapping[Any, int], inputs: Sequence[Tensor]) -> Any:
    if isinstance(value, Spec):
        return inputs[operands[value]] if value in operands else None
    if isinstance(value, tuple):
        return tuple(_given(v, operands, inputs) for v in value)
    return value


def _results(
    made: Tensor | Sequence[Tensor | None], body: Graph, inputs: Sequence[Tensor], wanted: Sequence[Wanted]
) -> tuple[Tensor, ...] | None:
    """Return what stands for each result; None where the run made something else."""
    returned = [made] if isinstance(made, Tensor) else list(made)
    found = []
    for w in wanted:
        if w.place >= 0:
            t = returned[w.place] if w.place < len(returned) else None
        else:  # an operand that it wrote into
            t = next((r for r in returned if r is not None and r.storage in _stored(body, inputs[w.of or 0])), None)
        t = body.adopt(t) if t is not None and t in inputs else t
        if t is None or t.dtype != w.spec.dtype or len(t.sizes) != len(w.spec.sizes):
            return None
        if not all(map(body.same, t.sizes, w.spec.sizes)):
            return None
        shared = next((i for i, x in enumerate(inputs) if t.storage in _stored(body, x)), None)
        if shared != w.of:
            return None
        found.append(t)
    return tuple(found)


def _stored(body: Graph, outer: Tensor) -> list[Any]:
    return [outer.storage, *(inner.storage for out, inner in body._captured.items() if out is outer)]


def _settled(
    body: Graph,
    used: tuple[int, ...],
    results: tuple[Tensor, ...],
    wanted: Sequence[Wanted],
    workspace: Poly,
    whole: bool,
) -> Template | None:
    """Say whether the ops stand for themselves, or are one kernel."""
    ops = body.ops
    as_run = all(_lies(body, t, w) for t, w in zip(results, wanted, strict=True))
    if not ops:
        return None
    work = [op for op in ops if op.kind.overwrites() or any(not t.is_view for t in op.results)]
    if len(work) == 1 and isinstance(work[0].kind, Opaque):
        work[0].state(workspace=work[0].kind.workspace + workspace)
        workspace = ZERO
    if not work:
        return Template(body, used, results, None) if as_run else None
    if len(work) == 1 and as_run and not workspace and not (whole and len(ops) > 1):
        return Template(body, used, results, None)
    if len(ops) == 1 and isinstance(ops[0].kind, Kernel) and not ops[0].kind.changed:
        inner = ops[0].kind
        order = [body.formals.index(t) for t in ops[0].operands]
        if tuple(ops[0].results) != results:
            return None
        kind = replace(inner, strides=_strides(wanted), workspace=inner.workspace + workspace)
        return Template(inner.body, tuple(used[i] for i in order), results, kind)
    changed = {body.formals.index(f) for f in body.formals for t in results if t.storage is f.storage}
    if any(w.of is not None for w in wanted) and not changed:
        return None
    body.outputs = list(results)
    # torch has a kernel for the gradients of one that contracts nothing, and products of their own for the others
    contracts = any(isinstance(op.kind, Einsum | Fourier) for op in ops)
    # of a modulus it makes the sign first
    contracts = contracts or (len(ops) == 1 and any(t.dtype.kind == "complex" for t in ops[0].operands[:1]))
    kind = Kernel(
        body=body,
        changed=tuple(sorted(changed)),
        backward="ops" if contracts else "",
        strides=_strides(wanted),
        workspace=workspace,
    )
    return Template(body, used, results, kind)


def _lies(body: Graph, t: Tensor, w: Wanted) -> bool:
    """Whether a result lies in memory as in the run; where an axis of size 1 leads makes no difference."""
    same = all(n == ONE or body.same(a, b) for n, a, b in zip(t.sizes, t.strides, w.spec.strides, strict=True))
    return same and (w.of is None or body.same(t.offset, w.offset))


def _strides(wanted: Sequence[Wanted]) -> tuple[Sizes | None, ...]:
    """Return how results lie where not all of them are dense in the order of their axes."""
    out = []
    for w in wanted:
        dense = contiguous(w.spec.sizes)
        own = any(n != ONE and a != b for n, a, b in zip(w.spec.sizes, w.spec.strides, dense, strict=True))
        out.append(w.spec.strides if own and w.of is None else None)
    return tuple(out) if any(s is not None for s in out) else ()
