"""What each op costs: the table behind FLOPs, bytes moved and intensity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from functools import reduce as fold

import sympy

from ..algebra.carried import conditioned, held_by, plain
from ..algebra.extremum import Owner, as_expr, extremum
from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..bind.evaluate import Formula, answer, bound_answer
from ..dtypes import promote
from ..errors import GraphError, UnsupportedError
from ..graph.arguments import need_choice, need_flag
from ..graph.graph import Graph, need_graph
from ..graph.loop import Loop
from ..graph.op import Op
from ..graph.sizes import Bindings, bindings, known_names, of_stages
from ..graph.tensor import Storage, Tensor
from ..ops.contraction import Einsum
from ..ops.grouped import Grouped
from ..ops.pieces import Absent, Accumulate, taken
from ..ops.rules import Flops
from .aliases import aliased, situations
from .bounds import least_traffic
from .collecting import collection_paused
from .table import FLOP_KINDS, CostRow, Costs
from .tiling import cache_bytes
from .traffic import compulsory

__all__ = [
    "bytes_moved", "costs", "executions", "flops", "flops_of_kind", "intensity", "matmul_flops", "traffic_of",
]  # fmt: skip

_COUNTS = ("executed", "full")


def executions(graph: Graph, times: Poly = ONE, *, moves: bool = True) -> Iterator[tuple[Op, Poly, bool]]:
    """Yield every op that does something, how often it runs, and whether its operands are in memory.

    An op is yielded again for iterations of a Repeat in which it reads another number of different tensors; what it
    reads has to be asked for before the next one.
    """
    yield from _executions(graph, times, moves, {})


def _executions(graph: Graph, times: Poly, moves: bool, absent: dict[Tensor, Poly]) -> Iterator[tuple[Op, Poly, bool]]:
    """As above; `absent` has the sums that are not there yet, and in how many of the executions they are not."""
    for op in graph.ops:
        if op.loop is not None:
            yield from _iterations(op.loop, times, moves, absent)
            continue
        if isinstance(op.kind, Absent):
            absent[op.results[0]] = times
            continue
        runs = times
        if isinstance(op.kind, Accumulate):  # the first term of a sum becomes it
            without = absent.get(op.operands[0], ZERO)
            if op.kind.lent and without:
                yield taken(op), without, moves
            runs = times - without
            if not runs:
                continue
        yield op, runs, moves
        if op.body is not None:
            yield from _executions(op.body, times, False, absent)


def _iterations(loop: Loop, times: Poly, moves: bool, absent: dict[Tensor, Poly]) -> Iterator[tuple[Op, Poly, bool]]:
    for nth, (aliases, runs) in enumerate(_situations(loop)):
        # of a sum that is handed on, the first iteration makes something
        begun = zip(loop.carries, loop.starts, strict=True) if nth == 0 else ()
        inner = {f: absent[t] for f, t in begun if t in absent}
        given = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        inner |= {f: absent[t] * runs for f, t in given if t in absent}
        with aliased(aliases):
            yield from _executions(loop.body, times * runs, moves, inner)


def _situations(loop: Loop) -> list[tuple[Mapping[Storage, tuple[Storage, Poly]], Poly]]:
    """Return the situations of a loop; one up to the iteration of the loop around runs 0 + 1 + ... times."""
    found = situations(loop)
    if not loop.until:
        return found
    if len(found) > 1:
        raise UnsupportedError(
            f"{loop.op.name!r} reads one tensor under two names, expected a loop that reads each once"
        )
    # as often in the mean
    return [(found[0][0], (loop.count - 1) / 2)]


def compute_dtype(op: Op) -> str:
    """Return the format that an op calculates in: the common one of its floating operands, else of its result.

    A product of whole numbers adds up in a wider format than that of its operands, which decides the unit that it
    runs on.
    """
    multiplies = isinstance(op.kind, Einsum | Grouped)
    operands = op.operands[:2] if isinstance(op.kind, Grouped) else op.operands  # the others say where rows belong
    found = [t.dtype for t in operands if t.dtype.kind == "float"]
    if not found:
        found = [t.dtype for t in (operands if multiplies else op.results[:1])]
    if multiplies and found[0].kind == "float" and all(f.bits <= 8 for f in found):
        made = max(found, key=lambda f: (f.bits, f.mantissa))  # E4M3 times E5M2 runs on the units of either
    else:
        made = fold(promote, found)
    return made.element or made.name


def _main_kind(op: Op, flops_of: Callable[[Op], Flops]) -> str:
    """Name the kind of an op's bytes: the first kind of FLOPs that it, or what is fused into it, has any of."""
    inside = [op] if op.body is None else [inner for inner, _, _ in executions(op.body)]
    found = [flops_of(i).by_kind() for i in inside]
    return next((k for k in FLOP_KINDS if any(flops[k] for flops in found)), "data")


