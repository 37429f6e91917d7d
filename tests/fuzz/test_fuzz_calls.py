"""Unusual arguments to every public name give a result or an error; no amount is negative or infinite."""

import dataclasses
import inspect
import itertools
import math
import random
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager

import hostile
import numpy as np
import pytest
import sympy
from budget import examples
from calls import CALLS, CLASSES, FUNCTIONS, METHODS, setting
from guard import SECONDS, show
from limits import TooSlowError, limited
from public import PUBLIC, RECORDS

import costgraph as cg
from costgraph.ir import graph
from costgraph.ir.graph import (
    building,
    here,
)
from costgraph.notation import validation

B = cg.dims("B")

#: Table rows that only the library constructs, so users never call them.
ROWS = {"Action", "CostRow", "Lifetime", "RooflineRow", "Tensor"}
#: Results that may be negative or infinite: user inputs, differences, and thresholds that are never reached.
SIGNED = {"compare", "leading_term", "regimes", "evaluate", "compile", "units.exact", "units.Quantity", "DType.round"}
SIGNED |= {"crossover", *CLASSES}


def odd_values(e):
    """Yield constructors, because iterators are consumed on use and megabyte texts are slow to build."""
    constants = [v for v in hostile.VALUES if v is not len]  # a callback's exceptions belong to the caller
    texts = [t for t in hostile.TEXTS if len(t) < 1000]
    sizes = [
        sympy.sin(B), sympy.log(2 * B), sympy.sqrt(B) - 10, sympy.pi, sympy.nan, sympy.oo, sympy.zoo, sympy.I, -B,
        B - 100, B / 7, sympy.Derivative(sympy.Function("f")(B), B), sympy.Symbol("q"), sympy.Float(2.5), B > 1,
        sympy.Matrix([B]), sympy.Integer(2), B**1024,
    ]  # fmt: skip
    arrays = [
        np.int32(3), np.uint8(255), np.float32("nan"), np.float64("inf"), np.bool_(True), np.array(3),
        np.array([[1, 2], [3, 4]]), np.array([]), np.datetime64("2020-01-01"), np.ma.masked,
    ]  # fmt: skip
    graphs = [
        lambda: cg.Graph("other"), lambda: cg.Graph("other").input("f", (2, 3)), lambda: e.lm, lambda: e.step,
        lambda: e.op, lambda: e.costs, lambda: e.roofline, lambda: e.hardware, lambda: cg.every(2), cg.AdamW,
        lambda: cg.Domain(True), lambda: cg.Policy("p"), lambda: cg.dtype("int4"), lambda: e.x, lambda: e.ids,
        lambda: e.n, lambda: (e.x, e.w), lambda: [e.x, None], lambda: {"one": e.x},
    ]  # fmt: skip
    others = [
        lambda: (i for i in (1, 2)), lambda: itertools.count(1), lambda: iter([]), lambda: hostile.nested(500),
        lambda: lambda *given, **named: 5, lambda: lambda *given, **named: given, lambda: cg.Graph, lambda: -3,
        lambda: [1, 0], lambda: (10**30, 1), lambda: {"B": -1}, lambda: {1, 2}, lambda: 2.0, lambda: 40,
    ]  # fmt: skip
    return [(lambda v=v: v) for v in (*constants, *texts, *sizes, *arrays)] + graphs + others


def slots(function, args, named):
    """Yield paths to every argument: given arguments, elements of their lists, and options left at their default."""
    given = [(i,) for i in range(len(args))] + [(name,) for name in named]
    inner = [
        (*r, k) for r in given for v in [_at(args, named, r)] if isinstance(v, list | tuple) for k in range(len(v))
    ]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        parameters = []
    taken = {p.name for p in parameters[: len(args)]}
    free = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return given + inner + [(p.name,) for p in free if p.name not in {*named, *taken}]


def _at(args, named, route):
    return args[route[0]] if isinstance(route[0], int) else named.get(route[0])


def replaced(args, named, route, value):
    """Return the arguments with one of them, or one list element, replaced."""
    args, named = list(args), dict(named)
    if len(route) == 2:
        held = _at(args, named, route)
        if not isinstance(held, list | tuple):
            return args, named  # the whole argument is already replaced
        value = type(held)([*held[: route[1]], value, *held[route[1] + 1 :]])
    (args if isinstance(route[0], int) else named)[route[0]] = value
    return args, named


def amounts(found, depth=0):
    """Yield every number in a result."""
    if isinstance(found, bool | str | bytes | None | cg.Graph | cg.Tensor | cg.Hardware | cg.DType) or depth > 4:
        return
    if isinstance(found, int | float | sympy.Expr):
        yield found
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for f in dataclasses.fields(found):
            yield from amounts(getattr(found, f.name), depth + 1)
    elif isinstance(found, Mapping | list | tuple):
        for value in found.values() if isinstance(found, Mapping) else found:
            yield from amounts(value, depth + 1)


