"""What each op costs: the table behind FLOPs, bytes moved and intensity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce as fold

import sympy

from ..arguments import need_call, need_choice, need_flag
from ..bind import Formula, answer, bindings, known_names, size_of
from ..dtypes import promote
from ..errors import BindingError, GraphError
from ..graph import Graph, need_graph
from ..op import Op
from ..polynomial import ONE, Poly, as_poly, total
from ..rules import Flops
from .traffic import compulsory

__all__ = [
    "Cost",
    "CostRow",
    "Costs",
    "bytes_moved",
    "costs",
    "executions",
    "flops",
    "intensity",
    "matmul_flops",
]

_FLOP_KINDS = ("matmul", "pointwise", "transcendental")
_COUNTS = ("executed", "full")
_VALUES = {
    "kind": (*_FLOP_KINDS, "data"),
    "direction": ("compute", "read", "write"),
    "phase": ("forward", "recompute", "backward", "optimizer"),
}


@dataclass(frozen=True)
class Cost:
    """A sum of costs: small, additive."""

    matmul: Formula = 0
    """FLOPs of contractions: a multiply and an add for each index point"""
    pointwise: Formula = 0
    """FLOPs of single arithmetic operations"""
    transcendental: Formula = 0
    """FLOPs of exp, log, sqrt and the like"""
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


@dataclass(frozen=True)
class CostRow:
    """One entry of the table: FLOPs of one kind, or bytes in one direction, of one op."""

    op: str
    """name of the op"""
    scope: str
    """module scope, levels separated by /"""
    phase: str
    """forward, recompute, backward or optimizer"""
    kind: str
    """matmul, pointwise or transcendental; of bytes the first of these that the op has FLOPs of, else data"""
    dtype: str
    """number format: of FLOPs the one that they are done in, of bytes the stored one"""
    direction: str
    """compute, read or write"""
    amount: Poly
    """FLOPs where the direction is compute, else bytes; all iterations of a Repeat together"""

    @property
    def value(self) -> Formula:
        """The amount as a formula, or a number."""
        return answer(self.amount)


@dataclass(frozen=True)
class Costs:
    """A table of costs that can be filtered, grouped, summed and bound."""

    rows: tuple[CostRow, ...]
    """The entries, in program order."""
    names: frozenset[str] = frozenset()
    """Dimensions of the graph that they come from: what `bind` takes."""

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def filter(self, **wanted: str | Callable[[str], bool]) -> Costs:
        """Keep the rows whose columns have these values.

        Parameters
        ----------
        **wanted : str or callable
            By column: op, scope, phase, kind, dtype, direction. A scope or an op stands for all that is inside it
            (`scope="layers/attn"`); a callable decides by the column's text.

        Returns
        -------
        Costs
            Fewer rows.

        Raises
        ------
        GraphError
            If there is no such column.
        """
        for column, value in wanted.items():
            _need_column(column)
            _need_value(column, value)
        kept = [r for r in self.rows if all(_matches(getattr(r, c), w, c) for c, w in wanted.items())]
        return replace(self, rows=tuple(kept))

    def group(self, column: str, depth: int | None = None) -> Grouped:
        """Split the table by a column.

        Parameters
        ----------
        column : str
            op, scope, phase, kind, dtype or direction.
        depth : int, optional
            Levels of a scope to keep.

        Returns
        -------
        Grouped
            A mapping from value to table; `.total()` sums each.
        """
        _need_column(column)
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise GraphError(f"costs: depth {depth!r}, expected a positive integer")
        out: dict[str, list[CostRow]] = {}
        for r in self.rows:
            key = getattr(r, column)
            out.setdefault(key if depth is None else "/".join(key.split("/")[:depth]), []).append(r)
        return Grouped({k: replace(self, rows=tuple(v)) for k, v in out.items()})

    def total(self) -> Cost:
        """Add up all rows."""
        sums = {}
        for kind in _FLOP_KINDS:
            sums[kind] = total(r.amount for r in self.rows if r.direction == "compute" and r.kind == kind)
        read = total(r.amount for r in self.rows if r.direction == "read")
        written = total(r.amount for r in self.rows if r.direction == "write")
        return Cost(**{k: answer(p) for k, p in sums.items()}, read=answer(read), written=answer(written))

    def bind(self, **dims: int) -> Costs:
        """Put sizes into every row.

        Raises
        ------
        BindingError
            If a name is no dimension of the graph, or a size is not a positive integer.
        """
        for name in dims:
            if name not in self.names:
                raise BindingError(f"{name!r} is no dimension, expected one of {', '.join(sorted(self.names))}")
        values = {k: as_poly(size_of(k, v)) for k, v in dims.items()}
        return replace(self, rows=tuple(replace(r, amount=r.amount.bind(values)) for r in self.rows))


class Grouped(dict[str, Costs]):
    """Tables by the value of a column."""

    def total(self) -> dict[str, Cost]:
        """Add up each table."""
        return {k: v.total() for k, v in self.items()}

    def bind(self, **dims: int) -> Grouped:
        """Put sizes into every table."""
        return Grouped({k: v.bind(**dims) for k, v in self.items()})


def _need_column(column: str) -> None:
    need_choice("costs: column", column, [f.name for f in fields(CostRow) if f.name != "amount"])


def _need_value(column: str, wanted: object) -> None:
    """Refuse what no row can have: a misspelt kind would add up to nothing."""
    if not isinstance(wanted, str):
        need_call(f"costs: {column}", wanted)
    elif column in _VALUES:
        need_choice(f"costs: {column}", wanted, _VALUES[column])


def _matches(value: str, wanted: str | Callable[[str], bool], column: str) -> bool:
    if callable(wanted):
        return wanted(value)
    return value == wanted or (column in ("scope", "op") and value.startswith(f"{wanted}/"))


def executions(graph: Graph, times: Poly = ONE, *, moves: bool = True) -> Iterator[tuple[Op, Poly, bool]]:
    """Yield every op that does something, how often it runs, and whether its operands are in memory."""
    for op in graph.ops:
        if op.kind.body == "repeated":
            assert op.body is not None
            yield from executions(op.body, times * op.attrs["count"], moves=moves)
            continue
        yield op, times, moves
        if op.body is not None:
            yield from executions(op.body, times, moves=False)


def compute_dtype(op: Op) -> str:
    """Return the format that an op calculates in: the common one of its floating operands, else of its result."""
    floats = [t.dtype for t in op.operands if t.dtype.kind == "float"] or [t.dtype for t in op.results[:1]]
    return fold(promote, floats).name


def _main_kind(flops: Flops) -> str:
    return next((k for k in _FLOP_KINDS if getattr(flops, k)), "data")


def _inner_flops(op: Op) -> Flops:
    """FLOPs of a kernel's body, to name the kind of its bytes."""
    if op.body is None:
        own: Flops = op.kind.flops(op)
        return own
    parts = [inner.kind.flops(inner) for inner, _, _ in executions(op.body)]
    return Flops(*(total(getattr(p, f.name) for p in parts) for f in fields(Flops)))