def _traffic(op: Op) -> Iterator[tuple[str, str, Poly]]:
    for direction, tensors, amounts in (
        ("read", op.operands, op.kind.reads(op)),
        ("write", op.results, op.kind.writes(op)),
    ):
        by_format: dict[str, list[Poly]] = {}
        for t, amount in zip(tensors, amounts, strict=False):
            if amount:
                by_format.setdefault(t.dtype.name, []).append(amount * t.element_bytes())
        for dtype, parts in by_format.items():
            yield direction, dtype, parts[0] if len(parts) == 1 else total(parts)


@collection_paused()
def _rows(graph: Graph, count: str) -> tuple[CostRow, ...]:
    if ("costs", count) in graph.cache:
        return graph.cache["costs", count]  # type: ignore[no-any-return]  # of any answer
    rows = []
    flops_of = lru_cache(maxsize=None)(lambda op: op.kind.flops(op))  # of what is fused, asked twice
    for op, times, moves in executions(graph):
        for kind, amount in flops_of(op).by_kind(count).items():
            if amount:
                rows.append(CostRow(op.name, op.scope, op.phase, kind, compute_dtype(op), "compute", amount * times))
        if moves:
            kind = _main_kind(op, flops_of)
            for direction, dtype, amount in _traffic(op):
                rows.append(CostRow(op.name, op.scope, op.phase, kind, dtype, direction, amount * times))
    graph.cache["costs", count] = tuple(rows)
    return tuple(rows)


def traffic_of(op: Op) -> dict[str, Poly]:
    """Return the bytes that an op reads and writes."""
    out = {"read": ZERO, "written": ZERO}
    for direction, _, amount in _traffic(op):
        out["read" if direction == "read" else "written"] += amount
    return out


def _bound_rows(graph: Graph, count: str, dims: Mapping[str, object]) -> tuple[tuple[CostRow, ...], Bindings]:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    values = bindings(graph, dims)
    rows = _rows(graph, count)
    # a report asks several times for the same sizes
    kept: tuple[object, tuple[CostRow, ...]] = graph.cache.get(("bound costs", count), (None, ()))
    if kept[0] != values:
        validity = values.validity
        kept = values, tuple(replace(r, amount=r.amount.bind(values), validity=validity) for r in rows)
        graph.cache["bound costs", count] = kept
    return kept[1], values


def costs(graph: Graph, /, *, count: str = "executed", **dims: int) -> Costs:
    """Return the table of costs.

    Parameters
    ----------
    graph : Graph
        What is asked.
    count : str
        executed, or full: every domain ignored, as FlopCounterMode, PaLM and nanoGPT charge.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Costs
        `.filter(kind=, scope=, ...)`, `.group("scope")`, `.total()`, `.bind(**dims)`.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or the count is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up")))
    >>> cg.costs(g).filter(kind="matmul").total().flops
    2*B*D*F
    >>> cg.costs(g).group("scope").total()["up"].bytes
    4*B*D + 4*B*F + 4*D*F
    """
    rows, values = _bound_rows(graph, count, dims)
    return Costs(rows, known_names(graph), values.validity, graph.name)


def _sum_of(graph: Graph, dims: Mapping[str, object], count: str, wanted: Callable[[CostRow], bool]) -> Formula:
    need_graph("costs", graph)
    need_choice("count", count, _COUNTS)
    key = ("sum", count, wanted)
    found = of_stages(graph, dims)
    for g, _ in found:
        if key not in g.cache:
            g.cache[key] = total(r.amount for r in _rows(g, count) if wanted(r))
    if len(found) == 1:
        return bound_answer(graph.cache[key], found[0][1])
    amounts = [(g.cache[key].bind(values), Owner(g.name)) for g, values in found]
    return answer(extremum(amounts), tuple(v for _, values in found for v in values.held))


def _is_compute(row: CostRow) -> bool:
    return row.direction == "compute"


def _is_matmul(row: CostRow) -> bool:
    return row.direction == "compute" and row.kind == "matmul"


def _is_traffic(row: CostRow) -> bool:
    return row.direction != "compute"


@cache
def _is_of(kind: str) -> Callable[[CostRow], bool]:
    return lambda row: row.direction == "compute" and row.kind == kind


def flops_of_kind(graph: Graph, kind: str, dims: Mapping[str, object]) -> Formula:
    """Return the FLOPs of one kind, as executed."""
    return _sum_of(graph, dims, "executed", _is_of(kind))


