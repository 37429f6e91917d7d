"""When each storage of a graph is born and when it dies, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, bound_answer
from ..graph.graph import Graph, need_graph
from ..graph.sizes import bindings
from ..hardware.tables import Column, Fact, Table
from .lifetimes import copies_for, play
from .live import View
from .workspaces import on_device

__all__ = ["Lifetime", "Lifetimes", "lifetimes"]


@dataclass(frozen=True)
class Lifetime:
    """One storage: what it is, and when it is there."""

    tensor: str
    """name of the tensor that it was made for; iterations of a Repeat in brackets"""
    role: str
    """input, param, buffer, cache, output, activation, or workspace of a device"""
    bytes: Formula
    """bytes it takes"""
    born: str | None
    """op that makes it, None for what is there from the start"""
    dies: str | None
    """last op that needs it, None for what stays to the end"""


class Lifetimes(Table, list[Lifetime]):
    """The storages of a graph. Made by `lifetimes`; in all else a list."""

    graph = ""
    """name of the graph"""

    @property
    def rows(self) -> tuple[Lifetime, ...]:
        """The storages."""
        return tuple(self)

    def _about(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self)} storages"

    def _columns(self) -> Sequence[Column]:
        return Column("tensor"), Column("role"), Column("bytes", "B"), Column("born"), Column("dies")

    def _facts(self) -> Sequence[Fact]:
        throughout = [r.bytes for r in self if r.born is None and r.dies is None]
        return (Fact("throughout", sum(throughout), "B"),) if throughout else ()


def lifetimes(graph: Graph, /, *, device: str | None = None, arch: str | None = None, **dims: int) -> Lifetimes:
    """List every storage with its birth and death.

    Parameters
    ----------
    graph : Graph
        What is asked.
    device, arch : str, optional
        As in `peak_memory`: what libraries and kernels allocate there is listed beside the storages, role workspace.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Lifetimes
        A list of `Lifetime`, rows (tensor, role, bytes, born, dies), what lives throughout first. Of a Repeat the
        first, a middle and the last iteration are listed.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    GraphError
        If there is no such device or architecture.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     g.output(cg.relu(cg.relu(x)))
    >>> [(r.tensor, r.role, r.born, r.dies) for r in cg.lifetimes(g)]
    [('x', 'input', None, None), ('relu', 'activation', 'relu', 'relu_1'), ('relu_1', 'output', 'relu_1', None)]
    """
    need_graph("lifetimes", graph)
    out = Lifetimes(_rows(graph, dims, on_device("lifetimes", device, arch)))
    out.graph = graph.name
    return out


def _rows(graph: Graph, dims: Mapping[str, object], view: View) -> Iterator[Lifetime]:
    values = bindings(graph, dims)
    program = play(graph, copies_for(values), values)
    if view is not None:
        program = view(graph, program)
    for life in program.lives:
        born = None if life.born is None else program.steps[life.born].where
        dies = None if life.dies is None else program.steps[life.dies].where
        yield Lifetime(life.name, life.role, bound_answer(life.bytes, values), born, dies)
    for step in program.steps if view is not None else ():
        if step.workspace:
            yield Lifetime(step.where, "workspace", bound_answer(step.workspace, values), step.where, step.where)
