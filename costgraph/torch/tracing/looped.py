"""Which turn of which loop each op of a graph is of, as it is built from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...graph.adding import added_since
from ...graph.graph import Graph
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from ...ops.moves import Concat
from ...transforms.folding.cuts import Join, Turns
from .counted import Loops
from .events import Handle, Joined
from .sizes import Translator

__all__ = ["Looped"]


class Looped:
    """Labels the ops that are added to a graph by the turns that they are of.

    `names` are the tensors of each storage now, and `settle` gives one of them a name after a part of it was written.
    """

    def __init__(
        self, graph: Graph, names: Mapping[int, Mapping[Handle, Tensor]], settle: Callable[[Handle], None]
    ) -> None:
        self.graph, self.names, self.settle = graph, names, settle
        self.turns = Turns()
        self.written: set[int] = set()
        """storages that the turn has written to"""
        self._path: tuple[tuple[int, int], ...] = ()
        self._next: tuple[tuple[int, int], ...] = ()
        self._around: dict[int, Handle] = {}
        """the first name of each storage that is there before the loops"""

    def begin(self, path: tuple[tuple[int, int], ...]) -> None:
        """Go on with another turn: what the last one has written has a name by then."""
        if self._path:
            for number in sorted(self.written):
                if number in self._around:
                    self.settle(self._around[number])
        elif path:
            self._around = {number: next(iter(names)) for number, names in self.names.items() if names}
        self.written.clear()
        self._next = path

    def label(self, before: int) -> None:
        """Note which turn the ops are of that were added since a graph had so many nodes."""
        if self._path:
            self.turns.paths |= dict.fromkeys(added_since(self.graph, before), self._path)
        self._path = self._next

    def join(self, event: Joined, parts: Sequence[Tensor]) -> Tensor:
        """Add what stands for a join, which can be made once the loop has its turns in one."""
        graph, name = self.graph, f"joined.{len(self.turns.joins)}"
        whole = Tensor(graph, name, event.made.sizes, event.made.dtype, role="buffer")
        graph.add_node(whole)
        self.turns.joins[name] = Join(event.loop, Concat(axis=event.axis, stacked=event.stacked), event.back)
        return graph.add_op(Keep(), [whole, *parts], "stack" if event.stacked else "cat", event.phase).results[0]

    def counted(self, counts: Loops, translator: Translator) -> Turns:
        """Return what is known of the loops."""
        for number, loop in enumerate(counts.loops):
            self.turns.counts[number], self.turns.played[number] = translator.size(loop.count), loop.played
        return self.turns
