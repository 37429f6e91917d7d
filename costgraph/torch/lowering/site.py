"""One op at work: its operands as nodes of the fx graph, and where its results have to lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, overload

import torch

from ...algebra.polynomial import Poly
from ...graph.domain import Domain
from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.tensor import Tensor
from .emitter import Emitter, Numbers
from .formats import torch_dtype
from .groups import Groups
from .indices import Indices

__all__ = ["Shared", "Site", "laid_out", "strided"]

K_co = TypeVar("K_co", bound=OpKind, covariant=True)


def strided(x: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """View of the elements of a tensor, wherever in its storage the tensor starts."""
    return torch.as_strided(x, sizes, strides, x.storage_offset() + offset)


#: Functions that write another format than they compute in.
_CONVERTING: tuple[Callable[..., Any], ...] = (
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.pow, torch.addcmul, torch.addcdiv,
)  # fmt: skip


def laid_out(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, axes of size 1 aside."""
    return all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


@dataclass(frozen=True)
class Shared:
    """What the lowerings of all ops of a graph share."""

    emitter: Emitter
    """where calls are written down"""
    numbers: Numbers
    """numbers for formulas"""
    indices: Indices
    """what is known of integers"""
    groups: Groups
    """where ranks meet, by axis of their mesh; empty where a rank plays among ranks that all bring the same"""
    functions: Mapping[str, Callable[..., Any]]
    """functions of torch that the caller gives for ops of unknown meaning, by name"""
    inside: Callable[[Graph, Sequence[Any]], list[Any]]
    """lowers the ops of a fused body one by one: from nodes of its inputs to those of its outputs"""


