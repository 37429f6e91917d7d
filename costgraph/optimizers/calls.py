"""What an update is written in: calls on columns, which hold one tensor of each parameter.

A column has one tensor where a loop takes the parameters in turn, and one of each where torch calls a kernel for the
whole list: what a call makes then exists for all of them until the last call that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.tensor import Tensor
from ..ops.keep import keep
from ..ops.pointwise import FUNCTIONS, Function, pointwise
from ..ops.updates import ADD_PRODUCT, ADD_QUOTIENT, ADD_SCALED, ADD_SCALED_PRODUCT, ADD_SCALED_QUOTIENT
from .over import Made, over

__all__ = ["Calls", "Column", "Update", "one_by_one"]

Column = tuple[Tensor, ...]
#: Adds an update and returns the columns of what was updated and of its gradients as they are afterwards.
Update = Callable[..., tuple[Column, Column]]


def _directly(groups: Sequence[Column], function: Callable[..., Made], name: str) -> list[Column]:
    """Take what is one parameter already: the loop over them is outside."""
    out = []
    for group in groups:
        made = function(*group)
        out.append(() if made is None else made if isinstance(made, tuple) else (made,))
    return out


class Calls:
    """Adds ops to columns of tensors, if `listed` one for a whole list, as torch's `_foreach` functions."""

    def __init__(self, *, listed: bool) -> None:
        self.listed = listed
        self._over = over if listed else _directly

    def each(self, name: str, function: Callable[..., Made], *columns: Column) -> tuple[Column, ...]:
        """Call a function of one tensor of each column; returns a column of each tensor that it returns."""
        made = self._over(list(zip(*columns, strict=True)), function, name)
        return tuple(zip(*made, strict=True))

    def new(self, function: str | Function, *operands: Column | float) -> Column:
        """Make tensors by an elementwise function of columns and numbers."""
        return self._call(function, operands, inplace=False)

    def inplace(self, function: str | Function, *operands: Column | float) -> Column:
        """Write into the tensors of the first column; returns the column to read from then on."""
        return self._call(function, operands, inplace=True)

    def _call(self, function: str | Function, operands: Sequence[Column | float], *, inplace: bool) -> Column:
        record = FUNCTIONS[function] if isinstance(function, str) else function
        columns = [o for o in operands if isinstance(o, tuple)]

        def call(*tensors: Tensor) -> Tensor:
            given = iter(tensors)
            arguments = [next(given) if isinstance(o, tuple) else o for o in operands]
            # torch writes into a tensor whatever the formats of the others
            dtype = tensors[0].dtype if inplace else None
            return pointwise(record, *arguments, inplace=inplace, dtype=dtype)

        name = f"{record.name}_" if inplace else record.name
        return self.each(name, call, *columns)[0]

    # -- torch's functions with a factor, which costs nothing where it is 1 ---------------------------------------

    def add(self, a: Column, b: Column, alpha: float, *, inplace: bool = False) -> Column:
        """`a + alpha * b`."""
        return self._call(*(("add", (a, b)) if alpha == 1 else (ADD_SCALED, (a, b, alpha))), inplace=inplace)

    def addcmul(self, a: Column, b: Column, c: Column, value: float) -> Column:
        """`a + value * b * c`."""
        return self.new(ADD_SCALED_PRODUCT, a, b, c, value)

    def addcmul_(self, a: Column, b: Column, c: Column, value: float = 1) -> Column:
        """`a += value * b * c`."""
        return self.inplace(ADD_PRODUCT, a, b, c) if value == 1 else self.inplace(ADD_SCALED_PRODUCT, a, b, c, value)

    def addcdiv_(self, a: Column, b: Column, c: Column, value: float = 1) -> Column:
        """`a += value * b / c`."""
        return self.inplace(ADD_QUOTIENT, a, b, c) if value == 1 else self.inplace(ADD_SCALED_QUOTIENT, a, b, c, value)

    def keep(self, x: Column, *others: Column) -> Column:
        """Let tensors live until here that variables of a loop's function name; lists are deleted by hand."""
        return x if self.listed or not others else self.each("keep", keep, x, *others)[0]


def one_by_one(update: Update, groups: Sequence[Column], name: str) -> list[Column]:
    """Run a whole update for each parameter in turn; returns what was updated and the gradient of each."""
    calls = Calls(listed=False)

    def single(*group: Tensor) -> Column:
        updated, grad = update(calls, *((t,) for t in group))
        return updated + grad

    return over(groups, single, name)
