"""Mutation operators: small wrong changes of a module's source that a test suite should detect.

A mutant is a node of the syntax tree and its replacement. Annotations, docstrings, decorators, imports, assertions,
arguments of exceptions, formatted strings and the functions in `TEXTS` are not mutated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Step = tuple[str, int | None]  # a field of a node, and the index if the field is a list

TEXTS = {"__repr__", "__str__", "brief"}
NAMING = ("need_", "positive")  # functions with a text argument that their errors quote
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SKIPPED_FIELDS = {
    ast.FunctionDef: {"decorator_list", "returns"},
    ast.ClassDef: {"decorator_list", "bases", "keywords"},
    ast.arg: {"annotation"},
    ast.AnnAssign: {"annotation", "target"},
    ast.Raise: {"exc", "cause"},
    ast.ExceptHandler: {"type"},
}
_SKIPPED = ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr


@dataclass(frozen=True)
class Mutant:
    """A single change to a module."""

    path: tuple[Step, ...]
    new: ast.AST
    function: str
    """qualified name of the outermost function around it; empty for what runs when the module is imported"""
    lines: tuple[int, ...]
    """where its statement starts, and where it stands itself"""
    code: str
    """the text of its line: with `change` what names it, whatever lines are added above"""
    change: str


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Return the syntax tree of a module with one change."""
    tree = ast.parse(source)
    node: ast.AST = tree
    for field, i in mutant.path[:-1]:
        value = getattr(node, field)
        node = value if i is None else value[i]
    field, i = mutant.path[-1]
    if i is None:
        old = getattr(node, field)
        setattr(node, field, ast.copy_location(mutant.new, old))
    else:
        old = getattr(node, field)[i]
        getattr(node, field)[i] = ast.copy_location(mutant.new, old)
    return ast.fix_missing_locations(tree)


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module, in line order."""
    return list(_Finder(source).below(ast.parse(source), ()))


@dataclass(frozen=True)
class _Place:
    """Context of a node: the surroundings that determine its changes."""

    function: ast.FunctionDef | None = None
    name: str = ""
    line: int = 0
    known: frozenset[str] = frozenset()


_NOWHERE = _Place()


class _Finder:
    def __init__(self, source: str) -> None:
        self.rows = source.splitlines()

    def below(
        self, node: ast.AST, path: tuple[Step, ...], place: _Place = _NOWHERE, owner: str = ""
    ) -> Iterator[Mutant]:
        """Yield the mutants below a node."""
        for field, value in ast.iter_fields(node):
            if field in _SKIPPED_FIELDS.get(type(node), ()):
                continue
            inside = place
            if isinstance(node, ast.FunctionDef) and field == "body" and place.function is None:
                names = frozenset(a.arg for a in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs))
                inside = _Place(node, owner + node.name, node.lineno, names)
            for i, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST) and not _is_left_out(child, node, field, i):
                    yield from self._at(child, node, (*path, (field, i)), inside, owner)
                    inside = _after(child, inside)

    def _at(
        self, node: ast.AST, around: ast.AST, path: tuple[Step, ...], place: _Place, owner: str
    ) -> Iterator[Mutant]:
        line = getattr(node, "lineno", place.line)
        if isinstance(node, ast.stmt):
            place = _Place(place.function, place.name, line, place.known)
        for new in _instead(node, around, path[-1][0], place):
            code, change = self.rows[line - 1].strip(), _change(node, new, around)
            yield Mutant(path, new, place.name, (place.line, line), code, change)
        if isinstance(node, ast.ClassDef):
            owner = f"{owner}{node.name}."
        yield from self.below(node, path, place, owner)


def _is_left_out(node: ast.AST, parent: ast.AST, field: str, i: int | None) -> bool:
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.FunctionDef) and node.name in TEXTS):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return True
    if isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and _text(node.targets[0]) in {"__all__", "__slots__", "T"}:
        return True
    if isinstance(node, ast.Call) and _text(node.func).endswith("Error"):
        return True
    called = _text(parent.func) if isinstance(parent, ast.Call) else ""
    if called == "zip" and isinstance(node, ast.keyword):  # strict=True: the lengths are equal anyway
        return True
    if called.startswith(NAMING):
        return isinstance(node, ast.Constant) and isinstance(node.value, str)
    return field == "args" and (called, i) in {("isinstance", 1), ("cast", 0)}  # types


def _after(statement: ast.AST, place: _Place) -> _Place:
    """Add the names bound by a statement to those that may stay unbound in the next one."""
    if place.function is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return place
    names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return _Place(place.function, place.name, place.line, place.known | names)


def _text(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def _change(old: ast.AST, new: ast.AST, around: ast.AST) -> str:
    """Describe a change; a constant is ambiguous without its context."""
    where = f"{_text(around)}: " if isinstance(old, ast.Constant) and isinstance(around, ast.expr) else ""
    return f"{where}{_text(old)} -> {_text(new)}"


def _instead(node: ast.AST, around: ast.AST, field: str, place: _Place) -> Iterator[ast.AST]:
    """Yield a node's replacements."""
    if field in {"test", "ifs"} and not isinstance(node, ast.Constant):
        yield ast.Constant(False)
        if not isinstance(around, ast.While):  # would never terminate
            yield ast.Constant(True)
    if isinstance(node, ast.stmt):
        yield from _statement(node, place)
    elif isinstance(node, ast.expr):
        yield from _expression(node)


def _expression(node: ast.expr) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield ast.Compare(node.left, [*node.ops[:i], _COMPARE[type(op)](), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Call) and _text(node.func) in _CALLED:
        yield ast.Call(ast.Name(_CALLED[_text(node.func)], ast.Load()), node.args, node.keywords)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
        elif isinstance(node.value, str):
            yield ast.Constant("?" + node.value)


def _statement(node: ast.stmt, place: _Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None and _text(node.value) != "None":
        yield ast.Return(ast.Constant(None))
        kind = _text(place.function.returns) if place.function and place.function.returns else ""
        if kind in {"Poly", "int", "Rational"} and _text(node.value) not in {"ZERO", "0"}:
            yield ast.Return(ast.BinOp(node.value, ast.Mult(), ast.Constant(0)))
        elif kind == "bool":
            yield ast.Return(ast.UnaryOp(ast.Not(), node.value))
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
    if _can_be_dropped(node, place):
        yield ast.Pass()


def _can_be_dropped(node: ast.stmt, place: _Place) -> bool:
    """Whether a function still runs without a statement: any test would detect an unbound name."""
    if place.function is None:
        return False
    if isinstance(node, ast.Assign):
        return all(not isinstance(t, ast.Name) or t.id in place.known for t in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Expr)
