"""Cost table per op: FLOPs, bytes moved and arithmetic intensity."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache, partial
from functools import reduce as fold

import sympy

from ..algebra.conditions import Validity, conditioned, held_by, plain
from ..algebra.dominance import Relations
from ..algebra.extremum import Min, Owner, as_expr, at_least_zero, extremum, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, as_poly, poly, total
from ..algebra.symbols import shorten, shown, symbol
from ..bind.evaluate import Formula, answer, bound_answer
from ..dtypes import promote
from ..errors import BindingError, GraphError, UnsupportedError
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import (
    ALIASES,
    SOURCES,
    Bindings,
    Graph,
    Loop,
    Op,
    Storage,
    Tensor,
    bindings,
    known_names,
    need_call,
    need_choice,
    need_flag,
    need_graph,
    of_stages,
)
from ..ir.graph import dimension_size as size_of
from ..notation.grammar import parse_relation
from ..notation.validation import guarded
from ..ops.access_footprint import at_least
from ..ops.einsum import Einsum
from ..ops.experts import GroupedMatmul as GroupedMatmul
from ..ops.loops import Accumulate, Undef, taken
from ..ops.rules import Flops
from ..ops.uses import elements_read, together
from .tiling import cache_bytes, least_traffic

__all__ = [
    "collection_paused",
    "FLOP_KINDS",
    "Cost",
    "CostRow",
    "Costs",
    "Grouped",
    "aliased",
    "situations",
    "compulsory",
    "repeated_bodies",
    "bytes_moved",
    "costs",
    "executions",
    "flops",
    "flops_of_kind",
    "intensity",
    "matmul_flops",
    "traffic_of",
]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the context, and restore it afterwards.

    On a graph with 10^5 ops, collection otherwise takes longer than the work itself.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


# -- table -------------------------------------------------------------------------------------------------------------

#: Kinds of FLOPs that hardware treats differently.
FLOP_KINDS = ("matmul", "pointwise", "transcendental")
_VALUES = {
    "kind": (*FLOP_KINDS, "data"),
    "direction": ("compute", "read", "write"),
    "phase": ("forward", "recompute", "backward", "optimizer"),
}


@guarded()
@dataclass(frozen=True)
class Cost:
    """An additive cost record."""

    matmul: Formula = 0
    """FLOPs in contractions: one multiply and one add per index point"""
    pointwise: Formula = 0
    """FLOPs in elementwise arithmetic"""
    transcendental: Formula = 0
    """FLOPs in exp, log, sqrt and the like"""
    read: Formula = 0
    """bytes read"""
    written: Formula = 0
    """bytes written"""

    @property
    def flops(self) -> Formula:
        """FLOPs of all kinds."""
        return self.matmul + self.pointwise + self.transcendental

    @property
    def bytes(self) -> Formula:
        """Bytes moved, read and written."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class CostRow:
    """One table entry: FLOPs of one kind, or bytes in one direction, for one op."""

    op: str
    """name of the op"""
    scope: str
    """module scope, levels separated by /"""
    phase: str
    """forward, recompute, backward or optimizer"""
    kind: str
    """matmul, pointwise or transcendental; for bytes the first of these kinds that the op has, else data"""
    dtype: str
    """number format: for FLOPs the compute format, for bytes the stored format"""
    direction: str
    """compute, read or write"""
    amount: Poly
    """FLOPs if the direction is compute, else bytes; summed over all iterations"""
    validity: Validity | None = field(default=None, repr=False, compare=False)
    """conditions under which the amount holds"""

    @property
    def value(self) -> Formula:
        """The amount as a formula or number."""
        return answer(self.amount, _held(self.validity))


def _held(validity: Validity | None) -> tuple[Validity, ...]:
    return () if validity is None else (validity,)


