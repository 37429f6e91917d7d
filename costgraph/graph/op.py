"""Op nodes, and the records that say what they do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..algebra.polynomial import ZERO, Poly, Rational
from ..dtypes import DType
from ..errors import ShapeError, UnsupportedError
from .call import Call
from .copies import Node
from .facts import Amount, Flag, Limit, MemoryFormat, Places, limits_of
from .strides import Sizes
from .tensor import Tensor

if TYPE_CHECKING:
    from ..algebra.dominance import Relations
    from .domain import Domain
    from .graph import Graph
    from .loop import Loop
    from .placement import Split

__all__ = ["Bodied", "Flops", "Op", "OpKind", "Result", "Working", "itself"]


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
    host: bool | None = None
    """Whether it lies in memory of the host; None where that is said by the operands, which lie there or not."""
    spare: Poly = ZERO
    """Bytes of its storage beyond its elements."""


def itself(t: Tensor, of: int = 0) -> Result:
    """Return the result that is an operand: another name of it, or what it holds once an op has written into it."""
    return Result(t.sizes, t.dtype, t.strides, of=of, offset=t.offset, domain=t.domain)


#: Op kinds by name; `costgraph.ops.registry` fills it.
kinds: dict[str, type[OpKind]] = {}


@dataclass
class Flops:
    """FLOPs by the unit of the hardware that does them: formulas, and numbers where they are counted."""

    matmul: Poly = ZERO
    """multiplies and adds of contractions, as executed"""
    full: Poly = None  # type: ignore[assignment]  # never None once it is made
    """the same with every domain ignored: what is executed unless it is said"""
    pointwise: Poly = ZERO
    """single arithmetic operations"""
    transcendental: Poly = ZERO
    """exp, log, sqrt, sin, tanh, erf and the like"""

    def __post_init__(self) -> None:
        if self.full is None:
            self.full = self.matmul

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.full + other.full,
            self.pointwise + other.pointwise,
            self.transcendental + other.transcendental,
        )

    def __mul__(self, times: Poly | Rational) -> Flops:
        return Flops(self.matmul * times, self.full * times, self.pointwise * times, self.transcendental * times)

    def by_kind(self, count: str = "executed") -> dict[str, Poly]:
        """Return them by kind; those of contractions as executed, or with every domain ignored."""
        matmul = self.full if count == "full" else self.matmul
        return {"matmul": matmul, "pointwise": self.pointwise, "transcendental": self.transcendental}


@dataclass(frozen=True, kw_only=True)
class OpKind:
    """What an op does: facts in fields, and the rules of its kind. A kind is a subclass; no rule counts as zero.

    `costgraph.ops.rules` has the rules that many kinds share: `flops = rules.free` in the body of a class takes one.
    A kind that lacks one is an error where an op of it is counted.
    """

    name: ClassVar[str]
    """Name of the kind in tables and files."""
    restricted: ClassVar[bool] = False
    """Whether it takes operands that are restricted to a domain, `infer` says what is left of it; refused otherwise."""
    takes_complex: ClassVar[bool] = False
    """Whether its FLOPs are those of complex numbers as well; a kind with others refuses such operands."""
    crosses: ClassVar[bool] = False
    """Whether some of its operands may lie in memory of the host and others in that of the device."""
    renames: ClassVar[bool] = False
    """Whether it is another name for an operand that has been written to, and reads nothing of it itself."""
    takes_lists: ClassVar[bool] = False
    """Whether it takes what has a storage for each iteration, outside of any loop."""
    passes_gradients: ClassVar[bool] = True
    """Whether a backward pass goes through it at all."""
    save: Flag = field(default=False, repr=False)
    """Whether a kernel around it writes its result as well where a backward pass reads it."""
    again: Flag = field(default=False, repr=False)
    """Whether it is computed again for a backward pass."""
    no_grad: Flag = field(default=False, repr=False)
    """Whether it ran without autograd, which saves no tensors for it."""
    saved_operands: Places = field(default=(), repr=False)
    """Operands that autograd saves because the backward kernel has them as arguments, even if only for their shapes."""
    grad_memory_format: MemoryFormat = field(default="", repr=False)
    """Memory format into which the backward kernel copies an incoming gradient: contiguous, that of the grad itself or
    of the operand, where channels may be last, or (batch, sequence, heads, width) of attention; or none."""
    copies_grad_input: Flag = field(default=False, repr=False)
    """Whether the backward kernel computes in that format and copies the result into the format of the operand."""
    copies_matmul_operands: Flag = field(default=False, repr=False)
    """Whether matrix products of the backward pass copy operands whose layout BLAS does not accept, one at a time."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Shapes, formats and layouts of the results; raises where operands do not fit."""
        raise self._lacks("infer")

    def flops(self, op: Op) -> Flops:
        """FLOPs of an op."""
        raise self._lacks("flops")

    def reads(self, op: Op) -> Sequence[Poly]:
        """Elements that an op reads of each operand."""
        raise self._lacks("reads")

    def writes(self, op: Op) -> Sequence[Poly]:
        """Elements that an op writes of each result."""
        raise self._lacks("writes")

    def overwrites(self) -> tuple[int, ...]:
        """Places of operands that it writes into, which hold other values afterwards."""
        return ()

    def parts(self, op: Op) -> Loop | None:
        """Return the parts of a loop, of kinds that repeat a body."""
        return None

    def placed(self, op: Op) -> Split | None:
        """Say how the axes of operands and results belong together; None where all have to be whole on each rank."""
        return None

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Raise where a field says something else than the operands; what `infer` finds is left to it.

        `known` is what may have been known of sizes when the record was made, one case after the other.
        """

    def facts(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def limits(self) -> Mapping[str, Limit]:
        """Return what the formulas in fields have to be once sizes are bound, by name of the field."""
        return limits_of(type(self))

    def stated(self) -> dict[str, Any]:
        """Return the fields that say something: those that differ from their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not f.default and v != f.default}

    def results_of(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the results, of operands that the kind takes.

        Raises
        ------
        CostGraphError
            If an operand does not fit, is restricted to a domain where that means nothing, or is written into where
            several of its index points are one element.
        """
        limited = None if self.restricted else next((t for t in operands if t.domain is not None), None)
        if limited is not None:
            raise ShapeError(f"{self.name} of {limited!r}, which is restricted to a domain: expected a whole tensor")
        results = self.infer(operands)
        expanded = next((t for t in map(operands.__getitem__, self.overwrites()) if t.touched != t.numel), None)
        if expanded is not None:
            raise ShapeError(f"{self.name} in place into {expanded!r}: expected a tensor that is not expanded")
        return results

    def _lacks(self, rule: str) -> UnsupportedError:
        return UnsupportedError(f"op kind {self.name!r} has no rule {rule!r}, expected one in {type(self).__name__}")


@dataclass(frozen=True, kw_only=True)
class Working(OpKind):
    """A kind whose ops may need memory while they run, beside operands and results."""

    workspace: Amount = ZERO
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Bodied(OpKind):
    """A kind whose ops run the ops of a graph."""

    body: Graph
    """Its formals stand for the operands, its outputs for the results."""


class Op(Node):
    """An op node: one kernel, which reads each operand once and writes each result once."""

    __slots__ = ("call", "graph", "kind", "name", "operands", "phase", "results", "scope")

    def __init__(
        self, graph: Graph, kind: OpKind, name: str, operands: tuple[Tensor, ...], scope: str, phase: str
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.name = name
        self.operands = operands
        self.results: tuple[Tensor, ...] = ()
        self.scope = scope
        self.phase = phase
        self.call: Call | None = None
        """What a trace saw here: made again, in place of what the kind says, where the graph is run as it was."""

    @property
    def body(self) -> Graph | None:
        """The graph that a kernel fuses or a loop repeats."""
        return self.kind.body if isinstance(self.kind, Bodied) else None

    @property
    def loop(self) -> Loop | None:
        """What is repeated and how, by the names of its parts; None where it is no loop."""
        return self.kind.parts(self)

    @property
    def workspace(self) -> Poly:
        """Bytes that it needs while it runs, beside operands and results."""
        return self.kind.workspace if isinstance(self.kind, Working) else ZERO

    @property
    def on_host(self) -> bool:
        """Whether the host runs it: what it reads and makes lies there. A transfer is of neither side."""
        return not self.kind.crosses and any(t.storage.host for t in (*self.operands, *self.results))

    def state(self, **facts: Any) -> None:
        """Take a record with other facts in place of the op's own."""
        before = self.kind
        self.kind = replace(before, **facts)
        self.graph.note(lambda: setattr(self, "kind", before))

    def __repr__(self) -> str:
        return f"{self.name}[{self.kind.name}]"
