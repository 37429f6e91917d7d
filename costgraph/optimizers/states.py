"""State in blocks of few bits, as of Adam in 8 bits: codes of which those of a block share a scale.

Dettmers et al. 2021 (arXiv 2110.02861). One kernel looks each code up in a table, multiplies it by the scale of its
block, updates, takes the largest magnitude in the block as its new scale, and writes the nearest codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..dtypes import DType, dtype
from ..errors import GraphError
from ..graph.sizes import bindings
from ..graph.strides import numel, windows_along
from ..graph.tensor import Tensor
from .slots import Slot, declare_state, pieces

__all__ = ["STATES", "BlockStates"]


@dataclass(frozen=True, kw_only=True)
class BlockStates:
    """How a library keeps the state of large tensors in few bits, and that of small ones.

    Which tensors are large follows from their sizes, open ones by their defaults; where nothing is known of a size its
    tensor is large. What was decided so is assumed from then on: a size that breaks it is refused when it is bound.

    Raises
    ------
    GraphError, FormatError
        If the format is unknown or has no blocks, or an amount is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (7, 128)) @ g.param("w", (128, 256))
    ...     g.output(cg.reduce(x @ g.param("v", (256, 10)), "b c -> ", "mean"))
    >>> step = cg.training_step(g, optimizer=cg.AdamW(implementation="fused", states="bitsandbytes-8bit"))
    >>> w, v = 128 * 256, 2560  # the second is small
    >>> cg.state_bytes(step).state == 2 * (w + 4 * w // 256) + 2 * 4 * v + 2 * 4 * 256
    True
    """

    format: str
    """of the state of a large tensor, with a scale for the elements of a block"""
    table: int = 0
    """fp32 entries of the table in which codes are looked up; 0 where a code is a number by itself"""
    shared: bool = False
    """whether all tensors look into one table for each kind of state; each state has its own otherwise"""
    only_whole: bool = False
    """whether a tensor is small, too, whose elements are no multiple of the block"""
    small: str | None = None
    """format of the state of small tensors, by default that of the parameter"""
    least: int = 4096
    """fewest elements of a large tensor"""

    def __post_init__(self) -> None:
        if not dtype(self.format).block:
            raise GraphError(f"BlockStates: format {self.format!r}, expected one whose elements share scales in blocks")
        for name, value in (("table", self.table), ("least", self.least)):
            if type(value) is not int or value < 0:
                raise GraphError(f"BlockStates: {name} is {value!r}, expected a whole number of at least 0")

    def format_of(self, slot: Slot) -> DType:
        """Return the format of a parameter's state."""
        if self._is_large(slot.param):
            return dtype(self.format)
        return slot.updated.dtype if self.small is None else dtype(self.small)

    def _is_large(self, param: Tensor) -> bool:
        graph, n = param.graph.root, numel(param.sizes[pieces(param) :])
        block = dtype(self.format).block or 1
        usual = n.bind(bindings(graph, {})).constant
        blocks = windows_along(n, 0, block)
        if graph.relations.nonnegative(self.least - 1 - n):
            return False
        large = graph.relations.nonnegative(n - self.least) or usual is None or usual >= self.least
        if not graph.relations.nonnegative(n - self.least if large else self.least - 1 - n):
            graph.assume(f"{n.expr} >= {self.least}" if large else f"{n.expr} < {self.least}")
        if not large or not self.only_whole or graph.same(blocks, n / block):
            return large
        if usual is not None and usual % block:
            return False
        graph.assume(f"{blocks.expr} == {(n / block).expr}")
        return True

    def holds(self, state: Tensor) -> bool:
        """Whether a state is in blocks."""
        return state.dtype.name == dtype(self.format).name

    def own_tables(self, slots: Sequence[Slot], states: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Declare the tables of each parameter's states: none where all look into the same."""
        return [
            tuple(
                slot.state(f"{t.name.rpartition('.')[2]}.table", (*slot.layers(), self.table), "fp32")
                for t in (kept if self.table and not self.shared else ())
                if self.holds(t)
            )
            for slot, kept in zip(slots, states, strict=True)
        ]

    def common_tables(self, states: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Declare the tables that all parameters share, one for each kind of state that is in blocks."""
        found = next((kept for kept in states if self.shared and self.table and any(map(self.holds, kept))), ())
        return tuple(self._common(t, i) for i, t in enumerate(found))

    def _common(self, state: Tensor, i: int) -> Tensor:
        name = f"table{i + 1}"
        there = next((t for t in state.graph.root.tensors if t.name == name and t.role == "state"), None)
        return declare_state(state.graph, name, (self.table,), "fp32") if there is None else there


#: bitsandbytes from 0.45 on (`bitsandbytes/optim/optimizer.py`, `Optimizer2State.init_state`; blocks had 2,048 elements
#: before), and torchao (`torchao/optim/adam.py`, `_AdamBase._new_buffer`; `subclass_8bit.py`, `subclass_4bit.py`,
#: `subclass_fp8.py`).
STATES: Mapping[str, BlockStates] = MappingProxyType({
    "bitsandbytes-8bit": BlockStates(format="uint8_g256_fp32_flat", table=256, shared=True, small="fp32"),
    "torchao-8bit": BlockStates(format="uint8_g256_fp32_flat", table=256, only_whole=True),
    "torchao-4bit": BlockStates(format="uint4_g128_fp32_flat", table=16, only_whole=True),
    "torchao-fp8": BlockStates(format="fp8_e4m3_g256_fp32_flat", only_whole=True),
})  # fmt: skip