@guarded()
@dataclass(frozen=True, repr=False)
class Costs(Table):
    """Cost table that can be filtered, grouped, summed and bound."""

    rows: tuple[CostRow, ...]
    """Entries in program order."""
    names: frozenset[str] = frozenset()
    """Dimensions of the graph, as accepted by `bind`."""
    validity: Validity | None = field(default=None, repr=False, compare=False)
    """Conditions under which the rows hold."""
    graph: str = field(default="", compare=False)
    """Name of the graph."""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Descriptions of dimensions."""

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _description(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self.rows)} rows"

    def _columns(self) -> Sequence[Column]:
        return _COLUMNS

    def _facts(self) -> Sequence[Fact]:
        sums = self.total()
        return (
            Fact("FLOPs", sums.flops, "FLOP"), Fact("of contractions", sums.matmul, "FLOP"),
            Fact("bytes moved", sums.bytes, "B"),
        )  # fmt: skip

    def filter(self, **wanted: str | Callable[[str], bool]) -> Costs:
        """Return the rows with the given column values.

        Parameters
        ----------
        **wanted : str or callable
            Value by column: op, scope, phase, kind, dtype, direction. A scope or op includes everything inside it
            (`scope="layers/attn"`); a callable receives the column's text.

        Returns
        -------
        Costs
            The selected rows.

        Raises
        ------
        GraphError
            If a column does not exist.
        """
        for column, value in wanted.items():
            _need_column(column)
            _need_value(column, value)
        selected = [r for r in self.rows if all(_matches(getattr(r, c), w, c) for c, w in wanted.items())]
        return replace(self, rows=tuple(selected))

    def group(self, column: str, depth: int | None = None) -> Grouped:
        """Split the table by a column.

        Parameters
        ----------
        column : str
            op, scope, phase, kind, dtype or direction.
        depth : int, optional
            Number of levels to keep of a scope.

        Returns
        -------
        Grouped
            Mapping from value to table; `.total()` sums each.
        """
        _need_column(column)
        if depth is not None and depth < 1:
            raise GraphError(f"costs: depth {shown(depth)}, expected a positive integer")
        out: dict[str, list[CostRow]] = {}
        for r in self.rows:
            key = getattr(r, column)
            out.setdefault(key if depth is None else "/".join(key.split("/")[:depth]), []).append(r)
        return Grouped({k: replace(self, rows=tuple(v)) for k, v in out.items()})

    def total(self) -> Cost:
        """Sum all rows."""
        sums = {}
        for kind in FLOP_KINDS:
            sums[kind] = total(r.amount for r in self.rows if r.direction == "compute" and r.kind == kind)
        read = total(r.amount for r in self.rows if r.direction == "read")
        written = total(r.amount for r in self.rows if r.direction == "write")
        amounts = {**sums, "read": read, "written": written}
        return Cost(**{k: answer(p, _held(self.validity)) for k, p in amounts.items()})

    def bind(self, **dims: int) -> Costs:
        """Bind sizes in every row.

        Raises
        ------
        BindingError
            If a name is not a dimension of the graph, is already bound to another size, or the size is invalid.
        """
        for name in dims:
            if name not in self.names:
                raise BindingError(f"{name!r} is no dimension, expected one of {', '.join(sorted(self.names))}")
        values = {k: as_poly(size_of(k, v)) for k, v in dims.items()}
        validity = self.validity
        if validity is not None:
            for name, size in validity.values:
                if values.get(name, size) != size:
                    raise BindingError(
                        f"{name}={dims[name]}: the costs were derived with {name}={size}; "
                        f"derive them again for another size"
                    )
            validity = validity.at(values)
            values |= validity.settled()
        rows = (replace(r, amount=r.amount.bind(values), validity=validity) for r in self.rows)
        return replace(self, rows=tuple(rows), validity=validity)


_COLUMNS = (
    *map(Column, ("op", "scope", "phase", "kind", "dtype", "direction")),
    Column("amount", lambda r: "FLOP" if r.direction == "compute" else "B", lambda r: r.value),
)


class Grouped(Table, dict[str, Costs]):
    """Cost tables by column value."""

    @property
    def rows(self) -> tuple[tuple[str, Cost], ...]:
        """Each value with its total cost."""
        return tuple(self.total().items())

    def _description(self) -> str:
        return f"{len(self)} tables"

    @property
    def legend(self) -> Mapping[str, str]:  # type: ignore[override]  # an attribute of other tables
        """Descriptions of dimensions."""
        return next((v.legend for v in self.values()), {})

    def _columns(self) -> Sequence[Column]:
        amounts = {"matmul": "FLOP", "pointwise": "FLOP", "transcendental": "FLOP", "read": "B", "written": "B"}
        return (
            Column("of", read=lambda row: row[0]),
            *(Column(name, unit, _part(name)) for name, unit in amounts.items()),
        )

    def total(self) -> dict[str, Cost]:
        """Sum each table."""
        return {k: v.total() for k, v in self.items()}

    def bind(self, **dims: int) -> Grouped:
        """Bind sizes in every table."""
        return Grouped({k: v.bind(**dims) for k, v in self.items()})


def _part(name: str) -> Callable[[tuple[str, Cost]], Formula]:
    return lambda row: getattr(row[1], name)


def _need_column(column: str) -> None:
    need_choice("costs: column", column, [f.name for f in fields(CostRow) if f.type == "str"])


def _need_value(column: str, value: object) -> None:
    """Raise for values that no row can have, since a misspelt kind would sum to zero."""
    if not isinstance(value, str):
        need_call(f"costs: {column}", value)
    elif column in _VALUES:
        need_choice(f"costs: {column}", value, _VALUES[column])


def _matches(value: str, condition: str | Callable[[str], bool], column: str) -> bool:
    if callable(condition):
        return condition(value)
    return value == condition or (column in ("scope", "op") and value.startswith(f"{condition}/"))


# -- aliases -----------------------------------------------------------------------------------------------------------
# An op that reads one tensor under two names reads it once. In a loop, this can differ per iteration: the initial value
# of a carry may be a tensor that the body also captures, and a body may forward a captured tensor or return one result
# twice.

Aliases = Mapping[Storage, tuple[Storage, Poly]]
Place = tuple[Storage, Poly]


@contextmanager
def aliased(aliases: Aliases) -> Iterator[None]:
    """Identify regions of tensors by the storages in `aliases`."""
    token = ALIASES.set({**ALIASES.get(), **aliases})
    try:
        yield
    finally:
        ALIASES.reset(token)


def situations(loop: Loop) -> list[tuple[Aliases, Poly]]:
    """Return the alias sets among a loop body's inputs, with the number of iterations for each.

    Each alias set maps the storages of body inputs to the storages that they alias. There is a single set if no tensor
    is read under two names.
    """
    count = loop.count
    alias_sets, first = _carried_aliases(loop)
    if len(alias_sets) == 1:
        return [(alias_sets[0], count)]
    out = []
    for k, aliases in enumerate(alias_sets):
        if k < first:
            times = smaller(ONE, at_least_zero(count - k)) if k else ONE
        else:  # periodic from here on
            times = at_least_zero(poly(sympy.ceiling(((count - k) / (len(alias_sets) - first)).expr)))
        if times:
            out.append((aliases, times))
    return out


def _carried_aliases(loop: Loop) -> tuple[list[Aliases], int]:
    """Follow the carries until their alias sets repeat; return the sets and the start of the period."""
    iteration = _iteration(loop.body)
    before = {name: poly(symbol(name)) - 1 for name in iteration.names()}
    fixed = dict(_entries(loop, iteration))
    state = [_resolved(t.storage, t.offset) for t in loop.starts]
    copies: dict[tuple[Storage, int], Storage] = {}
    places = {f.storage: i for i, f in enumerate(loop.carries)}
    history: list[tuple[Place, ...]] = []
    while tuple(state) not in history:
        history.append(tuple(state))
        after = []
        for t in loop.nexts:
            if t.storage in places:
                base, delta = state[places[t.storage]]
                after.append((_older(copies, base), delta.bind(before) + t.offset))
            elif t.storage in fixed:  # a slice carried from the previous iteration
                base, delta = fixed[t.storage]
                after.append((base, delta.bind(before) + t.offset))
            else:
                after.append((copies.setdefault((t.storage, 0), _copy(t.storage)), t.offset))
        state = after
    first = history.index(tuple(state))
    inputs = [f.storage for f in loop.carries]
    alias_sets = [_alias_sets(loop.body, {**fixed, **dict(zip(inputs, s, strict=True))}) for s in history]
    if all(t == alias_sets[0] for t in alias_sets):
        return alias_sets[:1], 0
    return _shortened(alias_sets, first)


def _shortened(alias_sets: list[Aliases], first: int) -> tuple[list[Aliases], int]:
    """Shorten the sequence if alias sets repeat sooner than the carries."""
    if all(t == alias_sets[first] for t in alias_sets[first:]):
        alias_sets = alias_sets[: first + 1]
    while first and len(alias_sets) == first + 1 and alias_sets[first - 1] == alias_sets[first]:
        alias_sets.pop()
        first -= 1
    return alias_sets, first


def _copy(storage: Storage) -> Storage:
    """Return a placeholder for a storage from an earlier iteration."""
    out = Storage.__new__(Storage)
    out.name, out.elements, out.bytes, out.role = storage.name, storage.elements, storage.bytes, storage.role
    return out


def _older(copies: dict[tuple[Storage, int], Storage], base: Storage) -> Storage:
    """Return the storage as seen one iteration later: one produced in the body is then older than the newest."""
    key = next((k for k, s in copies.items() if s is base), None)
    return base if key is None else copies.setdefault((key[0], key[1] + 1), _copy(base))


def _resolved(storage: Storage, offset: Poly) -> Place:
    aliases = ALIASES.get()
    while storage in aliases:
        storage, delta = aliases[storage]
        offset = offset + delta
    return storage, offset


def _iteration(body: Graph) -> Poly:
    """Return the symbol for the iteration index, distinct for each nesting level."""
    depth = 0
    while body.parent is not None:
        body, depth = body.parent, depth + 1
    return poly(symbol(f"iteration_{depth}"))


def _entries(loop: Loop, iteration: Poly) -> Iterator[tuple[Storage, Place]]:
    """Yield the storages behind the captured inputs and slices of a body."""
    for f, t in zip(loop.slices, loop.xs, strict=True):
        yield f.storage, _resolved(t.storage, t.offset + t.strides[0] * iteration)
    for f, t in zip(loop.captured, loop.shared, strict=True):
        yield f.storage, _resolved(t.storage, ZERO)  # its own offset is the outer one's


def _alias_sets(body: Graph, places: Mapping[Storage, Place]) -> Aliases:
    """Return the alias sets if an op reads one storage under two names, else nothing."""
    bases = [base for base, _ in places.values()]
    shared = {name: location for name, location in places.items() if bases.count(location[0]) > 1}
    if not shared:
        return {}
    base_of = partial(_base, shared)
    for inner in body.walk():
        names = {t.storage for t in inner.operands}
        if len({base_of(n) for n in names}) < len(names):
            return shared
    return {}


def _base(shared: Aliases, storage: Storage) -> Storage:
    return shared[storage][0] if storage in shared else storage


# -- compulsory traffic ------------------------------------------------------------------------------------------------


def repeated_bodies(graph: Graph, times: Poly = ONE) -> Iterator[tuple[Graph, Poly]]:
    """Yield a graph and every repeated body inside it, with the number of executions."""
    yield graph, times
    for op in graph.ops:
        if op.body is not None:
            repeated = times if op.loop is None else times * op.loop.count
            yield from repeated_bodies(op.body, repeated)


def _known(graph: Graph) -> Relations:
    """Return the known relations, including that no token chooses more experts than exist."""
    products = ((op, op.kind) for op in graph.walk() if isinstance(op.kind, GroupedMatmul))
    pairs = {(op.operands[1].sizes[0], kind.chosen) for op, kind in products if kind.routing == "expected"}
    texts = sorted(f"{experts} >= {chosen}" for experts, chosen in pairs if (experts - chosen).constant is None)
    return Relations([*graph.root.relations.relations, *map(parse_relation, texts)])


def _clamped(touched: Poly, size: Poly, relations: Relations) -> Poly:
    """Return the accessed elements, bounded by the size of the tensor."""
    if at_least(size, touched) or relations.nonnegative(size - touched):
        return touched
    return size if at_least(touched, size) else poly(Min(touched.expr, size.expr))


def _written_identity(t: Tensor) -> tuple[object, ...] | None:
    """Identify the elements that an output has to write, or None if a loop may only forward them."""
    source = t
    while source.is_view and source.producer is not None:
        source = next(o for o in source.producer.operands if o.storage is t.storage)
    op = source.producer
    if op is None or op.body is None or op.loop is None:
        return t.region()
    inner = op.body.outputs[op.results.index(source)]
    identity = None if inner.role != "activation" else _written_identity(inner)
    return None if identity is None else (op, *identity, *t.region()[1:])


def _outputs(graph: Graph) -> Iterator[Poly]:
    """Yield the bytes written per output storage; of parts that may overlap, only the largest counts."""
    by_storage: dict[object, dict[tuple[object, ...], Tensor]] = {}
    for t in graph.outputs:
        if t.storage.role == "activation" and not t.storage.host and (identity := _written_identity(t)):
            by_storage.setdefault(t.storage, {}).setdefault(identity, t)
    counted: set[tuple[object, ...]] = set()
    for tensors_by_identity in by_storage.values():
        tensors = [t for identity, t in tensors_by_identity.items() if identity not in counted]
        counted.update(tensors_by_identity)
        if tensors:
            yield together(tensors) * tensors[0].element_bytes()


def _cache_writes(graph: Graph, t: Tensor) -> Poly:
    """Return the elements that a step writes to a cache, which the next step reads."""
    if t.role != "cache":
        return ZERO
    changing = [op for op in graph.successors(t) if op.kind.overwrites()]
    # a kernel may update caches in addition to its results
    return total(
        written
        for op in changing
        for result, written in zip(op.results, op.kind.writes(op), strict=True)
        if result.storage is t.storage
    )


def compulsory(graph: Graph) -> Poly:
    """Return the bytes that no fusion avoids.

    Each input, parameter and buffer counts the part that its widest reader accesses, at most the whole tensor. Outputs
    count in full, and caches also the elements written to them. Unused tensors are not moved.
    """
    if "compulsory" not in graph.cache:
        amounts, relations = [], _known(graph)
        for g, times in repeated_bodies(graph):
            for t in g.tensors:
                if t.producer is None and t.role in SOURCES and t.role != "formal" and not t.storage.host:
                    touched = _clamped(elements_read(g, t), t.storage.elements, relations)
                    amounts.append((touched + _cache_writes(g, t)) * t.element_bytes() * times)
        amounts += _outputs(graph)
        graph.cache["compulsory"] = total(amounts)
    out: Poly = graph.cache["compulsory"]
    return out


# -- costs -------------------------------------------------------------------------------------------------------------

_COUNTS = ("executed", "full")


def executions(graph: Graph, times: Poly = ONE, *, moves: bool = True) -> Iterator[tuple[Op, Poly, bool]]:
    """Yield every op that does work, how often it runs, and whether its operands are in memory.

    An op is yielded again for iterations in which more or fewer of its operands alias. Query its reads before
    advancing.
    """
    yield from _executions(graph, times, moves, {})


def _executions(
    graph: Graph, times: Poly, moves: bool, undefined: dict[Tensor, Poly]
) -> Iterator[tuple[Op, Poly, bool]]:
    """Yield executions; `undefined` maps accumulators without a first term to how often they lack it."""
    for op in graph.ops:
        if op.loop is not None:
            yield from _iterations(op.loop, times, moves, undefined)
            continue
        if isinstance(op.kind, Undef):
            undefined[op.results[0]] = times
            continue
        runs = times
        if isinstance(op.kind, Accumulate):  # the first term initializes the sum
            without = undefined.get(op.operands[0], ZERO)
            if op.kind.aliased and without:
                yield taken(op), without, moves
            runs = times - without
            if not runs:
                continue
        yield op, runs, moves
        if op.body is not None:
            yield from _executions(op.body, times, False, undefined)


def _iterations(loop: Loop, times: Poly, moves: bool, undefined: dict[Tensor, Poly]) -> Iterator[tuple[Op, Poly, bool]]:
    for nth, (aliases, runs) in enumerate(_situations(loop)):
        # the first iteration initializes a carried accumulator
        begun = zip(loop.carries, loop.starts, strict=True) if nth == 0 else ()
        inner = {f: undefined[t] for f, t in begun if t in undefined}
        bindings_of_body = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        inner |= {f: undefined[t] * runs for f, t in bindings_of_body if t in undefined}
        with aliased(aliases):
            yield from _executions(loop.body, times * runs, moves, inner)


def _situations(loop: Loop) -> list[tuple[Mapping[Storage, tuple[Storage, Poly]], Poly]]:
    """Return the alias sets of a loop; one bounded by an outer loop's index runs 0 + 1 + ... times."""
    alias_sets = situations(loop)
    if not loop.until:
        return alias_sets
    if len(alias_sets) > 1:
        raise UnsupportedError(
            f"{loop.op.name!r} reads one tensor under two names, expected a loop that reads each tensor once"
        )
    # the mean trip count
    return [(alias_sets[0][0], (loop.count - 1) / 2)]


