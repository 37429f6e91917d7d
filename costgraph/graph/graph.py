"""The graph: a networkx DiGraph with two kinds of node, tensors and ops, in program order.

Program order is the order of the nodes. Ops are added by the functions in `costgraph.ops` and `costgraph.nn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Annotated, Any

import networkx as nx

from ..algebra.dominance import NOTHING_KNOWN, Relations
from ..algebra.polynomial import Poly
from ..algebra.symbols import kind_of, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError
from ..notation.door import READ, guarded
from ..notation.grammar import parse_relation
from . import adding, around, showing, sizes
from .adding import home, source
from .arguments import need_choice, need_flag, sizes_of
from .changes import Carried, Journal, Stated, append, changing, forget, modify
from .checks import check
from .copies import Attributes, filled, reduced
from .op import Op, OpKind
from .placement import Sharding, Waiting
from .scopes import Place, close, current_graph, enter
from .tensor import Storage, Tensor

__all__ = ["Graph", "apply", "current_graph", "need_graph", "sizes_of"]


# what the library itself calls for each op is not checked
@guarded(
    "unique", "formal", "adopt", "capture", "export", "add_result", "add_op", "add_node", "start_body", "same", "told",
    "whole", "note",
)  # fmt: skip
class Graph(nx.DiGraph):  # type: ignore[misc]  # networkx has no types
    """A model: tensors and ops in program order.

    A graph is open while its `with` block is, and finished once that is left: tensors and ops are neither added nor
    removed then, until it is entered again. What is stated of it, outputs, assumptions, defaults and the loss, may
    still be. One that was never entered is open, and so is a copy.

    Parameters
    ----------
    name : str
        Name in reports.
    dtype : str or DType
        Number format of inputs and parameters that name none.

    Raises
    ------
    FormatError
        If the number format is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("mlp") as g:
    ...     x = g.input("x", (B, D))
    ...     g.output(cg.einsum(x, g.param("w", (D, F)), "b d, d f -> b f"))
    >>> cg.flops(g)
    2*B*D*F

    A finished graph goes on in another block:

    >>> with g:
    ...     g.outputs = [cg.relu(g.outputs[0])]
    >>> cg.flops(g)
    2*B*D*F + B*F
    """

    frozen = False
    """Whether it is finished: networkx's name, which `networkx.is_frozen` asks for."""
    graph_attr_dict_factory = Attributes
    dtype = Carried[DType]()
    outputs = Carried[list[Tensor]]()
    relations = Carried[Relations]()
    defaults = Stated[dict[str, int]]()
    gradients = Carried[dict[Tensor, Tensor]]()
    """Gradients of parameters and inputs: they live from the first contribution to the end."""
    loss = Stated[str | None]()
    handed = Carried[dict[Storage, tuple[Storage, Poly]]]()
    """Storages of carries that a loop hands on as they came, each with what it started from."""
    sharding = Carried[Sharding | None]()
    """Of the graph of one rank, where its tensors lie on the mesh."""
    parts = Carried[tuple["Graph", ...]]()
    waiting = Carried[Waiting | None]()
    """Of a stage of a pipeline, the micro-batches that wait for their backward pass."""
    matmul_dtype = Stated[str | None]()
    """Name of the format in which the precision policy of the graph runs products; None for what was declared."""
    layers = Carried[frozenset[str]]()
    """Scopes that are one layer each, of stacks whose loops run through a period of several."""

    add_nodes_from = changing(nx.DiGraph.add_nodes_from)
    add_edge = changing(nx.DiGraph.add_edge)
    add_edges_from = changing(nx.DiGraph.add_edges_from)
    clear = changing(nx.DiGraph.clear)
    clear_edges = changing(nx.DiGraph.clear_edges)
    remove_node = changing(nx.DiGraph.remove_node)
    remove_nodes_from = changing(nx.DiGraph.remove_nodes_from)
    remove_edge = changing(nx.DiGraph.remove_edge)
    remove_edges_from = changing(nx.DiGraph.remove_edges_from)

    def __init__(self, name: object = "graph", dtype: str | DType = "fp32", **attr: object) -> None:
        if name is not None and not isinstance(name, str | nx.Graph):
            raise GraphError(f"graph: name {shown(name)}, expected text")
        self.formals: list[Tensor] = []
        self.parent: Graph | None = None
        self.fused = False
        self.owner: Op | None = None
        self.cache: dict[object, Any] = {}
        self._captured: dict[Tensor, Tensor] = {}
        self._taken: dict[str, int] = {}
        self.quotients: frozenset[Poly] = frozenset()
        """Sizes that are whole only because they are sizes, such as D/H; of the outermost graph."""
        self.modules: set[str] = set()
        """Scopes that a layer or a Repeat has for itself."""
        self._places: list[Place] = []
        self.journal = Journal()
        # networkx's own functions make graphs of this class with no argument, or with data to copy
        super().__init__(None if isinstance(name, str) else name, **attr)
        self.graph.setdefault("name", name if isinstance(name, str) else "graph")
        facts: dict[str, Any] = {"dtype": find_dtype(dtype), "outputs": [], "relations": NOTHING_KNOWN, "defaults": {}}
        facts |= {"gradients": {}, "handed": {}, "layers": frozenset(), "loss": None, "matmul_dtype": None}
        facts |= {"sharding": None, "parts": (), "waiting": None}
        self.graph.facts = facts | self.graph.facts

    def copy(self, as_view: bool = False) -> Graph:
        """Return a graph of the same nodes, in which nodes can be removed; ops of its tensors go to the original."""
        out: Graph = super().copy(as_view=as_view)
        if not as_view:
            for kept in (out.graph, out.graph.facts):
                kept |= {key: v.copy() for key, v in kept.items() if isinstance(v, list | dict)}
        return out

    # -- structure -----------------------------------------------------------------------------------------------

    @property
    def ops(self) -> list[Op]:
        """Ops in program order, those inside bodies left out."""
        return [n for n in self.nodes if isinstance(n, Op)]

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors in program order."""
        return [n for n in self.nodes if isinstance(n, Tensor)]

    @property
    def root(self) -> Graph:
        """The outermost graph."""
        out = self
        while out.parent is not None:
            out = out.parent
        return out

    def walk(self) -> Iterator[Op]:
        """Yield every op, those inside bodies included, an op before its body's."""
        for op in self.ops:
            yield op
            if op.body is not None:
                yield from op.body.walk()

    def bodies(self) -> Iterator[Graph]:
        """Yield this graph and every graph inside it."""
        yield self
        for op in self.ops:
            if op.body is not None:
                yield from op.body.bodies()

    @property
    def params(self) -> list[Tensor]:
        """Parameters, those of bodies included: a body's belong to each of its iterations."""
        return [t for g in self.bodies() for t in g.tensors if t.role == "param" and t.producer is None]

    def __repr__(self) -> str:
        return f"Graph({self.name!r}: {len(self.ops)} ops, {len(self.tensors)} tensors)"

    def __str__(self) -> str:
        return showing.summary(self)

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors that the caller owns, in the order of their declaration."""
        return [t for t in self.tensors if t.role == "input"]

    # -- declaring -----------------------------------------------------------------------------------------------

    def input(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, grad: bool = False
    ) -> Tensor:
        """Declare a tensor that the caller owns.

        Parameters
        ----------
        name : str
            Name, unique in the graph.
        shape : sequence of sympy.Expr or int
            Sizes; `()` for a scalar.
        dtype : str or DType, optional
            Number format, the graph's by default.
        grad : bool
            True where the backward pass should make its gradient.

        Returns
        -------
        Tensor
            With role input.

        Raises
        ------
        GraphError, ShapeError, FormatError
            If the name is taken, a size is no size, or the format is unknown.
        """
        need_flag(f"input {name!r}", grad=grad)
        return source(self.root, name, shape, dtype, "input", requires_grad=grad)

    def param(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, grad: bool = True
    ) -> Tensor:
        """Declare a parameter; inside the body of a Repeat, one for each iteration.

        Parameters
        ----------
        name : str
            Name, prefixed by the scope and unique in the graph.
        shape : sequence of sympy.Expr or int
            Sizes.
        dtype : str or DType, optional
            Number format, the graph's by default.
        grad : bool
            False for a frozen parameter, which gets no gradient.

        Returns
        -------
        Tensor
            With role param.

        Raises
        ------
        GraphError, ShapeError, FormatError
            As `input`.
        """
        need_flag(f"param {name!r}", grad=grad)
        return source(home(self), name, shape, dtype, "param", requires_grad=grad)

    def buffer(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, role: str = "buffer"
    ) -> Tensor:
        """Declare what lives throughout and is no parameter: constants, or with role cache or state what is kept."""
        need_choice(f"buffer {name!r}: role", role, ("buffer", "cache", "state", "gradient"))
        return source(home(self), name, shape, dtype, role)

    def output(self, *tensors: Tensor) -> None:
        """Declare results of the graph: they live from birth to the end.

        Parameters
        ----------
        *tensors : Tensor
            Tensors of this graph; several calls add up.

        Raises
        ------
        GraphError
            If one is no tensor, or of another graph.
        """
        forget(self)
        with self.whole():
            for t in tensors:
                if not isinstance(t, Tensor):
                    raise GraphError(f"output of graph {self.name!r}: got {kind_of(t)}, expected a tensor")
                append(self, self.outputs, self.adopt(t))

    def assume(self, *relations: Annotated[str, READ]) -> None:
        """State what is known of sizes, so that formulas narrow and bound sizes are checked.

        Parameters
        ----------
        *relations : str
            Such as `"F >= D"`, `"D == H*K"`, `"S <= 1024"`; `costgraph.notation.grammar` has the grammar.

        Raises
        ------
        PatternError
            If a text is no relation, or contradicts what is known.
        """
        known = self.root.relations.relations
        self.root.relations = Relations([*known, *(parse_relation(r) for r in relations)])

    def freeze(self) -> Graph:
        """Validate and finish, as the end of a `with` block does."""
        self.validate()
        self._finish()
        return self

    # -- as a context --------------------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self.frozen and self.parent is None:
            self._reopen()
        # a graph that is declared while another one is open starts with no scope of that one
        self._places.append(enter(graph=self, levels=()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        inmost = close(self._places.pop())
        outermost = self.parent is None and not self._places
        if outermost:
            self._finish()  # whatever it ended with: nothing is added to it by accident
        if kind is not None:
            return
        if not inmost:  # ops of both may have got the scope of the other one
            raise GraphError(
                f"graph {self.name!r} is closed while what was opened later is still open, expected the innermost one "
                "first: two generators that run by turns cannot both hold a graph open"
            )
        if self.parent is None:
            self.validate()

    def _finish(self) -> None:
        for g in self._own_bodies():
            g.cache.clear()  # its lists and dictionaries may have been changed in place
            g.frozen = True

    def _reopen(self) -> None:
        for g in self._own_bodies():
            for name in [n for n, v in vars(g).items() if v is nx.classes.function.frozen]:
                delattr(g, name)  # set by nx.freeze
            g.frozen = False

    def _own_bodies(self) -> Iterator[Graph]:
        """Yield this graph and every graph inside it, nothing of a view, which has all from another graph."""
        return iter(()) if hasattr(self, "_graph") else self.bodies()

    # -- inside --------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return reduced(self)

    def __setstate__(self, state: Any) -> None:
        filled(self, state)

    def __copy__(self) -> Graph:
        return self.copy()

    def whole(self, asked: str = "") -> AbstractContextManager[None]:
        """Take back every change made inside, to this graph or to another part of the same one, if it is refused."""
        return self.root.journal.whole(asked)

    def note(self, undo: Callable[[], object]) -> None:
        """Note what takes back a change that is made now."""
        self.root.journal.note(undo)

    add_node = adding.add_node
    add_op = adding.add_op
    add_result = adding.add_result
    unique = adding.unique
    formal = around.formal
    adopt = around.adopt
    capture = around.capture
    export = around.export
    explore = showing.explore
    same = sizes.same
    told = sizes.told
    stages = property(sizes.stages)

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Tensors of the graph around that ops in here read."""
        return tuple(self._captured)

    def start_body(self, name: str, *, fused: bool) -> Graph:
        """Return an empty body graph of this one."""
        modify(self, name)
        body = Graph(name, dtype=self.dtype)
        body.parent = self
        body.fused = fused
        return body

    def validate(self) -> None:
        """Check that the graph means something.

        Raises
        ------
        GraphError
            If program order is broken, a kernel has no result that anyone reads, or a tensor is read after an op has
            overwritten it in place.
        """
        check(self)


def need_graph(place: str, graph: object) -> None:
    """Raise GraphError if a question is asked of something else than a graph."""
    if not isinstance(graph, Graph):
        raise GraphError(f"{place}: got {kind_of(graph)}, expected a graph")


def apply(kind: OpKind, operands: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Append an op of some kind to the graph of its operands and return its results."""
    for i, t in enumerate(operands):
        if not isinstance(t, Tensor):
            raise GraphError(f"{kind.name}: operand {i + 1} is {kind_of(t)}, expected a tensor")
    graph = current_graph(operands[0].graph if operands else None)
    return graph.add_op(kind, operands, name).results
