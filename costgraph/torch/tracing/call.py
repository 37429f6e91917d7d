"""What a rule for an aten op sees of one call: its arguments by the names of torch's schema, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...algebra.polynomial import ZERO, Poly
from ...dtypes import DType
from ...graph.strides import Sizes, distinct, numel
from ...ops.rules import Flops

__all__ = ["Call", "Counts", "Spec"]


@dataclass(frozen=True)
class Spec:
    """A tensor as a rule sees it."""

    sizes: Sizes
    """shape"""
    strides: Sizes
    """elements between neighbours along each axis"""
    dtype: DType
    """number format"""

    @property
    def numel(self) -> Poly:
        """Number of index points."""
        return numel(self.sizes)

    @property
    def touched(self) -> Poly:
        """Different elements: an expanded axis repeats the same ones."""
        return distinct(self.sizes, self.strides)

    @property
    def bytes(self) -> Poly:
        """Bytes of the different elements."""
        return self.touched * self.dtype.bytes


@dataclass(frozen=True)
class Call:
    """One call of an aten op."""

    name: str
    """Name without overload and without the underscore of an op in place, such as `add` for `aten.add_.Tensor`."""
    overload: str
    """Name of the overload, such as `Tensor`."""
    inplace: bool
    """Whether it writes into an operand."""
    arguments: Mapping[str, Any]
    """Arguments by the names of torch's schema, defaults filled in: tensors as Spec, sizes as Poly or int."""
    results: tuple[Spec, ...]
    """The tensors that it returns, those of lists one by one."""
    device: str = "cpu"
    """What it runs on: kernels take their workspace by it."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return an argument, None where the schema has none of that name."""
        return self.arguments.get(name)

    @property
    def operands(self) -> tuple[Spec, ...]:
        """Tensor arguments in the order of the schema, those of lists one by one."""
        return tuple(_specs(self.arguments.values()))

    @property
    def out(self) -> Spec:
        """The first result."""
        return self.results[0]


def _specs(values: Any) -> Iterator[Spec]:
    for value in values:
        if isinstance(value, Spec):
            yield value
        elif isinstance(value, tuple | list):
            yield from _specs(value)


@dataclass
class Counts(Flops):
    """What one call costs: `costgraph.ops.rules.Flops`, and bytes where they are not those of whole tensors."""

    reads: Sequence[Poly] | None = None
    """bytes read of each tensor argument, as `Call.operands` lists them, None for each of them whole"""
    writes: Sequence[Poly] | None = None
    """bytes written of each result, or, of an op that returns none, of each tensor that its schema says it writes and
    that holds anything; None for each of them whole"""
    workspace: Poly = ZERO
    """bytes that the kernel needs while it runs, beside operands and results"""
