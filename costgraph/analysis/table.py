"""The table of costs: rows that can be filtered, grouped, summed and bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from ..algebra.conditions import Validity
from ..algebra.polynomial import Poly, as_poly, total
from ..algebra.symbols import shorten, shown
from ..bind.evaluate import Formula, answer
from ..errors import BindingError, GraphError
from ..graph.arguments import need_call, need_choice
from ..graph.sizes import size_of
from ..hardware.tables import Column, Fact, Table
from ..notation.door import guarded

__all__ = ["FLOP_KINDS", "Cost", "CostRow", "Costs", "Grouped"]

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


@dataclass(frozen=True, slots=True)
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
    validity: Validity | None = field(default=None, repr=False, compare=False)
    """what the amount holds for"""

    @property
    def value(self) -> Formula:
        """The amount as a formula, or a number."""
        return answer(self.amount, _held(self.validity))


def _held(validity: Validity | None) -> tuple[Validity, ...]:
    return () if validity is None else (validity,)


@guarded()
@dataclass(frozen=True, repr=False)
class Costs(Table):
    """A table of costs that can be filtered, grouped, summed and bound."""

    rows: tuple[CostRow, ...]
    """The entries, in program order."""
    names: frozenset[str] = frozenset()
    """Dimensions of the graph that they come from: what `bind` takes."""
    validity: Validity | None = field(default=None, repr=False, compare=False)
    """What the rows hold for."""
    graph: str = field(default="", compare=False)
    """Name of the graph that they come from."""

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _about(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self.rows)} rows"

    def _columns(self) -> Sequence[Column]:
        return _COLUMNS

    def _facts(self) -> Sequence[Fact]:
        whole = self.total()
        return (
            Fact("FLOPs", whole.flops, "FLOP"), Fact("of contractions", whole.matmul, "FLOP"),
            Fact("bytes moved", whole.bytes, "B"),
        )  # fmt: skip

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
        if depth is not None and depth < 1:
            raise GraphError(f"costs: depth {shown(depth)}, expected a positive integer")
        out: dict[str, list[CostRow]] = {}
        for r in self.rows:
            key = getattr(r, column)
            out.setdefault(key if depth is None else "/".join(key.split("/")[:depth]), []).append(r)
        return Grouped({k: replace(self, rows=tuple(v)) for k, v in out.items()})

    def total(self) -> Cost:
        """Add up all rows."""
        sums = {}
        for kind in FLOP_KINDS:
            sums[kind] = total(r.amount for r in self.rows if r.direction == "compute" and r.kind == kind)
        read = total(r.amount for r in self.rows if r.direction == "read")
        written = total(r.amount for r in self.rows if r.direction == "write")
        parts = {**sums, "read": read, "written": written}
        return Cost(**{k: answer(p, _held(self.validity)) for k, p in parts.items()})

    def bind(self, **dims: int) -> Costs:
        """Put sizes into every row.

        Raises
        ------
        BindingError
            If a name is no dimension of the graph or is bound to another size, or the graph refuses a size.
        """
        for name in dims:
            if name not in self.names:
                raise BindingError(f"{name!r} is no dimension, expected one of {', '.join(sorted(self.names))}")
        values = {k: as_poly(size_of(k, v)) for k, v in dims.items()}
        validity = self.validity
        if validity is not None:
            for name, size in validity.values:
                if values.get(name, size) != size:
                    raise BindingError(f"{name}={dims[name]}: the costs were derived with {name}={size}, expected that")
            validity = validity.at(values)
            values |= validity.settled()
        rows = (replace(r, amount=r.amount.bind(values), validity=validity) for r in self.rows)
        return replace(self, rows=tuple(rows), validity=validity)


_COLUMNS = (
    *map(Column, ("op", "scope", "phase", "kind", "dtype", "direction")),
    Column("amount", lambda r: "FLOP" if r.direction == "compute" else "B", lambda r: r.value),
)


class Grouped(Table, dict[str, Costs]):
    """Tables by the value of a column."""

    @property
    def rows(self) -> tuple[tuple[str, Cost], ...]:
        """Each value with what its table adds up to."""
        return tuple(self.total().items())

    def _about(self) -> str:
        return f"{len(self)} tables"

    def _columns(self) -> Sequence[Column]:
        amounts = {"matmul": "FLOP", "pointwise": "FLOP", "transcendental": "FLOP", "read": "B", "written": "B"}
        return (
            Column("of", read=lambda row: row[0]),
            *(Column(name, unit, _part(name)) for name, unit in amounts.items()),
        )

    def total(self) -> dict[str, Cost]:
        """Add up each table."""
        return {k: v.total() for k, v in self.items()}

    def bind(self, **dims: int) -> Grouped:
        """Put sizes into every table."""
        return Grouped({k: v.bind(**dims) for k, v in self.items()})


def _part(name: str) -> Callable[[tuple[str, Cost]], Formula]:
    return lambda row: getattr(row[1], name)


def _need_column(column: str) -> None:
    need_choice("costs: column", column, [f.name for f in fields(CostRow) if f.type == "str"])


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
