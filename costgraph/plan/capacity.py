"""Capacity: how many parameters, tokens or samples fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import lcm, prod
from typing import Annotated, Any

import sympy

from ..algebra.polynomial import ONE, Poly, poly
from ..analysis.memory import peak_memory
from ..analysis.training import given
from ..bind.evaluate import Formula, answer, need_bound
from ..errors import BindingError
from ..hardware.specs import Hardware, load_hardware
from ..ir.graph import Graph, Tensor, bindings, need_open
from ..ir.graph import dimension_size as size_of
from ..notation.validation import Rule, rule

__all__ = [
    "dataset_bytes",
    "dataset_tokens",
    "largest_params",
    "is_allowed",
    "largest",
    "memory_limit",
    "parts_of",
    "rooms",
    "smallest",
]


# -- closed formulas ---------------------------------------------------------------------------------------------------
# Any argument may be a symbol.


def largest_params(memory: object, bytes_per_param: Formula, *, devices: Formula = 1) -> Formula:
    """Return how many parameters fit, counting training state only: activations are extra.

    Parameters
    ----------
    memory : str, path-like, Hardware, number or sympy.Expr
        A device, whose usable memory (`Hardware.capacity`) is the limit, or a number of bytes.
    bytes_per_param : number or sympy.Expr
        Bytes for each parameter, such as `costgraph.bytes_per_param(step)`.
    devices : number or sympy.Expr
        Number of devices that share the state evenly.

    Returns
    -------
    int or sympy.Expr
        Parameters, rounded down.

    Raises
    ------
    BindingError, SpecError
        If an amount is not positive, or the device is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16")
    >>> cg.plan.largest_params("h100-sxm", 16, devices=8)
    42508746752
    >>> cg.plan.largest_params("h100-sxm", cg.bytes_per_param(step), devices=8)
    56678329002
    >>> cg.plan.largest_params(cg.dims("M"), 16)
    floor(M/16)
    """
    if isinstance(memory, str | os.PathLike | Hardware):
        memory = load_hardware(memory).capacity().value
    room = given("largest_params: memory", memory) * given("largest_params: devices", devices)
    return answer(sympy.floor(room / given("largest_params: bytes_per_param", bytes_per_param)))


def dataset_bytes(tokens: Formula, bytes_per_token: Formula) -> Formula:
    """Return the size of a data set in bytes.

    Parameters
    ----------
    tokens : number or sympy.Expr
        Number of tokens.
    bytes_per_token : number or sympy.Expr
        Bytes for each token, such as 2 for token indices below 65,536, or 4 for text.

    Returns
    -------
    int, float or sympy.Expr
        Bytes.

    Raises
    ------
    BindingError
        If an amount is not positive.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.dataset_bytes(15e12, 4)
    60000000000000
    """
    each = given("dataset_bytes: bytes_per_token", bytes_per_token)
    return answer(given("dataset_bytes: tokens", tokens) * each)


def dataset_tokens(size: Formula, bytes_per_token: Formula) -> Formula:
    """Return the number of tokens in a data set.

    Parameters
    ----------
    size : number or sympy.Expr
        Size in bytes.
    bytes_per_token : number or sympy.Expr
        Bytes for each token, such as 2 for token indices below 65,536, or 4 for text.

    Returns
    -------
    int, float or sympy.Expr
        Tokens, not rounded.

    Raises
    ------
    BindingError
        If an amount is not positive.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.dataset_tokens(2.8e12, 2)
    1400000000000
    """
    each = given("dataset_tokens: bytes_per_token", bytes_per_token)
    return answer(given("dataset_tokens: bytes", size) / each)


# -- search ------------------------------------------------------------------------------------------------------------

# If even this size fits, the dimension takes no memory.
_MOST = 2**62
#: A memory limit.
Bytes = Annotated[float, Rule("a positive number of bytes", lambda n: rule(float).holds(n) and n > 0, BindingError)]
# Conditions may exclude small sizes: the smallest allowed size is searched below this.
_FEWEST = 2**12


def memory_limit(place: str, hardware: str | Hardware | None, memory: float | None) -> float:
    """Return the memory limit in bytes: the one given, or the capacity of a device; exactly one is required."""
    if (hardware is None) == (memory is None):
        raise BindingError(f"{place}: expected exactly one limit, hardware= or memory=")
    return float(load_hardware(hardware).capacity().value if hardware is not None else memory or 0)


def is_allowed(graph: Graph, dims: dict[str, Any]) -> bool:
    """Whether sizes satisfy the conditions of a graph."""
    try:
        bindings(graph, dims)
    except BindingError:
        return False
    return True


def smallest(allowed: Callable[[int], bool]) -> int:
    """Return the smallest allowed size, 1 if none of those tried is."""
    return next((n for n in range(1, _FEWEST) if allowed(n)), 1)


def largest(
    graph: Graph,
    symbol: str,
    /,
    *,
    hardware: str | Hardware | None = None,
    memory: Bytes | None = None,
    multiple_of: int = 1,
    **dims: int,
) -> int:
    """Return the largest size of a dimension for which the peak memory fits.

    Parameters
    ----------
    graph : Graph
        The graph that has to fit, such as a training step.
    symbol : str
        Dimension to maximize, such as `"B"`; peak memory must not fall as it grows.
    hardware : str or Hardware, optional
        Device whose usable memory (`Hardware.capacity`) is the limit.
    memory : int or float, optional
        Memory limit in bytes; give either `hardware` or `memory`.
    multiple_of : int
        Try only multiples of this number, such as the number of heads for a width.
    **dims : int
        Sizes of all other dimensions.

    Returns
    -------
    int
        The largest size that fits and satisfies the graph's conditions, 0 if there is none.

    Raises
    ------
    BindingError
        If a dimension is unknown or unbound, no limit or two are given, or every size fits.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(g.input("x", (B, D))))
    >>> cg.largest(g, "B", memory=80e9, D=1000)  # 8*B*D bytes
    10000000
    >>> step = cg.training_step(cg.models.load("gpt2"), precision="bf16", checkpoint=cg.every_block())
    >>> L = cg.largest(step, "L", hardware="h100-sxm", B=8, S=1024)  # the deepest model
    >>> L, cg.param_count(step, L=L)
    (744, 5312762112)
    """
    need_open(graph, symbol, dims, "largest")
    limit = memory_limit("largest", hardware, memory)

    multiple_of = size_of("largest: multiple_of", multiple_of)

    bindings(graph, dims)  # errors in these do not depend on the size that is searched

    def allowed(size: int) -> bool:
        return is_allowed(graph, {**dims, symbol: size * multiple_of})

    def fits(size: int) -> bool:
        if not allowed(size):
            return False
        sizes: dict[str, Any] = {**dims, symbol: size * multiple_of}
        peak = peak_memory(graph, **sizes)
        need_bound([peak], f"largest {symbol}")
        return bool(peak <= limit)

    low = smallest(allowed)
    if not fits(low):
        return 0
    high = 2 * low
    while fits(high):
        low, high = high, high * 2
        if high > _MOST:
            raise BindingError(f"largest: every size of {symbol} fits; expected a dimension that memory depends on")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * multiple_of


def parts_of(graph: Graph, t: Tensor, along: str) -> Poly:
    """Return the number of ranks that split a source along a dimension."""
    placement = None if graph.sharding is None else graph.sharding.places.get(t.name)
    if graph.sharding is None or placement is None:
        return ONE
    split = (dim for dim, size in zip(placement.dims, t.sizes, strict=True) if along in size.names())
    return prod((graph.sharding.mesh[f] for dim in split for f in dim if isinstance(f, str)), start=ONE)


def rooms(graph: Graph, sizes: Mapping[str, int], along: str) -> Callable[[int], int]:
    """Return a function that rounds a sequence length up to equal cache lengths on all ranks."""
    values = {name: poly(n) for name, n in sizes.items()}
    caches = (t for g in graph.bodies() for t in g.tensors if t.role == "cache")
    split_counts = {parts_of(graph, t, along).bind(values).constant for t in caches}
    ranks = lcm(*(int(n) for n in split_counts if n is not None))
    return lambda size: -(-size // ranks) * ranks