def compute_dtype(op: Op) -> str:
    """Return the format that an op computes in: the promoted format of its floating operands, else of its result.

    An integer matmul accumulates in a wider format than its operands, which determine the unit it runs on.
    """
    multiplies = isinstance(op.kind, Einsum | GroupedMatmul)
    operands = op.operands[:2] if isinstance(op.kind, GroupedMatmul) else op.operands  # the others are routing indices
    formats = [t.dtype for t in operands if t.dtype.kind == "float"]
    if not formats:
        formats = [t.dtype for t in (operands if multiplies else op.results[:1])]
    if multiplies and formats[0].kind == "float" and all(f.bits <= 8 for f in formats):
        promoted = max(formats, key=lambda f: (f.bits, f.mantissa))  # E4M3 times E5M2 runs on either unit
    else:
        promoted = fold(promote, formats)
    return promoted.element or promoted.name


def _main_kind(op: Op, flops_of: Callable[[Op], Flops]) -> str:
    """Return the kind that an op's bytes are listed under: its first kind of FLOPs, including fused ops."""
    inner_ops = [op] if op.body is None else [inner for inner, _, _ in executions(op.body)]
    flops_by_op = [flops_of(i).by_kind() for i in inner_ops]
    return next((k for k in FLOP_KINDS if any(flops[k] for flops in flops_by_op)), "data")


