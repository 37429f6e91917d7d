"""Op nodes and the records of op kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..algebra.polynomial import ZERO, Poly
from ..algebra.symbols import shorten
from ..dtypes import DType
from ..errors import GraphError, ShapeError
from .copies import Node
from .strides import Sizes
from .tensor import Tensor

if TYPE_CHECKING:
    from .domain import Domain
    from .graph import Graph

__all__ = ["Attrs", "Op", "OpKind", "Result"]

Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What an op kind infers of one of its results."""

    sizes: Sizes
    """Shape."""
    dtype: DType
    """Number format."""
    strides: Sizes | None = None
    """Elements between neighbours along each axis; None for a fresh dense tensor."""
    of: int | None = None
    """Index of the operand whose storage it shares, None for a storage of its own."""
    offset: Poly = ZERO
    """First element within the storage."""
    domain: tuple[Domain, int, int] | None = None
    """Restriction of its index points, as in Tensor."""
    pieces: int = 0
    """Leading axes whose positions are storages of their own, as in Storage."""


#: Op kinds by name; `costgraph.ops.registry` fills it.
kinds: dict[str, OpKind] = {}


@dataclass(frozen=True)
class OpKind:
    """The record of an op kind: facts and named rules, no arithmetic of its own."""

    name: str
    """Name in tables and files."""
    infer: Callable[[Sequence[Tensor], Attrs], Sequence[Result]]
    """Shapes, formats and layouts of the results; raises where operands do not fit."""
    flops: Callable[[Op], Any]
    """Rule of `costgraph.ops.rules` for its FLOPs."""
    reads: Callable[[Op], Sequence[Poly]]
    """Rule for the elements that it reads of each operand."""
    writes: Callable[[Op], Sequence[Poly]]
    """Rule for the elements that it writes of each result."""
    body: str | None = None
    """fused or repeated where the op runs a body graph, None otherwise."""
    restricted: bool = False
    """Whether it takes operands that are restricted to a domain, `infer` says what is left of it; refused otherwise."""

    def results_of(self, operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
        """Infer the results, of operands that the kind takes.

        Raises
        ------
        CostGraphError
            If an operand does not fit, or is restricted to a domain where that means nothing.
        """
        limited = None if self.restricted else next((t for t in operands if t.domain is not None), None)
        if limited is not None:
            raise ShapeError(f"{self.name} of {limited!r}, which is restricted to a domain: expected a whole tensor")
        return self.infer(operands, attrs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a kind is one record in a process
        return (_kind, (self.name,)) if kinds.get(self.name) is self else super().__reduce_ex__(protocol)


def _kind(name: str) -> OpKind:
    if name not in kinds:
        raise GraphError(f"op kind {shorten(name)} is not registered, expected one of {', '.join(sorted(kinds))}")
    return kinds[name]


class Op(Node):
    """An op node: one kernel, which reads each operand once and writes each result once."""

    __slots__ = ("attrs", "graph", "kind", "name", "operands", "phase", "results", "scope")

    def __init__(
        self,
        graph: Graph,
        kind: OpKind,
        name: str,
        operands: tuple[Tensor, ...],
        attrs: Attrs,
        scope: str,
        phase: str,
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.name = name
        self.operands = operands
        self.results: tuple[Tensor, ...] = ()
        self.attrs = MappingProxyType(dict(attrs))
        self.scope = scope
        self.phase = phase

    @property
    def body(self) -> Graph | None:
        """The graph that a Kernel fuses or a Repeat repeats."""
        return self.attrs.get("body")

    def __repr__(self) -> str:
        return f"{self.name}[{self.kind.name}]"