def _traffic(op: Op) -> Iterator[tuple[str, str, Poly]]:
    for direction, tensors, amounts in (
        ("read", op.operands, op.kind.reads(op)),
        ("write", op.results, op.kind.writes(op)),
    ):
        by_format: dict[str, list[Poly]] = {}
        for t, amount in zip(tensors, amounts, strict=False):
            if amount:
                by_format.setdefault(t.dtype.name, []).append(amount * t.element_bytes())
        for dtype, parts in by_format.items():
            yield direction, dtype, total(parts)


def _rows(graph: Graph, count: str) -> tuple[CostRow, ...]:
    if ("costs", count) in graph.cache:
        return graph.cache["costs", count]  # type: ignore[no-any-return]
    rows = []
    for op, times, moves in executions(graph):
        own = op.kind.flops(op)
        for kind in _FLOP_KINDS:
            amount = own.full if kind == "matmul" and count == "full" else getattr(own, kind)
            if amount:
                rows.append(CostRow(op.name, op.scope, op.phase, kind, compute_dtype(op), "compute", amount * times))
        if moves:
            kind = _main_kind(_inner_flops(op))
            for direction, dtype, amount in _traffic(op):
                rows.append(CostRow(op.name, op.scope, op.phase, kind, dtype, direction, amount * times))
    graph.cache["costs", count] = tuple(rows)
    return tuple(rows)


