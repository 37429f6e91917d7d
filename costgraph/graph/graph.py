"""The graph: a networkx DiGraph with two kinds of node, tensors and ops, in program order.

Program order is the order of the nodes. Ops are added by the functions in `costgraph.ops` and `costgraph.nn`.
"""

# Longer than other files: one class, half of it the documentation of what users call.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Annotated, Any, Generic, TypeVar, get_args

import networkx as nx

from ..algebra.dominance import NOTHING_KNOWN, Relations
from ..algebra.polynomial import Poly
from ..algebra.symbols import is_level, kind_of, shorten, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, GraphError
from ..notation.door import READ, rule
from ..notation.grammar import parse_relation
from .arguments import need_choice, need_flag, need_name, sizes_of
from .changes import Journal
from .checks import check
from .copies import Attributes, filled, reduced
from .op import Op, OpKind, Result
from .scopes import Place, close, enter, here
from .strides import Sizes, is_integral, settled
from .tensor import Storage, Tensor

__all__ = ["Graph", "apply", "current_graph", "need_graph", "sizes_of"]

T = TypeVar("T")


class _Carried(Generic[T]):
    """An attribute kept in the dictionary that networkx hands on to copies, views and reversed graphs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, graph: Graph, owner: type) -> T:
        out: T = graph.graph.facts[self.name]
        return out

    def __set__(self, graph: Graph, value: T) -> None:
        graph._forget()
        graph.note(graph._forget)
        graph.graph.facts[self.name] = value


class _Stated(_Carried[T]):
    """One that is set from outside: what it holds is looked at."""

    def __set__(self, graph: Graph, value: T) -> None:
        asked = rule(get_args(self.__orig_class__)[0])  # type: ignore[attr-defined]  # typing sets it
        if not asked.holds(value):
            raise GraphError(f"graph {graph.name!r}: {self.name} is {shown(value)}, expected {asked.expected}")
        super().__set__(graph, value)


def _changing(method: Callable[..., None]) -> Callable[..., None]:
    """Let one of networkx's own ways to change a graph need an open one, and forget what was derived before."""

    @wraps(method)
    def changed(self: Graph, *args: Any, **kwargs: Any) -> None:
        self._modify(method.__name__)
        method(self, *args, **kwargs)

    return changed


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
    dtype = _Carried[DType]()
    outputs = _Carried[list[Tensor]]()
    relations = _Carried[Relations]()
    defaults = _Stated[dict[str, int]]()
    gradients = _Carried[dict[Tensor, Tensor]]()
    """Gradients of parameters and inputs: they live from the first contribution to the end."""
    loss = _Stated[str | None]()
    handed = _Carried[dict[Storage, tuple[Storage, Poly]]]()
    """Storages of carries that a loop hands on as they came, each with what it started from."""

    add_nodes_from = _changing(nx.DiGraph.add_nodes_from)
    add_edge = _changing(nx.DiGraph.add_edge)
    add_edges_from = _changing(nx.DiGraph.add_edges_from)
    clear = _changing(nx.DiGraph.clear)
    clear_edges = _changing(nx.DiGraph.clear_edges)
    remove_node = _changing(nx.DiGraph.remove_node)
    remove_nodes_from = _changing(nx.DiGraph.remove_nodes_from)
    remove_edge = _changing(nx.DiGraph.remove_edge)
    remove_edges_from = _changing(nx.DiGraph.remove_edges_from)

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
        facts = {"dtype": find_dtype(dtype), "outputs": [], "relations": NOTHING_KNOWN, "defaults": {}, "loss": None}
        self.graph.facts = facts | {"gradients": {}, "handed": {}} | self.graph.facts

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
        return self if self.parent is None else self.parent.root

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
        return self.root._source(name, shape, dtype, "input", requires_grad=grad)

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
        return self._home()._source(name, shape, dtype, "param", requires_grad=grad)

    def buffer(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, role: str = "buffer"
    ) -> Tensor:
        """Declare what lives throughout and is no parameter: constants, or with role cache or state what is kept."""
        need_choice(f"buffer {name!r}: role", role, ("buffer", "cache", "state", "gradient"))
        return self._home()._source(name, shape, dtype, role)

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
        self._forget()
        self.note(self._forget)
        with self.whole():
            for t in tensors:
                if not isinstance(t, Tensor):
                    raise GraphError(f"output of graph {self.name!r}: got {kind_of(t)}, expected a tensor")
                self._append(self.outputs, self.adopt(t))

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

    def add_node(self, node: Tensor | Op, **attr: object) -> None:
        """Append a node."""
        if self.frozen:
            self._modify(f"add_node {node!r}")
        root, new = self.root, [n for n in (node.sizes if isinstance(node, Tensor) else ()) if not is_integral(n)]
        if not root.quotients.issuperset(new):
            before, root.quotients = root.quotients, root.quotients.union(new)
            self.note(lambda: setattr(root, "quotients", before))
        super().add_node(node, **attr)
        self.note(lambda: node in self and nx.DiGraph.remove_node(self, node))

    def _append(self, tensors: list[Tensor], tensor: Tensor) -> None:
        """Append to the inputs or outputs."""
        length = len(tensors)
        tensors.append(tensor)
        self.note(lambda: tensors.__delitem__(slice(length, None)))

    def _modify(self, asked: str) -> None:
        """Refuse what was asked for if the graph is finished, else forget what was derived of it."""
        if self.frozen:
            raise GraphError(
                f"{self.root.journal.asked or asked}: graph {self.root.name!r} is finished, expected an open one: "
                "'with g:' opens graph g again"
            )
        self._forget()
        self.note(self._forget)

    def _forget(self) -> None:
        graph: Graph | None = self
        while graph is not None:
            graph.cache.clear()
            graph = graph.parent

    def _home(self) -> Graph:
        """Where a parameter declared now belongs: the innermost body being built that is not fused."""
        home = current_graph(self)
        while home.fused and home.parent is not None:
            home = home.parent
        return home

    def unique(self, base: str) -> str:
        """Return the name, numbered if it is taken."""
        taken = self.root._taken
        number = taken.get(base, 0)
        name = base
        while name in taken:
            name = f"{base}_{number}"
            number += 1
        self._take(base, max(number, 1))
        self._take(name, taken.get(name, 1))
        return name

    def _take(self, name: str, number: int = 1) -> None:
        """Take a name, with the number that the next one of it gets."""
        taken = self.root._taken
        before = taken.get(name)
        taken[name] = number
        self.note(lambda: taken.pop(name, None) if before is None else taken.__setitem__(name, before))

    def _source(
        self,
        name: str,
        shape: Sequence[object],
        dtype: str | DType | None,
        role: str,
        *,
        requires_grad: bool = False,
    ) -> Tensor:
        self._modify(f"{role} {shorten(str(name))}")
        if not isinstance(name, str) or not all(map(is_level, name.replace(".", "/").split("/"))):
            raise GraphError(f"{role} {shorten(str(name))}: expected a name of letters, digits, '_', '.' and '/'")
        full = "/".join((*here().levels, name)) if role != "input" else name
        if full in self.root._taken:
            raise GraphError(f"{role} {full!r}: the name is taken in graph {self.root.name!r}, expected a new one")
        format_ = self.root.dtype if dtype is None else find_dtype(dtype)
        tensor = Tensor(
            self, full, sizes_of(shape, f"{role} {full!r}"), format_, role=role, requires_grad=requires_grad
        )
        with self.whole():
            self._take(full)
            self.add_node(tensor)
        return tensor

    def formal(self, like: Tensor, name: str, sizes: Sizes, strides: Sizes, pieces: int | None = None) -> Tensor:
        """Add an input of a body, which stands for a tensor outside."""
        pieces = like.storage.pieces if pieces is None else pieces
        tensor = Tensor(self, self.unique(name), sizes, like.dtype, role="formal", strides=strides, pieces=pieces)
        tensor.domain = like.domain
        self._append(self.formals, tensor)
        self.add_node(tensor)
        return tensor

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return the tensor as this graph sees it: itself, a captured one, or what a finished kernel hands out."""
        home = tensor.graph
        if home is self or tensor in self:
            return tensor
        ancestor = self.parent
        while ancestor is not None and ancestor is not home:
            ancestor = ancestor.parent
        if ancestor is not None:
            return self.capture(self.parent.adopt(tensor))  # type: ignore[union-attr]  # it has an ancestor
        if home.fused and home.owner is not None:
            return self.adopt(home.export(tensor))
        if home.owner is not None and home.root is self.root:
            raise GraphError(
                f"tensor {tensor.name!r} is made inside {home.owner.name!r}: expected it among the results of its body"
            )
        raise GraphError(
            f"tensor {tensor.name!r} belongs to graph {home.root.name!r}, expected one of graph {self.root.name!r}"
        )

    def capture(self, outer: Tensor) -> Tensor:
        """Return this body's input that stands for a tensor of the graph around it."""
        found = self._captured.get(outer)
        if found is None:
            found = self._captured[outer] = self.formal(outer, f"{outer.name}.in", outer.sizes, outer.strides)
            found.offset = outer.offset
            self.note(lambda: self._captured.pop(outer, None))
        return found

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Tensors of the graph around that ops in here read."""
        return tuple(self._captured)

    def export(self, tensor: Tensor) -> Tensor:
        """Return the outer tensor for one made inside this fused body: read outside, it has to reach memory."""
        owner = self.owner
        assert owner is not None
        if tensor in self.outputs:
            return owner.results[self.outputs.index(tensor)]
        for outer, inner in self._captured.items():
            if inner is tensor:
                return outer
        owner.graph._modify(owner.name)
        self._append(self.outputs, tensor)
        name = tensor.name if owner.results else None
        owner.graph.add_result(owner, Result(tensor.sizes, tensor.dtype, domain=tensor.domain), name)
        return owner.results[-1]

    def add_result(self, op: Op, result: Result, name: str | None = None) -> None:
        """Attach one more result to an op."""
        base = op.operands[result.of] if result.of is not None else None
        tensor = Tensor(
            self,
            self.unique(name or op.name) if name or op.results else op.name,
            result.sizes,
            result.dtype,
            role="activation",
            strides=result.strides,
            offset=result.offset,
            storage=None if base is None else base.storage,
            pieces=result.pieces,
        )
        tensor.producer = op
        tensor.domain = result.domain
        before, op.results = op.results, (*op.results, tensor)
        self.note(lambda: setattr(op, "results", before))
        self.add_node(tensor)
        super().add_edge(op, tensor)

    def add_op(self, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None = None) -> Op:
        """Append an op; its results are inferred."""
        need_name(kind.name, name)
        operands = tuple(operands)
        foreign = next((t for t in operands if self.frozen and t.graph.root is not self.root), None)
        if foreign is not None:
            self.adopt(foreign)  # which says more than that this one is finished
        self._modify(name)
        with self.whole():
            return self._op(kind, operands, name, phase)

    def _op(self, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None) -> Op:
        adopted = tuple(self.adopt(t) for t in operands)
        full = self.unique("/".join((*here().levels, name)))
        try:
            results = kind.results_of(adopted)
            for i, result in enumerate(results):
                sizes_of(result.sizes, f"result {i + 1}")
        except CostGraphError as error:
            raise type(error)(f"{full!r} in graph {self.root.name!r}: {error}") from None
        op = Op(self, kind, full, adopted, full.rpartition("/")[0], phase or here().phase)
        self.add_node(op)
        super().add_edges_from((t, op) for t in adopted)
        for result in results:
            self.add_result(op, result)
        if op.loop is not None:
            self._hand(op.loop.handed_on())
        return op

    def _hand(self, storages: dict[Storage, tuple[Storage, Poly]]) -> None:
        handed = self.root.handed
        handed.update(storages)
        self.note(lambda: [handed.pop(s, None) for s in storages])

    def start_body(self, name: str, *, fused: bool) -> Graph:
        """Return an empty body graph of this one."""
        self._modify(name)
        body = Graph(name, dtype=self.dtype)
        body.parent = self
        body.fused = fused
        return body

    def same(self, a: Poly, b: Poly) -> bool:
        """Whether two sizes are equal, assumptions included."""
        if a == b:
            return True
        a, b = self.told((a, b))
        return a == b

    def told(self, sizes: Sizes) -> Sizes:
        """Return sizes or strides with all that is known put in: what is equal is then the same polynomial.

        Known are assumed equalities, and that sizes such as D/H are whole: ceiling(D/H) is then D/H.
        """
        known, whole = self.root.relations, self.root.quotients
        if known.relations:
            sizes, whole = tuple(map(known.reduce, sizes)), frozenset(map(known.reduce, whole))
        return tuple(settled(n, whole) for n in sizes) if whole else sizes

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


def current_graph(of: Graph | None = None) -> Graph:
    """Return the graph that an op added now goes to: the body being built, if it is one of the same graph."""
    current = here().graph
    if of is None:
        if current is None:
            raise GraphError("no graph is open, expected 'with costgraph.Graph(...) as g:' around")
        return current
    if current is not None and current.root is of.root:
        return current
    return of.root


def apply(kind: OpKind, operands: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Append an op of some kind to the graph of its operands and return its results."""
    for i, t in enumerate(operands):
        if not isinstance(t, Tensor):
            raise GraphError(f"{kind.name}: operand {i + 1} is {kind_of(t)}, expected a tensor")
    graph = current_graph(operands[0].graph if operands else None)
    return graph.add_op(kind, operands, name).results
