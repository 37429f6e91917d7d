"""Figures as text: formulas in a canonical order, digests, and refusals by their type."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache

import sympy
from limits import TooSlowError, limited

import costgraph as cg

#: Length in characters up to which a value is written out; a longer one is replaced by its hash.
LONGEST = 2000

Questions = Mapping[str, Callable[..., object]]


@lru_cache(maxsize=1 << 16)
def canonical(formula: sympy.Expr) -> str:
    """Return a formula as text, with the operands of commutative functions sorted by their own texts."""
    if not formula.args:
        return str(formula)
    parts = [canonical(a) for a in formula.args]
    if formula.is_Add:
        return " + ".join(sorted(parts))
    if formula.is_Mul or formula.is_Pow:
        parts = [
            p if a.is_Symbol or a.is_Integer or a.is_Pow else f"({p})" for p, a in zip(parts, formula.args, strict=True)
        ]
        return "**".join(parts) if formula.is_Pow else "*".join(sorted(parts))
    if isinstance(formula, cg.Max | cg.Min):
        parts.sort()
    return f"{type(formula).__name__}({', '.join(parts)})"


def text(value: object) -> str:
    """Return the answer to a question as text."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return "; ".join(f"{k or 'outside'}: {text(v)}" for k, v in sorted(value.items()))
    return canonical(value) if isinstance(value, sympy.Expr) else str(value)


def digest(lines: Iterable[str]) -> str:
    """Return a short hash of some lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def shortened(value: str) -> str:
    """Return a value that fits a line: itself, or its hash if it is long."""
    value = value.replace("\n", "\\n").replace("\t", "\\t")
    return value if len(value) <= LONGEST else f"sha256 {digest([value])} of {len(value)} characters"


def numbers_in(value: object) -> Iterator[str]:
    """Yield the numbers and formulas in a result, whatever its classes and fields are called.

    Text is left out. Floats are rounded to 12 digits, so that the order of a sum does not matter.
    """
    if isinstance(value, bool | int | Fraction):
        yield str(value)
    elif isinstance(value, float):
        yield f"{value:.12g}"
    elif isinstance(value, sympy.Expr):
        yield canonical(value)
    elif isinstance(value, Mapping):
        yield from numbers_in(tuple(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from numbers_in([getattr(value, f.name) for f in dataclasses.fields(value) if f.name[0] != "_"])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | cg.Graph):
        for part in value:
            yield from numbers_in(part)


def numbers(value: object) -> str:
    """Return the sorted numbers in a result, or their count and digest if there are many."""
    found = sorted(numbers_in(value))
    line = " | ".join(found)
    return line if len(line) <= 400 else f"{len(found)} numbers {digest(found)}"


def answer(question: Callable[..., object], *args: object, **dims: object) -> str:
    """Return an answer as text, or the type of the error that refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cg.StandInWarning)
            found = question(*args, **dims)
        return found if isinstance(found, str) else text(found)
    except cg.CostGraphError as error:
        return type(error).__name__


def asked(prefix: str, seconds: float, figures: Callable[[], Iterable[tuple[str, str]]]) -> dict[str, str]:
    """Return figures under a common prefix, or one figure that names the error or timeout.

    Errors other than `CostGraphError` are marked unexpected: either the script or the library has a bug.
    """
    try:
        with limited(seconds):
            found = {f"{prefix} {key}".strip(): shortened(value) for key, value in figures()}
    except cg.CostGraphError as error:
        found = {prefix: type(error).__name__}
    except TooSlowError:
        found = {prefix: "too slow"}
    except Exception as error:
        found = {prefix: f"unexpected {type(error).__name__}: {shortened(str(error))[:200]}"}
    return found
