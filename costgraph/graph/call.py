"""A call of one of torch's ops, as a trace saw it: what runs again where the graph is lowered as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..algebra.polynomial import Poly
from ..dtypes import DType
from ..notation.door import Rule
from .facts import all_of, is_count, need

__all__ = ["Call"]


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


@dataclass(frozen=True)
class Call:
    """One call of an op of torch."""

    target: Annotated[
        str, Rule("the name of an op of torch with its overload", lambda v: isinstance(v, str) and "." in v)
    ]
    """The op, as `torch.ops.aten` names it, with its namespace before it where that is another one."""
    arguments: Annotated[tuple[Any, ...], Rule("a tuple of arguments", all_of(_is_argument))]
    """What it was called with, `{"operand": i}` standing for tensors."""
    keywords: Annotated[
        Mapping[str, Any],
        Rule("arguments by name", lambda v: isinstance(v, dict) and all(map(_is_argument, v.values()))),
    ]
    places: Annotated[tuple[int, ...], Rule("a tuple of integers of at least -1", all_of(lambda v: is_count(v, -1)))]
    """Where each result stands in what it returns, -1 for an operand that it wrote into."""
    rule: Annotated[str, Rule("the name of a rule", lambda v: isinstance(v, str))] = ""
    """The rule by which it is what another device runs, empty where it ran as it stands here."""
    why: Annotated[str, Rule("a text", lambda v: isinstance(v, str))] = ""
    """What that rule went by."""

    @property
    def name(self) -> str:
        """Name of the op without its overload."""
        return self.target.partition(".")[0]

    def verify(self, operands: int, results: int) -> None:
        """Raise ShapeError where it is the call of an op of other tensors."""
        need(len(self.places) == results, f"{len(self.places)} places of {results} results")
        for i in _places_in((*self.arguments, *self.keywords.values())):
            need(i < operands, f"argument {i} of {operands} operands")