def flops(graph: Graph, /, **dims: int) -> Formula:
    """Return the FLOPs of all kinds, as executed.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs: matmul, pointwise and transcendental.

    Raises
    ------
    BindingError
        If a name is no dimension of the graph, or a size is not a positive integer.
    """
    return _sum_of(graph, dims, "executed", _is_compute)


def matmul_flops(graph: Graph, /, count: str = "executed", **dims: int) -> Formula:
    """Return the FLOPs of contractions: what 6ND, MFU and FlopCounterMode speak of.

    Parameters
    ----------
    graph : Graph
        What is asked.
    count : str
        executed, or full: the whole square of every attention, as torch's counter, PaLM and nanoGPT charge.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or the count is unknown.
    """
    return _sum_of(graph, dims, count, _is_matmul)


def bytes_moved(graph: Graph, /, fused: bool = False, *, cache: object = None, **dims: int) -> Formula:
    """Return the bytes read and written.

    Parameters
    ----------
    graph : Graph
        What is asked.
    fused : bool
        False: as declared, each op one kernel that reads each operand and writes each result once. True: what no
        fusion can avoid, the touched part of graph inputs, parameters and buffers, and the outputs.
    cache : int, str or sympy.Expr, optional
        Bytes of a fast memory, such as `"50 MB"`, that each op goes through and that holds nothing from one op to the
        next: of every op the least that any schedule of it moves. That is what it touches, or where that is more the
        bound of `tiling` of a contraction of two operands or of a kernel. Nothing as declared reads an operand twice;
        this does where operands do not fit. Schedules that come near it are those of `tiling`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes; a bound that holds a root is a float once it is bound.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, the cache is no positive number of bytes, or it is given beside `fused`, which knows
        of one kernel alone.

    Examples
    --------
    >>> import costgraph as cg
    >>> N, M = cg.dims("N M")
    >>> with cg.Graph("g", dtype="fp32") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> cg.bytes_moved(g), cg.bytes_moved(g, cache=M)
    (12*N**2, Max(12*N**2, -2*M + 16*N**3/sqrt(M)))
    >>> cg.bytes_moved(g, cache="1 MiB", N=4096) / cg.bytes_moved(g, N=4096)
    5.322916666666667
    """
    need_graph("bytes_moved", graph)
    need_flag("bytes_moved", fused=fused)
    if cache is not None:
        return _through(graph, fused, cache, dims)
    if not fused:
        return _sum_of(graph, dims, "executed", _is_traffic)
    return bound_answer(compulsory(graph), bindings(graph, dims))


def _through(graph: Graph, fused: bool, cache: object, dims: Mapping[str, object]) -> Formula:
    size = cache_bytes("bytes_moved", graph, cache)
    if fused:
        raise GraphError("bytes_moved: fused=True beside a cache, expected one of them: the cache is that of each op")
    values = bindings(graph, dims)
    moved = (least_traffic(op, size, values) * times.bind(values) for op, times, moves in executions(graph) if moves)
    return bound_answer(total(moved), values)


def intensity(graph: Graph, /, fused: bool = False, **dims: int) -> Formula:
    """Return the arithmetic intensity: FLOPs of all kinds for each byte moved.

    Parameters
    ----------
    graph : Graph
        What is asked.
    fused : bool
        Which bytes: as `bytes_moved`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        FLOP/B.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or nothing is moved.
    """
    work, moved = flops(graph, **dims), bytes_moved(graph, fused, **dims)
    if moved == 0:
        raise GraphError(f"intensity of graph {graph.name!r}: it moves no bytes, expected an op that does")
    ratio = as_expr(work) / as_expr(moved)
    short = not ratio.atoms(sympy.floor, sympy.ceiling) and _small(ratio)
    return answer(conditioned(_cancelled(plain(ratio)), held_by(ratio)) if short else ratio)


_cancelled = lru_cache(maxsize=1 << 7)(sympy.Expr.cancel)  # which takes long, and a report asks open and bound


def _small(ratio: sympy.Expr) -> bool:
    # cancelling a common factor of many terms takes longer than the whole derivation
    return bool(sum(len(sympy.Add.make_args(p)) for p in ratio.as_numer_denom()) <= 30)


def unused_names(graph: Graph, formulas: list[Formula]) -> list[str]:
    """Return the dimensions of the graph that show up in none of the formulas."""
    shown = {s.name for f in formulas if isinstance(f, sympy.Expr) for s in f.free_symbols}
    return sorted(known_names(graph) - shown - graph.root.defaults.keys())