def _traffic(op: Op) -> Iterator[tuple[str, str, Poly]]:
    for direction, tensors, amounts in (
        ("read", op.operands, op.kind.reads(op)),
        ("write", op.results, op.kind.writes(op)),
    ):
        by_format: dict[str, list[Poly]] = {}
        for t, amount in zip(tensors, amounts, strict=False):
            if amount:
                by_format.setdefault(t.dtype.name, []).append(amount * t.element_bytes())
        for dtype, summands in by_format.items():
            yield direction, dtype, summands[0] if len(summands) == 1 else total(summands)


@collection_paused()
def _rows(graph: Graph, count: str) -> tuple[CostRow, ...]:
    if ("costs", count) in graph.cache:
        return graph.cache["costs", count]  # type: ignore[no-any-return]  # of any answer
    rows = []
    flops_of = lru_cache(maxsize=None)(lambda op: op.kind.flops(op))  # cached: fused ops are queried twice
    for op, times, moves in executions(graph):
        for kind, amount in flops_of(op).by_kind(count).items():
            if amount:
                rows.append(CostRow(op.name, op.scope, op.phase, kind, compute_dtype(op), "compute", amount * times))
        if moves:
            kind = _main_kind(op, flops_of)
            for direction, dtype, amount in _traffic(op):
                rows.append(CostRow(op.name, op.scope, op.phase, kind, dtype, direction, amount * times))
    graph.cache["costs", count] = tuple(rows)
    return tuple(rows)


