"""Laws of identity: what a graph costs depends on no name, on no order of its sources, and on no way through a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import sympy

from ..algebra.polynomial import poly
from ..algebra.symbols import dims
from ..graph.graph import Graph
from ..notation.grammar import parse_formula
from ..report import report
from .arithmetic import value
from .files import loaded, saved
from .laws import QUESTIONS, Trial, law, same

__all__ = ["renamed"]

Data = dict[str, Any]


def _names(data: Data) -> list[str]:
    """Return the names of all tensors and ops, those in bodies included."""
    out = []
    for node in data["nodes"]:
        out.append(node["id"])
        body = node.get("attrs", {}).get("body")
        out += _names(body["graph"]) if body else []
    return out


def renamed(data: Data, names: Mapping[str, str], symbols: Mapping[str, str]) -> Data:
    """Return the data of the same graph with other names of tensors and ops, and other symbols."""
    swapped = {dims(old): dims(new) for old, new in symbols.items()}

    @cache
    def size(text: str) -> str:
        return str(poly(parse_formula(text, "size").expr.xreplace(swapped))) if swapped else text

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        if not isinstance(value, str):
            return value
        if key in ("shape", "strides", "offset", "size"):
            return size(value)
        if key == "assumptions":
            return _WORD.sub(lambda m: symbols.get(m.group(), m.group()), value)
        return names.get(value, value) if key in _NAMED else value

    found: Data = walk(data)
    return found


_WORD = re.compile(r"[A-Za-z_]\w*")
_NAMED = ("id", "operands", "results", "source", "target", "formals", "outputs", "gradients")


@law
def no_cost_depends_on_names(trial: Trial) -> None:
    """Tensors, ops and scopes may be called anything."""
    data = trial.data
    names = {old: f"n{i}" + ("()" if old.endswith("()") else "") for i, old in enumerate(reversed(_names(data)))}
    _same_answers(trial, loaded(renamed(data, names, {})), "under other names")


@law
def renaming_symbols_renames_formulas(trial: Trial) -> None:
    """The formula in other symbols is the formula, its symbols renamed, also where they stand in another order then."""
    names = sorted(trial.point)
    others = dict(zip(names, [*names[1:], "A_longer_name"], strict=False))
    graph = loaded(renamed(trial.data, {}, others))
    for question, ask in QUESTIONS.items():
        expected, found = ask(trial.graph), ask(graph)
        if isinstance(expected, sympy.Expr):
            new = {others[n]: trial.point[n] for n in names}
            same(value(found, new), value(expected, trial.point), f"{question} in other symbols")
            swapped = {dims(n): dims(others[n]) for n in names}
            if expected.is_polynomial():  # other forms of the same function are as good
                assert sympy.expand(expected.xreplace(swapped) - found) == 0, f"{question} is {found}, was {expected}"
        else:
            same(found, expected, f"{question} in other symbols")


@law
def no_cost_depends_on_the_order_of_sources(trial: Trial) -> None:
    """Inputs, parameters and buffers may be declared in any order."""

    def turned(data: Data) -> Data:
        sources = [n for n in data["nodes"] if n["type"] == "tensor" and n["role"] not in ("result",)]
        nodes = [{**n, "attrs": _turned_body(n["attrs"])} if n["type"] == "op" else n for n in data["nodes"]]
        rest = [n for n in nodes if n["type"] == "op" or n["role"] == "result"]
        return {**data, "nodes": [*reversed(sources), *rest]}

    def _turned_body(attrs: Data) -> Data:
        return {**attrs, "body": {"graph": turned(attrs["body"]["graph"])}} if "body" in attrs else attrs

    _same_answers(trial, loaded(turned(trial.data)), "with sources in another order")


@law
def saving_and_loading_is_the_identity(trial: Trial) -> None:
    """The file of a loaded graph is the file that it was loaded from, and every answer is the same."""
    data = trial.data
    again = loaded(data)
    assert saved(again) == data, "the file of the loaded graph differs"
    _same_answers(trial, again, "after saving and loading")
    for question, ask in QUESTIONS.items():
        assert ask(again) == ask(trial.graph), f"the formula of {question} differs after saving and loading"


def _same_answers(trial: Trial, graph: Graph, how: str) -> None:
    for question, ask in QUESTIONS.items():
        assert ask(graph, **trial.point) == trial.answers[question], f"{question} differs {how}"


@law
def what_validates_can_be_reported(trial: Trial) -> None:
    """A report, with sizes open and bound, in text, and the graph itself prints."""
    trial.graph.validate()
    bound = report(trial.graph, None, **trial.point)  # type: ignore[arg-type]  # sizes alone
    for found in (report(trial.graph), bound):
        assert found.figures
        assert find_spec("rich") is None or str(found)  # what text is drawn with is an extra
    assert all(repr(node) for node in trial.graph)
