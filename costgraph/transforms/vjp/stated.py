"""Gradients of moves between memories and devices, and of ops whose costs are stated."""

from __future__ import annotations

from collections.abc import Sequence

from ...algebra.polynomial import Poly, total
from ...errors import UnsupportedError
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.collectives import Collective, collective
from ...ops.stated import Opaque, Transfer, transfer
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES

#: The collective that takes gradients the other way.
_BACK = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send": "send",
}


@vjp(Transfer)
def _transfer(pull: Pull[Transfer]) -> Sequence[Tensor | None]:
    g = pull.grads[0]
    to = "host" if pull.op.operands[0].storage.host else "device"
    return [None if g is None or not pull.needs[0] else transfer(g, pull.kind.link, to=to)]


@vjp(Collective)
def _collective(pull: Pull[Collective]) -> Sequence[Tensor | None]:
    g = pull.grads[0]
    if g is None or not pull.needs[0]:
        return [None]
    return [collective(g, _BACK[pull.kind.collective], pull.kind.ranks.expr)]


@vjp(Opaque)
def _opaque(pull: Pull[Opaque]) -> Sequence[Tensor | None]:
    """Add the op whose costs the caller stated."""
    op, stated = pull.op, pull.kind.backward
    if stated is None:
        raise UnsupportedError(f"backward of {op.name!r}: nothing is stated of it, expected backward= of opaque")
    kept = [op.operands[i] for i in stated.inputs] + [op.results[i] for i in stated.outputs]
    grads = [i for i, g in enumerate(pull.grads) if g is not None]
    operands = [g for g in pull.grads if g is not None] + [pull.saved(t) for t in kept]
    wanted = [i for i, needed in enumerate(pull.needs) if needed]
    count = len(pull.grads)
    kind = Opaque(
        matmul=stated.matmul,
        pointwise=stated.pointwise,
        transcendental=stated.transcendental,
        workspace=stated.workspace,
        outputs=tuple((op.operands[i].sizes, op.operands[i].dtype) for i in wanted),
        bytes_read=_chosen(stated.reads, [*grads, *range(count, count + len(kept))], len(operands)),
        bytes_written=_chosen(stated.writes, wanted, len(wanted)),
    )
    made = dict(zip(wanted, apply(kind, operands, f"{op.name.rpartition('/')[2]}_backward"), strict=True))
    return [made.get(i) for i in range(len(op.operands))]


def _chosen(amounts: Sequence[Poly] | None, places: Sequence[int], count: int) -> tuple[Poly, ...] | None:
    """Return the bytes of some tensors; an amount for all of them stands at the first."""
    if amounts is None or not count:
        return None
    if len(amounts) == 1:
        return (amounts[0], *(total(()),) * (count - 1))
    return tuple(amounts[i] for i in places)
