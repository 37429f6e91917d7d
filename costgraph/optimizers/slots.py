"""What an optimizer updates: a parameter, its gradient, and the state that it keeps for the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..algebra.polynomial import ONE
from ..dtypes import DType
from ..errors import GraphError, ShapeError
from ..graph.graph import Graph
from ..graph.scopes import opened
from ..graph.strides import Sizes
from ..graph.tensor import Storage, Tensor
from ..ops.spectra import view_as

__all__ = ["Slot", "declare_state", "in_parts", "need_slots", "pieces", "source_like"]


def pieces(t: Tensor) -> int:
    """Return how many leading axes number tensors of their own: 1 for a parameter of a layer stack, else 0."""
    return t.storage.pieces


def declare_state(graph: Graph, name: str, sizes: Sequence[object], dtype: str | DType, role: str = "state") -> Tensor:
    """Declare a tensor that stays under its own name, whatever scope is open."""
    with opened(graph=graph.root, levels=()):
        return graph.root.buffer(name, sizes, dtype, role=role)


def source_like(param: Tensor, name: str, sizes: Sequence[object], dtype: str | DType, role: str = "state") -> Tensor:
    """Declare state, or a gradient that stays, beside a parameter, one storage for each of a stack's layers."""
    # the tensor that was declared has the name, a result of an op in place has the op's
    state = declare_state(param.graph, f"{param.storage.name}.{name}", sizes, dtype, role)
    state.storage = Storage(state.name, state.sizes, state.dtype, role, pieces(param))
    return state


@dataclass(frozen=True)
class Slot:
    """A parameter, its gradient and its state, as an optimizer sees them.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import AdamW, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = AdamW().update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> [t.name for t in g.tensors if t.role == "state" and t.producer is None]
    ['w.exp_avg', 'w.exp_avg_sq']
    """

    param: Tensor
    """Updated in place; of a layer stack all of its layers, the first axis numbers them."""
    grad: Tensor
    """Its gradient, of the same shape, maybe in another format."""
    master: Tensor | None = None
    """Copy in a wider format that is updated in place of the parameter, which is then assigned its values."""
    moments: DType | None = None
    """Format of state of the parameter's shape, by default that of what is updated."""
    declare: Callable[[str, Sequence[object], str | DType], Tensor] | None = None
    """Declares state of a name, sizes and a format, by default beside the parameter."""

    def __post_init__(self) -> None:
        for what, t in (("grad", self.grad), ("master", self.master)):
            if t is None and what == "master":
                continue
            if not isinstance(t, Tensor) or not isinstance(self.param, Tensor):
                raise GraphError(f"slot of {self.param!r}: {what} {t!r}, expected a parameter and its tensors")
            same = self.param.graph.root.same
            if t.ndim != self.param.ndim or not all(map(same, t.sizes, self.param.sizes)):
                raise ShapeError(f"slot of {self.param!r}: {what} {t!r}, expected the parameter's shape")

    @property
    def updated(self) -> Tensor:
        """What the optimizer updates: the master copy where there is one, else the parameter."""
        return self.param if self.master is None else self.master

    def state(self, name: str, sizes: Sequence[object] | None = None, dtype: str | DType | None = None) -> Tensor:
        """Declare optimizer state: a tensor that is there throughout, by default like what is updated.

        Parameters
        ----------
        name : str
            Joined to the parameter's name by a dot.
        sizes : sequence of sizes, optional
            Shape, the parameter's by default; of a layer stack with the axis of the layers.
        dtype : str or DType, optional
            Number format, by default `moments` or that of what is updated.

        Returns
        -------
        Tensor
            With role state.

        Raises
        ------
        GraphError, ShapeError, FormatError
            If the name is taken, a size is none, or the format is unknown.
        """
        shape = self.updated.sizes if sizes is None else sizes
        wanted = self.moments or self.updated.dtype if dtype is None else dtype
        declare = partial(source_like, self.param) if self.declare is None else self.declare
        return declare(name, shape, wanted)

    def axes(self) -> Sizes:
        """Return the shape of one parameter, without the axes that number those of a layer stack."""
        return self.param.sizes[pieces(self.param) :]

    def layers(self) -> Sizes:
        """Return the axes that number the parameters of a layer stack; none where there is one alone."""
        return self.param.sizes[: pieces(self.param)]

    def factor(self, axis: int) -> Sizes:
        """Return the parameter's shape with size 1 along one axis, counted from the last: row or column statistics."""
        sizes = list(self.param.sizes)
        sizes[axis] = ONE
        return tuple(sizes)


def in_parts(slot: Slot) -> Slot:
    """Return a slot whose complex numbers are seen as twice as many real ones, as torch's optimizers do it."""
    if slot.param.dtype.kind != "complex":
        return slot
    param, grad = (view_as(t, "real") for t in (slot.param, slot.grad))
    return replace(slot, param=param, grad=grad, moments=None if slot.moments == slot.param.dtype else slot.moments)


def need_slots(place: str, slots: object) -> list[Slot]:
    """Return the slots as a list, or raise GraphError: there is nothing to do without one."""
    found = list(slots) if isinstance(slots, list | tuple) else []
    if not found or not all(isinstance(s, Slot) for s in found):
        raise GraphError(f"{place}: slots {slots!r}, expected a list of Slot, one at least")
    return found
