"""Calls on lists of tensors, one of each parameter: what they do is done at each place of the lists by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ...algebra.polynomial import Poly
from .call import Call, Spec
from .events import Handle

__all__ = ["Place", "handles", "is_listed", "one_by_one", "places", "tags_of"]

#: Beginnings of their names: the first stands before that of the op which does the same with one tensor.
_EACH, _UPDATE = "_foreach_", "_fused_"
#: What schemas of lists call a number that stands beside each tensor, and a factor of a product.
_NUMBERS = ("scalar", "scalars")


def is_listed(call: Call) -> bool:
    """Whether a call does something at each place of lists."""
    return call.name.startswith((_EACH, _UPDATE)) and any(map(_is_list, call.arguments.values()))


def _lead(call: Call) -> tuple[Spec, ...]:
    """Return the first list of tensors, which has as many as there are places."""
    found: tuple[Spec, ...] = next(filter(_is_list, call.arguments.values()))
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Spec)


def one_by_one(call: Call) -> list[Call]:
    """Return what a call does at each place of its lists, as calls of single tensors; a call of none as it is.

    An op that is there for single tensors has its name, and names of arguments by which rules ask for them.
    """
    if not is_listed(call):
        return [call]
    name = call.name.removeprefix(_EACH)
    number = "value" if name.startswith("addc") else "other"
    lead = _lead(call)

    def at(i: int) -> Call:
        arguments = {
            number if k in _NUMBERS else k: (v[i] if i < len(v) else None) if isinstance(v, tuple) else v
            for k, v in call.arguments.items()
        }
        return replace(call, name=name, arguments=arguments, results=call.results[i : i + 1] or lead[i : i + 1])

    return [at(i) for i in range(len(lead))]


@cache
def tags_of(name: str) -> tuple[Any, ...]:
    """Return what torch says of an op for single tensors, by its name."""
    packet = getattr(torch.ops.aten, name, None)
    return () if packet is None else tuple(getattr(packet, packet.overloads()[0]).tags)


@dataclass(frozen=True)
class Place:
    """What a call gets and makes at one place of its lists."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    operands: Mapping[Handle, int]
    """number of each tensor"""
    outputs: list[tuple[Handle, int | None, int, Poly | None]]


def places(call: Call, whole: Place) -> list[Place]:
    """Return what a call gets and makes at each place of its lists, which have one element there; else the whole."""
    return [_at(whole, i) for i in range(len(_lead(call)))] if is_listed(call) else [whole]


def _at(whole: Place, i: int) -> Place:
    def cut(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, tuple) else value

    arguments, keywords = tuple(map(cut, whole.arguments)), {k: cut(v) for k, v in whole.keywords.items()}
    operands: dict[Handle, int] = {}
    for h in handles((arguments, *keywords.values())):
        if h.numel:
            operands.setdefault(h, len(operands))
    outputs = [
        (h, None if place >= 0 else operands[h], min(place, 0), bytes_)
        for h, _, place, bytes_ in whole.outputs
        if place == i or (place < 0 and h in operands)
    ]
    return Place(arguments, keywords, operands, outputs)


def handles(value: Any) -> Iterator[Handle]:
    """Yield the tensors in an argument, those of lists one by one."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from handles(v)
