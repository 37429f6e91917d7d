"""What a published benchmark calls: a program of plain torch, its tensors, and what else is kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from ...errors import UnsupportedError

__all__ = ["FORMATS", "Program", "axes_of", "joined", "made_of", "names_of"]

#: Number formats by the names that torch has for them.
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMATS = FORMATS | {"complex64": torch.complex64}
_MARKS = {"ids", "fixed", *_FORMATS}


@dataclass(frozen=True, eq=False)
class Program:
    """A call of plain torch, and what it is called with.

    Of tensors the axes are stated by name, in one text; those in parentheses are one, of the product of their sizes. A
    word among them is a format that the tensor has whatever the program is asked for in, ``ids`` one of indices,
    ``fixed`` that no gradient is wanted.
    """

    subject: str
    """what limits are stated for"""
    call: Callable[..., Any]
    """of the tensors, to one or several results"""
    tensors: Mapping[str, str]
    """axes of each, by name"""
    made: Sequence[str] = ()
    """axes of the results, whose gradients are given; none of a loss"""
    sizes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """facts that have the size of an axis, of which the first is taken that is stated; `B*T` is a product of two, `H/2`
    a half. By default it is the fact of the axis' own name"""
    format: str = ""
    """number format where nothing states one"""
    untimed: str = ""
    """why a time is none of the call; empty where it is one"""
    given: Mapping[str, object] = field(default_factory=dict)
    """what facts have to be, where they are stated: with others it is another program"""
    kept: Sequence[str] = ()
    """tensors that a benchmark keeps beside those of the program: parameters of its other forms"""
    summed: bool = False
    """whether the backward pass starts from the sum of the result"""
    drawn: bool = False
    """whether the gradients that are given are drawn in each run, beside its results; by default they are kept"""
    freed: bool = False
    """whether the backward pass lets go what it has used; by default it could be run again"""
    until: str = ""
    """date from which `later` is run instead, as 2026-05-15; empty where it never is"""
    later: Program | None = None
    """what is run from then on"""
    before: Callable[..., Any] | None = None
    """of the tensors: what runs once before, of which only the workspaces of libraries stay"""
    fresh: bool = False
    """whether gradients of the run before are let go; by default new ones are added to them"""
    returned: bool = False
    """whether gradients are returned, and let go"""
    refused: str = ""
    """why a peak of memory is none of this program; empty where it is one"""

    def at(self, date: str) -> Program:
        """Return what was run on a date."""
        return self if self.later is None or date < self.until else self.later.at(date)

    def since(self, date: str, **changes: Any) -> Program:
        """Return a program that runs alone from a date on: no other form is kept, and gradients are drawn."""
        alone: dict[str, Any] = {"kept": (), "drawn": True, "freed": False} | changes
        return replace(self, until=date, later=replace(self, **alone))

    def bound(self, facts: Mapping[str, object]) -> dict[str, int]:
        """Return the size of each axis from facts of a record.

        UnsupportedError if one is missing or no positive whole number, or a fact is that of another program.
        """
        for name, value in self.given.items():
            if facts.get(name) not in (None, value):
                raise UnsupportedError(f"inputs: {name} {facts[name]!r}, expected {value!r}")
        axes = dict.fromkeys(axis for text in self.tensors.values() for axis in axes_of(text))
        return {axis: _size(facts, self.sizes.get(axis, (axis,))) for axis in axes}


def axes_of(text: str) -> list[str]:
    """Return the names of axes, those of a stated size left out."""
    return [word for word in names_of(text) if word is not None]


def names_of(text: str) -> list[str | None]:
    """Return the name of each axis, None of one of a stated size."""
    return [None if word.isdigit() else word for word in _words(text) if word not in _MARKS]


def _words(text: str) -> list[str]:
    return text.replace("(", " ").replace(")", " ").split()


def joined(text: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose axes in parentheses are one."""
    at, start = 0, 0
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            start = at
        elif word == ")":
            tensor, at = tensor.flatten(start, at - 1), start + 1
        elif word not in _MARKS:
            at += 1
    return tensor


def made_of(text: str, sizes: Mapping[str, int], format: torch.dtype) -> torch.Tensor:
    """Return a tensor of no memory, for a trace."""
    words = _words(text)
    shape = [int(word) if word.isdigit() else sizes[word] for word in words if word not in _MARKS]
    if "ids" in words:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    own = next((_FORMATS[word] for word in words if word in _FORMATS), format)
    return torch.empty(shape, dtype=own, device="meta", requires_grad="fixed" not in words)


def _size(facts: Mapping[str, object], choices: Sequence[str]) -> int:
    for choice in choices:
        above, *below = choice.split("/")
        product, divisor = (_product(facts, words) for words in (above.split("*"), below))
        if product and divisor and product % divisor == 0:
            return product // divisor
    raise UnsupportedError(f"inputs: no size {' or '.join(choices)}, expected a positive whole number")


def _product(facts: Mapping[str, object], words: Sequence[str]) -> int:
    """Return a product of facts and numbers, 0 if one of them is no size."""
    found = [int(word) if word.isdigit() else facts.get(word) for word in words]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**63 for n in found):
        return 0
    return prod(n for n in found if isinstance(n, int))
