"""Symbolic shapes of a trace: named sizes on fake tensors, guards on them, and specialization to numbers."""

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
    "CachedSizeNode",
    "memoized",
    "answer",
    "TRACER",
    "REMAINDERS",
    "TORCH",
    "Shapes",
    "alternatives",
    "caller",
    "hints",
    "is_program",
    "location",
    "assumptions",
]


# -- nodes -------------------------------------------------------------------------------------------------------------
# Memoize size arithmetic: a run repeats the same products and comparisons.

#: Operations on two sizes; unary ones are rare.
_BINARY = (
    "add", "sub", "mul", "mod", "eq", "ne", "gt", "lt", "ge", "le", "and_", "or_", "int_floordiv", "sym_min", "sym_max",
)  # fmt: skip


class CachedSizeNode(SymNode):
    """A `SymNode` whose operations are memoized per pair of operands."""

    def wrap_int(self, num: int) -> SymNode:
        """Return a constant operand."""
        memo = _memo(self)
        if num not in memo:
            memo[num] = memoized(super().wrap_int(num))
        return memo[num]

    def neg(self) -> SymNode:
        """Return the negated size."""
        return memoized(super().neg())

    def statically_known_true(self, file: str, line: int) -> bool:
        """Whether a relation holds for all sizes; in particular, sizes do not exceed the end of a slice `:`."""
        if isinstance(self.expr, sympy.Le) and self.expr.rhs == sys.maxsize:
            return True
        return bool(super().statically_known_true(file, line))


def _memo(node: SymNode) -> dict[Any, SymNode]:
    """Return the memo of a run."""
    memo: dict[Any, SymNode] = getattr(node.shape_env, "known_nodes")  # noqa: B009  # always the tracer's `Shapes`
    return memo


def memoized(node: SymNode) -> SymNode:
    """Enable memoization of a size, which saves a third of a run's time."""
    if type(node) is SymNode:
        node.__class__ = CachedSizeNode
    return node


def _memoized_operation(name: str) -> Callable[[CachedSizeNode, Any], Any]:
    original = getattr(SymNode, name)

    def operation(self: CachedSizeNode, other: Any) -> Any:
        shapes: Any = self.shape_env  # always `Shapes`
        if not isinstance(other, SymNode) or shapes is None:
            return original(self, other)
        # equal constant expressions may differ in type
        key = (name, self._expr, self.pytype, other._expr, other.pytype)
        memo = _memo(self)
        if key not in memo:
            result = memoized(original(self, other))
            memo[key] = shapes.express_padding(result) if name == "mod" else result
        return memo[key]

    return operation


for _name in _BINARY:
    setattr(CachedSizeNode, _name, _memoized_operation(_name))


# -- value checks ------------------------------------------------------------------------------------------------------
# Answer conditions on tensor values that only guard a `raise`.

_TORCH = Path(torch.__file__).parent
# frames between a program and the condition: torch's own, and the tracer's
_INTERNAL_FILES = (
    *(str(_TORCH / name) for name in ("fx", "_subclasses", "utils", "_ops.py", "__init__.py", "_tensor.py")),
    str(Path(__file__).parent),
)
_RAISE_OPCODES = ("RAISE_VARARGS", "RERAISE")


