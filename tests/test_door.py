"""Argument validation: the types that annotations require and the metadata of decorated functions."""

import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

import numpy as np
import pytest
import sympy
from each import each
from public import FUNCTIONS, NAMESPACES, PUBLIC, RECORDS

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.notation.validation import (
    READ,
    REAL,
    checked,
    rule,
)
from costgraph.report import Report

T = TypeVar("T")
NAN, INF = float("nan"), float("inf")
B, D = cg.dims("B D")


@each(
    ("hint", "good", "odd"),
    [
        (bool, [True], [1, None, np.bool_(True)]),
        (int, [1, -1, np.int64(3), 10**400, sympy.Integer(2)], [True, 1.0, "1", None, B, 10**5000]),
        (float, [1, 0.5, Fraction(1, 3), np.float32(2)], [True, NAN, INF, 10**400, 1j, "1", np.array(1.0)]),
        (str, ["", "x"], [b"x", None, 5]),
        (str | None, ["x", None], [5]),
        (Any, [None, object], []),
        (T, [None, object], []),
        (cg.Graph, [cg.Graph()], [cg.Graph, None, "g"]),
        (Callable[..., int], [len, lambda: 0], [int, 5, None]),
        (Sequence[int], [[1], (), (2, 3)], ["12", [None], {1}, 5, iter([1])]),
        (Sequence[object], [5], []),
        (Iterable[int], [[1], {1}, iter("ab"), range(3)], ["12", 5, [None]]),
        (tuple[int, ...], [(1, 2), [3]], [5, ("a",)]),
        (tuple[float | None, float], [(None, 1), (1, 2)], [(1,), (1, None), 5, (1, NAN)]),
        (Mapping[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "b"}, [("a", 1)], None]),
        (dict[str, int], [{"a": 1}], [None, {"a": None}]),
        (frozenset[str], [frozenset("a")], [{"a"}, frozenset([1])]),
        (Annotated[float, REAL], [NAN, INF, 1], [True, 10**400, "1", None]),
        (Annotated[int, READ], ["anything"], []),
        (type(poly(B)), [poly(B)], [B, 3]),
    ],
)
def test_annotation_checks_accept_and_reject_values(hint, good, odd):
    asked = rule(hint)
    assert [v for v in good if not asked.holds(v)] == []
    assert [v for v in odd if asked.holds(v)] == []


@each(
    ("hint", "text"),
    [
        (int | None, "an integer"),
        (int | float, "a number"),
        (cg.Graph | float | None, "a graph or a number"),
        (Sequence[cg.Tensor], "a list, each a tensor"),
        (Mapping[str, Callable[..., int]], "a mapping from text to a function"),
        (tuple[cg.Tensor, cg.Tensor], "(a tensor, a tensor)"),
        (cg.analysis.roofline.RooflineRow | None, "a roofline row"),
    ],
)
def test_annotation_checks_describe_expected_values(hint, text):
    assert rule(hint).expected == text


def setting():
    g = cg.Graph("g")
    return g, g.input("x", (B, 6))


def stated(**facts):
    for name, value in facts.items():
        setattr(cg.Graph("g"), name, value)


