"""Named sizes on fake tensors, and the place where a program turns one of them into a number."""

from __future__ import annotations

import dis
import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ...algebra.dominance import integral
from ...algebra.extremum import Max, Min
from ...algebra.polynomial import Poly, poly
from ...algebra.symbols import shown
from ...errors import CostGraphError, UnsupportedError
from ...ir.strides import is_integral
from .sizes import Translator, holds, remainder

__all__ = [
    "Node",
    "remembering",
    "answer",
    "HERE",
    "REMAINDERS",
    "TORCH",
    "Shapes",
    "alternatives",
    "caller",
    "hints",
    "is_program",
    "place",
    "assumptions",
]


# -- nodes -------------------------------------------------------------------------------------------------------------
# Sizes that remember what was made of them: a run asks for the same products and comparisons again and again.

#: Operations of two sizes; those of one are rare.
_BINARY = (
    "add", "sub", "mul", "mod", "eq", "ne", "gt", "lt", "ge", "le", "and_", "or_", "int_floordiv", "sym_min", "sym_max",
)  # fmt: skip


class Node(SymNode):
    """A size as torch has it, whose operations are worked out once for each pair of operands."""

    def wrap_int(self, num: int) -> SymNode:
        """Return a number that meets a size."""
        known = _known(self)
        if num not in known:
            known[num] = remembering(super().wrap_int(num))
        return known[num]

    def neg(self) -> SymNode:
        """Return a size with the other sign."""
        return remembering(super().neg())

    def statically_known_true(self, file: str, line: int) -> bool:
        """Whether it holds of all sizes: none is above the end of a slice `:`, which is no call then, as in any run."""
        if isinstance(self.expr, sympy.Le) and self.expr.rhs == sys.maxsize:
            return True
        return bool(super().statically_known_true(file, line))


def _known(node: SymNode) -> dict[Any, SymNode]:
    """Return what is remembered of all sizes of a run."""
    known: dict[Any, SymNode] = getattr(node.shape_env, "known_nodes")  # noqa: B009  # of the tracer's own shapes
    return known


def remembering(node: SymNode) -> SymNode:
    """Let a size remember what is made of it: a third of the time of a run goes into working that out again."""
    if type(node) is SymNode:
        node.__class__ = Node
    return node


def _remembered(name: str) -> Callable[[Node, Any], Any]:
    plain = getattr(SymNode, name)

    def operation(self: Node, other: Any) -> Any:
        shapes: Any = self.shape_env  # the tracer's own
        if not isinstance(other, SymNode) or shapes is None:
            return plain(self, other)
        # an expression of numbers alone does not say of which type they are
        key = (name, self._expr, self.pytype, other._expr, other.pytype)
        known = _known(self)
        if key not in known:
            made = remembering(plain(self, other))
            known[key] = shapes.padding(made) if name == "mod" else made
        return known[key]

    return operation


for _name in _BINARY:
    setattr(Node, _name, _remembered(_name))


# -- checks ------------------------------------------------------------------------------------------------------------
# Questions about the values of tensors: which of them a program asks only to stop with an error.

_TORCH = Path(torch.__file__).parent
# between a program and the question: how torch asks it, and the tracer
_ASKING = (
    *(str(_TORCH / name) for name in ("fx", "_subclasses", "utils", "_ops.py", "__init__.py", "_tensor.py")),
    str(Path(__file__).parent),
)
_ENDS = ("RAISE_VARARGS", "RERAISE")


