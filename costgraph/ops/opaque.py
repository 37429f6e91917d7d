"""Ops with user-stated costs, recorded calls of other libraries, and transfers between host and device."""

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
    WorkspaceKind,
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
    "OpaqueBackward",
    "Opaque",
    "StatedCosts",
    "Transfer",
    "opaque",
    "transfer",
    "CustomCall",
    "Output",
    "exact",
    "need_declared",
    "refusal",
]


# -- stated costs ------------------------------------------------------------------------------------------------------

MatmulFlops = Annotated[Amount, Limit(0, whole=False, words="matmul FLOPs of")]
_KINDS = ("matmul", "pointwise", "transcendental")
#: Memories that hold tensors.
MEMORIES = ("device", "host")


def _is_output(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all_of(is_size)(value[0]) and isinstance(value[1], DType)


class OpaqueBackward(NamedTuple):
    """Costs of the backward pass of an opaque op, as one op."""

    matmul: Poly
    """matmul FLOPs"""
    pointwise: Poly
    transcendental: Poly
    inputs: tuple[int, ...]
    """indices of the inputs that the backward pass reads"""
    outputs: tuple[int, ...]
    """indices of the outputs that it reads"""
    reads: tuple[Poly, ...] | None
    """bytes read: one amount in total, or one per output gradient and then per saved tensor"""
    writes: tuple[Poly, ...] | None
    """bytes written: one amount in total, or one per input gradient"""
    workspace: Poly
    """workspace in bytes"""


def _is_backward(value: object) -> bool:
    """Return whether a value is a `OpaqueBackward`, or its mapping as loaded from a file."""
    costs = value if isinstance(value, OpaqueBackward) else _read(value) if isinstance(value, Mapping) else None
    return (
        costs is not None
        and all(map(is_amount, (costs.matmul, costs.pointwise, costs.transcendental, costs.workspace)))
        and all(amounts is None or all_of(is_amount)(amounts) for amounts in (costs.reads, costs.writes))
        and all(map(all_of(is_count), (costs.inputs, costs.outputs)))
    )


def _read(value: Mapping[str, Any]) -> OpaqueBackward | None:
    return OpaqueBackward(**value) if value.keys() == set(OpaqueBackward._fields) else None


@dataclass(frozen=True, kw_only=True)
class StatedCosts(WorkspaceKind):
    """Kind of op whose costs are fields."""

    takes_complex = True
    matmul: MatmulFlops = ZERO
    """Matmul FLOPs."""
    pointwise: Annotated[Amount, Limit(0, whole=False, words="pointwise FLOPs of")] = ZERO
    transcendental: Annotated[Amount, Limit(0, whole=False, words="transcendental FLOPs of")] = ZERO
    bytes_read: Amounts = None
    """Bytes read from each operand; None if each is read once as a whole."""
    bytes_written: Amounts = None
    """Bytes written to each result; None if each is written once as a whole."""

    def flops(self, op: Op) -> Flops:
        """Return the stated FLOPs."""
        return Flops(self.matmul, pointwise=self.pointwise, transcendental=self.transcendental)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the stated bytes in elements of each operand, or each operand as a whole."""
        return rules.whole(self, op) if self.bytes_read is None else rules.in_elements(op.operands, self.bytes_read)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the stated bytes in elements of each result, or each result as a whole."""
        if self.bytes_written is None:
            return rules.all_results(self, op)
        return rules.in_elements(op.results, self.bytes_written)

    def need_amounts(self, operands: int, results: int) -> None:
        """Raise ShapeError unless there is one amount per operand and result."""
        for name, amounts, count in (("reads", self.bytes_read, operands), ("writes", self.bytes_written, results)):
            need(amounts is None or len(amounts) == count, f"{name} of {count} tensors")


@register
@dataclass(frozen=True, kw_only=True)
class Opaque(StatedCosts):
    """Op with stated shapes and costs, for ops that no other kind expresses."""

    name = "opaque"
    restricted = True
    outputs: Annotated[tuple[tuple[Shape, DType], ...], Rule("a tuple of shapes with formats", all_of(_is_output))]
    backward: Annotated[
        OpaqueBackward | None,
        optional("the costs of a backward pass", _is_backward),
        Limit(0, whole=False, words="backward pass of"),
    ] = None
    """Costs of its backward pass; None makes differentiating it an error."""

    def __post_init__(self) -> None:
        """Normalize `backward`, which files and rewriters pass as a mapping or a tuple."""
        backward: Any = self.backward
        if isinstance(backward, Mapping):
            object.__setattr__(self, "backward", OpaqueBackward(**backward))
        elif backward is not None:
            object.__setattr__(self, "backward", OpaqueBackward(*backward))

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the stated outputs."""
        return [Result(sizes, dtype) for sizes, dtype in self.outputs]

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check amounts and indices against the operands and results."""
        self.need_amounts(len(operands), len(self.outputs))
        if self.backward is not None:
            saved = (self.backward.inputs, len(operands)), (self.backward.outputs, len(self.outputs))
            for name, (places, count) in zip(("inputs", "outputs"), saved, strict=True):
                need(all(i < count for i in places), f"backward: {name} {shown(places)} of {count}")


@register
@dataclass(frozen=True, kw_only=True)
class Transfer(OpKind):
    """Copy over a link with its own bandwidth."""

    name = "transfer"
    restricted = crosses = True
    link: str
    to: Annotated[str, one_of(*MEMORIES)] = "device"
    """Memory of the copy."""
    into: Flag = False
    """Whether the copy is written into the first operand instead of a new tensor."""
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the copy."""
        rules.need_operands(self, operands, 1 + self.into)
        x = operands[-1]
        if not self.into:
            return [Result(x.sizes, x.dtype, domain=x.domain, host=self.to == "host")]
        target = operands[0]
        if (target.sizes, target.dtype) != (x.sizes, x.dtype) or target.storage.host != (self.to == "host"):
            raise ShapeError(
                f"transfer of {x!r} into {target!r}, expected a tensor of the same shape and format on the {self.to}"
            )
        return [itself(target)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the copied elements."""
        return (*(ZERO,) * self.into, rules.elements(op.operands[-1]))

    def overwrites(self) -> tuple[int, ...]:
        """Return the operand that the copy is written into."""
        return (0,) if self.into else ()

    def placed(self, op: Op) -> Split | None:
        """Let each rank copy its shard."""
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
    """Declare an op with stated costs, for ops that no other function expresses.

    Parameters
    ----------
    name : str
        Op name.
    inputs : list of Tensor
        Operands.
    outputs : output, or list of them
        A shape, in the graph's dtype, or a pair (shape, dtype).
    flops : formula, or mapping of kind to formula
        FLOPs: a single formula is pointwise; kinds are matmul, pointwise and transcendental. There is no default: pass
        0 for an op without FLOPs.
    reads, writes : formula, or list of formulas, optional
        Bytes read and written, in total or per input and output; by default each is touched once as a whole.
    workspace : formula
        Workspace in bytes, besides inputs and outputs.
    backward : mapping, optional
        Costs of the backward pass as one op; without them, differentiating the op is an error. Required are `flops` and
        `saves`, a mapping of `inputs` and `outputs` to the indices that the backward pass reads. Optional are `reads`
        (per output gradient, then per saved tensor), `writes` (per input gradient) and `workspace`.

    Returns
    -------
    Tensor or tuple of Tensor
        A tensor for a single output, a tuple for a list.

    Raises
    ------
    GraphError, ShapeError, FormatError
        If a kind of FLOPs is unknown, counts differ, or a shape or dtype is invalid.

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
    backward_costs = None if backward is None else _backward(f"{place}: backward", backward, len(inputs), len(listed))
    kind = Opaque(
        **_flops(place, flops),
        outputs=tuple(_output(f"{place}: output {i + 1}", o, graph) for i, o in enumerate(listed)),
        bytes_read=_byte_amounts(f"{place}: reads", reads, len(inputs)),
        bytes_written=_byte_amounts(f"{place}: writes", writes, len(listed)),
        workspace=amount(f"{place}: workspace", workspace),
        backward=backward_costs,
    )
    results = apply(kind, list(inputs), name)
    return results if isinstance(outputs, list) else results[0]


def _flops(place: str, flops: object) -> dict[str, Any]:
    kinds = dict(flops) if isinstance(flops, Mapping) else {"pointwise": flops}
    if not kinds:
        raise GraphError(f"{place}: no FLOPs stated, pass 0 for an op without FLOPs")
    for kind in kinds:
        need_choice(f"{place}: FLOPs of kind", kind, _KINDS)
    return {kind: amount(f"{place}: {kind} FLOPs", kinds.get(kind, ZERO)) for kind in _KINDS}


def _backward(place: str, costs: object, inputs: int, outputs: int) -> OpaqueBackward:
    """Return the stated costs of a backward pass."""
    allowed = ("flops", "saves", "reads", "writes", "workspace")
    if not isinstance(costs, Mapping) or not {"flops", "saves"} <= set(costs) <= set(allowed):
        raise GraphError(
            f"{place}: {costs!r}, expected a mapping with flops and saves, and no keys but {', '.join(allowed)}"
        )
    saves = costs["saves"]
    if not isinstance(saves, Mapping) or not set(saves) <= {"inputs", "outputs"}:
        raise GraphError(f"{place}: saves {saves!r}, expected indices by 'inputs' and 'outputs'")
    saved: dict[str, Any] = {}
    for side, count in (("inputs", inputs), ("outputs", outputs)):
        places = saved[side] = tuple(need_list(f"{place}: saves of {side}", saves.get(side, ())))
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in places):
            raise GraphError(f"{place}: saves {side} {places!r}, expected indices below {count}")
    tensors_read = outputs + sum(map(len, saved.values()))
    return OpaqueBackward(
        **_flops(place, costs["flops"]),
        **saved,
        reads=_total_or_per_tensor(f"{place}: reads", costs.get("reads"), tensors_read),
        writes=_total_or_per_tensor(f"{place}: writes", costs.get("writes"), inputs),
        workspace=amount(f"{place}: workspace", costs.get("workspace", 0)),
    )


def _total_or_per_tensor(place: str, value: object, expected: int) -> tuple[Poly, ...] | None:
    amounts = _byte_amounts(place, value, expected)
    return amounts if amounts is None or isinstance(value, list | tuple) else amounts[:1]


def _output(place: str, output: object, graph: Graph) -> tuple[Shape, DType]:
    if not isinstance(output, tuple):
        raise GraphError(f"{place} is {output!r}, expected a shape or a pair (shape, dtype)")
    if len(output) == 2 and isinstance(output[0], tuple | list):
        return sizes_of(output[0], place), find_dtype(output[1])
    return sizes_of(output, place), graph.root.dtype


def _byte_amounts(place: str, value: object, expected: int) -> tuple[Poly, ...] | None:
    """Return the bytes of each tensor; a single total is assigned to the first."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        if not expected:
            raise GraphError(f"{place}: {value!r} bytes, expected a tensor that they belong to")
        return amount(place, value), *(ZERO,) * (expected - 1)
    if len(value) != expected:
        raise GraphError(f"{place}: {len(value)} amounts, expected one for each of {expected} tensors")
    return tuple(amount(f"{place} {i + 1}", a) for i, a in enumerate(value))


def transfer(x: Tensor, link: str = "pcie", *, to: str = "device", name: str = "transfer") -> Tensor:
    """Copy a tensor over a link with its own bandwidth: host to device, or back.

    Parameters
    ----------
    x : Tensor
        Tensor to copy.
    link : str
        Name of the link in the hardware specification, `pcie` by default.
    to : str
        Memory of the copy: device or host. Host tensors take no device memory, and ops that read them run on the host.
    name : str
        Op name.

    Returns
    -------
    Tensor
        The copy. The roofline counts its bytes once, on the link.
    """
    if not isinstance(link, str):
        raise GraphError(f"transfer: link {link!r}, expected the name of a link such as 'pcie'")
    need_choice("transfer: to", to, MEMORIES)
    return apply(Transfer(link=link, to=to), [x], name)[0]


# -- recorded calls ----------------------------------------------------------------------------------------------------

#: Shape, dtype, strides or None, index of the operand that it views or None, and its offset.
Output = tuple[Shape, DType, tuple[Poly, ...] | None, int | None, Poly]


def _is_call_output(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    sizes, dtype, strides, base, offset = value
    fits = (
        all_of(is_size)(sizes) and isinstance(dtype, DType) and is_amount(offset) and (base is None or is_count(base))
    )
    return fits and (strides is None or (all_of(is_amount)(strides) and len(strides) == len(sizes)))


@register
@dataclass(frozen=True, kw_only=True)
class CustomCall(StatedCosts):
    """External call without a kind of its own: a cost rule gives its FLOPs and bytes for this call."""

    name = "custom_call"
    outputs: Annotated[tuple[Output, ...], Rule("a tuple of shapes with formats and layouts", all_of(_is_call_output))]
    full: MatmulFlops = ZERO
    """Matmul FLOPs with every mask ignored."""
    pieces: Annotated[tuple[int, ...], Rule("a tuple of numbers of axes", all_of(is_count))] = ()
    """Per result, the number of leading axes with one allocation per layer of a stack."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the recorded outputs."""
        outputs, pieces = self.outputs, self.pieces or (0,) * len(self.outputs)
        need(len(pieces) == len(outputs), f"{len(pieces)} entries of pieces for {len(outputs)} results")
        for leading, (sizes, _, _, base, _) in zip(pieces, outputs, strict=True):
            need(leading <= len(sizes), f"{leading} pieces of {len(sizes)} axes")
            need(base is None or base < len(operands), f"a view of operand {base} of {len(operands)}")
        return [
            Result(sizes, dtype, strides, of=base, offset=offset, pieces=leading)
            for (sizes, dtype, strides, base, offset), leading in zip(outputs, pieces, strict=True)
        ]

    @property
    def is_blind(self) -> bool:
        """Whether it only creates tensors and reads nothing, as random numbers and `empty` do."""
        written = self.bytes_written or (None,) * len(self.outputs)
        all_new = all(base is None or n != ZERO for (*_, base, _), n in zip(self.outputs, written, strict=True))
        return all_new and self.bytes_read is not None and not any(self.bytes_read)

    def flops(self, op: Op) -> Flops:
        """Return the recorded FLOPs, masked ones included."""
        return replace(StatedCosts.flops(self, op), full=self.full)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check amounts against the operands and results."""
        self.need_amounts(len(operands), len(self.outputs))


def refusal(place: str, op: Op, instead: str) -> UnsupportedError:
    """Return the error of a transform that cannot handle a recorded call."""
    target = op.name if op.call is None else op.call.target
    return UnsupportedError(
        f"{place}: {op.name!r} of graph {op.graph.root.name!r} is a recorded call of {target}, expected declared ops; "
        f"{instead}"
    )


def exact(graph: Graph) -> set[Op]:
    """Return the recorded calls that depend on integers only, with the ops that compute their operands.

    Examples are expert counts and sequence positions: they keep their dtype when the dtype of the model changes.
    """
    calls = set[Op]()
    for body in graph.bodies():
        integer_tensors = {t for t in body.tensors if t.producer is None and t.dtype.kind != "float"}
        for op in body.ops:
            from_integers = op.operands and integer_tensors.issuperset(op.operands)
            integer_tensors.update(t for t in op.results if from_integers or t.dtype.kind != "float")
        needed = set[Tensor]()
        for op in reversed(list(body.ops)):
            relevant = isinstance(op.kind, CustomCall) or not needed.isdisjoint(op.results)
            if relevant and integer_tensors.issuperset((*op.operands, *op.results)):
                calls.add(op)
                needed.update(t for t in op.operands if t.dtype.kind == "float")
    return calls


def need_declared(place: str, graph: Graph, instead: str, *, floats: bool = False) -> None:
    """Raise UnsupportedError if a graph has recorded calls, whose costs a transform cannot derive.

    The message names the call and recommends `instead`. With `floats`, calls on integers only and calls that read
    nothing are allowed.
    """
    integer_calls = exact(graph) if floats else set()
    for op in graph.walk():
        if isinstance(op.kind, CustomCall) and op not in integer_calls and not (floats and op.kind.is_blind):
            raise refusal(place, op, instead)