def _bound_rows(graph: Graph, count: str, dims: Mapping[str, object]) -> tuple[CostRow, ...]:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    values = bindings(graph, dims)
    rows = _rows(graph, count)
    return tuple(replace(r, amount=r.amount.bind(values)) for r in rows) if values else rows


def costs(graph: Graph, /, *, count: str = "executed", **dims: int) -> Costs:
    """Return the table of costs.

    Parameters
    ----------
    graph : Graph
        What is asked.
    count : str
        executed, or full: every domain ignored, as FlopCounterMode, PaLM and nanoGPT charge.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Costs
        `.filter(kind=, scope=, ...)`, `.group("scope")`, `.total()`, `.bind(**dims)`.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or the count is unknown.

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
    return Costs(_bound_rows(graph, count, dims), known_names(graph))


def _sum_of(graph: Graph, dims: Mapping[str, object], count: str, wanted: Callable[[CostRow], bool]) -> Formula:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    key = ("sum", count, wanted)
    if key not in graph.cache:
        graph.cache[key] = total(r.amount for r in _rows(graph, count) if wanted(r))
    return answer(graph.cache[key].bind(bindings(graph, dims)))


def _is_compute(row: CostRow) -> bool:
    return row.direction == "compute"


def _is_matmul(row: CostRow) -> bool:
    return row.direction == "compute" and row.kind == "matmul"


def _is_traffic(row: CostRow) -> bool:
    return row.direction != "compute"


def flops(graph: Graph, /, **dims: int) -> Formula:
    """Return the FLOPs of all kinds, as executed.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs: matmul, pointwise and transcendental.

    Raises
    ------
    BindingError
        If a name is no dimension of the graph, or a size is not a positive integer.
    """
    return _sum_of(graph, dims, "executed", _is_compute)


def matmul_flops(graph: Graph, /, count: str = "executed", **dims: int) -> Formula:
    """Return the FLOPs of contractions: what 6ND, MFU and FlopCounterMode speak of.

    Parameters
    ----------
    graph : Graph
        What is asked.
    count : str
        executed, or full: the whole square of every attention, as torch's counter, PaLM and nanoGPT charge.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or the count is unknown.
    """
    return _sum_of(graph, dims, count, _is_matmul)


def bytes_moved(graph: Graph, /, fused: bool = False, **dims: int) -> Formula:
    """Return the bytes read and written.

    Parameters
    ----------
    graph : Graph
        What is asked.
    fused : bool
        False: as declared, each op one kernel that reads each operand and writes each result once. True: what no
        fusion can avoid, the touched part of graph inputs, parameters and buffers, and the outputs.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    """
    need_graph("bytes_moved", graph)
    need_flag("bytes_moved", fused=fused)
    if not fused:
        return _sum_of(graph, dims, "executed", _is_traffic)
    return answer(compulsory(graph).bind(bindings(graph, dims)))


def intensity(graph: Graph, /, fused: bool = False, **dims: int) -> Formula:
    """Return the arithmetic intensity: FLOPs of all kinds for each byte moved.

    Parameters
    ----------
    graph : Graph
        What is asked.
    fused : bool
        Which bytes: as `bytes_moved`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        FLOP/B.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or nothing is moved.
    """
    work, moved = flops(graph, **dims), bytes_moved(graph, fused, **dims)
    if moved == 0:
        raise GraphError(f"intensity of graph {graph.name!r}: it moves no bytes, expected an op that does")
    ratio = sympy.sympify(work) / sympy.sympify(moved)
    return answer(sympy.cancel(ratio) if not ratio.atoms(sympy.floor, sympy.ceiling) and _small(ratio) else ratio)


def _small(ratio: sympy.Expr) -> bool:
    # cancelling a common factor of many terms takes longer than the whole derivation
    return bool(sum(len(sympy.Add.make_args(p)) for p in ratio.as_numer_denom()) <= 30)


def unused_names(graph: Graph, formulas: list[Formula]) -> list[str]:
    """Return the dimensions of the graph that show up in none of the formulas."""
    shown = {s.name for f in formulas if isinstance(f, sympy.Expr) for s in f.free_symbols}
    return sorted(known_names(graph) - shown - graph.root.defaults.keys())
