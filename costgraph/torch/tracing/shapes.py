"""Named sizes on fake tensors, and the place where a program turns one of them into a number."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from ...algebra.symbols import shown
from ...errors import UnsupportedError
from .checks import answer
from .nodes import remembering

__all__ = ["HERE", "TORCH", "Shapes", "caller", "hints"]

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)


class Shapes(ShapeEnv):
    """torch's symbolic shapes, in which a dimension that has a name never becomes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[sympy.Symbol, str] = {}
        """Names of torch's symbols."""
        self.equal: list[tuple[str, sympy.Expr]] = []
        """Dimensions that the program needs to be equal to something else."""
        self.known_nodes: dict[Any, Any] = {}
        """What operations on sizes made, by the operation and its operands."""
        self._answers: dict[Any, sympy.Basic] = {}

    def named(self, name: str, size: int) -> torch.SymInt:
        """Return the size of this name; `size` decides which way the program goes where it asks."""
        source = ConstantSource(name)
        made = self.create_symbol(size, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
        assert isinstance(made, sympy.Symbol)
        self.names[made] = name
        out = self.create_symintnode(made, hint=size, source=source)
        assert isinstance(out, torch.SymInt)
        return out

    def create_symintnode(self, sym: sympy.Expr, *, hint: Any, source: Any = None) -> Any:
        """Return a size for a formula."""
        out = super().create_symintnode(sym, hint=hint, source=source)
        if isinstance(out, torch.SymInt):
            remembering(out.node)
        return out

    def _create_fx_call_function(self, op: Callable[..., Any], args: tuple[Any, ...]) -> tuple[None, bool]:
        return None, False  # what torch's own returns unless it is debugged; each operation on a size asks for it

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """Answer a question about sizes; what was asked before has its guard already."""
        key = (orig_expr, args[2:], tuple(kwargs.items()), self._suppress_guards_tls())
        if key not in self._answers:
            try:
                self._answers[key] = super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                return self._passed(orig_expr)
        return self._answers[key]

    def _passed(self, question: sympy.Basic) -> sympy.Basic:
        """Return how a check of values goes on; a choice between two ways is refused."""
        found = answer(question)
        if found is None:
            raise UnsupportedError(
                f"{caller()}: the values of a tensor choose the way from here, expected a program that goes one way "
                f"for all data; choose with torch.where, or by a number that is given"
            ) from None
        return sympy.true if found else sympy.false

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if a in self.names:
            if tgt.is_number:
                raise UnsupportedError(
                    f"{caller()}: turns the size {self.names[a]} into the number {tgt}, expected a program that takes "
                    f"any size; name no dimension for this axis (None) to keep it a number"
                )
            self.equal.append((self.names[a], tgt))
        super()._set_replacement(a, tgt, msg)


def caller() -> str:
    """Return file, line and text of the innermost line outside of torch and of the tracer."""
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, HERE)) and "<" not in file:
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}, {shown(text, 120)}"
    return "a line of torch"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def hints(given: Mapping[str, int]) -> dict[str, int]:
    """Return a size for each name, no two alike and none of them 0 or 1, as given where that can be.

    A program that compares two sizes, or looks for 1, would else be seen to go the way of a special case.
    """
    out: dict[str, int] = {}
    for name, size in given.items():
        while size < 2 or size in out.values():
            size = int(sympy.nextprime(max(size, 1)))
        out[name] = size
    return out