def traffic_of(op: Op) -> dict[str, Poly]:
    """Return the bytes that an op reads and writes."""
    out = {"read": ZERO, "written": ZERO}
    for direction, _, amount in _traffic(op):
        out["read" if direction == "read" else "written"] += amount
    return out


def _bound_rows(graph: Graph, count: str, dims: Mapping[str, object]) -> tuple[tuple[CostRow, ...], Bindings]:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    values = bindings(graph, dims)
    rows = _rows(graph, count)
    # cached, since a report requests the same sizes several times
    entry: tuple[object, tuple[CostRow, ...]] = graph.cache.get(("bound costs", count), (None, ()))
    if entry[0] != values:
        validity = values.validity
        entry = values, tuple(replace(r, amount=r.amount.bind(values), validity=validity) for r in rows)
        graph.cache["bound costs", count] = entry
    return entry[1], values


def costs(graph: Graph, /, *, count: str = "executed", **dims: int) -> Costs:
    """Return the cost table.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    count : str
        "executed", or "full" to ignore iteration domains, as FlopCounterMode, PaLM and nanoGPT do.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Costs
        `.filter(kind=, scope=, ...)`, `.group("scope")`, `.total()`, `.bind(**dims)`.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or `count` is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up")))
    >>> cg.costs(g).filter(kind="matmul").total().flops
    2*B*D*F
    >>> cg.costs(g).group("scope").total()["up"].bytes
    4*B*D + 4*B*F + 4*D*F
    """
    rows, values = _bound_rows(graph, count, dims)
    return Costs(rows, known_names(graph), values.validity, graph.name, dict(graph.root.legend))