def answer(question: sympy.Basic) -> bool | None:
    """Return the answer to a question about values after which a program goes on; None where both ways go on.

    An `assert`, or an `if` with nothing but a `raise` behind it, is a check: a trace takes it for passed. `max` and
    `min` of numbers choose between values, which no cost depends on.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_ASKING):
        frame = frame.f_back
    if frame is None:
        return None
    called = _called(frame)
    if called in ("max", "min") and all(symbol_is_type(s, SymT.UNBACKED_FLOAT) for s in question.free_symbols):
        return True
    return _passing(frame.f_code, frame.f_lasti, called == "bool")


@cache
def _passing(code: CodeType, at: int, called: bool) -> bool | None:
    """Return which answer does not lead to an error, None where both go on; `called` of what `bool` returns."""
    steps = list(dis.get_instructions(code))
    places = {step.offset: i for i, step in enumerate(steps)}
    i = bisect_right(steps, at, key=lambda step: step.offset) - 1 + called
    while steps[i].opname in ("TO_BOOL", "CACHE", "NOT_TAKEN"):
        i += 1
    name = steps[i].opname
    if "JUMP" not in name or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps = name.endswith("IF_TRUE")
    if _fails(steps, i + 1):
        return jumps
    return not jumps if _fails(steps, places[steps[i].argval]) else None


def _fails(steps: list[dis.Instruction], i: int) -> bool:
    """Whether from here an error is raised whatever happens: nothing is chosen before it."""
    for step in steps[i:]:
        if step.opname in _ENDS:
            return True
        if "JUMP" in step.opname or "RETURN" in step.opname or "YIELD" in step.opname:
            return False
    return False


def _called(frame: FrameType) -> str:
    """Return the name of the function of Python's own that is called just now, "" if none is."""
    step = [s for s in dis.get_instructions(frame.f_code) if s.offset <= frame.f_lasti][-1]
    where = step.positions
    if not step.opname.startswith("CALL") or where is None or where.lineno is None or where.col_offset is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, where.lineno).encode()[where.col_offset :]
    return text.partition(b"(")[0].decode()


# -- shapes ------------------------------------------------------------------------------------------------------------

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
_PYTHON = str(Path(linecache.__file__).parent)
_NOT_THEIRS = (TORCH, HERE, str(Path(sympy.__file__).parent))
_DOOR = str(Path(TORCH, "__init__.py"))  # of bool(size) and the like
_ALGEBRA = (_DOOR, str(Path(TORCH, "fx", "experimental")), __file__)


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


# -- guards ------------------------------------------------------------------------------------------------------------
# What a program asked of the sizes on its way, as assumptions on the graph.

#: Turns in which a number of a turn may be asked of.
_FEW = 3

_SIGNS = {sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "=="}


def assumptions(shapes: Shapes, translator: Translator) -> list[str]:
    """Return what sizes must keep so that the program goes the way that was recorded, as `Graph.assume` reads it.

    Sizes are in general position, as everywhere in the library: larger than 1, and equal only where they must be. What
    follows from the former is left out, and from the latter where torch itself asked, which is how tensors lie in
    memory; a program that compares two sizes goes another way where they are equal. UnsupportedError if something that
    was asked has no such form.
    """
    found = [f"{translator.formula(size)} == {translator.formula(expr)}" for size, expr in shapes.equal]
    left = (remainder(expr, translator) for expr in sorted(translator.exact, key=str))
    found += [f"{n} == 0" for n in left if n]
    named = [(s, most) for s, most in shapes.most.items() if s in translator.names]
    found += [f"{translator.names[s]} <= {translator.formula(most)}" for s, most in named]
    by_torch = {guard.expr: "" for guard in shapes.guards}
    late = {asked: line for asked, (line, turns) in shapes.late.items() if _always(turns)}
    for asked, place in (by_torch | late | shapes.asked).items():
        expr = sympy.to_nnf(asked, simplify=False)
        try:
            # what follows from general position is left out before it is written down
            found += [] if _follows(expr, translator, apart=not place) else _texts(expr, translator)
        except CostGraphError as error:
            raise UnsupportedError(
                f"{place or 'torch'}: asks whether {shown(str(expr))}, which is no relation of sizes ({error}), "
                f"expected one of sums, products and whole parts; name no dimension for its axes (None)"
            ) from error
    return list(dict.fromkeys(found))


