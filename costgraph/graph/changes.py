"""Changes of a graph: which are refused, what they make obsolete, and how they are taken back.

A public function that adds to a graph does it whole or not at all: what it notes is taken back where it, or a function
that it was given, ends in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from ..algebra.symbols import shown
from ..errors import GraphError
from ..notation.door import rule
from .scopes import here
from .tensor import Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["FACTS", "Carried", "Journal", "Stated", "append", "carry_facts", "changing", "forget", "modify", "whole"]

T = TypeVar("T")


class Journal:
    """What takes back the changes of a graph since the outermost call that is made whole or not at all."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] | None = None
        self.asked = ""
        """Name of the outermost call."""

    def note(self, undo: Callable[[], object]) -> None:
        """Note what takes back a change that is made now."""
        if self._undo is not None:
            self._undo.append(undo)

    @contextmanager
    def whole(self, asked: str = "") -> Iterator[None]:
        """Take back the changes made inside, by a call of some name, if it ends in an error."""
        outermost = self._undo is None
        if outermost:
            self.asked = asked
        undo = self._undo = [] if self._undo is None else self._undo
        before = len(undo)
        try:
            yield
        except BaseException:
            while len(undo) > before:
                undo.pop()()
            raise
        finally:
            if outermost:
                self._undo, self.asked = None, ""


def whole(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Let a function that is refused leave the graph of its operands, or the one that is open, as it was."""
    asked = name or function.__name__

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        operand = next(_tensors(args), None) or next(_tensors(named.values()), None)
        graph = here().graph if operand is None else operand.graph
        if graph is None:
            return function(*args, **named)
        with graph.whole(asked):
            return function(*args, **named)

    return called


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def forget(graph: Graph) -> None:
    """Forget what was derived of a graph that is changed now, and again where the change is taken back."""
    _forget(graph)
    graph.note(partial(_forget, graph))


def _forget(graph: Graph | None) -> None:
    while graph is not None:
        graph.cache.clear()
        graph = graph.parent


def modify(graph: Graph, asked: str) -> None:
    """Refuse what was asked for if the graph is finished, else forget what was derived of it."""
    if graph.frozen:
        raise GraphError(
            f"{graph.root.journal.asked or asked}: graph {graph.root.name!r} is finished, expected an open one: "
            "'with g:' opens graph g again"
        )
    forget(graph)


def changing(method: Callable[..., None]) -> Callable[..., None]:
    """Let one of networkx's own ways to change a graph need an open one, and forget what was derived before."""

    @wraps(method)
    def changed(graph: Graph, /, *args: Any, **kwargs: Any) -> None:
        modify(graph, method.__name__)
        method(graph, *args, **kwargs)

    return changed


def append(graph: Graph, tensors: list[Tensor], tensor: Tensor) -> None:
    """Append to the inputs or outputs of a graph."""
    length = len(tensors)
    tensors.append(tensor)
    graph.note(lambda: tensors.__delitem__(slice(length, None)))


class Carried(Generic[T]):
    """An attribute kept in the dictionary that networkx hands on to copies, views and reversed graphs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, graph: Graph, owner: type) -> T:
        out: T = graph.graph.facts[self.name]
        return out

    def __set__(self, graph: Graph, value: T) -> None:
        forget(graph)
        graph.graph.facts[self.name] = value


class Stated(Carried[T]):
    """One that is set from outside: what it holds is looked at."""

    def __set__(self, graph: Graph, value: T) -> None:
        asked = rule(get_args(self.__orig_class__)[0])  # type: ignore[attr-defined]  # typing sets it
        if not asked.holds(value):
            raise GraphError(f"graph {graph.name!r}: {self.name} is {shown(value)}, expected {asked.expected}")
        super().__set__(graph, value)


#: Facts of a whole graph that name none of its tensors: a transform copies them, it never derives them again.
FACTS = ("relations", "defaults", "loss", "layers", "matmul_dtype", "waiting")


def carry_facts(old: Graph, new: Graph, **changed: Any) -> None:
    """Copy the facts of a graph to the graph that a transform builds from it.

    Every transform calls this one function, so that a fact that is added to `FACTS` reaches all of them.

    Parameters
    ----------
    old : Graph
        Graph that is transformed.
    new : Graph
        Graph that is built.
    **changed : object
        Facts, by their names in `FACTS`, that differ in the new graph. `loss=None` drops the loss.
    """
    for name in FACTS:
        fact = changed.pop(name, getattr(old, name))
        setattr(new, name, dict(fact) if isinstance(fact, dict) else fact)
    assert not changed, changed
    new.modules |= old.modules
