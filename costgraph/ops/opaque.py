"""Ops whose costs are stated rather than derived, and moves between memories and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ..algebra.polynomial import ZERO, Poly
from ..algebra.symbols import shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError, UnsupportedError
from ..ir.graph import (
    Amount,
    Amounts,
    Flag,
    Flops,
    Graph,
    Limit,
    Op,
    OpKind,
    Result,
    Shape,
    Split,
    Tensor,
    Working,
    all_of,
    amount,
    apply,
    current_graph,
    is_amount,
    is_count,
    is_size,
    itself,
    need,
    need_choice,
    need_list,
    one_of,
    optional,
    sizes_of,
)
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = [
    "Backward",
    "Opaque",
    "Stated",
    "Transfer",
    "opaque",
    "transfer",
    "Foreign",
    "Output",
    "exact",
    "need_declared",
    "refusal",
]


# -- stated ------------------------------------------------------------------------------------------------------------

MatmulFlops = Annotated[Amount, Limit(0, whole=False, words="matmul FLOPs of")]
_KINDS = ("matmul", "pointwise", "transcendental")
#: Where a tensor may lie.
MEMORIES = ("device", "host")


def _is_output(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all_of(is_size)(value[0]) and isinstance(value[1], DType)


class Backward(NamedTuple):
    """What the gradients of an opaque op cost, in one op."""

    matmul: Poly
    """FLOPs of this kind"""
    pointwise: Poly
    transcendental: Poly
    inputs: tuple[int, ...]
    """places of the inputs that the backward pass reads"""
    outputs: tuple[int, ...]
    """places of the outputs that it reads"""
    reads: tuple[Poly, ...] | None
    """bytes, of the gradient of each output, then of each saved tensor; an amount for all of them stands alone"""
    writes: tuple[Poly, ...] | None
    """bytes, of the gradient of each input, as above"""
    workspace: Poly
    """bytes"""


def _is_backward(value: object) -> bool:
    """Return whether it is the costs of a backward pass, as a record or as a file has it."""
    found = value if isinstance(value, Backward) else _read(value) if isinstance(value, Mapping) else None
    return (
        found is not None
        and all(map(is_amount, (found.matmul, found.pointwise, found.transcendental, found.workspace)))
        and all(amounts is None or all_of(is_amount)(amounts) for amounts in (found.reads, found.writes))
        and all(map(all_of(is_count), (found.inputs, found.outputs)))
    )


def _read(value: Mapping[str, Any]) -> Backward | None:
    return Backward(**value) if value.keys() == set(Backward._fields) else None


@dataclass(frozen=True, kw_only=True)
class Stated(Working):
    """A kind whose ops say themselves what they cost."""

    takes_complex = True
    matmul: MatmulFlops = ZERO
    """FLOPs of this kind."""
    pointwise: Annotated[Amount, Limit(0, whole=False, words="pointwise FLOPs of")] = ZERO
    transcendental: Annotated[Amount, Limit(0, whole=False, words="transcendental FLOPs of")] = ZERO
    bytes_read: Amounts = None
    """Bytes read of each operand, None where each is read once as a whole."""
    bytes_written: Amounts = None
    """Bytes written of each result, None where each is written once as a whole."""

    def flops(self, op: Op) -> Flops:
        """Return the formulas that were stated."""
        return Flops(self.matmul, pointwise=self.pointwise, transcendental=self.transcendental)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements that the stated bytes of each operand are, or each operand whole."""
        return rules.whole(self, op) if self.bytes_read is None else rules.in_elements(op.operands, self.bytes_read)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements that the stated bytes of each result are, or each result whole."""
        if self.bytes_written is None:
            return rules.all_results(self, op)
        return rules.in_elements(op.results, self.bytes_written)

    def need_amounts(self, operands: int, results: int) -> None:
        """Raise ShapeError where bytes are stated of other tensors."""
        for name, stated, count in (("reads", self.bytes_read, operands), ("writes", self.bytes_written, results)):
            need(stated is None or len(stated) == count, f"{name} of {count} tensors")


@register
@dataclass(frozen=True, kw_only=True)
class Opaque(Stated):
    """An op that the others cannot express: shapes and costs are stated."""

    name = "opaque"
    restricted = True
    outputs: Annotated[tuple[tuple[Shape, DType], ...], Rule("a tuple of shapes with formats", all_of(_is_output))]
    backward: Annotated[
        Backward | None,
        optional("the costs of a backward pass", _is_backward),
        Limit(0, whole=False, words="backward pass of"),
    ] = None
    """What its gradients cost, None where a backward pass through it is an error."""

    def __post_init__(self) -> None:
        """Take the costs of a backward pass as files and rewriters hand them on: by name, or in order."""
        stated: Any = self.backward
        if isinstance(stated, Mapping):
            object.__setattr__(self, "backward", Backward(**stated))
        elif stated is not None:
            object.__setattr__(self, "backward", Backward(*stated))

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what is stated."""
        return [Result(sizes, dtype) for sizes, dtype in self.outputs]

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold amounts and places against the tensors."""
        self.need_amounts(len(operands), len(self.outputs))
        if self.backward is not None:
            stated = (self.backward.inputs, len(operands)), (self.backward.outputs, len(self.outputs))
            for name, (places, count) in zip(("inputs", "outputs"), stated, strict=True):
                need(all(i < count for i in places), f"backward: {name} {shown(places)} of {count}")


@register
@dataclass(frozen=True, kw_only=True)
class Transfer(OpKind):
    """A copy over a link with a bandwidth of its own."""

    name = "transfer"
    restricted = crosses = True
    link: str
    to: Annotated[str, one_of(*MEMORIES)] = "device"
    """The memory that the copy lies in."""
    into: Flag = False
    """Whether it is written into the first operand, which lies there, in place of a tensor of its own."""
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the copy."""
        rules.need_operands(self, operands, 1 + self.into)
        x = operands[-1]
        if not self.into:
            return [Result(x.sizes, x.dtype, domain=x.domain, host=self.to == "host")]
        there = operands[0]
        if (there.sizes, there.dtype) != (x.sizes, x.dtype) or there.storage.host != (self.to == "host"):
            raise ShapeError(f"transfer of {x!r} into {there!r}, expected one of its shape and format on the {self.to}")
        return [itself(there)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return what is copied."""
        return (*(ZERO,) * self.into, rules.elements(op.operands[-1]))

    def overwrites(self) -> tuple[int, ...]:
        """Return the operand that it is written into."""
        return (0,) if self.into else ()

    def placed(self, op: Op) -> Split | None:
        """Return that each rank copies its part."""
        return None if self.into else splits.same_shape(self, op)


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
    back = None if backward is None else _backward(f"{place}: backward", backward, len(inputs), len(listed))
    kind = Opaque(
        **_flops(place, flops),
        outputs=tuple(_output(f"{place}: output {i + 1}", o, graph) for i, o in enumerate(listed)),
        bytes_read=_stated(f"{place}: reads", reads, len(inputs)),
        bytes_written=_stated(f"{place}: writes", writes, len(listed)),
        workspace=amount(f"{place}: workspace", workspace),
        backward=back,
    )
    made = apply(kind, list(inputs), name)
    return made if isinstance(outputs, list) else made[0]


def _flops(place: str, flops: object) -> dict[str, Any]:
    kinds = dict(flops) if isinstance(flops, Mapping) else {"pointwise": flops}
    if not kinds:
        raise GraphError(f"{place}: no FLOPs stated, expected 0 of an op that does none")
    for kind in kinds:
        need_choice(f"{place}: FLOPs of kind", kind, _KINDS)
    return {kind: amount(f"{place}: {kind} FLOPs", kinds.get(kind, ZERO)) for kind in _KINDS}


def _backward(place: str, stated: object, inputs: int, outputs: int) -> Backward:
    """Return what is stated of a backward pass; amounts for all tensors stand alone."""
    known = ("flops", "saves", "reads", "writes", "workspace")
    if not isinstance(stated, Mapping) or not {"flops", "saves"} <= set(stated) <= set(known):
        raise GraphError(
            f"{place}: {stated!r}, expected a mapping with flops and saves, and of {', '.join(known)} only"
        )
    saves = stated["saves"]
    if not isinstance(saves, Mapping) or not set(saves) <= {"inputs", "outputs"}:
        raise GraphError(f"{place}: saves {saves!r}, expected places by 'inputs' and 'outputs'")
    kept: dict[str, Any] = {}
    for what, count in (("inputs", inputs), ("outputs", outputs)):
        places = kept[what] = tuple(need_list(f"{place}: saves of {what}", saves.get(what, ())))
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in places):
            raise GraphError(f"{place}: saves {what} {places!r}, expected places below {count}")
    read = outputs + sum(map(len, kept.values()))
    return Backward(
        **_flops(place, stated["flops"]),
        **kept,
        reads=_in_all_or_each(f"{place}: reads", stated.get("reads"), read),
        writes=_in_all_or_each(f"{place}: writes", stated.get("writes"), inputs),
        workspace=amount(f"{place}: workspace", stated.get("workspace", 0)),
    )


def _in_all_or_each(place: str, stated: object, expected: int) -> tuple[Poly, ...] | None:
    found = _stated(place, stated, expected)
    return found if found is None or isinstance(stated, list | tuple) else found[:1]


def _output(place: str, output: object, graph: Graph) -> tuple[Shape, DType]:
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


def transfer(x: Tensor, link: str = "pcie", *, to: str = "device", name: str = "transfer") -> Tensor:
    """Copy a tensor over a link with a bandwidth of its own: host to device, or back.

    Parameters
    ----------
    x : Tensor
        What is copied.
    link : str
        Name of the link in the hardware specification, `pcie` by default.
    to : str
        device or host: the memory that the copy lies in. What lies on the host takes none of the device's, and ops that
        read it are run by the host.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        The copy. Its bytes count once, as bytes over the link, in the roofline's time.
    """
    if not isinstance(link, str):
        raise GraphError(f"transfer: link {link!r}, expected the name of a link such as 'pcie'")
    need_choice("transfer: to", to, MEMORIES)
    return apply(Transfer(link=link, to=to), [x], name)[0]


# -- foreign -----------------------------------------------------------------------------------------------------------
# What no declared kinds say: shapes, layouts and costs are stated, for one call and as it was.

#: Shape, number format, strides or None, the operand whose storage it shares or None, and its offset there.
Output = tuple[Shape, DType, tuple[Poly, ...] | None, int | None, Poly]


def _foreign_is_output(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    sizes, dtype, strides, of, offset = value
    fits = all_of(is_size)(sizes) and isinstance(dtype, DType) and is_amount(offset) and (of is None or is_count(of))
    return fits and (strides is None or (all_of(is_amount)(strides) and len(strides) == len(sizes)))


@register
@dataclass(frozen=True, kw_only=True)
class Foreign(Stated):
    """An op of another library that no kind of this one says: FLOPs and bytes come from the rule for that op."""

    name = "foreign"
    outputs: Annotated[
        tuple[Output, ...], Rule("a tuple of shapes with formats and layouts", all_of(_foreign_is_output))
    ]
    full: MatmulFlops = ZERO
    """FLOPs of contractions with every mask ignored."""
    pieces: Annotated[tuple[int, ...], Rule("a tuple of numbers of axes", all_of(is_count))] = ()
    """Which results are lists: an element stands for a tensor of each layer of a stack."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what is stated."""
        outputs, pieces = self.outputs, self.pieces or (0,) * len(self.outputs)
        need(len(pieces) == len(outputs), f"{len(pieces)} pieces of {len(outputs)} results")
        for own, (sizes, _, _, of, _) in zip(pieces, outputs, strict=True):
            need(own <= len(sizes), f"{own} pieces of {len(sizes)} axes")
            need(of is None or of < len(operands), f"a view of operand {of} of {len(operands)}")
        return [
            Result(sizes, dtype, strides, of=of, offset=offset, pieces=own)
            for (sizes, dtype, strides, of, offset), own in zip(outputs, pieces, strict=True)
        ]

    @property
    def is_blind(self) -> bool:
        """Whether its results are new and nothing is read for them: random numbers, and memory that is only taken."""
        written = self.bytes_written or (None,) * len(self.outputs)
        new = all(of is None or n != ZERO for (*_, of, _), n in zip(self.outputs, written, strict=True))
        return new and self.bytes_read is not None and not any(self.bytes_read)

    def flops(self, op: Op) -> Flops:
        """Return what is stated, the masked part too."""
        return replace(Stated.flops(self, op), full=self.full)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold amounts against the tensors."""
        self.need_amounts(len(operands), len(self.outputs))


def refusal(place: str, op: Op, instead: str) -> UnsupportedError:
    """Return the error of a transform that would have to look inside an op whose costs are stated."""
    what = op.name if op.call is None else op.call.target
    return UnsupportedError(
        f"{place}: {op.name!r} of graph {op.graph.root.name!r} is a recorded call of {what}, expected declared ops; "
        f"{instead}"
    )


def exact(graph: Graph) -> set[Op]:
    """Return the recorded calls that integers alone decide, and what is made of integers for them.

    So experts are counted, and places of a sequence: whatever the format of a model, that of these numbers stays.
    """
    found = set[Op]()
    for body in graph.bodies():
        known = {t for t in body.tensors if t.producer is None and t.dtype.kind != "float"}
        for op in body.ops:
            made_of_known = op.operands and known.issuperset(op.operands)
            known.update(t for t in op.results if made_of_known or t.dtype.kind != "float")
        wanted = set[Tensor]()
        for op in reversed(list(body.ops)):
            asked = isinstance(op.kind, Foreign) or not wanted.isdisjoint(op.results)
            if asked and known.issuperset((*op.operands, *op.results)):
                found.add(op)
                wanted.update(t for t in op.operands if t.dtype.kind == "float")
    return found


def need_declared(place: str, graph: Graph, instead: str, *, floats: bool = False) -> None:
    """Refuse recorded calls: what they state holds for the call as it was, so a transform that looks inside cannot.

    UnsupportedError names the call and says what to do `instead`. `floats` says whether calls that integers alone
    decide, and those that read nothing, may stay: formats and weights are asked for.
    """
    kept = exact(graph) if floats else set()
    for op in graph.walk():
        if isinstance(op.kind, Foreign) and op not in kept and not (floats and op.kind.is_blind):
            raise refusal(place, op, instead)
