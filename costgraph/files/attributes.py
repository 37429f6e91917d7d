"""What the attributes of an op in a file have to be: of the right type, none missing, and as its operands say.

The functions that declare ops make attributes that fit; a file may say anything. What is refused here would otherwise
be counted as it stands, and be a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..algebra.polynomial import ONE, Poly, as_poly
from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..graph.strides import contiguous
from ..notation.pattern import Affine, Axes, Pattern
from ..ops.order import best_orders
from .attribute_types import ANY, TABLE

if TYPE_CHECKING:
    from ..algebra.dominance import Relations
    from ..graph.graph import Graph
    from ..graph.tensor import Tensor

__all__ = ["check_attributes"]

Attrs = Mapping[str, Any]


_OPERANDS = {
    "pool": 1, "reduce": 1, "rearrange": 1, "slice": 1, "expand": 1, "dropout": 1, "transfer": 1, "collective": 1,
    "gather": 2, "scatter": 3, "arange": 0, "empty": 0, "fill": 0, "assign": 2, "pad": 1,
    "absent": 0, "accumulate": 2,
}  # fmt: skip


def check_attributes(kind: str, operands: Sequence[Tensor], attrs: Attrs, known: Iterable[Relations]) -> None:
    """Raise GraphError or ShapeError where attributes are none of a kind, or say something else than the operands.

    Parameters
    ----------
    kind : str
        Name of the op kind; one that is not of the library has no rule here.
    operands : sequence of Tensor
        What the op reads.
    attrs : mapping
        Attributes as they stand in a file.
    known : iterable of Relations
        What was known of sizes when the op may have been made, one case after the other.
    """
    if kind not in TABLE:
        return
    _check_types(kind, attrs)
    wanted = _OPERANDS.get(kind)
    if wanted is not None and len(operands) != wanted:
        raise GraphError(f"{kind} of {len(operands)} operands, expected {wanted}")
    if kind == "einsum":
        _check_orders(operands, attrs, known)
    if kind in _CHECKS:
        _CHECKS[kind](operands, attrs)


def _check_types(kind: str, attrs: Attrs) -> None:
    rows = {name.rstrip("?"): row for name, row in TABLE[kind].items()}
    for name in attrs:
        if name in ANY and ANY[name][1](attrs[name]):
            continue
        if name not in rows:
            raise GraphError(f"attribute {shown(name)} of {kind!r}, expected none but {', '.join(rows)}")
    for name, (what, fits) in rows.items():
        if name not in attrs and f"{name}?" not in TABLE[kind]:
            raise GraphError(f"attribute {name!r} of {kind!r} is missing, expected {what}")
        if name in attrs and not fits(attrs[name]):
            raise GraphError(f"attribute {name!r} of {kind!r} is {shown(attrs[name])}, expected {what}")


# -- agreement with the operands ---------------------------------------------------------------------------------


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ShapeError(f"{what}: expected what agrees with the operands")


def _indexed(operands: Sequence[Tensor], attrs: Attrs) -> None:
    """Hold the pattern of a contraction or a pooling against the shapes, and the extents against both."""
    pattern: Pattern = attrs["pattern"]
    extents: Mapping[str, Poly] = attrs["extents"]
    _need(
        [len(o) for o in pattern.operands] == [t.ndim for t in operands], f"pattern {shown(str(pattern))}: its operands"
    )
    names = {n for o in pattern.operands for a in o for n in a.names}
    _need(set(extents) == names | set(pattern.result_names), f"extents of {shown(', '.join(extents))}")
    same = operands[0].graph.same
    places = [
        (dim, size, f"operand {i + 1} {t!r}")
        for i, t in enumerate(operands)
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True)
    ]
    if "sizes" in attrs:
        _need(len(attrs["sizes"]) == len(pattern.result), f"sizes of the result of pattern {shown(str(pattern))}")
        places += [(dim, n, "the result") for dim, n in zip(pattern.result, attrs["sizes"], strict=True)]
    rooms = set()
    for dim, size, where in places:
        if isinstance(dim, Axes):
            _need(same(prod((extents[n] for n in dim.names), start=ONE), size), f"axis {dim} of {where}")
            continue
        last = sum((step * (extents[n] - 1) for n, step in dim.terms), start=as_poly(0))
        room = size - 1 - last - (2 if dim.offset < 0 else 1) * dim.offset
        rooms.add(room)
        beyond = room.constant is not None and room.constant < 0
        _need(not beyond, f"index {dim} of {where} reaches beyond its axis")
    _need(rooms.issuperset(attrs.get("rooms", ())), "what stated outputs leave over of an axis")


def _need_plain(pattern: Pattern) -> None:
    """Refuse indices and diagonals on the right side, which only a contraction with stated sizes may have."""
    plain = all(isinstance(a, Axes) for a in pattern.result) and len(set(pattern.result_names)) == len(
        pattern.result_names
    )
    _need(plain, f"the result of pattern {shown(str(pattern))}")


def _einsum(operands: Sequence[Tensor], attrs: Attrs) -> None:
    pattern, restriction = attrs["pattern"], attrs["domain"]
    _need(bool(operands), "no operand")
    _indexed(operands, attrs)
    if "sizes" not in attrs:
        _need_plain(pattern)
        inside = {n for i in range(len(operands)) for n in pattern.operand_names(i)}
        _need(set(pattern.result_names) <= inside, f"the result of pattern {shown(str(pattern))}")
    if restriction is not None:
        domain, query, key = restriction
        _need({query, key} <= set(attrs["extents"]), f"domain over {shown(query)} and {shown(key)}")
        domain.points(attrs["extents"][query], attrs["extents"][key])  # refuses what it cannot count
    _need(restriction is not None or all(t.domain is None for t in operands), "no domain, where an operand has one")


def _check_orders(operands: Sequence[Tensor], attrs: Attrs, known: Iterable[Relations]) -> None:
    """Derive the FLOPs of a product of several tensors again: the file alone would be taken at its word."""
    _need(("orders" in attrs) == (len(operands) > 2) == ("workspace" in attrs), f"orders of {len(operands)} operands")
    if "orders" not in attrs:
        return
    pattern: Pattern = attrs["pattern"]
    _indexed(operands, attrs)
    affine = any(isinstance(a, Affine) for o in pattern.operands for a in o)
    _need(not affine and attrs["domain"] is None, f"{len(operands)} operands with an index or a domain")
    axes = [frozenset(pattern.operand_names(i)) for i in range(len(operands))]
    found = (best_orders(axes, frozenset(pattern.result_names), attrs["extents"], k) for k in known)
    _need(any(f.flops == attrs["orders"] for f in found), f"orders {shown(str(attrs['orders']))}")


def _pool(operands: Sequence[Tensor], attrs: Attrs) -> None:
    _indexed(operands, attrs)
    pattern: Pattern = attrs["pattern"]
    _need(len(pattern.operands) == 1, "a pooling of several operands")
    _need_plain(pattern)
    kept = [a.names for a in pattern.operands[0] if isinstance(a, Axes)]
    slid = [(a.terms[0][0],) for a in pattern.operands[0] if isinstance(a, Affine)]
    _need([a.names for a in pattern.result] == kept + slid, f"the result of pattern {shown(str(pattern))}")
    _need("indices" not in attrs or attrs["operation"] == "max", "indices of a mean")


def _unpool(operands: Sequence[Tensor], attrs: Attrs) -> None:
    largest = attrs["operation"] == "max"
    _need(len(operands) == (3 if largest else 2), f"{len(operands)} operands of a {attrs['operation']}")
    gradient, x = operands[:2]
    _pool([x], attrs)
    made = tuple(attrs["extents"][n] for n in attrs["pattern"].result_names)
    for t in (gradient, *operands[2:]):
        _need(len(made) == t.ndim and all(map(t.graph.same, made, t.sizes)), f"shape of {t!r}")


def _pointwise(operands: Sequence[Tensor], attrs: Attrs) -> None:
    _need(bool(operands), "no operand")
    _need(("scalars" in attrs) == ("numbers" in attrs), "scalars and their kind")
    scalars = attrs.get("scalars", (None,) * len(operands))
    _need(scalars.count(None) == len(operands), f"scalars {shown(scalars)} beside {len(operands)} operands")


def _dropout(operands: Sequence[Tensor], attrs: Attrs) -> None:
    _need(attrs["function"].arity == 1, f"function {attrs['function'].name!r} of {attrs['function'].arity} operands")


def _reduce(operands: Sequence[Tensor], attrs: Attrs) -> None:
    pattern: Pattern = attrs["pattern"]
    _need(len(pattern.operands) == 1 and len(pattern.operands[0]) == operands[0].ndim, "the operands of the pattern")
    plain = all(isinstance(a, Axes) and len(a.names) <= 1 for a in (*pattern.operands[0], *pattern.result))
    before, after = pattern.operand_names(0), set(pattern.result_names)
    once = len(set(before)) == len(before) == operands[0].ndim
    _need(plain and once and after < set(before), f"pattern {shown(str(pattern))}")
    _need_plain(pattern)


def _rearrange(operands: Sequence[Tensor], attrs: Attrs) -> None:
    split, order, merged = attrs["split"], attrs["order"], attrs["merged"]
    _need(sorted(order) == list(range(len(split))), f"order {shown(order)} of {len(split)} axes")
    pattern: Pattern | None = attrs.get("pattern")
    if pattern is None:
        return
    _need(len(pattern.operands) == 1 and len(pattern.operands[0]) == operands[0].ndim, "the operands of the pattern")
    _need(not any(isinstance(a, Affine) for a in (*pattern.operands[0], *pattern.result)), "an index in the pattern")
    names = pattern.operand_names(0)
    _need(len(names) == len(set(names)) == len(split), f"split {shown(split)} of pattern {shown(str(pattern))}")
    _need(tuple(names[i] for i in order) == pattern.result_names, f"order {shown(order)}")
    sizes = dict(zip(names, split, strict=True))
    same = operands[0].graph.same
    for dims, whole in ((pattern.operands[0], operands[0].sizes), (pattern.result, merged)):
        made = [prod((sizes[n] for n in a.names), start=ONE) for a in dims]
        _need(len(made) == len(whole) and all(map(same, made, whole)), f"sizes of pattern {shown(str(pattern))}")


def _slice(operands: Sequence[Tensor], attrs: Attrs) -> None:
    (x,), axis = operands, attrs["axis"]
    _need(axis < x.ndim, f"axis {axis} of {x!r}")
    left = x.sizes[axis] - attrs["start"] - (attrs["size"] - 1) * attrs["step"] - 1
    _need(attrs.get("room", left) == left, f"room {shown(str(attrs.get('room')))}")


def _pad(operands: Sequence[Tensor], attrs: Attrs) -> None:
    (x,), axis = operands, attrs["axis"]
    _need(axis < x.ndim, f"axis {axis} of {x!r}")
    left = attrs["full"] - attrs["start"] - (x.sizes[axis] - 1) * attrs["step"] - 1
    _need(attrs["room"] == left, f"room {shown(str(attrs['room']))}")


def _expand(operands: Sequence[Tensor], attrs: Attrs) -> None:
    (x,), kept = operands, attrs["kept"]
    _need(len(kept) == len(attrs["sizes"]), f"kept {shown(kept)} of {len(attrs['sizes'])} axes")
    used = [i for i in kept if i is not None]
    _need(len(set(used)) == len(used) and all(i < x.ndim for i in used), f"kept {shown(kept)} of {x!r}")
    _need(
        all(x.sizes[i] == ONE for i in range(x.ndim) if i not in used), f"kept {shown(kept)} leaves out axes of {x!r}"
    )
    _need("domain" not in attrs or x.domain is None, f"domain of {x!r}, which has one")
    _restricted(operands, attrs)


def _restricted(operands: Sequence[Tensor], attrs: Attrs) -> None:
    if "domain" in attrs:
        domain, *places = attrs["domain"]
        _need(all(0 <= i < len(attrs["sizes"]) for i in places), f"domain over {shown(places)}")
        domain.points(*(attrs["sizes"][i] for i in places))  # refuses what it cannot count


def _concat(operands: Sequence[Tensor], attrs: Attrs) -> None:
    _need(bool(operands) and attrs["axis"] < operands[0].ndim, f"axis {attrs['axis']}")


def _opaque(operands: Sequence[Tensor], attrs: Attrs) -> None:
    for name, count in (("reads", len(operands)), ("writes", len(attrs["outputs"]))):
        _need(attrs[name] is None or len(attrs[name]) == count, f"{name} of {count} tensors")
    if "backward" in attrs:
        stated, counts = attrs["backward"], (len(operands), len(attrs["outputs"]))
        for name, count in zip(("inputs", "outputs"), counts, strict=True):
            _need(all(i < count for i in stated[name]), f"backward: {name} {shown(stated[name])} of {count}")


def _aten(operands: Sequence[Tensor], attrs: Attrs) -> None:
    outputs = attrs["outputs"]
    _need(len(attrs["places"]) == len(outputs), f"{len(attrs['places'])} places of {len(outputs)} results")
    for name, count in (("reads", len(operands)), ("writes", len(outputs))):
        _need(attrs[name] is None or len(attrs[name]) == count, f"{name} of {count} tensors")
    pieces = attrs.get("pieces", (0,) * len(outputs))
    _need(len(pieces) == len(outputs), f"{len(pieces)} pieces of {len(outputs)} results")
    for own, (sizes, *_) in zip(pieces, outputs, strict=True):
        _need(own <= len(sizes), f"{own} pieces of {len(sizes)} axes")
    for _, _, _, of, _ in outputs:
        _need(of is None or of < len(operands), f"a view of operand {of} of {len(operands)}")
    for i in _places_in((attrs["arguments"], *attrs["keywords"].values())):
        _need(i < len(operands), f"argument {i} of {len(operands)} operands")


def _places_in(value: Any) -> Iterator[int]:
    """Yield the places of operands among arguments."""
    if isinstance(value, Mapping):
        if "operand" in value:
            yield value["operand"]
    elif isinstance(value, tuple):
        for v in value:
            yield from _places_in(v)


# -- bodies ------------------------------------------------------------------------------------------------------


def _fits(outer: Tensor, inner: Tensor, drop: int) -> Iterator[bool]:
    """Compare a body's input with what it stands for; strides of axes of size 1 mean nothing."""
    yield inner.dtype == outer.dtype
    yield inner.sizes == outer.sizes[drop:]
    places = zip(inner.sizes, inner.strides, outer.strides[drop:], strict=True)
    yield all(a == b for n, a, b in places if n != ONE)