def _sum_of(graph: Graph, dims: Mapping[str, object], count: str, selects: Callable[[CostRow], bool]) -> Formula:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    key = ("sum", count, selects)
    stages = of_stages(graph, dims)
    for g, _ in stages:
        if key not in g.cache:
            g.cache[key] = total(r.amount for r in _rows(g, count) if selects(r))
    if len(stages) == 1:
        return bound_answer(graph.cache[key], stages[0][1])
    amounts = [(g.cache[key].bind(values), Owner(g.name)) for g, values in stages]
    return answer(extremum(amounts), tuple(v for _, values in stages for v in values.held))


def _is_compute(row: CostRow) -> bool:
    return row.direction == "compute"


def _is_matmul(row: CostRow) -> bool:
    return row.direction == "compute" and row.kind == "matmul"


def _is_traffic(row: CostRow) -> bool:
    return row.direction != "compute"


@cache
def _is_of(kind: str) -> Callable[[CostRow], bool]:
    return lambda row: row.direction == "compute" and row.kind == kind


def flops_of_kind(graph: Graph, kind: str, dims: Mapping[str, object]) -> Formula:
    """Return the FLOPs of one kind, as executed."""
    return _sum_of(graph, dims, "executed", _is_of(kind))


def flops(graph: Graph, /, **dims: int) -> Formula:
    """Return the FLOPs of all kinds, as executed.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs: matmul, pointwise and transcendental.

    Raises
    ------
    BindingError
        If a name is not a dimension of the graph, or a size is not a positive integer.
    """
    return _sum_of(graph, dims, "executed", _is_compute)


