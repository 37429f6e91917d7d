"""Dimension symbols: one positive integer symbol per name, and validation of names and sizes."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cache
from operator import index

import sympy

from ..errors import BindingError, PatternError, ShapeError

__all__ = [
    "dims", "integer", "is_dimension", "is_level", "is_name", "kind_of", "printable", "read_size", "shorten", "shown",
    "size_or_name", "symbol",
]  # fmt: skip

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Names become keyword arguments, columns and axis labels.
_LONGEST_NAME = 64
_SIZE = re.compile(r"(\d{1,30})(?:\.(\d{1,30}))?(?:[eE]\+?(\d{1,2}))?(Ki|Mi|Gi|Ti|K|k|M|G|B|T)?\Z", re.ASCII)
_SCALES = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "K": 10**3, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12,
}  # fmt: skip


def is_name(text: object) -> bool:
    """Whether `text` is a valid name for a dimension, axis, tensor or model parameter."""
    return isinstance(text, str) and len(text) <= _LONGEST_NAME and _NAME.match(text) is not None


def shorten(text: str, most: int = 60) -> str:
    """Shorten and quote text for an error message."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def printable(text: str) -> str:
    """Escape control characters for a terminal, except tabs and newlines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def integer(value: object) -> int:
    """Convert any integer type to int; TypeError for other values, including bools of Python and NumPy."""
    if type(value).__name__ in ("bool", "bool_"):  # NumPy 1 bools have an index
        raise TypeError
    return index(value)  # type: ignore[arg-type]  # a value without __index__ raises here


def is_level(text: str) -> bool:
    """Whether `text` is a valid scope level: a name, or a number for an index in a list of modules."""
    return is_name(text) or (text.isascii() and text.isdigit())


# Python limits int to str to 4,300 digits, and error messages have less room.
_MOST_BITS = 400


def kind_of(value: object) -> str:
    """Return the type name of a value for error messages, with the module of foreign types."""
    kind = type(value)
    is_foreign = kind.__module__.partition(".")[0] not in ("builtins", "costgraph")
    return "None" if value is None else f"{kind.__module__}.{kind.__qualname__}" if is_foreign else kind.__name__


def shown(value: object, most: int = 60) -> str:
    """Return a short text of any value for error messages."""
    if isinstance(value, str):
        return shorten(value, most)
    for item in value if isinstance(value, list | tuple) else (value,):
        if hasattr(type(item), "requires_grad_"):  # torch tensors and modules
            description = f"a {kind_of(item)}" if item is value else f"a {kind_of(value)} with a {kind_of(item)}"
            return f"{description} (costgraph.torch.trace makes a graph of a module, Graph.input a tensor)"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value) if isinstance(value, Decimal) else " ".join(repr(value).split("\n"))
    except (ValueError, RecursionError):  # such an integer inside, or infinite nesting
        return f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= most else text[: most - 3] + "..."


@cache
def symbol(name: str) -> sympy.Symbol:
    """Return the positive integer symbol of this name."""
    if not is_name(name):
        raise PatternError(
            f"dimension name {shown(name)}: expected a letter or underscore followed by letters, digits or "
            f"underscores, at most {_LONGEST_NAME} in all"
        )
    return sympy.Symbol(name, integer=True, positive=True)


def is_dimension(expr: sympy.Symbol) -> bool:
    """Whether a symbol was created by `symbol`."""
    return is_name(expr.name) and bool(expr == symbol(expr.name))


def check_symbol(expr: sympy.Symbol) -> None:
    """Raise ShapeError for symbols not created by `symbol`, since equal names would not be equal sizes."""
    if not is_dimension(expr):
        assumptions = ", ".join(k for k, v in sorted(expr.assumptions0.items()) if v) or "none"
        raise ShapeError(
            f"symbol {shorten(expr.name)} has the assumptions {assumptions}; expected the positive integer symbol that "
            f"costgraph.dims returns"
        )


def is_number_like(expr: sympy.Expr) -> bool:
    """Whether a formula can be a finite real number, as far as sympy knows."""
    refused = not expr.is_commutative or expr.is_finite is False or expr.is_real is False
    return not refused and not expr.atoms(sympy.I, sympy.nan, sympy.oo, -sympy.oo, sympy.zoo)


#: Functions allowed in formulas in addition to sums and products; they can be evaluated exactly for bound sizes.
#: `extremum` adds its own.
FUNCTIONS: set[type[sympy.Basic]] = {sympy.Pow, sympy.floor, sympy.ceiling, sympy.log, sympy.Max, sympy.Min}


def check_exact(expr: sympy.Expr) -> None:
    """Raise ShapeError unless a formula has only exact numbers, symbols from `dims`, and `FUNCTIONS` of them."""
    kinds = tuple(FUNCTIONS)
    for e in sympy.preorder_traversal(expr):
        if e.is_Symbol:
            check_symbol(e)
        elif not (e.is_Rational or e.is_Add or e.is_Mul or isinstance(e, kinds)):
            raise _inexact(expr)
    if not is_number_like(expr):
        raise _inexact(expr)


def _inexact(expr: sympy.Expr) -> ShapeError:
    return ShapeError(
        f"{shorten(str(expr))}: expected an exact size, made of integers and of symbols from costgraph.dims by sums, "
        f"products, powers, floor, ceiling, log, Max and Min"
    )


def dims(names: str) -> sympy.Symbol | tuple[sympy.Symbol, ...]:
    """Declare dimensions as positive integer symbols, with one symbol per name.

    Parameters
    ----------
    names : str
        Names separated by spaces or commas.

    Returns
    -------
    sympy.Symbol or tuple of sympy.Symbol
        One symbol for a single name, as in `sympy.symbols`, otherwise a tuple; a trailing comma makes a tuple of one.

    Raises
    ------
    PatternError
        If there is no name, or one is not an identifier.

    Examples
    --------
    >>> B, S = dims("B S")
    >>> B * S
    B*S
    >>> dims("B") is B
    True
    """
    if not isinstance(names, str):
        raise PatternError(f"dims: got {shown(names)}, expected names in one string, such as 'B S D'")
    symbols = tuple(symbol(n) for n in names.replace(",", " ").split())
    if not symbols:
        raise PatternError(f"dims: got {shorten(names)}, expected at least one name")
    return symbols if len(symbols) > 1 or names.rstrip().endswith(",") else symbols[0]


def read_size(text: str, place: str) -> int:
    """Parse a size such as `8192`, `8Ki` (8192), `70B` (70e9), `1.5M` or `1e6`; BindingError if it is invalid.

    Examples
    --------
    >>> read_size("8Ki", "S"), read_size("1.5M", "N")
    (8192, 1500000)
    """
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        text_shown = shorten(text if isinstance(text, str) else shown(text))
        raise BindingError(f"{place}: got {text_shown}, expected a size such as 8192, 8Ki, 1.5M or 70B")
    integer_digits, fraction, power, scale = match.groups()
    # int(), since type checkers do not know that the exponent is nonnegative
    digits = int(integer_digits + (fraction or "")) * int(10 ** int(power or 0)) * _SCALES.get(scale or "", 1)
    value, remainder = divmod(digits, int(10 ** len(fraction or "")))
    if remainder or value < 1:
        raise BindingError(f"{place}: got {shorten(text)}, expected a positive integer")
    return value


def size_or_name(text: str, place: str) -> sympy.Expr | int:
    """Parse a size as in `read_size`, or a name, which becomes an open dimension.

    Examples
    --------
    >>> size_or_name("8Ki", "dp"), size_or_name("T", "tp")
    (8192, T)
    """
    return symbol(text) if is_name(text) else read_size(text, place)