def _always(turns: set[tuple[tuple[str, int], ...]]) -> bool:
    """Whether something is asked in so many turns of each loop around that it is not of the number of one of them.

    What reads some positions before its own, or behind it, asks of these in as many turns.
    """
    loops: dict[tuple[str, ...], list[list[int]]] = {}
    for path in turns:
        loops.setdefault(tuple(line for line, _ in path), []).append([k for _, k in path])
    return any(all(len(set(turn)) > _FEW for turn in zip(*found, strict=True)) for found in loops.values())


def _texts(expr: Any, translator: Translator) -> list[str]:
    """Return the relations that say what a guard says."""
    if isinstance(expr, sympy.And):
        return [text for part in expr.args for text in _texts(part, translator)]
    if isinstance(expr, sympy.Or):
        return [f"{_margin(expr, translator)} >= 0"]
    left, right = (translator.formula(side) for side in expr.args)
    times = None if right else _times(expr.args[0], translator)
    if times is not None and isinstance(expr, sympy.Eq | sympy.Ne):
        return [f"{times} {'==' if isinstance(expr, sympy.Eq) else '>'} 1"]
    if not isinstance(expr, sympy.Ne):
        return [f"{left} {_SIGNS[type(expr)]} {right}"]
    if holds(left - right) or (not right and isinstance(expr.args[0], REMAINDERS)):
        return [f"{left} > {right}"]
    return [f"{left} < {right}" if holds(right - left) else f"{_margin(expr, translator)} >= 0"]


def _times(expr: Any, translator: Translator) -> Poly | None:
    """Return the quotient of two sizes if it is a whole number."""
    if not isinstance(expr, REMAINDERS):
        return None
    size, block = map(translator.formula, expr.args)
    times = block / size if size.terms else size
    return times if times.terms and is_integral(times) else None


def _margin(expr: Any, translator: Translator) -> Poly:
    """Return what is at least 0 where a guard holds, and below 0 where it does not."""
    if isinstance(expr, sympy.And | sympy.Or):
        extremum = Min if isinstance(expr, sympy.And) else Max
        return poly(extremum(*(_margin(part, translator).expr for part in expr.args)))
    left, right = (translator.formula(side) for side in expr.args)
    ahead = left - right
    return {
        sympy.Ge: lambda: ahead,
        sympy.Le: lambda: -ahead,
        sympy.Gt: lambda: _above(ahead),
        sympy.Lt: lambda: _above(-ahead),
        sympy.Eq: lambda: poly(Min(ahead.expr, (-ahead).expr)),
        sympy.Ne: lambda: poly(Max(_above(ahead).expr, _above(-ahead).expr)),
    }[type(expr)]()


def _above(p: Poly) -> Poly:
    """Return what is at least 0 where a whole number is above 0."""
    whole = integral(p)
    if whole is None:
        raise UnsupportedError(f"{p} need not be a whole number")
    return whole - 1


def _follows(expr: Any, translator: Translator, *, apart: bool) -> bool:
    """Whether a guard holds for all sizes above 1; where they are `apart`, no two of them are equal."""
    if isinstance(expr, sympy.Or) and apart:
        return True  # in which order torch takes the axes of a tensor: layout is decided once
    if isinstance(expr, sympy.And | sympy.Or):
        each = (_follows(part, translator, apart=apart) for part in expr.args)
        return all(each) if isinstance(expr, sympy.And) else any(each)
    if isinstance(expr, sympy.Ne) and apart and not any(isinstance(side, REMAINDERS) for side in expr.args):
        return True
    left, right = (translator.formula(side) for side in expr.args)
    ahead = left - right
    if isinstance(expr, sympy.Eq | sympy.Ne):
        unequal = holds(ahead, strict=True) or holds(-ahead, strict=True)
        return unequal if isinstance(expr, sympy.Ne) else not ahead
    strict = isinstance(expr, sympy.Gt | sympy.Lt)
    return holds(ahead if isinstance(expr, sympy.Ge | sympy.Gt) else -ahead, strict=strict)