def matmul_flops(graph: Graph, /, count: str = "executed", **dims: int) -> Formula:
    """Return the FLOPs in contractions, as in 6ND, MFU and FlopCounterMode.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    count : str
        "executed", or "full" to count the whole square of causal attention, as torch's counter, PaLM and nanoGPT do.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or `count` is unknown.
    """
    return _sum_of(graph, dims, count, _is_matmul)


def bytes_moved(graph: Graph, /, fused: bool = False, *, cache: object = None, **dims: int) -> Formula:
    """Return the bytes read and written.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    fused : bool
        False: as declared, with one kernel per op that reads each operand and writes each result once. True:
        compulsory traffic, which no fusion avoids: the accessed part of graph inputs, parameters and buffers, and
        the outputs.
    cache : int, str or sympy.Expr, optional
        Capacity in bytes of a fast memory, such as `"50 MB"`, which keeps nothing between ops. Each op then counts
        the least traffic under any schedule: the bytes it accesses or, for a two-operand contraction or kernel, the
        bound from `tiling` if that is larger. Without a cache, every operand is read once; with one, operands that
        do not fit are read again. The schedules from `tiling` come close to this bound.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes; a bound with a root is a float once it is bound.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, the cache is not a positive number of bytes, or it is combined with `fused`.

    Examples
    --------
    >>> import costgraph as cg
    >>> N, M = cg.dims("N M")
    >>> with cg.Graph("g", dtype="fp32") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> cg.bytes_moved(g), cg.bytes_moved(g, cache=M)
    (12*N**2, Max(12*N**2, -2*M + 16*N**3/sqrt(M)))
    >>> cg.bytes_moved(g, cache="1 MiB", N=4096) / cg.bytes_moved(g, N=4096)
    5.322916666666667
    """
    need_graph("bytes_moved", graph)
    need_flag("bytes_moved", fused=fused)
    if cache is not None:
        return _through(graph, fused, cache, dims)
    if not fused:
        return _sum_of(graph, dims, "executed", _is_traffic)
    return bound_answer(compulsory(graph), bindings(graph, dims))


