"""One sample for each op kind: how to draw an op of it, with operands of all layouts that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..algebra.polynomial import ZERO, poly
from ..algebra.symbols import dims
from ..graph.graph import apply
from ..graph.op import OpKind
from ..graph.tensor import Tensor
from ..nn.conv import pool
from ..ops.collectives import COLLECTIVES, Around, Collective, Part, collective
from ..ops.contraction import Einsum
from ..ops.fill import fill
from ..ops.foreign import Foreign
from ..ops.index import Arange, Gather, Scatter, arange
from ..ops.layout import concat, contiguous_copy, expand, index, rearrange, reshape, slice_axis
from ..ops.moves import Concat, Expand, Rearrange, Slice
from ..ops.pack import Pack
from ..ops.pointwise import FUNCTIONS, Pointwise, cast, pointwise
from ..ops.pooling import Pool
from ..ops.reduce import REDUCTIONS, Reduce, reduce
from ..ops.registry import adding
from ..ops.stacks import Empty
from ..ops.stated import Opaque, Transfer, opaque, transfer
from ..ops.stochastic import Dropout, dropout
from .contractions import contraction, merged, names_of
from .sketch import LARGEST, Sketch, together

__all__ = ["SAMPLES", "Sample", "sample"]

Sample = Callable[[Sketch], Sequence[Tensor]]

#: How to draw an op of each kind.
SAMPLES: dict[type[OpKind], Sample] = {}


def sample(kind: type[OpKind]) -> Callable[[Sample], Sample]:
    """Say how to draw an op of a kind, so that the laws can hold it on inputs that nobody chose.

    Parameters
    ----------
    kind : subclass of OpKind
        Of which ops it is said.

    Returns
    -------
    callable
        Decorator of a function that gets a `Sketch`, adds one op to the open graph and returns what others may read
        of it.

    Raises
    ------
    GraphError
        If the kind has a sample already.
    """
    return adding(SAMPLES, "a sample", kind)


# -- contractions ------------------------------------------------------------------------------------------------


sample(Einsum)(contraction)


@sample(Pool)
def _pool(s: Sketch) -> Sequence[Tensor]:
    width = s.number(1, 3)
    x = s.tensor(lambda t: t.ndim >= 1 and s.value(t.sizes[-1]) >= width, (*s.shape(1, 6), s.number(width, 5)))
    operation = s.one_of(["max", "mean"])
    padding = s.number(0, width // 2)
    made = pool(x, operation, window=(width,), stride=s.number(1, 3), padding=padding)
    maker = made.producer
    if maker is not None and operation == "mean" and padding and width % 2:
        assert isinstance(maker.kind, Pool)
        return apply(replace(maker.kind, inside=True), maker.operands, "mean_pool")
    if operation == "mean" or maker is None or s.chance(1):
        return [made]
    assert isinstance(maker.kind, Pool)
    return apply(replace(maker.kind, indices=True), maker.operands, "max_pool")[:1]


# -- element by element ------------------------------------------------------------------------------------------

_PLAIN = sorted(name for name, f in FUNCTIONS.items() if name not in ("cast", "where", "masked_fill"))


@sample(Pointwise)
def _pointwise(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    if s.chance(6):
        return [cast(x, s.one_of([n for n in ("fp32", "bf16", "fp64", "int64") if n != x.dtype.name]))]
    if s.chance(6):
        mask = s.fresh(x.shape, "bool")
        return [pointwise("masked_fill", x, mask) if s.chance(1) else pointwise("where", mask, x, 0.0)]
    function = FUNCTIONS[s.one_of(s.functions or _PLAIN)]
    if function.name.startswith("causal_mask") and x.ndim < 2:
        function = FUNCTIONS["relu"]
    operands: list[Any] = [x]
    for _ in range(function.arity - 1):
        operands.append(s.one_of([2, 0.5, -1.5]) if s.chance(2) else _beside(s, x))
    tensors = [t for t in operands if isinstance(t, Tensor)]
    changes = s.may_change(x) and function.result == "same" and x.touched == x.numel
    if changes and s.chance(1) and all(t.dtype == x.dtype and t.sizes == x.sizes for t in tensors):
        return [pointwise(function, *operands, inplace=True)]
    return [pointwise(function, *s.order(operands))]


def _beside(s: Sketch, x: Tensor) -> Tensor:
    """Another operand: of the same shape, or of one that is broadcast to it."""
    found = s.others(lambda t: t.sizes == x.sizes and together(t.dtype, x.dtype))
    if found and s.chance(1):
        return s.one_of(found)
    if s.chance(6) and 3 * s.elements(x) <= LARGEST:
        return s.fresh((s.number(1, 3), *x.shape), s.partner(x))  # it is x that is repeated
    shape = [n if s.chance(2) else 1 for n in x.shape[s.number(0, x.ndim) :]]
    return s.fresh(shape if s.chance(1) else x.shape, s.partner(x))


@sample(Dropout)
def _dropout(s: Sketch) -> Sequence[Tensor]:
    return [dropout(s.tensor(), s.one_of([0.1, 0.5]), mask=s.one_of(["bool", "fp32"]))]


@sample(Reduce)
def _reduce(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    names = names_of(x.ndim)
    gone = s.some(names, 1)
    kept = s.order([n for n in names if n not in gone])
    if s.chance(1):
        kept.insert(s.number(0, len(kept)), "1")
    operation = s.one_of([r for r in REDUCTIONS if len(gone) == 1 or not r.startswith("arg")])
    return [reduce(x, f"{' '.join(names)} -> {' '.join(kept)}", operation)]


# -- moving elements ---------------------------------------------------------------------------------------------


@sample(Rearrange)
def _rearrange(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    if s.chance(4):
        return [contiguous_copy(x)]
    if s.chance(4):
        return [reshape(x, s.one_of([(x.numel,), (*x.sizes, 1), (1, *x.sizes), x.sizes]))]
    left, right, given = [], [], {}
    for i, size in enumerate(x.sizes):
        factor = next((f for f in (2, 3, *dims("A B C D")) if _divides(f, size)), None)
        if factor is None or s.chance(1):
            left.append(f"a{i}")
            right.append(f"a{i}")
        else:
            left.append(f"(a{i} b{i})")
            right += [f"a{i}", f"b{i}"]
            given[f"b{i}"] = factor
    right = merged(s, s.order(right) if s.chance(1) else right)
    return [rearrange(x, f"{' '.join(left)} -> {' '.join(right)}", **given)]


def _divides(factor: Any, size: Any) -> bool:
    quotient = poly(size) / poly(factor)
    whole = all(isinstance(c, int) and all(e > 0 for _, e in m) for m, c in quotient.terms.items())
    return whole and quotient != 1


@sample(Slice)
def _slice(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    axis = s.axis(x)
    long = s.value(x.sizes[axis])
    if s.chance(2):
        return [index(x, (slice(None),) * axis + (s.one_of([0, -1, slice(None, None, 2), None, slice(1)]),))]
    if s.chance(1) and x.sizes[axis].constant is None and long > 2:  # a symbolic size of 1 is another layout
        return [slice_axis(x, axis, s.number(0, 1), x.sizes[axis] - 1)]
    start = s.number(0, long - 1)
    step = s.number(1, 2)
    return [slice_axis(x, axis, start, s.number(1, (long - 1 - start) // step + 1), step)]


@sample(Expand)
def _expand(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim <= 2 and s.elements(t) <= 24, s.shape(s.number(0, 2), 12))
    names = names_of(x.ndim)
    new = s.one_of([2, 3, *dims("A B")])
    at = s.number(0, x.ndim)
    given = {"n": new} | {n: new for n, size in zip(names, x.sizes, strict=True) if size == 1 and s.chance(1)}
    if s.elements(x) * s.value(new) ** len(given) > LARGEST:
        given = {"n": 1}
    return [expand(x, f"{' '.join(names)} -> {' '.join([*names[:at], 'n', *names[at:]])}", **given)]


@sample(Concat)
def _concat(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis = s.axis(x)
    others = s.others(lambda t: t.dtype == x.dtype and t.sizes == x.sizes)
    shape = (*x.shape[:axis], s.one_of([1, 2, dims("A")]), *x.shape[axis + 1 :])
    other = s.like(x) if x.domain is not None else s.fresh(shape, x.dtype.name)
    parts = [x, s.one_of(others) if others and s.chance(1) else other]
    return [concat(s.order(parts), axis)]


@sample(Transfer)
def _transfer(s: Sketch) -> Sequence[Tensor]:
    return [transfer(s.tensor())]


@sample(Empty)
def _empty(s: Sketch) -> Sequence[Tensor]:
    apply(Empty(sizes=tuple(map(poly, s.shape())), dtype=s.fresh(()).dtype), [], "empty")
    return []  # nobody reads what was never written


# -- by index ----------------------------------------------------------------------------------------------------


def _ids(s: Sketch, most: int, *lead: Any) -> Tensor:
    """Indices: 0, 1, 2, ... when the graph runs, different ones if there are no more than rows."""
    fitting = [n for n in (2, 3, *dims("A B")) if s.value(n) <= most]
    shape = (s.one_of(fitting),) if fitting and not s.chance(3) else s.one_of([(1,), (2, 2)])
    return s.fresh((*lead, *shape) if lead else shape, s.one_of(["int64", "int32"]), "input")


def _indexed(s: Sketch) -> tuple[Tensor, list[Tensor], int]:
    """Draw a table, indices and how many leading axes they have in common."""
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 36, s.shape(s.number(1, 3), 36))
    batch = s.one_of([0, 0, x.ndim - 1, s.number(0, x.ndim - 1)])
    if not batch:
        ids = _ids(s, s.value(x.sizes[0]))
        return x, [ids, *(s.fresh(ids.shape, "int64", "input") for _ in range(s.one_of([0, 0, x.ndim - 1])))], 0
    return x, [s.fresh((*x.shape[:batch], s.number(1, s.value(x.sizes[batch]))), "int64", "input")], batch


@sample(Gather)
def _gather(s: Sketch) -> Sequence[Tensor]:
    x, ids, batch = _indexed(s)
    return apply(Gather(batch=batch), [x, *ids], "gather")


@sample(Scatter)
def _scatter(s: Sketch) -> Sequence[Tensor]:
    x, ids, batch = _indexed(s)
    updates = s.fresh((*ids[0].shape, *x.shape[batch + len(ids) :]), x.dtype.name)
    changes = s.may_change(x) and x.touched == x.numel and s.chance(1)
    mode = s.one_of(["add", "set", *(["max"] if len(ids) == 1 else [])])
    if s.trained and ((mode == "set" and s.elements(ids[0]) > s.value(x.sizes[0])) or (mode == "max" and changes)):
        mode = "add"  # of what is set twice, autograd has no gradient, and a maximum in place leaves none
    return apply(Scatter(mode=mode, inplace=changes, batch=batch), [x, *ids, updates], "scatter")


@sample(Arange)
def _arange(s: Sketch) -> Sequence[Tensor]:
    made = arange(s.size(), s.one_of(["int64", "int32", "fp32"]))
    return [made if made.dtype.kind == "float" else cast(made, "fp32")]


@sample(Opaque)
def _opaque(s: Sketch) -> Sequence[Tensor]:
    x, size = s.tensor(), s.size()
    amounts: dict[str, Any] = {} if s.chance(1) else dict.fromkeys(("reads", "writes"), 8 * size)
    amounts["flops"] = s.one_of([0, 5 * size, {"matmul": 2 * size, "transcendental": 3}])
    return [opaque("stated", [x], (size,), workspace=s.one_of([0, 64, 16 * size]), **amounts)]


@sample(Foreign)
def _foreign(s: Sketch) -> Sequence[Tensor]:
    x, n = s.tensor(), poly(s.size())
    kind = Foreign(
        outputs=(((n,), x.dtype, None, None, ZERO),),
        matmul=n,
        full=2 * n,
        pointwise=n,
        transcendental=n,
        bytes_read=s.one_of([None, (8 * n,)]),
        workspace=poly(8),
    )
    return apply(kind, [x], "relu")


def _dim(s: Sketch, ranks: Any, blocks: int, *others: Any) -> Tensor:
    """Return a tensor of which an axis can be cut into parts of each block."""
    return s.fresh((*others, ranks * blocks * s.one_of([1, dims("B")]), *s.shape(1, 4)))


@sample(Collective)
def _collective(s: Sketch) -> Sequence[Tensor]:
    kind = s.one_of(sorted(COLLECTIVES))
    ranks: Any = s.one_of([2, 3, dims("A")])
    if s.chance(1):
        rows = (ranks * s.one_of([1, dims("B")]), *s.shape(1, 4)) if kind == "reduce_scatter" else None
        x = s.tensor(lambda t: s.elements(t) <= 20, s.shape(1, 20)) if rows is None else s.fresh(rows)
        return [collective(x, kind, ranks)]
    kind = s.one_of(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    blocks, dim = s.number(1, 2), s.number(0, 1)
    x = _dim(s, ranks, blocks, *[2] * dim)
    source = x.ndim - 1 if kind == "all_to_all" and x.ndim - 1 != dim else None
    made = Collective(
        collective=kind, ranks=poly(ranks), axis="x", dim=dim, blocks=poly(blocks),
        operation=s.one_of(["sum", "mean", "max", "min"]), source=source,
    )  # fmt: skip
    return apply(made, [x], kind)


@sample(Around)
def _around(s: Sketch) -> Sequence[Tensor]:
    ranks: Any = s.one_of([2, 3, dims("A")])
    dim = s.number(0, 1)
    own = apply(Part(ranks=poly(ranks), axis="x", dim=dim), [_dim(s, ranks, 1, *[2] * dim)], "part")
    return apply(Around(ranks=poly(ranks), axis="x", dim=dim), own, "around")


@sample(Pack)
def _pack(s: Sketch) -> Sequence[Tensor]:
    first = s.fresh(s.shape(s.number(1, 2), 6))
    parts = [first, *(s.fresh(s.shape(s.number(1, 2), 6), first.dtype.name) for _ in range(s.number(0, 2)))]
    room = sum(t.numel.expr for t in parts)
    return apply(Pack(), [fill((room,), dtype=parts[0].dtype), *parts], "pack")


@sample(Part)
def _part(s: Sketch) -> Sequence[Tensor]:
    ranks: Any = s.one_of([2, 3, dims("A")])
    blocks, dim = s.number(1, 2), s.number(0, 1)
    return apply(
        Part(ranks=poly(ranks), axis="x", dim=dim, blocks=poly(blocks)), [_dim(s, ranks, blocks, *[2] * dim)], "part"
    )
