"""Ops whose costs are stated rather than derived, and moves between memories and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..algebra.polynomial import ZERO, Poly
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError
from ..graph.arguments import amount, named, need_choice, need_list, positive
from ..graph.graph import Graph, apply, current_graph, sizes_of
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from . import rules
from .registry import register
from .rules import Flops

__all__ = ["COLLECTIVES", "OPAQUE", "collective", "opaque", "transfer"]

#: Collectives and what each does to the first axis: times the number of ranks, divided by it, or nothing.
COLLECTIVES = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": -1, "all_to_all": 0, "send": 0}


_KINDS = ("matmul", "pointwise", "transcendental")


def _stated_results(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    return [Result(sizes, dtype) for sizes, dtype in attrs["outputs"]]


def _copied(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    return [Result(x.sizes, x.dtype, domain=x.domain)]


def _after_collective(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    first = x.sizes[0] * attrs["ranks"] ** COLLECTIVES[attrs["collective"]] if x.ndim else None
    return [Result(x.sizes if first is None else (first, *x.sizes[1:]), x.dtype)]


def _reduction(op: Op) -> Flops:
    """Count one addition for each element and each rank but one, spread evenly over the ranks."""
    if op.attrs["collective"] not in ("all_reduce", "reduce_scatter"):
        return Flops()
    ranks: Poly = op.attrs["ranks"]
    return Flops(pointwise=rules.points(op.operands[0]) * (ranks - 1) / ranks)


OPAQUE = register(
    OpKind("opaque", _stated_results, rules.stated_flops, rules.stated_reads, rules.stated_writes, restricted=True)
)
TRANSFER = register(OpKind("transfer", _copied, rules.free, rules.whole, rules.all_results, restricted=True))
COLLECTIVE = register(OpKind("collective", _after_collective, _reduction, rules.whole, rules.all_results))


def opaque(
    name: str,
    inputs: Sequence[Tensor],
    outputs: object,
    *,
    flops: object,
    reads: object = None,
    writes: object = None,
    workspace: object = 0,
    backward: Mapping[str, object] | None = None,
) -> Any:
    """State the costs of an op that the others cannot express.

    Parameters
    ----------
    name : str
        Name of the op.
    inputs : list of Tensor
        What it reads.
    outputs : output, or list of them
        What it makes: a shape, in the graph's number format, or a pair (shape, dtype).
    flops : formula, or mapping of kind to formula
        FLOPs: a formula alone is pointwise; kinds are matmul, pointwise and transcendental. There is no default: an
        op that does nothing says 0.
    reads, writes : formula, or list of formulas, optional
        Bytes read and written, in all or of each input and output; by default each is touched once as a whole.
    workspace : formula
        Bytes that it needs while it runs, beside inputs and outputs.
    backward : mapping, optional
        What its gradients cost, in one op; without it a backward pass through the op is an error. `flops`, and
        `saves`, a mapping of `inputs` and `outputs` to the places of those that the backward pass reads, are needed;
        `reads` (of the gradient of each output, then of each saved tensor), `writes` (of the gradient of each input)
        and `workspace` may be left out.

    Returns
    -------
    Tensor or tuple of Tensor
        A tensor for one output, a tuple for a list of them.

    Raises
    ------
    GraphError, ShapeError, FormatError
        If a kind of FLOPs is unknown, counts differ, or a shape or format is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     y = cg.opaque("fft", [g.input("x", (N,))], (N,), flops={"pointwise": 5 * N}, reads=8 * N)
    >>> cg.flops(g), cg.bytes_moved(g)
    (5*N, 12*N)
    """
    place = f"opaque {name!r}"
    need_list(f"{place}: inputs", inputs)
    listed = outputs if isinstance(outputs, list) else [outputs]
    graph = current_graph(inputs[0].graph if inputs and isinstance(inputs[0], Tensor) else None)
    attrs = {
        **_flops(place, flops),
        "outputs": tuple(_output(f"{place}: output {i + 1}", o, graph) for i, o in enumerate(listed)),
        "reads": _stated(f"{place}: reads", reads, len(inputs)),
        "writes": _stated(f"{place}: writes", writes, len(listed)),
        "workspace": amount(f"{place}: workspace", workspace),
    }
    if backward is not None:
        attrs["backward"] = _backward(f"{place}: backward", backward, len(inputs), len(listed))
    made = apply(OPAQUE, list(inputs), attrs, name)
    return made if isinstance(outputs, list) else made[0]


def _flops(place: str, flops: object) -> dict[str, Any]:
    kinds = dict(flops) if isinstance(flops, Mapping) else {"pointwise": flops}
    if not kinds:
        raise GraphError(f"{place}: no FLOPs stated, expected 0 of an op that does none")
    for kind in kinds:
        need_choice(f"{place}: FLOPs of kind", kind, _KINDS)
    return {kind: amount(f"{place}: {kind} FLOPs", kinds.get(kind, ZERO)) for kind in _KINDS}


def _backward(place: str, stated: object, inputs: int, outputs: int) -> dict[str, Any]:
    """Return what is stated of a backward pass; amounts for all tensors stand alone."""
    known = ("flops", "saves", "reads", "writes", "workspace")
    if not isinstance(stated, Mapping) or not {"flops", "saves"} <= set(stated) <= set(known):
        raise GraphError(
            f"{place}: {stated!r}, expected a mapping with flops and saves, and of {', '.join(known)} only"
        )
    saves = stated["saves"]
    if not isinstance(saves, Mapping) or not set(saves) <= {"inputs", "outputs"}:
        raise GraphError(f"{place}: saves {saves!r}, expected places by 'inputs' and 'outputs'")
    kept = {}
    for what, count in (("inputs", inputs), ("outputs", outputs)):
        places = kept[what] = tuple(need_list(f"{place}: saves of {what}", saves.get(what, ())))
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in places):
            raise GraphError(f"{place}: saves {what} {places!r}, expected places below {count}")
    read = outputs + sum(map(len, kept.values()))
    return {
        **_flops(place, stated["flops"]),
        **kept,
        "reads": _in_all_or_each(f"{place}: reads", stated.get("reads"), read),
        "writes": _in_all_or_each(f"{place}: writes", stated.get("writes"), inputs),
        "workspace": amount(f"{place}: workspace", stated.get("workspace", 0)),
    }


def _in_all_or_each(place: str, stated: object, expected: int) -> tuple[Poly, ...] | None:
    found = _stated(place, stated, expected)
    return found if found is None or isinstance(stated, list | tuple) else found[:1]


def _output(place: str, output: object, graph: Graph) -> tuple[Sizes, DType]:
    if not isinstance(output, tuple):
        raise GraphError(f"{place} is {output!r}, expected a shape or a pair (shape, dtype)")
    if len(output) == 2 and isinstance(output[0], tuple | list):
        return sizes_of(output[0], place), find_dtype(output[1])
    return sizes_of(output, place), graph.root.dtype


def _stated(place: str, stated: object, expected: int) -> tuple[Poly, ...] | None:
    """Return bytes for each of some tensors; an amount for all of them stands at the first."""
    if stated is None:
        return None
    if not isinstance(stated, list | tuple):
        if not expected:
            raise GraphError(f"{place}: {stated!r} bytes, expected an input that they are of")
        return amount(place, stated), *(ZERO,) * (expected - 1)
    if len(stated) != expected:
        raise GraphError(f"{place}: {len(stated)} amounts, expected one for each of {expected}")
    return tuple(amount(f"{place} {i + 1}", a) for i, a in enumerate(stated))


def transfer(x: Tensor, link: str = "pcie", *, name: str = "transfer") -> Tensor:
    """Copy a tensor over a link with a bandwidth of its own: host to device, or back.

    Parameters
    ----------
    x : Tensor
        What is copied.
    link : str
        Name of the link in the hardware specification, `pcie` by default.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        The copy. Its bytes count once, as bytes over the link, in the roofline's time.
    """
    if not isinstance(link, str):
        raise GraphError(f"transfer: link {link!r}, expected the name of a link such as 'pcie'")
    return apply(TRANSFER, [x], {"link": link}, name)[0]


def collective(x: Tensor, collective: str, ranks: object, *, name: str = "") -> Tensor:
    """Declare a collective over some ranks: its reduction's FLOPs and what it reads and writes on one rank.

    Parameters
    ----------
    x : Tensor
        What each rank brings.
    collective : str
        One of `COLLECTIVES`; all_gather multiplies the first axis by the ranks, reduce_scatter divides it.
    ranks : sympy.Expr or int
        Number of ranks.
    name : str
        Name of the op, by default the collective's.

    Returns
    -------
    Tensor
        What each rank gets. The time on the network has no rule yet: a roofline of it is an error.
    """
    need_choice("collective", collective, tuple(COLLECTIVES))
    attrs = {"collective": collective, "ranks": positive("collective: ranks", ranks)}
    return apply(COLLECTIVE, [x], attrs, named(name, collective))[0]
