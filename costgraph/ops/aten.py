"""Calls of torch's own ops, as a trace of a run records them: shapes, layouts and costs are stated for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

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

__all__ = ["Aten", "Output", "need_declared"]

#: Shape, number format, strides or None, the operand whose storage it shares or None, and its offset there.
Output = tuple[Shape, DType, tuple[Poly, ...] | None, int | None, Poly]


def _is_output(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    sizes, dtype, strides, of, offset = value
    fits = all_of(is_size)(sizes) and isinstance(dtype, DType) and is_amount(offset) and (of is None or is_count(of))
    return fits and (strides is None or (all_of(is_amount)(strides) and len(strides) == len(sizes)))


def _is_argument(value: object) -> bool:
    """Whether it is what an op of torch can be called with: a number, a text, a tensor by its place, or a list."""
    if isinstance(value, dict):
        shapes: dict[str, Callable[[object], bool]] = {
            "operand": is_count,
            "torch": lambda v: isinstance(v, str),
            "empty": all_of(lambda v: isinstance(v, Poly)),
            "dtype": lambda v: isinstance(v, DType),
        }
        return value.keys() in ({"operand"}, {"torch"}, {"empty", "dtype"}) and all(
            shapes[k](v) for k, v in value.items()
        )
    if isinstance(value, tuple):
        return all(map(_is_argument, value))
    return value is None or isinstance(value, bool | int | float | str | Poly | DType)


def _places_in(value: Any) -> Iterator[int]:
    """Yield the places of operands among arguments."""
    if isinstance(value, Mapping):
        if "operand" in value:
            yield value["operand"]
    elif isinstance(value, tuple):
        for v in value:
            yield from _places_in(v)


@register
@dataclass(frozen=True, kw_only=True)
class Aten(Stated):
    """One call of an op of torch. FLOPs and bytes come from the rule for that op."""

    name = "aten"
    target: Annotated[
        str, Rule("the name of an op of torch with its overload", lambda v: isinstance(v, str) and "." in v)
    ]
    """The op, as `torch.ops.aten` names it."""
    arguments: Annotated[tuple[Any, ...], Rule("a tuple of arguments", all_of(_is_argument))]
    """What it was called with, `{"operand": i}` standing for tensors."""
    keywords: Annotated[
        Mapping[str, Any],
        Rule("arguments by name", lambda v: isinstance(v, dict) and all(map(_is_argument, v.values()))),
    ]
    places: Annotated[tuple[int, ...], Rule("a tuple of integers of at least -1", all_of(lambda v: is_count(v, -1)))]
    """Where each result stands in what it returns."""
    outputs: Annotated[tuple[Output, ...], Rule("a tuple of shapes with formats and layouts", all_of(_is_output))]
    full: MatmulFlops = ZERO
    """FLOPs of contractions with every mask ignored."""
    pieces: Annotated[tuple[int, ...], Rule("a tuple of numbers of axes", all_of(is_count))] = ()
    """Which results are lists: an element stands for a tensor of each layer of a stack."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what is stated."""
        outputs, pieces = self.outputs, self.pieces or (0,) * len(self.outputs)
        need(len(self.places) == len(outputs), f"{len(self.places)} places of {len(outputs)} results")
        need(len(pieces) == len(outputs), f"{len(pieces)} pieces of {len(outputs)} results")
        for own, (sizes, _, _, of, _) in zip(pieces, outputs, strict=True):
            need(own <= len(sizes), f"{own} pieces of {len(sizes)} axes")
            need(of is None or of < len(operands), f"a view of operand {of} of {len(operands)}")
        return [
            Result(sizes, dtype, strides, of=of, offset=offset, pieces=own)
            for (sizes, dtype, strides, of, offset), own in zip(outputs, pieces, strict=True)
        ]

    def flops(self, op: Op) -> Flops:
        """Return what is stated, the masked part too."""
        return replace(Stated.flops(self, op), full=self.full)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold amounts and arguments against the operands."""
        self.need_amounts(len(operands), len(self.outputs))
        for i in _places_in((*self.arguments, *self.keywords.values())):
            need(i < len(operands), f"argument {i} of {len(operands)} operands")


def need_declared(place: str, graph: Graph, instead: str) -> None:
    """Refuse recorded calls: what they state holds for the call as it was, so a transform that looks inside cannot.

    Parameters
    ----------
    place : str
        What is asked.
    graph : Graph
        What it is asked of, bodies included.
    instead : str
        What to do with a traced module.

    Raises
    ------
    UnsupportedError
        If there is a recorded call: the text names it.
    """
    for op in graph.walk():
        if isinstance(op.kind, Aten):
            raise UnsupportedError(
                f"{place}: {op.name!r} of graph {graph.name!r} is a recorded call of {op.kind.target}, expected "
                f"declared ops; {instead}"
            )
