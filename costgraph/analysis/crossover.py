"""At which size an op or a graph changes from memory-bound to compute-bound."""

from __future__ import annotations

import math

import sympy

from ..algebra.polynomial import ONE, Poly, total
from ..bind.evaluate import Formula, answer
from ..errors import GraphError, UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.sizes import bindings, need_open
from ..hardware.specs import Hardware, load_hardware
from .roofline import Fallback, exact, works

__all__ = ["crossover"]

# Sizes up to which a crossover is looked for, as powers of two.
_DOUBLINGS = 61


def crossover(
    of: Graph | Op, hardware: str | Hardware, symbol: str, /, *, fallback: Fallback = None, **dims: int
) -> Formula:
    """Return the size at which an op or a graph changes from memory-bound to compute-bound.

    Parameters
    ----------
    of : Graph or Op
        What is asked; a graph as declared, all its ops together.
    hardware : str, path-like or Hardware
        The device.
    symbol : str
        Dimension that is solved for, such as `"B"`.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        Sizes of other dimensions.

    Returns
    -------
    sympy.Expr or float
        Where compute time equals memory time: a formula while others are open, else a number; where that is no ratio
        of two sums, the first whole size after the change. `math.inf` where it is memory-bound at every size, 0 where
        it is compute-bound at every size.

    Raises
    ------
    BindingError, SpecError, UnsupportedError
        If a name is no dimension, the device lacks a rate, or there is no closed form: bind the other sizes then.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> round(cg.crossover(g, "h100-sxm", "N"), 1)
    886.0
    """
    if not isinstance(of, Graph | Op):
        raise GraphError(f"crossover of {type(of).__name__}, expected a graph or one of its ops")
    device = load_hardware(hardware)
    graph = of if isinstance(of, Graph) else of.graph.root
    need_open(graph, symbol, dims, "crossover")
    values = bindings(graph, dims)
    values.pop(symbol, None)
    chosen = [w for w in works(graph) if of is graph or w.op is of]
    if not chosen:
        raise GraphError(f"crossover: op {getattr(of, 'name', '')!r} does nothing that takes time")
    times = [w.seconds(device, fallback) for w in chosen]
    excess = total(c - m for c, m in times).bind(values)
    found = _root(excess, symbol)
    return answer(found, values.held) if isinstance(found, sympy.Expr) else found


def _root(excess: Poly, symbol: str) -> Formula:
    """Solve for where an excess of compute over memory becomes positive."""
    powers: dict[int, list[Poly]] = {}
    for m, c in excess.terms.items():
        power = dict(m).get(symbol, 0)
        rest = Poly({tuple(f for f in m if f[0] != symbol): c})
        if symbol in rest.names():
            return _search(excess, symbol)
        powers.setdefault(power, []).append(rest)
    sums = {p: total(parts) for p, parts in powers.items() if total(parts)}
    signs = {c >= 0 for p in sums.values() for c in p.terms.values()}
    if len(signs) < 2:
        return 0 if signs != {False} else math.inf
    least = min(sums)
    if max(sums) - least == 1:
        return answer(sympy.cancel(-sums[least].expr / sums[least + 1].expr))
    return _search(excess, symbol)


def _search(excess: Poly, symbol: str) -> Formula:
    """Find by bisection the first size after the bound changes; everything else has to be bound."""
    left = sorted(excess.names() - {symbol})
    if left:
        raise UnsupportedError(
            f"crossover: no closed form for {symbol} in {excess}, expected sizes for {', '.join(left)}"
        )

    def positive(size: int) -> bool:
        return bool(exact(excess.bind({symbol: ONE * size})) >= 0)

    signs = [positive(2**i) for i in range(_DOUBLINGS)]
    changes = [i for i in range(_DOUBLINGS - 1) if signs[i] != signs[i + 1]]
    if not changes:
        return 0 if signs[0] else math.inf
    if len(changes) > 1:
        places = ", ".join(str(2**i) for i in changes)
        raise UnsupportedError(f"crossover: {symbol} has several, above {places}, expected an op or a graph with one")
    low, high = 2 ** changes[0], 2 ** (changes[0] + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if positive(middle) == signs[changes[0]] else (low, middle)
    return high
