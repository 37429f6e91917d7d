"""Gradients of elementwise functions, as the table of functions states them, and of dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log, nan
from typing import Any

import sympy

from ...algebra.polynomial import Poly, poly, total
from ...errors import UnsupportedError
from ...graph.graph import apply, current_graph
from ...graph.tensor import Tensor
from ...ops.blocks import kernel
from ...ops.functions import FUNCTIONS, names_in
from ...ops.keep import keep
from ...ops.pointwise import Pointwise, pointwise
from ...ops.spectra import view_as
from ...ops.stochastic import Dropout
from .common import also_saved, restricted, sum_to
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES

#: What functions of numbers alone give, without an op.
_NUMBERS: dict[str, Callable[..., Any]] = {
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "mul": lambda a, b: a * b,
    "copy": lambda a: a,
    "eq": lambda a, b: a == b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "log": lambda a: poly(sympy.log(a.expr)) if isinstance(a, Poly) else log(a) if a > 0 else nan,
}


@vjp(Pointwise)
def _pointwise(pull: Pull[Pointwise]) -> Sequence[Tensor | None]:
    op, (g,) = pull.op, pull.grads
    assert g is not None
    function = pull.kind.function
    if function.name == "sign" and op.results[0].dtype.kind == "complex":
        raise UnsupportedError(f"backward of {op.name!r}: sign of complex numbers, expected real ones")
    if function.grad is None or len(function.grad) != function.arity:
        raise UnsupportedError(
            f"backward of {op.name!r}: gradient of function {function.name!r} is not stated, expected "
            f"{function.arity} expressions in its record"
        )
    places = [i for i, s in enumerate(pull.kind.scalars or (None,) * len(op.operands)) if s is None]
    if any("y" in names_in(function.grad[place]) for place in places):
        also_saved(pull, op.results[0])  # whichever gradient is wanted
    given = _Given(pull, restricted(g, op.results[0]), places)
    found: dict[int, Any] = {}
    needs = dict(zip(places, pull.needs, strict=True))
    for place, tensor in zip(places, op.operands, strict=True):
        readers = [p for p in places if "abcd"[place] in names_in(function.grad[p])]
        # torch also saves an operand that a scalar makes unnecessary, and one that several gradients read
        if any(map(needs.get, readers)) or len(readers) > 1:
            also_saved(pull, tensor)
    wanted = [place for place in function.order or reversed(places) if needs.get(place)]
    joint = [place for place in places if needs.get(place) and any(_shared_in(function.grad[place]))]
    if joint:
        found |= zip(joint, given.gradients([function.grad[place] for place in joint]), strict=True)
    for place in wanted:
        expression = function.grad[place]
        if expression is not None and place not in joint:
            found[place] = given.gradient(expression)
    made = map(found.get, places)  # summed once all of them are there
    return [sum_to(g, t) if isinstance(g, Tensor) else None for g, t in zip(made, op.operands, strict=True)]


def _cast_first(function: str, values: Sequence[Any]) -> Tensor | None:
    """Multiply real numbers by complex ones, which casts the real ones first; None for operands of one kind."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    kinds = {t.dtype.kind for t in tensors}
    if function not in ("mul", "div") or kinds != {"float", "complex"} or current_graph().fused:
        return None
    wide = next(t.dtype for t in tensors if t.dtype.kind == "complex")
    workspace = total(t.numel * wide.bytes for t in tensors if t.dtype != wide)
    with kernel(function, workspace=workspace, backward="ops") as body:
        made = pointwise(function, *values)
    return body.export(made)


def _conjugate(x: Tensor) -> Tensor:
    return pointwise("copy", view_as(x, "conjugate"), name="resolve_conj")


def _shared_in(expression: Any) -> Iterator[Any]:
    """Yield the values that a function of torch computes for all gradients, in the order of their computation."""
    if isinstance(expression, tuple):
        for part in expression[1:]:
            yield from _shared_in(part)
        if expression[0] == "shared":
            yield expression