def _through(graph: Graph, fused: bool, cache: object, dims: Mapping[str, object]) -> Formula:
    size = cache_bytes("bytes_moved", graph, cache)
    if fused:
        raise GraphError(
            "bytes_moved: fused=True together with cache=; expected only one of them, since each op has its own cache"
        )
    values = bindings(graph, dims)
    moved = (least_traffic(op, size, values) * times.bind(values) for op, times, moves in executions(graph) if moves)
    return bound_answer(total(moved), values)


def intensity(graph: Graph, /, fused: bool = False, **dims: int) -> Formula:
    """Return the arithmetic intensity: FLOPs of all kinds per byte moved.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    fused : bool
        Selects the bytes, as in `bytes_moved`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        FLOP/B.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or no bytes are moved.
    """
    work, moved = flops(graph, **dims), bytes_moved(graph, fused, **dims)
    if moved == 0:
        raise GraphError(f"intensity of graph {graph.name!r}: it moves no bytes, so its intensity is undefined")
    ratio = as_expr(work) / as_expr(moved)
    short = not ratio.atoms(sympy.floor, sympy.ceiling) and _small(ratio)
    return answer(conditioned(_cancelled(plain(ratio)), held_by(ratio)) if short else ratio)


_cancelled = lru_cache(maxsize=1 << 7)(sympy.Expr.cancel)  # slow, and a report requests both open and bound formulas


def _small(ratio: sympy.Expr) -> bool:
    # cancelling common factors of many terms takes longer than deriving them
    return bool(sum(len(sympy.Add.make_args(p)) for p in ratio.as_numer_denom()) <= 30)


def unused_names(graph: Graph, formulas: list[Formula]) -> list[str]:
    """Return the dimensions of a graph that occur in none of the formulas."""
    shown = {s.name for f in formulas if isinstance(f, sympy.Expr) for s in f.free_symbols}
    return sorted(known_names(graph) - shown - graph.root.defaults.keys())
