"""Translate a call into declared ops; equal calls share one template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ...algebra.dominance import Relations
from ...algebra.polynomial import ONE, ZERO, Poly
from ...algebra.symbols import shown
from ...errors import CostGraphError, UnsupportedError
from ...ir.graph import (
    BodyKind,
    Graph,
    Op,
    OpKind,
    Tensor,
    here,
    opened,
    scope,
)
from ...ir.strides import (
    Sizes,
    contiguous,
)
from ...ops.einsum import Einsum
from ...ops.fourier import Fourier
from ...ops.loops import Kernel
from ...ops.opaque import Opaque
from ...transforms.rewrite import Rewriter
from .call import Call, Spec, number_of
from .rules.workspaces import copied, copies_matmul_operands, copies_results, workspace_of
from .translations.table import Translation

__all__ = ["Template", "ObservedResult", "declared", "template_of"]


@dataclass(frozen=True)
class ObservedResult:
    """A result as the run produced it."""

    spec: Spec
    of: int | None
    """operand whose storage it shares"""
    offset: Poly
    """first element within the storage"""
    index: int
    """index among the returned values; -1 for an operand that is written but not returned"""
    spare: Poly = ZERO
    """bytes of the storage beyond its elements"""


@dataclass(frozen=True)
class Template:
    """Declared ops for a call."""

    body: Graph
    """the ops, on tensors that stand for the operands"""
    operands: tuple[int, ...]
    """the call's operand for each input of the body"""
    results: tuple[Tensor, ...]
    """the tensor for each result"""
    kernel: Kernel | None
    """kernel that fuses the ops; None if each op is its own kernel"""

    def add(self, graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[list[Op], tuple[Tensor, ...]]:
        """Add the ops to a graph; return them and the results."""
        copier = _Copier()
        inputs = [operands[i] for i in self.operands]
        copier.tensors |= zip(self.body.formals, inputs, strict=True)
        if self.kernel is not None:
            op = _add_op(graph, replace(self.kernel, body=copier.copy_body(self.body, graph, name)), inputs, name)
            return [op], op.results
        ops = []
        for inner in self.body.ops:
            kind = inner.kind
            if isinstance(kind, BodyKind):
                kind = replace(kind, body=copier.copy_body(kind.body, graph, name))
            op = _add_op(graph, kind, [copier.tensors[t] for t in inner.operands], name)
            copier.tensors |= zip(inner.results, op.results, strict=True)
            ops.append(op)
        return ops, tuple(copier.tensors[t] for t in self.results)


class _Copier(Rewriter):
    """Copies ops into the scope and phase of the call."""

    def copy_body(self, body: Graph, graph: Graph, name: str) -> Graph:
        """Copy a kernel's body, in a scope with the kernel's name."""
        with scope(name):
            return self.body(body, graph, "")

    def add(self, op: Op, kind: OpKind, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add an op under its own name."""
        new_op = super().add(op, kind, operands, new, name)
        new_op.scope, new_op.phase = "/".join(here().levels), here().phase
        return new_op


def _add_op(graph: Graph, kind: Any, operands: Sequence[Tensor], name: str) -> Op:
    op = graph.add_op(kind, operands, name)
    if op.body is not None:
        op.body.owner = op
        _relocate(op)
    return op


def _relocate(op: Op) -> None:
    """Let the inputs of a kernel's body, and their views, start where its operands do: a template does not know it."""
    if not isinstance(op.kind, Kernel):
        return
    body = op.kind.body
    for inner, outer in zip(body.formals, op.operands, strict=True):
        moved = outer.offset - inner.offset
        for view in body.tensors if moved else ():
            if view.storage is inner.storage:
                view.offset = view.offset + moved
    for nested in body.ops:
        _relocate(nested)


def template_of(
    translation: Translation,
    call: Call,
    operands: Mapping[Any, int],
    tensors: Sequence[Tensor],
    observed: Sequence[ObservedResult],
    workspace: Poly = ZERO,
    *,
    one_kernel: bool = False,
) -> Template | None:
    """Return a call's declared ops; None if they do not reproduce the run's results.

    `operands` numbers the operands, `tensors` are their graph tensors, `observed` are the run's results, and
    `workspace` are the temporary bytes of torch's kernel. With `one_kernel`, the ops form one kernel that keeps the
    call, even if each could be its own.
    """
    relations = tensors[0].graph.root.relations if tensors else None
    try:
        declaration = declared(translation, call, operands, tensors, relations)
    except CostGraphError:
        return None  # its rule states the costs; without one, `counts_of` raises the reason
    if declaration is None:
        return None
    body, inputs, returned = declaration
    used = tuple(inputs[t] for t in body.captured)
    results = _result_tensors(returned, body, inputs, observed)
    if any(result.spare and (i or result.of is not None) for i, result in enumerate(observed)):
        return None
    template = None if results is None else _as_template(body, used, results, observed, workspace, one_kernel)
    return None if template is None else _with_gradient(template, call, operands)


@cache
def _arguments(name: str) -> tuple[str, ...]:
    """Return the argument names of a backward kernel; none if torch lacks it."""
    packet = getattr(torch.ops.aten, name, None)
    return _SAVED_OPERANDS.get(name, ()) if packet is None else tuple(a.name for a in packet.default._schema.arguments)


#: Operands that autograd saves although their gradients are views.
_SAVED_OPERANDS = {"complex_backward": ("real", "imag")}


def _with_gradient(template: Template, call: Call, operands: Mapping[Any, int]) -> Template:
    """State the properties of the backward kernel: saved operands, gradient memory format, temporaries."""
    name = "embedding_dense_backward" if call.name == "embedding" else f"{call.name.removesuffix('_forward')}_backward"
    names, body, kernel = _arguments(name), template.body, template.kernel
    op = next((op for op in reversed(body.ops) if _computes(op)), None)
    if op is None:
        return template
    positions = {t.storage: i for i, t in enumerate(op.operands if kernel is None else body.formals)}
    formals = dict(zip(template.operands, body.formals, strict=True))
    tensors = {k: formals.get(operands[v]) for k, v in call.arguments.items() if isinstance(v, Spec) and v in operands}
    saved = {k: positions[t.storage] for k, t in tensors.items() if t is not None and t.storage in positions}
    grad = next((n for n in names if n.startswith("grad")), "grad_output")
    dense = Spec(call.out.sizes, contiguous(call.out.sizes), call.out.dtype)
    backward_call = replace(call, name=name, arguments={**call.arguments, grad: dense}, results=(dense,))
    layout = copied(backward_call).get(grad)
    properties: Any = {
        "saved_operands": tuple(saved[n] for n in names if n in saved),
        "grad_memory_format": ""
        if layout is None
        else {"": "contiguous", "bshd": "bshd", grad: "grad"}.get(layout, "operand"),
        "copies_grad_input": copies_results(backward_call),
        "copies_matmul_operands": copies_matmul_operands(call),
    }
    if kernel is None:
        op.state(**properties)
        return template
    return replace(template, kernel=replace(kernel, **properties, gradient_workspace=workspace_of(backward_call)))


def declared(
    translation: Translation,
    call: Call,
    operands: Mapping[Any, int],
    tensors: Sequence[Tensor | Spec],
    relations: Relations | None = None,
) -> tuple[Graph, dict[Tensor, int], Tensor | Sequence[Tensor | None]] | None:
    """Return a body with the declared ops of a call, its inputs, and the results; None without a translation.

    Each input maps to the number of its operand. A tensor passed as several arguments, such as query and key, gets one
    input per argument, since torch computes one gradient per argument; an in-place op has a single input.

    Raises
    ------
    CostGraphError
        If no op kind accepts the operands, as when only data explains the shapes.
    UnsupportedError
        If the translation fails with a foreign error: it did not foresee the arguments.
    """
    scratch = Graph("call")
    scratch.relations = scratch.relations if relations is None else relations
    inputs: dict[Tensor, int] = {}

    def add_formal(operand: int) -> Tensor:
        t = tensors[operand]
        formal = Tensor(scratch, f"x{len(inputs)}", t.sizes, t.dtype, role="input", strides=t.strides)
        scratch.add_node(formal)
        inputs[formal] = operand
        return formal

    firsts = [add_formal(i) for i in range(len(tensors))]
    unused = dict(enumerate(firsts))

    def with_formals(value: Any) -> Any:
        if isinstance(value, Spec):
            operand = operands.get(value)
            if operand is None:
                return None
            return firsts[operand] if call.inplace else unused.pop(operand, None) or add_formal(operand)
        return tuple(map(with_formals, value)) if isinstance(value, tuple) else number_of(value)

    body = scratch.start_body("call", fused=True)
    graph_call = replace(call, arguments={k: with_formals(v) for k, v in call.arguments.items()})
    try:
        with opened(graph=body, levels=(), phase="forward"):
            returned = translation(graph_call)
    except CostGraphError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"aten::{call.name}.{call.overload}: its translation failed on these arguments with "
            f"{type(error).__name__}: {shown(str(error), 300)}; a translation returns None for calls that it does not "
            f"support"
        ) from error
    return None if returned is None else (body, inputs, returned)


def _result_tensors(
    outputs: Tensor | Sequence[Tensor | None],
    body: Graph,
    inputs: Mapping[Tensor, int],
    observed: Sequence[ObservedResult],
) -> tuple[Tensor, ...] | None:
    """Return the tensor for each result; None if the run produced other ones."""
    returned = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    tensors = []
    for result in observed:
        if result.index >= 0:
            t = returned[result.index] if result.index < len(returned) else None
        else:  # an operand written in place
            first = next(x for x, i in inputs.items() if i == (result.of or 0))
            t = next((r for r in returned if r is not None and r.storage in _storages(body, first)), None)
        t = body.adopt(t) if t is not None and t in inputs else t
        if t is None or t.dtype != result.spec.dtype or len(t.sizes) != len(result.spec.sizes):
            return None
        if not all(map(body.same, t.sizes, result.spec.sizes)):
            return None
        shared = next((i for x, i in inputs.items() if t.storage in _storages(body, x)), None)
        if shared != result.of:
            return None
        tensors.append(t)
    return tuple(tensors)


def _storages(body: Graph, outer: Tensor) -> list[Any]:
    return [outer.storage, *(inner.storage for out, inner in body._captured.items() if out is outer)]


def _as_template(
    body: Graph,
    used: tuple[int, ...],
    results: tuple[Tensor, ...],
    observed: Sequence[ObservedResult],
    workspace: Poly,
    one_kernel: bool,
) -> Template | None:
    """Decide whether the ops stand alone or form one kernel."""
    ops = body.ops
    spare = observed[0].spare if observed else ZERO
    as_run = not spare and all(_has_layout(body, t, result) for t, result in zip(results, observed, strict=True))
    if not ops:
        return None
    work = [op for op in ops if _computes(op)]
    if len(work) == 1 and isinstance(work[0].kind, Opaque) and as_run:
        work[0].state(workspace=work[0].kind.workspace + workspace)
        workspace = ZERO
    if not work:
        return Template(body, used, results, None) if as_run else None
    if len(work) == 1 and as_run and not workspace and not (one_kernel and len(ops) > 1):
        return Template(body, used, results, None)
    if len(ops) == 1 and isinstance(ops[0].kind, Kernel) and not ops[0].kind.changed:
        inner = ops[0].kind
        order = [body.formals.index(t) for t in ops[0].operands]
        if tuple(ops[0].results) != results:
            return None
        kind = replace(inner, strides=_strides(observed), spare=spare, workspace=inner.workspace + workspace)
        return Template(inner.body, tuple(used[i] for i in order), results, kind)
    changed = {body.formals.index(f) for f in body.formals for t in results if t.storage is f.storage}
    if any(result.of is not None for result in observed) and not changed:
        return None
    body.outputs = list(results)
    # torch has backward kernels for noncontracting ops; a contraction's gradients are contractions
    contracts = any(isinstance(op.kind, Einsum | Fourier) for op in ops)
    # the gradient of a modulus computes the sign first
    contracts = contracts or (len(ops) == 1 and any(t.dtype.kind == "complex" for t in ops[0].operands[:1]))
    kind = Kernel(
        body=body,
        changed=tuple(sorted(changed)),
        backward="ops" if contracts else "",
        strides=_strides(observed),
        spare=spare,
        workspace=workspace,
    )
    return Template(body, used, results, kind)


def _computes(op: Op) -> bool:
    """Whether an op does more than return a view."""
    return bool(op.kind.overwrites()) or any(not t.is_view for t in op.results)


def _has_layout(body: Graph, t: Tensor, result: ObservedResult) -> bool:
    """Whether a result has the run's memory layout; strides along size-1 axes do not matter."""
    same = all(n == ONE or body.same(a, b) for n, a, b in zip(t.sizes, t.strides, result.spec.strides, strict=True))
    return same and (result.of is None or body.same(t.offset, result.offset))


def _strides(observed: Sequence[ObservedResult]) -> tuple[Sizes | None, ...]:
    """Return the strides of results, if any is not contiguous."""
    out = []
    for result in observed:
        dense = contiguous(result.spec.sizes)
        is_strided = any(
            n != ONE and a != b for n, a, b in zip(result.spec.sizes, result.spec.strides, dense, strict=True)
        )
        out.append(result.spec.strides if is_strided and result.of is None else None)
    return tuple(out) if any(s is not None for s in out) else ()
