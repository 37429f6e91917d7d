"""Named sizes on fake tensors, and the place where a program turns one of them into a number."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy import functions

from ...algebra.symbols import shown
from ...errors import UnsupportedError
from .checks import answer
from .nodes import remembering

__all__ = ["HERE", "REMAINDERS", "TORCH", "Shapes", "alternatives", "caller", "hints", "is_program", "place"]

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
_PYTHON = str(Path(linecache.__file__).parent)
_NOT_THEIRS = (TORCH, HERE, str(Path(sympy.__file__).parent))
_DOOR = str(Path(TORCH, "__init__.py"))  # of bool(size) and the like
_ALGEBRA = (_DOOR, str(Path(TORCH, "fx", "experimental")), __file__, str(Path(HERE, "nodes.py")))


REMAINDERS = (functions.Mod, functions.PythonMod, sympy.Mod)

#: Ops whose result is a truth value.
_TRUTHS = {
    "all", "any", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
    "logical_and", "logical_or", "logical_not",
}  # fmt: skip

#: Other sizes than the one that was given, times and more: neighbours of it, and multiples.
_OTHERS = ((1, -1), (1, 1), (1, 2), (2, 0), (3, 0), (12, 0))


class Shapes(ShapeEnv):
    """torch's symbolic shapes, in which a dimension that has a name becomes a number only where that is wanted.

    `fixed` says whether a program may turn one of them into a number, which is an assumption then; it is an error else.
    `divided` are whole parts of quotients that are known to be the quotients.
    """

    def __init__(
        self,
        given: Mapping[str, int] = MappingProxyType({}),
        divided: Collection[sympy.Expr] = (),
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__()
        self.given, self.divided, self.fixed = given, divided, fixed
        self.names: dict[sympy.Symbol, str] = {}
        """Names of torch's symbols."""
        self.equal: list[tuple[sympy.Symbol, sympy.Expr]] = []
        """Dimensions that the program needs to be equal to something else."""
        self.asked: dict[sympy.Basic, str] = {}
        """What holds of the sizes where the program asked, and its line; what torch asked itself is in `guards`."""
        self.exact: set[sympy.Expr] = set()
        """Whole parts of quotients without a remainder, as what the program asked needs none."""
        self.turn: tuple[tuple[str, int], ...] = ()
        """Where a program is: the lines of loops over sizes, one of them past its first turn, and the turn of each."""
        self.late: dict[sympy.Basic, tuple[str, set[tuple[tuple[str, int], ...]]]] = {}
        """What holds of the sizes where a later turn asked: its line, or that of torch, and the turns that did."""
        self.wholes: dict[sympy.Symbol, sympy.Expr] = {}
        """Symbols for numbers of whole blocks, and what they are of sizes."""
        self._lacking: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]] = {}
        """The blocks of each of them, and what they lack of one that is filled up to them."""
        self.read: dict[sympy.Symbol, str] = {}
        """Numbers that the program reads from tensors, and the producer of each tensor."""
        self.chosen: dict[sympy.Symbol, str] = {}
        """Names of data-dependent sizes, after the op that found them."""
        self.most: dict[sympy.Symbol, sympy.Expr] = {}
        """Upper bounds of data-dependent sizes."""
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

    def padding(self, node: Any) -> Any:
        """Return what fills a size up to whole blocks with a symbol for their number.

        What is made of a size that was filled up, `(c - S % c) % c` or `-S % c`, would be remainders of remainders in
        all that follows, which torch's algebra takes apart for each question anew.
        """
        filled = _filled(node.expr)
        if filled is None or not filled[0].free_symbols <= self.backed_var_to_val.keys():
            return node
        size, block = filled
        if functions.FloorDiv(size, block) in self.divided:
            return self.create_symintnode(block * functions.FloorDiv(size, block) - size, hint=node.hint).node
        count = -functions.FloorDiv(-size, block)
        known = next((s for s, other in self.wholes.items() if other == count), None)
        if known is None:
            number = int(self.plain(count).xreplace(self.backed_var_to_val))
            if number < 2 or number in self.backed_var_to_val.values():  # as `hints` has it
                return node
            known = self.create_symbol(
                number, ConstantSource(f"blocks of {size}"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self.wholes[known], self._lacking[known] = count, (block * known - size, block)
        return self.create_symintnode(block * known - size, hint=node.hint).node

    def plain(self, expr: sympy.Basic) -> sympy.Basic:
        """Return something in symbols of named sizes."""
        known = self.replace(expr)
        return self.plain(known.xreplace(self.wholes)) if known.free_symbols & self.wholes.keys() else known

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """Answer a question about sizes; what was asked before has its guard already."""
        silent = self._suppress_guards_tls()
        key = (orig_expr, args[2:], tuple(kwargs.items()), silent)
        if key not in self._answers:
            known = self.plain(orig_expr)
            number = not isinstance(known, sympy.logic.boolalg.Boolean)
            named = known.free_symbols and known.free_symbols <= self.names.keys()
            if number and not silent and named and (_asked_by_program() or not self._is_shared(known)):
                self.fix(known)
            guards, ranges = len(self.guards), dict(self.var_to_range) if self.turn else {}
            try:
                self._answers[key] = super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                return self._passed(orig_expr)
            if self.turn and not number:  # nothing follows from it here: a turn's number is no fact of the size
                del self.guards[guards:]
                self.var_to_range.update(ranges)
                self._update_version_counter()
            elif not number:
                holds = known if self._answers[key] else sympy.Not(known)
                self.exact |= _without_remainder(holds)
        answer = self._answers[key]
        if answer in (sympy.true, sympy.false) and not silent and (self.turn or _asked_by_program()):
            known = self.plain(orig_expr)
            if known.free_symbols and known.free_symbols <= self.names.keys():
                self._note(known if answer else sympy.Not(known))
        return answer

    def _note(self, asked: sympy.Basic) -> None:
        """Note what a program asked; in a later turn of a loop it may be of the turn's number."""
        if not self.turn:
            self.asked.setdefault(asked, caller())
        elif asked not in self.asked:
            line = caller() if _asked_by_program(3) else ""
            self.late.setdefault(asked, (line, set()))[1].add(self.turn)

    def _is_shared(self, number: sympy.Expr) -> bool:
        """Whether other sizes make the same number, as S parts of S//3 each: that it is this one is an assumption."""
        given = {s: self.backed_var_to_val[s] for s in number.free_symbols}
        found = number.xreplace(given)
        return any(
            number.xreplace(given | {s: sympy.Integer(times * n + more)}) == found
            for s, n in given.items()
            for times, more in _OTHERS
        )

    def fix(self, size: sympy.Expr) -> None:
        """Note that a size becomes a number here: every size that it is made of is then the one that was given."""
        for free in sorted(size.free_symbols, key=str):
            name, number = self.names[free], self.backed_var_to_val[free]
            if not self.fixed:
                raise UnsupportedError(
                    f"{caller()}: turns the size {name} into the number {number}, expected a program that takes any "
                    f"size; name no dimension for this axis (None) to keep it a number, or trace with fixed='given'"
                )
            if number != self.given.get(name):
                raise UnsupportedError(
                    f"{caller()}: needs the size {name} as a number, which is given as {self.given.get(name)}, "
                    f"expected one above 1 that no other dimension has"
                )
            self._set_replacement(free, sympy.Integer(number), "given")

    def choosing(self, op: str, sizes: Iterable[Any], most: Any = None) -> None:
        """Name the data-dependent sizes of an op; `most` is their upper bound."""
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            if expr.is_Symbol and expr not in self.backed_var_to_val and expr not in self.chosen:
                taken = {*self.chosen.values(), *self.given}
                numbers = (f"{op}_{k}" for k in range(1, len(taken) + 2))
                self.chosen[expr] = next(name for name in numbers if name not in taken)
                if most is not None:
                    self.most[expr] = most.node.expr if isinstance(most, torch.SymInt) else sympy.Integer(most)

    def _general(self, question: sympy.Basic) -> bool | None:
        """Answer a question about data-dependent sizes if the answer is the same for all sizes above 1."""
        if not question.free_symbols & self.chosen.keys():
            return None
        general = {s: sympy.Dummy(integer=True, positive=True) + 1 for s in question.free_symbols & self.chosen.keys()}
        found = question.xreplace(general)
        found = found if found in (sympy.true, sympy.false) else sympy.simplify(found)
        return bool(found) if found in (sympy.true, sympy.false) else None

    def _passed(self, question: sympy.Basic) -> sympy.Basic:
        """Return how a check of values goes on; a choice between two ways is refused."""
        found = self._general(question)
        found = answer(question) if found is None else found
        if found is None:
            made = {self.read[s]: 1 if s.is_integer else 0.5 for s in question.free_symbols if s in self.read}
            given = ", ".join(f"{name!r}: {True if name in _TRUTHS else number}" for name, number in made.items())
            remedy = f"pass choose={{{given}}} to say what it reads, " if made else ""
            raise UnsupportedError(
                f"{caller()}: the values of a tensor choose the way from here, expected a program that goes one way "
                f"for all data; {remedy}choose with torch.where, or by a number that is given"
            ) from None
        return sympy.true if found else sympy.false

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if a in self.names and tgt.is_number and msg != "given":
            self.fix(a)
            return
        for whole in tgt.free_symbols & self.wholes.keys():
            lacking, block = self._lacking[whole]
            if not sympy.expand(lacking + a - tgt) or not sympy.expand(lacking - a + tgt):  # nothing is filled up
                a, tgt = whole, functions.FloorDiv(block * whole - lacking, block)
                self.exact.add(tgt)
                super()._set_replacement(a, tgt, msg)
                return
        if a in (self.names.keys() | self.wholes.keys()) and self.replacements.get(a) != tgt:
            self.equal.append((a, tgt))
        if not any(a in self.wholes[whole].free_symbols for whole in tgt.free_symbols & self.wholes.keys()):
            super()._set_replacement(a, tgt, msg)  # what is made of itself is no replacement


def _filled(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Return size and block where something is what fills one up to whole ones of the other."""
    if not isinstance(expr, REMAINDERS) or not expr.args[1].is_Integer:
        return None
    over, block = expr.args
    left = block - over
    if isinstance(left, REMAINDERS) and left.args[1] == block:
        return left.args[0], block
    return (-over, block) if over.could_extract_minus_sign() else None


def _without_remainder(known: sympy.Basic) -> set[sympy.Expr]:
    """Return the whole parts that have to be the quotients for something to hold.

    A remainder that is 0 says so, and a product of whole parts that is as large as that of the quotients: it would be
    smaller if one of them were.
    """
    if not isinstance(known, sympy.Eq):
        return set()
    for product, other in (known.args, known.args[::-1]):
        if not other and isinstance(product, REMAINDERS):
            quotient = functions.FloorDiv(*product.args)
            return {quotient} if isinstance(quotient, functions.FloorDiv) else set()
        factors = [f.as_base_exp() for f in sympy.Mul.make_args(product)]
        parts = {f for f, n in factors if isinstance(f, functions.FloorDiv) and n.is_positive}
        if not parts or not all(f in parts or f.is_positive for f, _ in factors):
            continue
        quotients = sympy.Mul(*((f.args[0] / f.args[1] if f in parts else f) ** n for f, n in factors))
        if quotients == other or ((quotients - other).is_polynomial() and not sympy.expand(quotients - other)):
            return parts
    return set()


def _asked_by_program(depth: int = 2) -> bool:
    """Whether the innermost line outside of torch's algebra of sizes is one of the program, which asks in Python.

    What torch's kernels ask, layouts above all, comes from C++ straight to that algebra.
    """
    frame, asked = sys._getframe(depth), False
    while frame is not None and frame.f_code.co_filename.startswith(_ALGEBRA):
        asked = asked or frame.f_code.co_filename == _DOOR
        frame = frame.f_back  # type: ignore[assignment]
    return asked and frame is not None and not frame.f_code.co_filename.startswith((TORCH, HERE))


def is_program(file: str) -> bool:
    """Whether a file is the program's: none of torch, of the tracer, of what they call or of Python's library."""
    return not (file.startswith(_NOT_THEIRS) or "<" in file or (file.startswith(_PYTHON) and "-packages" not in file))


def caller() -> str:
    """Return file, line and text of the innermost line of the program."""
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_program(file):
            return place(file, frame.f_lineno, frame.f_code.co_name)
    return "a line of torch"


def place(file: str, line: int | None, function: str) -> str:
    """Return a line of a file in words."""
    text = linecache.getline(file, line or 0).strip()
    return f"{file}:{line}, in {function}, {shown(text, 120)}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def hints(given: Mapping[str, int], step: Callable[[int], int] | None = None) -> dict[str, int]:
    """Return a size for each name, no two alike and none of them 0 or 1, as given where that can be.

    A program that compares two sizes, or looks for 1, would else be seen to go the way of a special case. A size that
    an earlier name has becomes the next prime, or grows by steps that keep some of its divisors.
    """
    out: dict[str, int] = {}
    for name, size in given.items():
        grown = size
        while grown < 2 or grown in out.values():
            grown = int(sympy.nextprime(max(grown, 1))) if step is None or size < 2 else grown + step(size)
        out[name] = grown
    return out


def alternatives(given: Mapping[str, int]) -> list[dict[str, int]]:
    """Return sizes to run a program at, best first: general sizes, then sizes with divisors of the given ones.

    The latter are for programs that accept only multiples, such as those of a patch or a window.
    """
    found = [hints(given, step) for step in (None, lambda n: n & -n, lambda n: n)]
    return [sizes for i, sizes in enumerate(found) if sizes not in found[:i]]