def _need_fit(outer: Tensor, inner: Tensor, drop: int = 0) -> None:
    fits = all(_fits(outer, inner, drop)) and (drop > 0 or outer.domain == inner.domain)
    _need(fits, f"{inner!r} of the body, which stands for {outer!r}")


def _formals(operands: Sequence[Tensor], body: Graph) -> None:
    inputs = [t for t in body.tensors if t.role == "formal" and t.producer is None]
    _need(len(body.formals) == len(inputs) and set(body.formals) == set(inputs), "inputs of the body")
    _need(len(body.formals) == len(operands), f"{len(body.formals)} inputs of the body, {len(operands)} operands")


def _kernel(operands: Sequence[Tensor], attrs: Attrs) -> None:
    body: Graph = attrs["body"]
    _formals(operands, body)
    sources = [t for t in body.tensors if t.producer is None and t.role != "formal"]
    _need(not sources, f"{sources[:1]!r} declared inside a kernel")
    for outer, inner in zip(operands, body.formals, strict=True):
        _need_fit(outer, inner)
        _need(inner.offset == outer.offset, f"offset of {inner!r}")


def _repeat(operands: Sequence[Tensor], attrs: Attrs) -> None:
    body, count, carries, xs = attrs["body"], attrs["count"], attrs["carries"], attrs["xs"]
    saved = attrs.get("saved", 0)
    _need("least" in attrs or count.constant != 0, "count 0")
    _formals(operands, body)
    _need(carries + xs <= len(operands), f"{carries} carries and {xs} slices of {len(operands)} operands")
    _need(carries + saved <= len(body.outputs), f"{carries} carries, {saved} saved of {len(body.outputs)} outputs")
    for i, (outer, inner) in enumerate(zip(operands, body.formals, strict=True)):
        if i < carries:
            _need(inner.dtype == outer.dtype and inner.sizes == outer.sizes, f"carry {inner!r} of {outer!r}")
            _need(inner.strides == contiguous(inner.sizes), f"strides of carry {inner!r}")
        elif i < carries + xs:
            _need(outer.ndim > 0 and outer.graph.same(outer.sizes[0], count), f"{outer!r} in {count} slices")
            _need_fit(outer, inner, 1)
        else:
            _need_fit(outer, inner)
        pieces = outer.storage.pieces
        left = max(pieces - 1, 0) if carries <= i < carries + xs else pieces
        _need(inner.storage.pieces == left, f"{inner.storage.pieces} axes of pieces of {inner!r}, {pieces} outside")
    for i, t in enumerate(body.outputs[: len(body.outputs) - saved]):
        _need(i >= carries or t.is_contiguous, f"strides of carry {t!r}")
        pieces = operands[i].storage.pieces if i < carries else 0
        _need(t.storage.pieces == pieces, f"{t.storage.pieces} axes of pieces of {t!r}, {pieces} outside")


_CHECKS: dict[str, Callable[[Sequence[Any], Attrs], None]] = {
    "einsum": _einsum, "pool": _pool, "unpool": _unpool, "pointwise": _pointwise, "dropout": _dropout,
    "reduce": _reduce, "rearrange": _rearrange, "slice": _slice, "pad": _pad, "expand": _expand, "concat": _concat,
    "absent": _restricted, "opaque": _opaque, "aten": _aten, "kernel": _kernel, "repeat": _repeat,
}  # fmt: skip
