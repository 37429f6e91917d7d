"""What a fused body computes, told by the names of its ops and by what each of them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.pointwise import Pointwise
from ...ops.reduce import Reduce
from .site import Site

__all__ = [
    "Bound", "Rule", "given_node", "match", "named_results", "narrow", "number_of", "record_of", "reduced_axis",
    "whole",
]  # fmt: skip

K = TypeVar("K", bound=OpKind)

#: What the names of a text stand for.
Bound = dict[str, Tensor]
#: Lowers a kernel whose body is recognised, or returns False where sizes, formats or results do not allow it.
Rule = Callable[[Site[Kernel], Bound], bool]


def label_of(op: Op) -> str:
    match op.kind:
        case Pointwise() as kind:
            return kind.function.name
        case Reduce() as kind:
            return kind.operation
        case Kernel() as kind:
            return kind.backward or kind.name
        case kind:
            return kind.name


def through(t: Tensor) -> Tensor:
    """Look through casts: torch's kernels compute in a wider format than they read and write by themselves."""
    while t.producer is not None and label_of(t.producer) == "cast":
        t = t.producer.operands[0]
    return t


def match(body: Graph, text: str) -> Bound | None:
    """Return what the names of a text such as `e = exp x; z = sum e` stand for, None if the body is another one."""
    rows = [row.split() for row in text.split("; ")]
    ops = [op for op in body.ops if label_of(op) != "cast"]
    if len(ops) != len(rows):
        return None
    found: Bound = {}
    for op, (made, _, label, *names) in zip(ops, rows, strict=True):
        operands = [through(t) for t in op.operands]
        if label != label_of(op) or len(names) != len(operands):
            return None
        if any(found.setdefault(n, t) is not t for n, t in zip(names, operands, strict=True)):
            return None
        found[made] = op.results[0]
        found |= {f"{made}'": t for t in op.results[1:2]}
    return found


def named_results(site: Site[Kernel], found: Bound, *names: str) -> dict[int, str] | None:
    """Return which name each result of the kernel is, None if it hands out anything else."""
    by_tensor = {found[n]: n for n in names}
    out = {i: by_tensor.get(through(t), "") for i, t in enumerate(site.kind.body.outputs)}
    return out if out and all(out.values()) and len(set(out.values())) == len(out) else None


def given_node(site: Site[Kernel], t: Tensor) -> Any:
    """Return what a name stands for that the kernel is given, None for what is made inside."""
    formals = dict(zip(site.kind.body.formals, site.operands, strict=True))
    return formals.get(t)


def record_of(found: Bound, name: str, kind: type[K]) -> K:
    """Return the record of the op that makes what a name stands for."""
    op = found[name].producer
    assert op is not None
    assert isinstance(op.kind, kind)
    return op.kind


def number_of(site: Site[Kernel], found: Bound, name: str) -> float:
    """Return the number beside the operands of the elementwise op that makes what a name stands for."""
    return next(float(n) for n in site.of(record_of(found, name, Pointwise).scalars) if n is not None)


def reduced_axis(found: Bound, name: str) -> int | None:
    """Return the only axis that a reduction leaves out, None if there are several."""
    pattern = record_of(found, name, Reduce).pattern
    gone = [i for i, a in enumerate(pattern.operands[0]) if not a.names or a.names[0] not in pattern.result_names]
    return gone[0] if len(gone) == 1 and len(pattern.operands[0]) == len(pattern.result) else None


def whole(found: Mapping[str, Tensor]) -> bool:
    """Whether no tensor is restricted to a domain."""
    return all(t.domain is None for t in found.values())


def narrow(site: Site[Kernel], node: Any) -> bool:
    """Whether torch computes with none of the format."""
    dtype = site.shadow(node).dtype
    return dtype.itemsize == 1 or not dtype.is_floating_point