@dataclass
class Site(Generic[K_co]):
    """What a lowering is given."""

    op: Op
    shared: Shared
    operands: list[Any]
    """nodes"""
    places: Mapping[Tensor, Any] = field(default_factory=dict)
    """nodes of the slices that results are written into"""
    made: dict[int, Any] = field(default_factory=dict)
    """nodes of the results, by place"""

    @property
    def emitter(self) -> Emitter:
        """Where calls are written down."""
        return self.shared.emitter

    @property
    def numbers(self) -> Numbers:
        """Numbers for formulas."""
        return self.shared.numbers

    @property
    def kind(self) -> K_co:
        """The record of the op: its facts in fields."""
        return cast("K_co", self.op.kind)  # a lowering is called with ops of its kind alone

    @overload
    def of(self, fact: Poly) -> Any: ...

    @overload
    def of(self, fact: tuple[Any, ...]) -> tuple[Any, ...]: ...

    @overload
    def of(self, fact: Mapping[str, Any]) -> dict[str, Any]: ...

    def of(self, fact: Any) -> Any:
        """Return a fact of an op with numbers put in: `site.of(site.kind.size)`."""
        return self.numbers.fact(fact)

    def sizes(self, t: Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor of the graph."""
        return self.numbers.of(t.sizes)

    def dtype(self, t: Tensor) -> torch.dtype:
        """Return the format of a tensor of the graph."""
        return torch_dtype(repr(self.op.name), t.dtype)

    def seen(self, domain: Domain, queries: int, keys: int) -> tuple[bool, int | None, int]:
        """Return whether later keys are hidden, the window, and at which key's position the first query stands."""
        place, parts = 0, 1
        for axis, n in domain.ranks:
            group, ranks = self.shared.groups.get(axis), self.numbers(n)
            place, parts = place * ranks + (0 if group is None else group.rank), parts * ranks
        window = None if domain.window is None else self.numbers(domain.window)
        return domain.causal, window, keys - queries * (parts - place)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write a call down and return its node."""
        return self.emitter.call(function, *args, **kwargs)

    def shadow(self, node: Any) -> Any:
        """Return a meta tensor of the shape, format and layout of a node."""
        return self.emitter.shadow(node)

    def permuted(self, node: Any, order: Sequence[int]) -> Any:
        """Return a view with the axes in another order."""
        return node if list(order) == list(range(len(order))) else self.call(torch.permute, node, list(order))

    def viewed(self, node: Any, sizes: Sequence[int]) -> Any:
        """Return a view of another shape."""
        same = tuple(self.shadow(node).shape) == tuple(sizes)
        return node if same else self.call(torch.ops.aten.view, node, list(sizes))

    def shaped(self, node: Any, sizes: Sequence[int]) -> Any:
        """Return a view of another shape, or a copy where the layout has none."""
        try:
            return self.viewed(node, sizes)
        except RuntimeError:
            return self.call(torch.reshape, node, list(sizes))

    def cast(self, node: Any, dtype: torch.dtype) -> Any:
        """Return a node in a format, which is a copy where it has another one."""
        if self.shadow(node).dtype == dtype:
            return node
        return self.call(torch.ops.aten._to_copy, node, dtype=dtype)

    # -- results -------------------------------------------------------------------------------------------------

    def alias(self, node: Any, i: int = 0) -> None:
        """Place a result that shares the storage of an operand."""
        self.made[i] = node

    def own(self, function: Callable[..., Any], *args: Any, i: int = 0, shape: Any = None, **kwargs: Any) -> None:
        """Place a result with a storage of its own: what a call makes, written where and as the graph has it.

        The function, one of torch's, is given `out=` where its own choice of layout or format is another one. `i` is
        the place of the result; `shape` that which the function returns, with as many elements in the same order.
        """
        made = self.emitter.tried(function, *args, **kwargs)
        if self._fits(made, i):
            self.made[i] = self.shaped(self.call(function, *args, **kwargs), self.sizes(self.op.results[i]))
            return
        target = self._target(i)
        out = target if shape is None else self.shaped(target, shape)
        written = self.into(out, function, *args, **kwargs)
        if written is None:
            self.made[i] = self.call(torch.Tensor.copy_, target, self._whole(self.call(function, *args, **kwargs), i))
        else:
            self.made[i] = written if shape is None else self.shaped(written, self.sizes(self.op.results[i]))

    def into(self, target: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let a function write into a node; None, and nothing is written down, where it cannot."""
        wanted = self.shadow(target)
        try:
            made = self.emitter.tried(function, *args, **kwargs)
            converts = made.dtype == wanted.dtype or function in _CONVERTING
            if made.shape != wanted.shape or not converts:
                return None
            return self.call(function, *args, **kwargs, out=target)
        except (TypeError, RuntimeError):  # it takes no out=, or its format does not go into that of the target
            return None

    def settle(self, node: Any, i: int = 0, *, fresh: bool = True) -> None:
        """Place a result that lies in a node already, copied where it lies otherwise than the graph has it."""
        if fresh and self._fits(self.shadow(node), i):
            self.made[i] = self.shaped(node, self.sizes(self.op.results[i]))
        else:
            self.made[i] = self.call(torch.Tensor.copy_, self._target(i), self._whole(node, i))

    def _whole(self, node: Any, i: int) -> Any:
        return self.shaped(node, self.sizes(self.op.results[i]))

    def _target(self, i: int) -> Any:
        """Return what a result is written into: a slice of a stack, or new memory of the graph's layout."""
        t = self.op.results[i]
        if t in self.places:
            return self.places[t]
        sizes, strides = self.sizes(t), self.numbers.of(t.strides)
        return self.call(torch.empty_strided, sizes, strides, dtype=self.dtype(t), device=self.emitter.device)

    def _fits(self, made: torch.Tensor, i: int) -> bool:
        """Whether a call makes what the graph has, its layout included."""
        t = self.op.results[i]
        if t in self.places or made.dtype != self.dtype(t):
            return False
        sizes, strides = self.sizes(t), self.numbers.of(t.strides)
        if tuple(made.shape) == sizes:
            return laid_out(made, strides)
        dense = torch.empty(sizes, device="meta").stride()
        return made.is_contiguous() and all(n <= 1 or a == b for n, a, b in zip(sizes, strides, dense, strict=True))