class _Given:
    """What the names in the gradient of a function stand for: asked for only where they are read."""

    def __init__(self, pull: Pull[Pointwise], g: Tensor, places: Sequence[int]) -> None:
        self.pull = pull
        self.g = g
        self.places = places
        self.conjugates: dict[Tensor, Tensor] = {}
        self.plain = False
        """Whether complex numbers stand for themselves, not for their conjugates."""
        self.made: list[Tensor] = []
        """What an expression has made so far."""
        self.parts: dict[Any, Any] = {}
        """Values of subexpressions that a C++ variable holds."""

    def gradient(self, expression: Any, parts: dict[Any, Any] | None = None) -> Any:
        """Return what an expression makes; all that it makes on the way lives to its end, as in C++."""
        return self.gradients([expression], parts)[0]

    def gradients(self, expressions: Sequence[Any], parts: dict[Any, Any] | None = None) -> list[Any]:
        """Return what expressions of one C++ function make; all that it makes on the way lives to its end."""
        self.made, self.parts = [], parts or {}
        if parts is None:
            for shared in (part for expression in expressions for part in _shared_in(expression)):
                self.value(shared)
        found = list(map(self.value, expressions))
        last = found[-1]
        if not isinstance(last, Tensor) or last.producer is None or last.graph.fused:
            return found
        read = {t.storage for t in (*found, *last.producer.operands) if isinstance(t, Tensor)}
        newest = {t.storage: t for t in self.made}
        early = [t for storage, t in newest.items() if storage not in read]
        return [*found[:-1], keep(last, *early) if early else last]

    def value(self, expression: Any) -> Any:
        """Return the tensor or number that an expression makes, its ops one by one."""
        if isinstance(expression, tuple):
            if expression not in self.parts:
                self.parts[expression] = self.applied(*expression)
            return self.parts[expression]
        if not isinstance(expression, str):
            return expression
        if expression == "g":
            return self.g
        op = self.pull.op
        if expression == "y":
            return self.factor(op.results[0])
        place = "abcd".index(expression)
        if place not in self.places:
            number = self.pull.kind.scalars[place]
            return number.conjugate() if isinstance(number, complex) and not self.plain else number
        return self.factor(op.operands[self.places.index(place)])

    def factor(self, t: Tensor) -> Tensor:
        """Return what the gradient is multiplied with: the conjugate of complex numbers, which torch makes first.

        The gradient of a real loss by z is that by the conjugate of z (Wirtinger): of f it is multiplied with f' of the
        conjugate. A modulus has no derivative, and its gradient the sign of the number itself.
        """
        found = self.pull.saved(t)
        if t.dtype.kind != "complex" or self.pull.kind.function.name == "abs" or self.plain:
            return found
        if t not in self.conjugates:
            self.conjugates[t] = _conjugate(found)
        return self.conjugates[t]

    def conjugated(self, expression: Any) -> Any:
        """Evaluate an expression of complex numbers, and conjugate its value."""
        outer, self.plain = self.plain, True
        found = self.value(expression)
        self.plain = outer
        if not isinstance(found, Tensor) or found.dtype.kind != "complex":
            return found
        self.made.append(_conjugate(found))
        return self.made[-1]

    def applied(self, name: str, *arguments: Any) -> Any:
        """Apply a function; what numbers alone decide takes no op."""
        plain = name.removesuffix("_")
        if plain == "causal_mask_backward":
            return apply(Pointwise(function=FUNCTIONS[plain], masked=self.pull.kind.masked), [self.g], plain)[0]
        if plain == "one":
            return self.in_one_kernel(arguments[0])
        if plain == "conj":
            return self.conjugated(arguments[0])
        if plain in ("call", "shared"):
            return self.called(arguments[0])
        if plain == "again":
            op = self.pull.op
            kind = replace(self.pull.kind, inplace=False)
            self.made += apply(kind, [self.factor(t) for t in op.operands], plain)
            self.made[-1].producer.call = op.call  # type: ignore[union-attr]  # it was made by an op just now
            return self.made[-1]
        first = self.value(arguments[0])
        if not isinstance(first, Tensor) and plain in ("where", "logical_and"):
            left = arguments[1 if first else -1] if plain == "where" else arguments[1] if first else False
            return self.value(left)
        values = [first, *map(self.value, arguments[1:])]
        if plain == "where" and not any(isinstance(v, Tensor) for v in values[1:]):
            raise UnsupportedError(f"gradient of {self.pull.op.name!r}: two numbers to choose from, expected a tensor")
        if plain == "logical_and" and values[1] is True:
            return first
        if not any(isinstance(v, Tensor) for v in values):
            return _NUMBERS[plain](*values)
        self.made.append(_cast_first(plain, values) or pointwise(plain, *values, inplace=name != plain))
        return self.made[-1]

    def called(self, expression: Any) -> Any:
        """Evaluate an expression; its temporaries are freed at its end, as in a C++ function."""
        outer, before = self.made, {*self.parts}
        found = self.gradient(expression, {**self.parts})
        self.made = [*outer, found] if isinstance(found, Tensor) else outer
        self.parts = {k: v for k, v in self.parts.items() if k in before}
        return found

    def in_one_kernel(self, expression: Any) -> Any:
        """Evaluate an expression in one kernel, whose temporaries take no memory."""
        if current_graph().fused:
            return self.value(expression)
        with kernel(f"{self.pull.op.name.rpartition('/')[2]}_slope".replace(".", "_")) as body:
            made, self.parts = self.value(expression), {}
        self.made = [t for t in self.made if t.graph is not body]
        self.made.append(body.export(made))
        return self.made[-1]


@vjp(Dropout)
def _dropout(pull: Pull[Dropout]) -> Sequence[Tensor | None]:
    g, op = pull.grads[0], pull.op
    if g is None or not pull.needs[0]:
        return [None]
    g = restricted(g, op.results[0])
    return [pointwise("masked_scale", g, pull.saved(op.results[1]), 1 / (1 - pull.kind.p))]