def answer(question: sympy.Basic) -> bool | None:
    """Return the answer to a condition on tensor values that avoids an error; None if both branches continue.

    An `assert`, or an `if` whose body only raises, is assumed to pass. `max` and `min` of numbers select values, on
    which no cost depends.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL_FILES):
        frame = frame.f_back
    if frame is None:
        return None
    called = _called_builtin(frame)
    if called in ("max", "min") and all(symbol_is_type(s, SymT.UNBACKED_FLOAT) for s in question.free_symbols):
        return True
    return _answer_without_error(frame.f_code, frame.f_lasti, called == "bool")


@cache
def _answer_without_error(code: CodeType, offset: int, called: bool) -> bool | None:
    """Return the answer that avoids an error, None if both branches continue; `called` for the result of `bool`."""
    instructions = list(dis.get_instructions(code))
    positions = {step.offset: i for i, step in enumerate(instructions)}
    i = bisect_right(instructions, offset, key=lambda step: step.offset) - 1 + called
    while instructions[i].opname in ("TO_BOOL", "CACHE", "NOT_TAKEN"):
        i += 1
    name = instructions[i].opname
    if "JUMP" not in name or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_if_true = name.endswith("IF_TRUE")
    if _raises(instructions, i + 1):
        return jumps_if_true
    return not jumps_if_true if _raises(instructions, positions[instructions[i].argval]) else None


def _raises(instructions: list[dis.Instruction], i: int) -> bool:
    """Whether an error is raised unconditionally from here on."""
    for step in instructions[i:]:
        if step.opname in _RAISE_OPCODES:
            return True
        if "JUMP" in step.opname or "RETURN" in step.opname or "YIELD" in step.opname:
            return False
    return False


def _called_builtin(frame: FrameType) -> str:
    """Return the name of the builtin function being called; "" if none is."""
    step = [s for s in dis.get_instructions(frame.f_code) if s.offset <= frame.f_lasti][-1]
    position = step.positions
    if not step.opname.startswith("CALL") or position is None or position.lineno is None or position.col_offset is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, position.lineno).encode()[position.col_offset :]
    return text.partition(b"(")[0].decode()


# -- shapes ------------------------------------------------------------------------------------------------------------

TORCH = str(Path(torch.__file__).parent)
TRACER = str(Path(__file__).parent)
_PYTHON = str(Path(linecache.__file__).parent)
_LIBRARIES = (TORCH, TRACER, str(Path(sympy.__file__).parent))
_SYMINT_FILE = str(Path(TORCH, "__init__.py"))  # `bool(size)` and the like
_ALGEBRA_FILES = (_SYMINT_FILE, str(Path(TORCH, "fx", "experimental")), __file__)


REMAINDERS = (functions.Mod, functions.PythonMod, sympy.Mod)

#: Ops with a boolean result.
_BOOLEAN_OPS = {
    "all", "any", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
    "logical_and", "logical_or", "logical_not",
}  # fmt: skip

#: Other sizes to try, as a factor and a term: neighbours and multiples.
_PROBE_SIZES = ((1, -1), (1, 1), (1, 2), (2, 0), (3, 0), (12, 0))


class Shapes(ShapeEnv):
    """torch's symbolic shapes, in which named sizes become numbers only if that is allowed.

    With `fixed`, a program may specialize a size to a number, which becomes an assumption; otherwise that is an error.
    `exact_divisions` are floor divisions known to be exact.
    """

    def __init__(
        self,
        given_sizes: Mapping[str, int] = MappingProxyType({}),
        exact_divisions: Collection[sympy.Expr] = (),
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__()
        self.given_sizes, self.exact_divisions, self.fixed = given_sizes, exact_divisions, fixed
        self.names: dict[sympy.Symbol, str] = {}
        """Names of torch's symbols."""
        self.equalities: list[tuple[sympy.Symbol, sympy.Expr]] = []
        """Equalities of sizes that the program requires."""
        self.checked: dict[sympy.Basic, str] = {}
        """Relations that the program checked, and the line; relations that torch checked are in `guards`."""
        self.exact: set[sympy.Expr] = set()
        """Floor divisions that are exact because of a checked relation."""
        self.iteration: tuple[tuple[str, int], ...] = ()
        """Enclosing loops over sizes by line, with the iteration of each, if any is past its first."""
        self.checked_later: dict[sympy.Basic, tuple[str, set[tuple[tuple[str, int], ...]]]] = {}
        """Relations checked in later iterations: the line of the program (or "" in torch), and the iterations."""
        self.block_counts: dict[sympy.Symbol, sympy.Expr] = {}
        """Symbols for block counts, and their formulas."""
        self._paddings: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]] = {}
        """Padding up to each block count, and the block size."""
        self.read_numbers: dict[sympy.Symbol, str] = {}
        """Numbers that the program reads from tensors, and the producer of each tensor."""
        self.data_sizes: dict[sympy.Symbol, str] = {}
        """Names of data-dependent sizes, after the op that found them."""
        self.upper_bounds: dict[sympy.Symbol, sympy.Expr] = {}
        """Upper bounds of data-dependent sizes."""
        self.known_nodes: dict[Any, Any] = {}
        """Memoized results of size operations."""
        self._answers: dict[Any, sympy.Basic] = {}

    def named(self, name: str, size: int) -> torch.SymInt:
        """Return the size of this name; `size` is the hint that decides branches."""
        source = ConstantSource(name)
        symbol = self.create_symbol(size, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
        assert isinstance(symbol, sympy.Symbol)
        self.names[symbol] = name
        out = self.create_symintnode(symbol, hint=size, source=source)
        assert isinstance(out, torch.SymInt)
        return out

    def create_symintnode(self, sym: sympy.Expr, *, hint: Any, source: Any = None) -> Any:
        """Return a size for an expression."""
        out = super().create_symintnode(sym, hint=hint, source=source)
        if isinstance(out, torch.SymInt):
            memoized(out.node)
        return out

    def _create_fx_call_function(self, op: Callable[..., Any], args: tuple[Any, ...]) -> tuple[None, bool]:
        return None, False  # torch's result without debugging; skips work on each size operation

    def express_padding(self, node: Any) -> Any:
        """Express the padding of a size to whole blocks by a symbol for the block count.

        Sizes derived from a padded one, `(c - S % c) % c` or `-S % c`, would otherwise nest remainders, which torch's
        algebra takes apart again for each question.
        """
        padded = _padded_size(node.expr)
        if padded is None or not padded[0].free_symbols <= self.backed_var_to_val.keys():
            return node
        size, block = padded
        if functions.FloorDiv(size, block) in self.exact_divisions:
            return self.create_symintnode(block * functions.FloorDiv(size, block) - size, hint=node.hint).node
        count = -functions.FloorDiv(-size, block)
        block_count = next((s for s, other in self.block_counts.items() if other == count), None)
        if block_count is None:
            count_hint = int(self.in_named_sizes(count).xreplace(self.backed_var_to_val))
            if count_hint < 2 or count_hint in self.backed_var_to_val.values():  # as in `hints`
                return node
            block_count = self.create_symbol(
                count_hint, ConstantSource(f"blocks of {size}"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self.block_counts[block_count], self._paddings[block_count] = count, (block * block_count - size, block)
        return self.create_symintnode(block * block_count - size, hint=node.hint).node

    def in_named_sizes(self, expr: sympy.Basic) -> sympy.Basic:
        """Return an expression in symbols of named sizes."""
        resolved = self.replace(expr)
        return (
            self.in_named_sizes(resolved.xreplace(self.block_counts))
            if resolved.free_symbols & self.block_counts.keys()
            else resolved
        )

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """Evaluate a condition on sizes; repeated conditions are memoized, since their guards exist."""
        silent = self._suppress_guards_tls()
        key = (orig_expr, args[2:], tuple(kwargs.items()), silent)
        if key not in self._answers:
            resolved = self.in_named_sizes(orig_expr)
            is_number = not isinstance(resolved, sympy.logic.boolalg.Boolean)
            named = resolved.free_symbols and resolved.free_symbols <= self.names.keys()
            if is_number and not silent and named and (_asked_by_program() or not self._is_shared(resolved)):
                self.specialize(resolved)
            guard_count, ranges = len(self.guards), dict(self.var_to_range) if self.iteration else {}
            try:
                self._answers[key] = super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                return self._answer_on_values(orig_expr)
            if self.iteration and not is_number:
                # in a later iteration, derived facts may depend on the iteration number
                del self.guards[guard_count:]
                self.var_to_range.update(ranges)
                self._update_version_counter()
            elif not is_number:
                relation = resolved if self._answers[key] else sympy.Not(resolved)
                self.exact |= _exact_divisions(relation)
        answer = self._answers[key]
        if answer in (sympy.true, sympy.false) and not silent and (self.iteration or _asked_by_program()):
            resolved = self.in_named_sizes(orig_expr)
            if resolved.free_symbols and resolved.free_symbols <= self.names.keys():
                self._record_check(resolved if answer else sympy.Not(resolved))
        return answer

    def _record_check(self, relation: sympy.Basic) -> None:
        """Record a checked relation; in a later iteration it may depend on the iteration number."""
        if not self.iteration:
            self.checked.setdefault(relation, caller())
        elif relation not in self.checked:
            line = caller() if _asked_by_program(3) else ""
            self.checked_later.setdefault(relation, (line, set()))[1].add(self.iteration)

    def _is_shared(self, number: sympy.Expr) -> bool:
        """Whether other sizes give the same number, as `S//3` does: then a guard on the number suffices."""
        hint_values = {s: self.backed_var_to_val[s] for s in number.free_symbols}
        value = number.xreplace(hint_values)
        return any(
            number.xreplace(hint_values | {s: sympy.Integer(times * n + more)}) == value
            for s, n in hint_values.items()
            for times, more in _PROBE_SIZES
        )

    def specialize(self, size: sympy.Expr) -> None:
        """Specialize an expression to a number: each of its sizes is then the given one."""
        for symbol in sorted(size.free_symbols, key=str):
            name, number = self.names[symbol], self.backed_var_to_val[symbol]
            if not self.fixed:
                raise UnsupportedError(
                    f"{caller()}: converts the size {name} to the number {number}, but the trace must hold for all "
                    f"sizes; leave this axis unnamed (None) to keep it a number, or trace with fixed='given'"
                )
            if number != self.given_sizes.get(name):
                raise UnsupportedError(
                    f"{caller()}: needs the size {name} as a number, but its given size is "
                    f"{self.given_sizes.get(name)}; expected a size above 1 that no other dimension has"
                )
            self._set_replacement(symbol, sympy.Integer(number), "given")

    def name_data_sizes(self, op: str, sizes: Iterable[Any], upper_bound: Any = None) -> None:
        """Name the data-dependent sizes of an op, up to `upper_bound`."""
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            if expr.is_Symbol and expr not in self.backed_var_to_val and expr not in self.data_sizes:
                used = {*self.data_sizes.values(), *self.given_sizes}
                candidates = (f"{op}_{k}" for k in range(1, len(used) + 2))
                self.data_sizes[expr] = next(name for name in candidates if name not in used)
                if upper_bound is not None:
                    self.upper_bounds[expr] = (
                        upper_bound.node.expr if isinstance(upper_bound, torch.SymInt) else sympy.Integer(upper_bound)
                    )

    def _size_independent_answer(self, question: sympy.Basic) -> bool | None:
        """Evaluate a condition on data-dependent sizes if it has one answer for all sizes above 1."""
        if not question.free_symbols & self.data_sizes.keys():
            return None
        substitution = {
            s: sympy.Dummy(integer=True, positive=True) + 1 for s in question.free_symbols & self.data_sizes.keys()
        }
        result = question.xreplace(substitution)
        result = result if result in (sympy.true, sympy.false) else sympy.simplify(result)
        return bool(result) if result in (sympy.true, sympy.false) else None

    def _answer_on_values(self, question: sympy.Basic) -> sympy.Basic:
        """Evaluate a value check that one branch fails; refuse a choice between two branches."""
        result = self._size_independent_answer(question)
        result = answer(question) if result is None else result
        if result is None:
            answers = {
                self.read_numbers[s]: 1 if s.is_integer else 0.5
                for s in question.free_symbols
                if s in self.read_numbers
            }
            choices = ", ".join(
                f"{name!r}: {True if name in _BOOLEAN_OPS else number}" for name, number in answers.items()
            )
            remedy = f"pass choose={{{choices}}} to state the value, or " if answers else ""
            raise UnsupportedError(
                f"{caller()}: branches on the values of a tensor, which are unknown; {remedy}use torch.where, or "
                f"branch on a Python number"
            ) from None
        return sympy.true if result else sympy.false

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if a in self.names and tgt.is_number and msg != "given":
            self.specialize(a)
            return
        for block_count in tgt.free_symbols & self.block_counts.keys():
            padding, block = self._paddings[block_count]
            if not sympy.expand(padding + a - tgt) or not sympy.expand(padding - a + tgt):  # no padding
                a, tgt = block_count, functions.FloorDiv(block * block_count - padding, block)
                self.exact.add(tgt)
                super()._set_replacement(a, tgt, msg)
                return
        if a in (self.names.keys() | self.block_counts.keys()) and self.replacements.get(a) != tgt:
            self.equalities.append((a, tgt))
        if not any(
            a in self.block_counts[block_count].free_symbols
            for block_count in tgt.free_symbols & self.block_counts.keys()
        ):
            super()._set_replacement(a, tgt, msg)  # an expression of the symbol itself is no replacement


def _padded_size(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Return the size and block of an expression that pads the size to whole blocks; None otherwise."""
    if not isinstance(expr, REMAINDERS) or not expr.args[1].is_Integer:
        return None
    numerator, block = expr.args
    inner = block - numerator
    if isinstance(inner, REMAINDERS) and inner.args[1] == block:
        return inner.args[0], block
    return (-numerator, block) if numerator.could_extract_minus_sign() else None


def _exact_divisions(relation: sympy.Basic) -> set[sympy.Expr]:
    """Return the floor divisions that must be exact for a relation to hold.

    Examples are a zero remainder, and a product of floor divisions that equals the product of quotients: it would be
    smaller if one of them were inexact.
    """
    if not isinstance(relation, sympy.Eq):
        return set()
    for product, other in (relation.args, relation.args[::-1]):
        if not other and isinstance(product, REMAINDERS):
            quotient = functions.FloorDiv(*product.args)
            return {quotient} if isinstance(quotient, functions.FloorDiv) else set()
        factors = [f.as_base_exp() for f in sympy.Mul.make_args(product)]
        divisions = {f for f, n in factors if isinstance(f, functions.FloorDiv) and n.is_positive}
        if not divisions or not all(f in divisions or f.is_positive for f, _ in factors):
            continue
        quotients = sympy.Mul(*((f.args[0] / f.args[1] if f in divisions else f) ** n for f, n in factors))
        if quotients == other or ((quotients - other).is_polynomial() and not sympy.expand(quotients - other)):
            return divisions
    return set()


def _asked_by_program(depth: int = 2) -> bool:
    """Whether the innermost frame outside torch's size algebra is the program's, in Python.

    Questions from torch's kernels, mostly about layouts, enter that algebra directly from C++.
    """
    frame, asked = sys._getframe(depth), False
    while frame is not None and frame.f_code.co_filename.startswith(_ALGEBRA_FILES):
        asked = asked or frame.f_code.co_filename == _SYMINT_FILE
        frame = frame.f_back  # type: ignore[assignment]
    return asked and frame is not None and not frame.f_code.co_filename.startswith((TORCH, TRACER))


def is_program(file: str) -> bool:
    """Whether a file belongs to the program: not to torch, the tracer, their dependencies or Python's library."""
    return not (file.startswith(_LIBRARIES) or "<" in file or (file.startswith(_PYTHON) and "-packages" not in file))


def caller() -> str:
    """Return file, line and text of the program's innermost frame."""
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_program(file):
            return location(file, frame.f_lineno, frame.f_code.co_name)
    return "a line of torch"


def location(file: str, line: int | None, function: str) -> str:
    """Return a printable source location."""
    text = linecache.getline(file, line or 0).strip()
    return f"{file}:{line}, in {function}, {shown(text, 120)}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def hints(sizes: Mapping[str, int], step: Callable[[int], int] | None = None) -> dict[str, int]:
    """Return a hint per name, distinct and above 1, and as given where possible.

    Otherwise a program that compares two sizes, or tests for 1, would take a special case. A repeated size becomes the
    next prime, or grows by steps that keep some of its divisors.
    """
    out: dict[str, int] = {}
    for name, size in sizes.items():
        grown = size
        while grown < 2 or grown in out.values():
            grown = int(sympy.nextprime(max(grown, 1))) if step is None or size < 2 else grown + step(size)
        out[name] = grown
    return out


def alternatives(named_sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return sizes to run a program at, best first: general sizes, then sizes with divisors of the given ones.

    The latter are for programs that accept only multiples, such as those of a patch or a window.
    """
    candidates = [hints(named_sizes, step) for step in (None, lambda n: n & -n, lambda n: n)]
    return [sizes for i, sizes in enumerate(candidates) if sizes not in candidates[:i]]


# -- guards ------------------------------------------------------------------------------------------------------------
# Turn the checked relations into assumptions of the graph.

#: Number of iterations in which a relation may depend on the iteration number.
_MAX_END_ITERATIONS = 3

_SIGNS = {sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "=="}


def assumptions(shapes: Shapes, translator: Translator) -> list[str]:
    """Return the relations under which the program takes the recorded path, as `Graph.assume` reads them.

    Sizes are in general position: above 1, and equal only where required. Consequences of the former are omitted, and
    of the latter for torch's own guards, which decide memory layouts; a program that compares two sizes takes another
    path where they are equal.

    Raises
    ------
    UnsupportedError
        If a guard has no such form.
    """
    relations = [f"{translator.formula(size)} == {translator.formula(expr)}" for size, expr in shapes.equalities]
    remainders = (remainder(expr, translator) for expr in sorted(translator.exact, key=str))
    relations += [f"{n} == 0" for n in remainders if n]
    bounded = [(s, upper_bound) for s, upper_bound in shapes.upper_bounds.items() if s in translator.names]
    relations += [f"{translator.names[s]} <= {translator.formula(upper_bound)}" for s, upper_bound in bounded]
    by_torch = {guard.expr: "" for guard in shapes.guards}
    later = {
        relation: line
        for relation, (line, iterations) in shapes.checked_later.items()
        if _holds_in_all_iterations(iterations)
    }
    for relation, where in (by_torch | later | shapes.checked).items():
        expr = sympy.to_nnf(relation, simplify=False)
        try:
            # skip consequences of general position before writing them out
            relations += [] if _is_implied(expr, translator, distinct=not where) else _relations(expr, translator)
        except CostGraphError as error:
            raise UnsupportedError(
                f"{where or 'torch'}: the condition {shown(str(expr))} is not a relation of sums, products and integer "
                f"parts of sizes ({error}); leave its axes unnamed (None)"
            ) from error
    return list(dict.fromkeys(relations))


def _holds_in_all_iterations(iterations: set[tuple[tuple[str, int], ...]]) -> bool:
    """Whether a relation is checked in enough iterations of each enclosing loop not to depend on the iteration number.

    A program that reads neighbouring positions checks them only in a few iterations at the ends.
    """
    loops: dict[tuple[str, ...], list[list[int]]] = {}
    for path in iterations:
        loops.setdefault(tuple(line for line, _ in path), []).append([k for _, k in path])
    return any(
        all(len(set(numbers)) > _MAX_END_ITERATIONS for numbers in zip(*paths, strict=True)) for paths in loops.values()
    )


def _relations(expr: Any, translator: Translator) -> list[str]:
    """Return the relations that a guard states."""
    if isinstance(expr, sympy.And):
        return [text for part in expr.args for text in _relations(part, translator)]
    if isinstance(expr, sympy.Or):
        return [f"{_margin(expr, translator)} >= 0"]
    left, right = (translator.formula(side) for side in expr.args)
    ratio = None if right else _integer_ratio(expr.args[0], translator)
    if ratio is not None and isinstance(expr, sympy.Eq | sympy.Ne):
        return [f"{ratio} {'==' if isinstance(expr, sympy.Eq) else '>'} 1"]
    if not isinstance(expr, sympy.Ne):
        return [f"{left} {_SIGNS[type(expr)]} {right}"]
    if holds(left - right) or (not right and isinstance(expr.args[0], REMAINDERS)):
        return [f"{left} > {right}"]
    return [f"{left} < {right}" if holds(right - left) else f"{_margin(expr, translator)} >= 0"]


def _integer_ratio(expr: Any, translator: Translator) -> Poly | None:
    """Return the quotient of two sizes if it is an integer."""
    if not isinstance(expr, REMAINDERS):
        return None
    size, block = map(translator.formula, expr.args)
    ratio = block / size if size.terms else size
    return ratio if ratio.terms and is_integral(ratio) else None


def _margin(expr: Any, translator: Translator) -> Poly:
    """Return an expression that is nonnegative exactly where a guard holds."""
    if isinstance(expr, sympy.And | sympy.Or):
        extremum = Min if isinstance(expr, sympy.And) else Max
        return poly(extremum(*(_margin(part, translator).expr for part in expr.args)))
    left, right = (translator.formula(side) for side in expr.args)
    difference = left - right
    return {
        sympy.Ge: lambda: difference,
        sympy.Le: lambda: -difference,
        sympy.Gt: lambda: _positive_margin(difference),
        sympy.Lt: lambda: _positive_margin(-difference),
        sympy.Eq: lambda: poly(Min(difference.expr, (-difference).expr)),
        sympy.Ne: lambda: poly(Max(_positive_margin(difference).expr, _positive_margin(-difference).expr)),
    }[type(expr)]()


def _positive_margin(p: Poly) -> Poly:
    """Return an expression that is nonnegative where an integer is positive."""
    integer = integral(p)
    if integer is None:
        raise UnsupportedError(f"{p} may not be an integer")
    return integer - 1


def _is_implied(expr: Any, translator: Translator, *, distinct: bool) -> bool:
    """Whether a guard holds for all sizes above 1, and, with `distinct`, no two of them equal."""
    if isinstance(expr, sympy.Or) and distinct:
        return True  # torch's order of axes: the layout is decided once
    if isinstance(expr, sympy.And | sympy.Or):
        each = (_is_implied(part, translator, distinct=distinct) for part in expr.args)
        return all(each) if isinstance(expr, sympy.And) else any(each)
    if isinstance(expr, sympy.Ne) and distinct and not any(isinstance(side, REMAINDERS) for side in expr.args):
        return True
    left, right = (translator.formula(side) for side in expr.args)
    difference = left - right
    if isinstance(expr, sympy.Eq | sympy.Ne):
        unequal = holds(difference, strict=True) or holds(-difference, strict=True)
        return unequal if isinstance(expr, sympy.Ne) else not difference
    strict = isinstance(expr, sympy.Gt | sympy.Lt)
    return holds(difference if isinstance(expr, sympy.Ge | sympy.Gt) else -difference, strict=strict)
