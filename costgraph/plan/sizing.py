"""How large: questions of planning, answered by search on the derived formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm, prod
from typing import Annotated, Any

from ..algebra.polynomial import ONE, Poly, poly
from ..analysis.memory import peak_memory
from ..bind.evaluate import need_bound
from ..errors import BindingError
from ..graph.graph import Graph
from ..graph.sizes import bindings, need_open, size_of
from ..graph.tensor import Tensor
from ..hardware.specs import Hardware, load_hardware
from ..notation.door import Rule, rule

__all__ = ["is_allowed", "largest", "memory_limit", "parts_of", "rooms", "smallest"]

# Beyond this the answer is that the dimension takes no memory.
_MOST = 2**62
#: What memory there is.
Bytes = Annotated[float, Rule("a positive number of bytes", lambda n: rule(float).holds(n) and n > 0, BindingError)]
# Assumptions may be against small sizes: the smallest that none is against is looked for below this.
_FEWEST = 2**12


def memory_limit(place: str, hardware: str | Hardware | None, memory: float | None) -> float:
    """Return the bytes that there are: those given, or the capacity of a device; one of the two has to be said."""
    if (hardware is None) == (memory is None):
        raise BindingError(f"{place}: expected a limit, either hardware= or memory=")
    return float(load_hardware(hardware).capacity().value if hardware is not None else memory or 0)


def is_allowed(graph: Graph, dims: dict[str, Any]) -> bool:
    """Whether nothing that is assumed of sizes is against these."""
    try:
        bindings(graph, dims)
    except BindingError:
        return False
    return True


def smallest(allowed: Callable[[int], bool]) -> int:
    """Return the smallest size that is allowed, 1 where none of the first ones is."""
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
        What has to fit, such as a step of training.
    symbol : str
        Dimension that is searched, such as `"B"`; peak memory never falls as it grows.
    hardware : str or Hardware, optional
        Device whose usable memory (`Hardware.capacity`) is the limit.
    memory : int or float, optional
        Limit in bytes; one of the two has to be given.
    multiple_of : int
        Only multiples of it are tried, such as the number of heads for a width.
    **dims : int
        Sizes of all other dimensions.

    Returns
    -------
    int
        The largest size that fits and that nothing assumed is against, 0 if not even the smallest does.

    Raises
    ------
    BindingError
        If a dimension is unknown or left open, no limit or two are given, or every size fits.

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

    bindings(graph, dims)  # what is wrong with these is no matter of the size that is looked for

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
            raise BindingError(f"largest: every {symbol} fits, expected a dimension that takes memory")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * multiple_of


def parts_of(graph: Graph, t: Tensor, along: str) -> Poly:
    """Return over how many ranks a source is split along a size."""
    place = None if graph.sharding is None else graph.sharding.places.get(t.name)
    if graph.sharding is None or place is None:
        return ONE
    split = (dim for dim, size in zip(place.dims, t.sizes, strict=True) if along in size.names())
    return prod((graph.sharding.mesh[f] for dim in split for f in dim if isinstance(f, str)), start=ONE)


def rooms(graph: Graph, sizes: Mapping[str, int], along: str) -> Callable[[int], int]:
    """Return how many positions caches of all ranks have room for, by how many there are: each rank has as many."""
    values = {name: poly(n) for name, n in sizes.items()}
    caches = (t for g in graph.bodies() for t in g.tensors if t.role == "cache")
    found = {parts_of(graph, t, along).bind(values).constant for t in caches}
    ranks = lcm(*(int(n) for n in found if n is not None))
    return lambda size: -(-size // ranks) * ranks
