"""A minimal reverse-mode driver and finite differences, as references for the rules."""

import itertools

import numpy as np

from costgraph import Graph
from costgraph.algebra.polynomial import Poly
from costgraph.ops.elementwise import pointwise
from costgraph.ops.layout import KeepAlive
from costgraph.testing import run
from costgraph.transforms.vjp.table import VJPContext, rule_of


def walk(results, seeds, wanted, saved=lambda t: t):
    """Return gradients for some tensors by applying the rules in reverse program order."""
    grads = {}

    def add(t, g):
        grads[t] = g if t not in grads else pointwise("add", grads[t], g)

    for t, seed in zip(results, seeds, strict=True):
        add(t, seed)
    for op in reversed(list(results[0].graph.ops)):
        given = tuple(grads.get(t) for t in op.results)
        if all(g is None for g in given):
            continue
        needs = tuple(t.dtype.kind == "float" for t in op.operands)
        for t, g in zip(op.operands, rule_of(op)(VJPContext(op, given, needs, saved)), strict=True):
            if g is not None:
                assert g.sizes == t.sizes, (op, t, g)
                assert g.dtype == t.dtype, (op, t, g)
                add(t, g)
    return [grads.get(t) for t in wanted]


def built(build, shapes, dtypes=None, dtype="fp64"):
    """Return a graph that applies a function to inputs with these shapes, and seeds for its results."""
    graph = Graph("g", dtype=dtype)
    with graph:
        xs = [graph.input(f"x{i}", s, (dtypes or {}).get(i)) for i, s in enumerate(shapes)]
        made = build(*xs)
        results = list(made) if isinstance(made, tuple) else [made]
        seeds = [graph.input(f"g{i}", [n.expr for n in t.sizes], t.dtype.name) for i, t in enumerate(results)]
    return graph, xs, results, seeds


def gradients(build, arrays, *, dtypes=None, dims=None, saved=lambda t: t, seed=0, numeric=False):
    """Return rule gradients, finite-difference gradients if asked, the graph and the backward ops."""
    dims = dims or {}
    dtypes = dtypes or {}
    shapes = [a[1] if isinstance(a, tuple) else a.shape for a in arrays]  # (array, symbolic shape)
    arrays = [a[0] if isinstance(a, tuple) else a for a in arrays]
    graph, xs, results, seeds = built(build, shapes, dtypes)
    forward = len(graph.ops)
    draw = np.random.default_rng(seed)
    value = {f"x{i}": a for i, a in enumerate(arrays)}
    for s in seeds:
        value[s.name] = draw.uniform(0.5, 1.5, [int(n.bind(_polys(dims)).constant) for n in s.sizes])
    plain, _, outs, _ = built(build, shapes, dtypes)
    with plain:
        plain.output(*outs)

    def loss(at):
        inputs = {k: v for k, v in {**value, **at}.items() if k.startswith("x")}
        outputs = run(plain, inputs, **dims).outputs
        return sum(float(np.nansum(m * value[s.name])) for m, s in zip(outputs, seeds, strict=True))

    floats = [x for x in xs if x.dtype.kind == "float"]
    with graph:
        grads = walk(results, seeds, floats, saved)
        graph.output(*results, *(f for f in grads if f is not None))
    done = iter(run(graph, value, **dims).outputs[len(results) :])
    mine = [np.zeros(value[x.name].shape) if f is None else next(done) for x, f in zip(floats, grads, strict=True)]
    expected = [differences(loss, x.name, value[x.name]) for x in floats] if numeric else []
    return mine, expected, graph, [op for op in graph.ops[forward:] if not isinstance(op.kind, KeepAlive)]


def _polys(dims):
    return {k: Poly({(): v}) for k, v in dims.items()}


def differences(loss, name, array, step=1e-5):
    """Return central differences of a scalar with respect to each array element."""
    out = np.zeros(array.shape)
    for index in itertools.product(*map(range, array.shape)):
        up, down = array.copy(), array.copy()
        up[index] += step
        down[index] -= step
        out[index] = (loss({name: up}) - loss({name: down})) / (2 * step)
    return out


def check(build, *arrays, **options):
    """Compare the rules with finite differences; return the gradients and the backward ops."""
    mine, expected, _, ops = gradients(build, arrays, numeric=True, **options)
    for i, (a, b) in enumerate(zip(mine, expected, strict=True)):
        a = np.nan_to_num(a)  # elements outside a domain are never written
        assert a.shape == b.shape
        assert np.allclose(a, b, rtol=1e-6, atol=1e-7), f"gradient {i}:\n{a}\nexpected\n{b}"
    return mine, ops
