"""Ops over lists of tensors, one of each parameter: those of the blocks become one element with a storage each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.polynomial import ONE, ZERO, Poly, total
from ...errors import UnsupportedError
from ...graph.call import Call
from ...graph.op import Op
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...ops.foreign import Foreign, Output
from .values import Family

__all__ = ["Lists"]

# ops of aten that do the same with each element of their lists, and with the elements at one place together
_LISTED = ("_foreach_", "_fused_")


@dataclass(frozen=True)
class Lists:
    """A call that takes lists, and which places of them become one.

    Parameters
    ----------
    op : Op
        The op as it is.
    families : sequence of Family or None
        Of its operands: what stands in the lists for each block.
    blocks : int
        How many blocks there are.

    Raises
    ------
    UnsupportedError
        If it does not take its lists place by place, or what belongs together is not one tensor of each block.
    """

    op: Op
    families: Sequence[Family | None]
    blocks: int

    def __post_init__(self) -> None:
        if not self.call.target.startswith(_LISTED):
            raise self._unsupported("is no op on lists")
        if len({len(row) for row in self.lists}) != 1:
            raise self._unsupported(f"has lists of {sorted({len(row) for row in self.lists})} tensors")
        wrong = next((g for g in self.groups if len(g) not in (1, self.blocks)), None)
        if wrong is not None:
            raise self._unsupported(f"has {len(wrong)} places for what {self.blocks} blocks have")
        if any(len(self.results.get(i, ())) * self.size != len(self.op.results) for i in range(self.size)):
            raise self._unsupported("has results that are not one of each place")

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"fold: {self.op.name!r} ({self.call.target}) reads something of every block and {what}, expected "
            f"an op that takes lists place by place"
        )

    @property
    def kind(self) -> Foreign:
        """The record of the op as it is."""
        assert isinstance(self.op.kind, Foreign)
        return self.op.kind

    @property
    def call(self) -> Call:
        """What was called."""
        assert self.op.call is not None
        return self.op.call

    @property
    def lists(self) -> list[tuple[int, ...]]:
        """Operands in each argument that is a list of tensors."""
        values = (*self.call.arguments, *self.call.keywords.values())
        return [tuple(v["operand"] for v in value) for value in values if _is_list(value)]

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self.lists[0])

    @property
    def groups(self) -> list[list[int]]:
        """Places that become one: those where the lists have members of the same families."""
        found: dict[object, list[int]] = {}
        for place, operands in enumerate(zip(*self.lists, strict=True)):
            own = tuple(self.families[i] for i in operands)
            found.setdefault(own if any(f is not None for f in own) else place, []).append(place)
        return list(found.values())

    @property
    def results(self) -> dict[int, list[int]]:
        """Results that are made for each place."""
        places = {operand: place for row in self.lists for place, operand in enumerate(row)}
        out: dict[int, list[int]] = {}
        for i, (place, (*_, of, _)) in enumerate(zip(self.call.places, self.kind.outputs, strict=True)):
            out.setdefault(place if of is None else places.get(of, -1), []).append(i)
        return out

    def together(self) -> list[tuple[tuple[int, ...], tuple[Tensor, ...]]]:
        """Return the results that belong together, one of each block, with an operand of each block."""
        out, results = [], self.results
        for group in self.groups:
            if len(group) > 1:
                own = next(row for row in self.lists if self.families[row[group[0]]] is not None)
                for made in zip(*(results[p] for p in group), strict=True):
                    out.append((tuple(own[p] for p in group), tuple(self.op.results[i] for i in made)))
        return out

    # -- the op with fewer places --------------------------------------------------------------------------------

    def record(self, count: Poly, operands: Sequence[int]) -> tuple[Foreign, Call]:
        """Return record and call of the op in which one place stands for those of all blocks.

        Parameters
        ----------
        count : Poly
            How many blocks there are then.
        operands : sequence of int
            For each operand its number among those that are left.
        """
        old, call, groups, results = self.kind, self.call, self.groups, self.results
        left = sorted((i, len(g) > 1) for g in groups for i in results[g[0]])
        times = [count if len(g) > 1 else ONE for g in groups]
        lead = [self.op.operands[i].numel for i in self.lists[0]]
        after = total(n * lead[g[0]] for n, g in zip(times, groups, strict=True))
        if old.bytes_read is not None:
            raise self._unsupported("states what it reads")

        def scaled(kind: str, amount: Poly) -> Poly:
            return self._scaled(kind, amount, total(lead), after)

        called = replace(
            call,
            arguments=tuple(self._merged(v, operands) for v in call.arguments),
            keywords={k: self._merged(v, operands) for k, v in call.keywords.items()},
            places=tuple(i if call.places[row] >= 0 else -1 for i, (row, _) in enumerate(left)),
        )
        record = replace(
            old,
            pieces=tuple(int(several) for _, several in left),
            outputs=tuple(self._output(row, count if several else None, operands) for row, several in left),
            bytes_written=None if old.bytes_written is None else self._written(old.bytes_written, count),
            matmul=scaled("matmul", old.matmul),
            full=scaled("full", old.full),
            pointwise=scaled("pointwise", old.pointwise),
            transcendental=scaled("transcendental", old.transcendental),
            workspace=scaled("workspace", old.workspace),
        )
        return record, called

    def _written(self, amounts: Sequence[Poly], count: Poly) -> tuple[Poly, ...]:
        """Return what is written of each result: of one for all blocks, as much as of each times their number."""
        out: dict[int, Poly] = {}
        for group in self.groups:
            for made in zip(*(self.results[p] for p in group), strict=True):
                if len({amounts[i] for i in made}) > 1:
                    raise self._unsupported("writes other amounts for some blocks than for others")
                out[made[0]] = amounts[made[0]] * (count if len(group) > 1 else ONE)
        return tuple(out[i] for i in sorted(out))

    def _scaled(self, kind: str, amount: Poly, before: Poly, after: Poly) -> Poly:
        """Return what an op costs that does as much for each element of each place."""
        if not amount:
            return ZERO
        rate = (amount / before).constant
        if not isinstance(rate, int):
            raise self._unsupported(f"has {kind} {amount} for {before} elements")
        return after * rate

    def _merged(self, value: Any, operands: Sequence[int]) -> Any:
        """Return an argument with one element for each group of places."""
        if isinstance(value, Mapping) and "operand" in value:
            return {"operand": operands[value["operand"]]}
        if not isinstance(value, tuple) or len(value) != self.size:
            return value
        if not _is_list(value) and any(value[p] != value[g[0]] for g in self.groups for p in g):
            raise self._unsupported("takes other numbers for some blocks than for others")
        return tuple(self._merged(value[g[0]], operands) for g in self.groups)

    def _output(self, row: int, count: Poly | None, operands: Sequence[int]) -> Output:
        """Return what is stated of a result: of one for all blocks, with a first axis that numbers them."""
        sizes, dtype, strides, of, offset = self.kind.outputs[row]
        if count is not None:
            inner = contiguous(sizes) if strides is None else strides
            sizes, strides = (count, *sizes), (self.op.results[row].storage.elements, *inner)
        return sizes, dtype, strides, None if of is None else operands[of], offset


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, Mapping) and "operand" in v for v in value)
