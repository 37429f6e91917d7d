"""What no declared kinds say: shapes, layouts and costs are stated, for one call and as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..algebra.polynomial import ZERO, Poly
from ..dtypes import DType
from ..errors import UnsupportedError
from ..graph.facts import Shape, all_of, is_amount, is_count, is_size, need
from ..graph.graph import Graph
from ..graph.op import Flops, Op, Result
from ..graph.tensor import Tensor
from ..notation.door import Rule
from .registry import register
from .stated import MatmulFlops, Stated

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = ["Foreign", "Output", "exact", "need_declared", "refusal"]

#: Shape, number format, strides or None, the operand whose storage it shares or None, and its offset there.
Output = tuple[Shape, DType, tuple[Poly, ...] | None, int | None, Poly]


def _is_output(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    sizes, dtype, strides, of, offset = value
    fits = all_of(is_size)(sizes) and isinstance(dtype, DType) and is_amount(offset) and (of is None or is_count(of))
    return fits and (strides is None or (all_of(is_amount)(strides) and len(strides) == len(sizes)))


@register
@dataclass(frozen=True, kw_only=True)
class Foreign(Stated):
    """An op of another library that no kind of this one says: FLOPs and bytes come from the rule for that op."""

    name = "foreign"
    outputs: Annotated[tuple[Output, ...], Rule("a tuple of shapes with formats and layouts", all_of(_is_output))]
    full: MatmulFlops = ZERO
    """FLOPs of contractions with every mask ignored."""
    pieces: Annotated[tuple[int, ...], Rule("a tuple of numbers of axes", all_of(is_count))] = ()
    """Which results are lists: an element stands for a tensor of each layer of a stack."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what is stated."""
        outputs, pieces = self.outputs, self.pieces or (0,) * len(self.outputs)
        need(len(pieces) == len(outputs), f"{len(pieces)} pieces of {len(outputs)} results")
        for own, (sizes, _, _, of, _) in zip(pieces, outputs, strict=True):
            need(own <= len(sizes), f"{own} pieces of {len(sizes)} axes")
            need(of is None or of < len(operands), f"a view of operand {of} of {len(operands)}")
        return [
            Result(sizes, dtype, strides, of=of, offset=offset, pieces=own)
            for (sizes, dtype, strides, of, offset), own in zip(outputs, pieces, strict=True)
        ]

    @property
    def is_blind(self) -> bool:
        """Whether its results are new and nothing is read for them: random numbers, and memory that is only taken."""
        written = self.bytes_written or (None,) * len(self.outputs)
        new = all(of is None or n != ZERO for (*_, of, _), n in zip(self.outputs, written, strict=True))
        return new and self.bytes_read is not None and not any(self.bytes_read)

    def flops(self, op: Op) -> Flops:
        """Return what is stated, the masked part too."""
        return replace(Stated.flops(self, op), full=self.full)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold amounts against the tensors."""
        self.need_amounts(len(operands), len(self.outputs))


def refusal(place: str, op: Op, instead: str) -> UnsupportedError:
    """Return the error of a transform that would have to look inside an op whose costs are stated."""
    what = op.name if op.call is None else op.call.target
    return UnsupportedError(
        f"{place}: {op.name!r} of graph {op.graph.root.name!r} is a recorded call of {what}, expected declared ops; "
        f"{instead}"
    )


def exact(graph: Graph) -> set[Op]:
    """Return the recorded calls that integers alone decide, and what is made of integers for them.

    So experts are counted, and places of a sequence: whatever the format of a model, that of these numbers stays.
    """
    found = set[Op]()
    for body in graph.bodies():
        known = {t for t in body.tensors if t.producer is None and t.dtype.kind != "float"}
        for op in body.ops:
            made_of_known = op.operands and known.issuperset(op.operands)
            known.update(t for t in op.results if made_of_known or t.dtype.kind != "float")
        wanted = set[Tensor]()
        for op in reversed(list(body.ops)):
            asked = isinstance(op.kind, Foreign) or not wanted.isdisjoint(op.results)
            if asked and known.issuperset((*op.operands, *op.results)):
                found.add(op)
                wanted.update(t for t in op.operands if t.dtype.kind == "float")
    return found


def need_declared(place: str, graph: Graph, instead: str, *, floats: bool = False) -> None:
    """Refuse recorded calls: what they state holds for the call as it was, so a transform that looks inside cannot.

    UnsupportedError names the call and says what to do `instead`. `floats` says whether calls that integers alone
    decide, and those that read nothing, may stay: formats and weights are asked for.
    """
    kept = exact(graph) if floats else set()
    for op in graph.walk():
        if isinstance(op.kind, Foreign) and op not in kept and not (floats and op.kind.is_blind):
            raise refusal(place, op, instead)
