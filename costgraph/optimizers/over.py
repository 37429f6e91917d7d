"""One parameter after the other: those of a layer stack inside a loop over the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..algebra.polynomial import Poly
from ..errors import GraphError
from ..graph.tensor import Tensor
from ..ops.blocks import each
from .slots import pieces

__all__ = ["over"]

Made = Tensor | tuple[Tensor, ...] | None
Group = tuple[Tensor, ...]


def over(groups: Sequence[Group], function: Callable[..., Made], name: str) -> list[Group]:
    """Apply a function to the tensors of each group, one parameter after the other.

    Parameters
    ----------
    groups : sequence of tuple of Tensor
        The tensors of one parameter each; of a layer stack, tensors whose first axis numbers its layers.
    function : callable
        `function(*group)`, of a layer stack with the tensors of one layer: adds ops and returns new tensors, operands
        that it changed in place, or None.
    name : str
        Name of the loop over the layers of a stack; neighbours in the list with as many layers share one.

    Returns
    -------
    list of tuple of Tensor
        What the function returned for each group; an operand changed in place is the tensor to read from then on.

    Raises
    ------
    GraphError
        If tensors of a layer stack stand beside others in a group.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import over
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     w = g.param("w", (N,))
    ...     ((half,),) = over([(w,)], lambda w: cg.ops.pointwise("mul", w, 0.5, inplace=True), "halve")
    >>> half.storage is w.storage
    True
    """
    out: list[Group] = []
    for layers, run in _runs(groups, name):
        if layers is None:
            out += [_tuple(function(*group)) for group in run]
        else:
            out += _stack(layers, run, function, name)
    return out


def _runs(groups: Sequence[Group], name: str) -> Iterator[tuple[Poly | None, list[Group]]]:
    """Yield neighbours that one loop can take together: how many layers they have, None for no stack."""
    run: list[Group] = []
    current: Poly | None = None
    for group in groups:
        layers = _layers(group, name)
        if run and layers != current:
            yield current, run
            run = []
        current = layers
        run.append(group)
    if run:
        yield current, run


def _layers(group: Group, name: str) -> Poly | None:
    counts = {t.sizes[0] if pieces(t) else None for t in group}
    if len(counts) != 1:
        raise GraphError(f"{name}: {group!r}, expected tensors of one layer stack or of none")
    return counts.pop()


def _stack(layers: Poly, run: list[Group], function: Callable[..., Made], name: str) -> list[Group]:
    """Run a loop over the layers, whose body takes the parameters of one layer in turn; stacks nest."""
    lengths: list[int] = []

    def step(*slices: Tensor) -> Group:
        at = 0
        inner = []
        for group in run:
            inner.append(slices[at : at + len(group)])
            at += len(group)
        made = over(inner, function, name)
        lengths.extend(map(len, made))
        return tuple(t for group in made for t in group)

    made = each(layers, step, tuple(t for group in run for t in group), name=name)
    out, at = [], 0
    for n in lengths:
        out.append(made[at : at + n])
        at += n
    return out


def _tuple(made: Made) -> Group:
    return () if made is None else made if isinstance(made, tuple) else (made,)