@each(
    ("call", "text"),
    [
        (lambda: cg.roofline(5, "h100-sxm"), "roofline: graph is 5, expected a graph"),
        (lambda: cg.report(None), "report: graph is None, expected a graph"),
        (lambda: cg.fuse("g"), "fuse: graph is 'g', expected a graph"),
        (lambda: cg.save(5, "x.json"), "save: graph is 5, expected a graph"),
        (lambda: cg.state_bytes([]), "state_bytes: step is [], expected a graph"),
        (lambda: cg.ops.keep_alive(setting()[1], 5), "keep_alive: others[0] is 5, expected a tensor"),
        (lambda: cg.nn.moe(setting()[1], 4, 2, 5, gate=5), "moe: gate is 5, expected a function"),
        (lambda: cg.nn.self_attention(setting()[1], 2, 3, rope=5), "rope is 5, expected (a tensor, a tensor)"),
        (lambda: cg.crossover(setting()[0], "h100-sxm", ["B"]), "crossover: symbol is ['B'], expected text"),
        (lambda: cg.AdamW(betas=0.9), "AdamW: betas is 0.9, expected (a number, a number)"),
        (lambda: cg.Muon(ns_coefficients=(1, 2)), "expected (a number, a number, a number)"),
        (lambda: cg.Adafactor(eps=None), "Adafactor: eps is None, expected (a number, a number)"),
        (lambda: cg.Max(B, D, owners=5), "Max: owners is 5, expected an owner for each argument"),
        (lambda: cg.Max(B, D, owners=[]), "Max: owners is [], expected an owner for each argument"),
        (lambda: stated(defaults=None), "graph 'g': defaults is None, expected a mapping from text to an integer"),
        (lambda: stated(loss=5), "graph 'g': loss is 5, expected text"),
        (lambda: cg.analysis.costs.Cost(matmul=NAN), "Cost: matmul is nan, expected a number or a formula"),
        (lambda: cg.DType("x", -8, "float"), "x: bits is -8, expected an integer from 1 to 1024"),
        (lambda: cg.DType("x", 8, "float", 10**9), "x: exponent is 1000000000, expected an integer from 0 to 19"),
        (lambda: cg.DType("x", 8, "flaot"), "x: kind is 'flaot', expected one of bool, int, float"),
        (lambda: cg.Checkpoint(interval=NAN), "every: k: size nan: expected"),
        (lambda: cg.Checkpoint(interval=-3), "every: k: -3, expected a positive integer"),
        (lambda: cg.every(INF), "every: k: size inf: expected"),
        (lambda: cg.every_block(inside=5), "every_block: inside is 5, expected a checkpoint"),
        (lambda: cg.every_block(keep=["a b"]), "keep: 'a b', expected identifiers separated by '/'"),
        (
            lambda: cg.every_block(keep=["a"], inside=cg.every_block()),
            "keep: saved results are not recomputed, expected no policy inside=",
        ),
        (lambda: cg.selective("a b"), "selective: 'a b', expected identifiers separated by '/'"),
        (lambda: cg.compile(sympy.zoo), "zoo"),
    ],
)
def test_errors_name_place_value_and_expectation(call, text):
    with pytest.raises(cg.CostGraphError, match=re.escape(text)):
        call()


@each("name", FUNCTIONS)
def test_checked_functions_keep_their_metadata(name):
    function = FUNCTIONS[name]
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.signature(function) == inspect.signature(inspect.unwrap(function))
    assert function.__doc__ == inspect.unwrap(function).__doc__
    assert function.__name__ == name


def test_all_public_annotations_can_be_checked():
    # plans are built on the first call; this builds all of them
    from costgraph.notation.validation import _plan

    for found in [*PUBLIC.values(), *RECORDS.values()]:
        members = [found] if inspect.isfunction(found) else vars(found).values() if inspect.isclass(found) else []
        for member in members:
            if inspect.isfunction(member) and inspect.unwrap(member) is not member and "costgraph" in member.__module__:
                _plan(inspect.unwrap(member))


def test_validation_does_not_consume_iterators():
    def first(values: Iterable[int]) -> int:
        return next(iter(values))

    assert checked(first)(iter([7])) == 7


def test_inherited_fields_from_another_module_are_validated():
    with pytest.raises(cg.GraphError, match="Report: count is 5, expected text"):
        Report(count=5)


#: Contract layers exported both at the top level and in `cg.nn`.
LAYERS = {
    "attention", "conv", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "relu", "rms_norm",
    "sigmoid", "silu", "softmax", "tanh",
}  # fmt: skip


def test_only_contract_layers_have_two_public_paths():
    rooms = ["models", "testing", *(["torch"] if find_spec("torch") else [])]
    doors = NAMESPACES | {f"{room}.": import_module(f"costgraph.{room}") for room in rooms}
    names: dict[int, list[str]] = {}
    for door, module in doors.items():
        for name in module.__all__:
            member = getattr(module, name)
            if callable(member) or inspect.ismodule(member):  # constants have no owner
                names.setdefault(id(inspect.unwrap(member) if callable(member) else member), []).append(door + name)
    twice = [tuple(member) for member in names.values() if len(member) > 1]
    assert sorted(twice) == [(name, f"nn.{name}") for name in sorted(LAYERS)]