def is_amount(n):
    if isinstance(n, sympy.Expr):
        return not n.has(sympy.nan, sympy.oo, -sympy.oo, sympy.zoo, sympy.I)
    return (isinstance(n, int) or math.isfinite(n)) and n >= 0


def use(e, found):
    """Use a result as intended; silently accepted arguments fail here."""
    if isinstance(found, AbstractContextManager) and not isinstance(found, cg.Graph):
        with found:
            cg.relu(e.x)
    elif isinstance(found, cg.optimizers.optimizer.Optimizer):
        cg.training_step(e.loss, optimizer=found)
    elif isinstance(found, cg.Checkpoint):
        cg.backward(e.loss, checkpoint=found)
    elif isinstance(found, cg.Policy):
        cg.apply_precision(e.loss, found)
    elif isinstance(found, cg.DType):
        cg.peak_memory(cg.Graph("h").input("h", (B, 6), found).graph)


def at_the_boundary(error):
    """Whether Python itself rejected the call: missing or unexpected arguments."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    doors = (__file__, ""), (validation.__file__, "entered"), (graph.__file__, "called")
    return isinstance(error, TypeError) and any(place.filename == f and place.name.endswith(n) for f, n in doors)


def ask(name, e, function, args, named):
    """Return the problem with a call, None if there is none."""
    before = here()
    try:
        with limited(SECONDS):
            result = function(*args, **named)
            use(e, result)
            wrong = [] if name in SIGNED else [n for n in amounts(result) if not is_amount(n)]
            if e.g.nodes:
                wrong += [
                    n for q in (cg.flops, cg.bytes_moved, cg.peak_memory) for n in [q(e.g, B=2)] if not is_amount(n)
                ]
        problem = f"the amount {show(wrong[0])}" if wrong else None
    except cg.CostGraphError as error:
        problem = None if 0 < len(str(error)) <= 2100 else f"a text of {len(str(error))} characters"
    except (Exception, TooSlowError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = (
            None
            if at_the_boundary(error)
            else f"{type(error).__name__} {str(error)[:200]} in {place.filename}:{place.lineno}"
        )
    after = here()
    return problem or (None if before is after else f"what is open is {after}, before it was {before}")


def odd_call(name, rng, folder):
    """Replace one or two arguments in a valid call; return its problem and the call as text."""
    e = setting()
    e.folder = folder
    what, given = CALLS[name]
    with building(e.g):
        function, (args, named) = what(e), given(e)
        odd = odd_values(e)
        routes = slots(function, args, named)
        for route in rng.sample(routes, min(len(routes), rng.choice([1, 1, 2]))):
            args, named = replaced(args, named, route, rng.choice(odd)())
        return ask(name, e, function, args, named), f"{name}{show((*args, named))[:400]}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text may be a path
    e = setting()
    cg.save(e.loss, tmp_path / "g.json")
    header = b'{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    return tmp_path


def test_every_public_name_has_a_call():
    public = {n for n, found in (PUBLIC | RECORDS).items() if inspect.isroutine(found) or isinstance(found, type)}
    errors = {n for n in public if inspect.isclass(PUBLIC.get(n)) and issubclass(PUBLIC[n], Exception)}
    assert public - errors - ROWS == FUNCTIONS.keys() | CLASSES.keys()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_public_method_has_a_call(name):
    members = vars((PUBLIC | RECORDS)[name])
    methods = {k for k, v in members.items() if inspect.isfunction(v) and not k.startswith("_")}
    methods = {k for k in methods if hasattr(members[k], "__wrapped__")}  # methods that check their arguments
    networkx = {k for k in methods if k.startswith(("add_", "clear", "remove_"))}
    assert methods - networkx == (METHODS[name][1].keys() if name in METHODS else set())


def test_valid_calls_succeed(folder):
    for name, (what, given) in CALLS.items():
        if name == "Hardware.attained":
            continue  # needs a measured device
        e = setting()
        e.folder = folder
        with building(e.g):
            args, named = given(e)
            what(e)(*args, **named)


def test_odd_calls_are_answered_or_refused(folder):
    problems = []
    for name in sorted(CALLS):
        for i in range(examples(4)):
            problem, call = odd_call(name, random.Random(f"{name} {i}"), folder)
            problems += [f"{problem} from {call}"] if problem else []
    assert not problems, f"{len(problems)} calls:\n" + "\n".join(problems)


def test_missing_and_unknown_arguments_are_left_to_python(folder):
    for call in (lambda: cg.flops(), lambda: cg.relu(setting().x, no_such=1), lambda: cg.relu(setting().x, True)):
        with pytest.raises(TypeError) as caught:
            call()
        assert at_the_boundary(caught.value)
