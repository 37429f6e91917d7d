"""Whether two ops of two blocks are equal, and if not, in what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...algebra.symbols import shown
from ...errors import CostGraphError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor

__all__ = ["Differs", "difference", "layout", "unlike"]

Names = Callable[[str], str]


class Differs(CostGraphError):  # noqa: N818  # no error that anyone sees
    """Two neighbouring blocks are not equal: caught where blocks at the edges are left out."""

    def __init__(self, blocks: tuple[int, int], text: str) -> None:
        super().__init__(text)
        self.low = min(blocks)


def layout(t: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common whose reading costs the same."""
    return t.sizes, t.dtype, t.strides, t.offset, t.domain


def _shared(op: Op) -> list[int | None]:
    """Return for each result the operand whose storage it lies in."""
    stored = [t.storage for t in op.operands]
    return [stored.index(t.storage) if t.storage in stored else None for t in op.results]


def difference(a: Op, b: Op, names: tuple[Names, Names]) -> str | None:
    """Say in what two ops differ, apart from which tensors they read; None where they are equal.

    They are at one place of two blocks; `names` return a scope as it is seen from the block of each.
    """
    facts: dict[str, tuple[Any, Any]] = {
        "kind": (a.kind.name, b.kind.name),
        "phase": (a.phase, b.phase),
        "scope": (names[0](a.scope), names[1](b.scope)),
        "operands": (len(a.operands), len(b.operands)),
    }
    if a.call is not None and b.call is not None:
        facts["target"] = a.call.target, b.call.target
    for name, (mine, other) in facts.items():
        if mine != other:
            return f"{b.name!r} has {name} {other!r}, {a.name!r} has {mine!r}"
    if [*map(_stored, a.results)] != [*map(_stored, b.results)] or _shared(a) != _shared(b):
        return f"{b.name!r} makes {_told(b.results)}, {a.name!r} makes {_told(a.results)}"
    stated = b.kind.facts()
    for name, mine in a.kind.facts().items():
        other = stated[name]
        if name != "body" and mine != other:
            return f"{b.name!r} has {name} {shown(other, 120)}, {a.name!r} has {shown(mine, 120)}"
    if a.call != b.call:
        return f"{b.name!r} has call {shown(b.call, 120)}, {a.name!r} has {shown(a.call, 120)}"
    if a.body is not None and b.body is not None:
        return _bodies(a.body, b.body, names)
    return None


def _stored(t: Tensor) -> tuple[object, ...]:
    return *layout(t), t.storage.bytes, t.storage.pieces


def _told(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(repr, tensors[:3])) or "nothing"


def _bodies(a: Graph, b: Graph, names: tuple[Names, Names]) -> str | None:
    """Say in what two bodies differ: they are equal where their ops are, read in order."""
    if len(a.ops) != len(b.ops) or a.fused != b.fused:
        return f"body {b.name!r} has {len(b.ops)} ops, {a.name!r} has {len(a.ops)}"
    mine, other = _numbered(a), _numbered(b)
    if [layout(t) for t in mine] != [layout(t) for t in other]:
        return f"body {b.name!r} has other tensors than {a.name!r}"
    for x, y in zip(a.ops, b.ops, strict=True):
        text = difference(x, y, names)
        if text is None and [mine[t] for t in x.operands] != [other[t] for t in y.operands]:
            text = f"{y.name!r} reads other tensors than {x.name!r}"
        if text is not None:
            return text
    same = [mine[t] for t in a.outputs] == [other[t] for t in b.outputs]
    return None if same else f"body {b.name!r} has other outputs than {a.name!r}"


def unlike(a: Graph, b: Graph) -> str | None:
    """Say in what two graphs differ, whatever the names of their tensors; None where they are equal."""
    roles = [[(t.role, *layout(t)) for t in g.tensors if t.producer is None] for g in (a, b)]
    if roles[0] != roles[1]:
        return "other parameters, inputs or buffers"
    return _bodies(a, b, (str, str))


def _numbered(graph: Graph) -> dict[Tensor, int]:
    """Number the tensors of a body: its inputs first, then what ops make, then what it owns."""
    own = [t for t in graph.tensors if t.producer is None and t.role != "formal"]
    return {t: i for i, t in enumerate([*graph.formals, *(r for op in graph.ops for r in op.results), *own])}
