"""CPU offload: keep optimizer state, parameters or saved activations in host memory, with transfers to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..algebra.polynomial import ZERO
from ..algebra.symbols import shown
from ..errors import GraphError, UnsupportedError
from ..ir.graph import (
    SOURCES,
    Graph,
    Loop,
    Op,
    Repeat,
    Tensor,
    is_pass,
    need_graph,
    opened,
)
from ..ir.strides import contiguous
from ..ops.collectives import Collective, Send
from ..ops.fill import DenseFactory
from ..ops.keep_alive import KeepAlive
from ..ops.loops import (
    Empty,
    Kernel,
    each,
)
from ..ops.opaque import (
    Transfer,
    transfer,
)
from .rewrite import Rewriter, bound_record, map_stages

__all__ = ["OFFLOADED", "need_offloaded", "offload"]

#: Kinds of tensors that can be offloaded.
OFFLOADED = ("optimizer", "parameters", "activations")
_ROLES = {"state": "optimizer", "param": "parameters"}
_BACK = ("backward", "recompute")


def offload(graph: Graph, what: str | Iterable[str], *, link: str = "pcie") -> Graph:
    """Keep some tensors of a graph in host memory, with transfers over a link where ops need them.

    Parameters
    ----------
    graph : Graph
        A training step, an inference pass, or one rank of it as returned by `shard`.
    what : str or iterable of str
        `optimizer`: optimizer state, with updates on the host. `parameters`: fetched for each pass, inside a loop once
        per iteration, and freed after their last use. `activations`: tensors saved for the backward pass, sent to the
        host when computed and fetched where they are read.
    link : str
        Name of the link in the hardware specification.

    Returns
    -------
    Graph
        With transfers as ops. `peak_memory` refers to the device; use `side="host"` for the host.

    Raises
    ------
    GraphError
        If a name is unknown, the graph has no such tensors, or no graph is given.
    UnsupportedError
        If the graph is offloaded already, or offloaded parameters are gathered in place, as by ZeRO-1 and 2.

    Notes
    -----
    A tensor lies in one memory, and an op reads tensors in its own. Others are copied there once per pass, and values
    written into a copy are written back. Updates run on the host as with `CPUOffloadPolicy` of torch's `fully_shard`
    (optimizer and parameters) and ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840; optimizer): gradients are sent as
    soon as they are complete. Parameters on the device are copied both ways for their update; with master weights only
    the updated values return, cast on the host. Activations are as in `saved_bytes` and
    `torch.autograd.graph.save_on_cpu`. The latter also copies tensors that exist anyway, such as parameters, and copies
    a tensor once per op that saves it. Nothing is prefetched.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, L = cg.dims("B D F L")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     layer = lambda x: x + cg.nn.mlp(x, F)
    ...     x = cg.repeat(L, layer, cg.linear(g.input("x", (B, D)), "b d -> b e", e=D), name="layers")
    ...     g.output(cg.reduce(x, "b d -> ", "mean"))
    >>> step = cg.training_step(g, precision="bf16-master")
    >>> sizes = {"B": 4096, "D": 1024, "F": 4096, "L": 32}
    >>> for what in ((), "optimizer", ("optimizer", "parameters"), "activations"):
    ...     away = cg.offload(step, what)
    ...     print([round(cg.peak_memory(away, side=side, **sizes) / 1e6) for side in ("device", "host")])
    [6247, 0]
    [3014, 4851]
    [2483, 5390]
    [5398, 2416]
    """
    need_graph("offload", graph)
    chosen = need_offloaded("offload", what)
    if any(t.storage.host for g in graph.bodies() for t in g.tensors):
        raise UnsupportedError(f"offload of graph {graph.name!r}, of which something lies on the host already")
    found = set[str]()
    made = map_stages(graph, lambda stage: _Offloader(chosen, link, found).run(stage))
    missing = next((name for name in OFFLOADED if name in chosen - found), None)
    if missing is not None:
        raise GraphError(
            f"offload: graph {graph.name!r} has no {missing} to offload, expected "
            f"{'a graph with parameters' if missing == 'parameters' else 'a training step'}"
        )
    return made


def need_offloaded(place: str, what: str | Iterable[str]) -> frozenset[str]:
    """Return the kinds to offload; raise GraphError for names that are not in `OFFLOADED`."""
    given = [what] if isinstance(what, str) else [*what]
    odd = next((name for name in given if name not in OFFLOADED), None)
    if odd is not None:
        raise GraphError(f"{place}: {shown(odd)}, expected of {', '.join(OFFLOADED)}")
    return frozenset(given)


class _Offloader(Rewriter):
    """Copies a graph with a memory for each tensor; `side` and `host` are True for the host."""

    lies = True

    def __init__(self, what: frozenset[str], link: str, done: set[str]) -> None:
        super().__init__()
        self.what, self.link, self.done = what, link, done
        self.copies: dict[tuple[Tensor, str, Graph], Tensor] = {}
        """Copy of a new tensor in the other memory, by pass."""
        self.away: dict[Tensor, Tensor] = {}
        """Host copy of an old tensor, read by later passes."""
        self.leaving: set[Tensor] = set()
        """Old tensors that iterations return on the host."""
        self.given: dict[Tensor, Tensor] = {}
        """Operands by formal, for the kernel being copied."""
        self.side = False
        """Whether the kernel being copied runs on the host."""

    def chosen(self, what: str) -> bool:
        """Whether a kind is offloaded; records that the graph has it."""
        self.done |= self.what & {what}
        return what in self.what

    # -- users -------------------------------------------------------------------------------------------------------

    def on_host(self, op: Op) -> bool:
        """Whether the host runs an op of the old graph."""
        alone = not isinstance(op.kind, Collective | Send)
        return op.phase == "optimizer" and alone and self.chosen("optimizer")

    def readers(self, t: Tensor, *, further: bool = True) -> Iterator[Op]:
        """Yield the ops that read a tensor, also through views and in loop bodies; a loop that carries it counts.

        With `further`, include readers outside the body that returns it.
        """
        for op in t.graph.successors(t):
            if op.loop is not None:
                if t in op.loop.starts:
                    yield op
                given = (*op.loop.slices, *op.loop.captured)
                for f, outer in zip(given, op.operands[len(op.loop.carries) :], strict=True):
                    if outer is t:
                        yield from self.readers(f)
            elif _is_view(op):
                for made in op.results if op.operands[0] is t else ():
                    yield from self.readers(made, further=False)
            elif not isinstance(op.kind, KeepAlive):
                yield op
        owner = t.graph.owner
        if further and owner is not None and owner.loop is not None:
            for i, made in enumerate(t.graph.outputs):
                if made is t:
                    yield from [owner] if i < len(owner.loop.carries) else self.readers(owner.results[i])

    def leaves(self, t: Tensor) -> bool:
        """Whether all later passes read a tensor on the host."""
        made = t.producer
        if made is None or t.role != "activation" or _is_view(made):
            return False
        found = list(self.readers(t))
        if "activations" in self.what and made.phase == "forward":
            behind = [op for op in found if op.phase in _BACK]
            within = made.loop is not None and t not in made.loop.lasts and len(behind) < len(found)
            return bool(behind) and not within and self.chosen("activations")
        return made.phase in _BACK and bool(found) and all(map(self.on_host, found))

    # -- placement ---------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        made: Tensor = super().source(old, new, suffix)
        made.storage.host = old.role in _ROLES and self.chosen(_ROLES[old.role])
        return made

    def found(self, t: Tensor, op: Op, new: Graph) -> Tensor:
        """Return an op's new operand, on the host if it was offloaded."""
        if op.phase == "forward":
            return self.there(t)
        view = t.producer
        made: Tensor | None = self.away.get(t)
        if made is None and view is not None and view.phase == "forward" and view.graph is op.graph and _is_view(view):
            of = self.found(view.operands[0], op, new)
            if of.storage.host:  # view the copy: a view of the original would keep it on the device
                made = self.away[t] = new.add_op(view.kind, [of], view.name, op.phase).results[0]
        return self.there(t) if made is None else made

    def there(self, t: Tensor) -> Tensor:
        """Return the new tensor in the memory where it was computed."""
        made: Tensor = self.tensors[t]
        return made

    def at(self, found: Tensor, op: Op, new: Graph, *, host: bool) -> Tensor:
        """Return a new tensor in the given memory: itself, or a copy shared by an op's pass."""
        if found.storage.host == host:
            return found
        key = (found, _pass(op), new)
        if key not in self.copies:
            self.copies[key] = self.moved([found], op, new, host=host)
        return self.copies[key]

    def moved(self, tensors: Sequence[Tensor], op: Op, new: Graph, *, host: bool) -> Tensor:
        """Transfer the last of `tensors`, into the first if there are two."""
        to = "host" if host else "device"
        kind = Transfer(link=self.link, to=to, into=len(tensors) > 1)
        made = new.add_op(kind, tensors, f"{tensors[-1].name}.to_{to}", op.phase)
        made.scope = op.scope
        return made.results[0]

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if new.fused:
            made = self.copy(op, new, suffix)
            if self.side and isinstance(made.kind, DenseFactory):
                made.state(host=True)
            return
        if op.loop is not None:
            self.loop(op, op.loop, new)
        elif _is_view(op) or isinstance(op.kind, KeepAlive):
            self.view(op, new)
        else:
            self.one(op, new)
        for t in op.results:
            self.send(t, op, new)

    def send(self, t: Tensor, op: Op, new: Graph) -> None:
        """Send a tensor to the host if it is offloaded."""
        owner = t.graph.owner
        around = owner is not None and t in t.graph.outputs[len(owner.loop.carries) :]  # type: ignore[union-attr]
        if self.tensors[t].storage.pieces or not (t in self.leaving if around else self.leaves(t)):
            return
        self.away[t] = self.at(self.tensors[t], op, new, host=True)
        if op.phase != "forward":
            self.tensors[t] = self.away[t]

    def view(self, op: Op, new: Graph) -> None:
        """Add a view or `KeepAlive` of a tensor in whichever memory has it; a mere `KeepAlive` fetches nothing."""
        operands = [self.found(t, op, new) for t in op.operands]
        operands = [self.copies.get((t, _pass(op), new), t) if t.storage.host else t for t in operands]
        sides = {self.on_host(reader) for t in op.results for reader in self.readers(t)}
        if len(sides) == 1 and not isinstance(op.kind, KeepAlive) and op.results[0].numel == op.operands[0].numel:
            operands = [self.at(operands[0], op, new, host=sides.pop()), *operands[1:]]  # all readers are there
        self.add(op, bound_record(op.kind, self.values), operands, new)

    def one(self, op: Op, new: Graph) -> None:
        """Add an op where it runs, with transfers of its operands and of the values it writes back."""
        host, kind = self.on_host(op), op.kind
        read, written = op.kind.reads(op), op.kind.overwrites()
        places = [self.found(t, op, new) for t in op.operands]
        operands = []
        for i, t in enumerate(places):
            if t.storage.host != host and i in written and read[i] == ZERO:
                empty = Empty(sizes=t.sizes, dtype=t.dtype, host=host)
                operands.append(new.add_op(empty, [], f"{t.name}.new", op.phase).results[0])
            else:
                operands.append(self.at(t, op, new, host=host))
        if isinstance(kind, Collective) and kind.inplace and places[0].storage.host:
            raise UnsupportedError(
                f"offload: {op.name!r} puts a parameter on the host together of parts of all ranks, expected "
                f"parameters of which each rank has a part (zero=3), or all"
            )
        if isinstance(kind, DenseFactory):
            kind = replace(kind, host=host)
        if isinstance(kind, Kernel):
            kind = replace(kind, body=self.inside(kind.body, operands, new))
        made = self.add(op, kind, operands, new)
        for i in written:
            if places[i].storage.host != host and places[i].role in SOURCES:
                self.back(op, op.operands[i], places[i], made, new)

    def back(self, op: Op, old: Tensor, place: Tensor, made: Op, new: Graph) -> None:
        """Write the result of an in-place op on a copy back into the original."""
        for t, result in zip(op.results, made.results, strict=True):
            if t.storage is old.storage:
                self.tensors[t] = self.moved([place, result], op, new, host=place.storage.host)

    def inside(self, old: Graph, operands: Sequence[Tensor], new: Graph) -> Graph:
        """Copy a kernel's body, whose tensors are all in one memory."""
        self.given = dict(zip(old.formals, operands, strict=True))
        self.side = any(t.storage.host for t in operands)
        return self.body(old, new, "")

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        made = super().formal(old, body, suffix)
        made.storage.host = self.side
        if old in self.given:
            made.strides, made.offset = self.given[old].strides, self.given[old].offset
        return made

    # -- loops -------------------------------------------------------------------------------------------------------

    def loop(self, op: Op, loop: Loop, new: Graph) -> None:
        """Add a loop; slices are fetched in each iteration, captured tensors before it."""
        host, old = self.on_host(op), loop.body
        self.leaving |= {t for t, r in zip(old.outputs, op.results, strict=True) if r.producer and self.leaves(r)}
        starts = [self.at(self.found(t, op, new), op, new, host=host) for t in loop.starts]
        xs = [self.sliced(t, op, new) for t in loop.xs]
        shared = [
            self.shared(self.found(t, op, new), f, op, new) for t, f in zip(loop.shared, loop.captured, strict=True)
        ]
        body = new.start_body(old.name, fused=False)
        for f, outer in zip(old.formals, [*starts, *xs, *shared], strict=True):
            strides = contiguous(f.sizes) if f in loop.carries else outer.strides[outer.ndim - f.ndim :]
            made = body.formal(outer, f.name, f.sizes, strides, f.storage.pieces)
            made.offset, made.domain = outer.offset if f in loop.captured else f.offset, f.domain
            self.tensors[f] = made
        for f in loop.carries:
            if f in self.leaving:
                self.away[f] = self.at(self.tensors[f], op, body, host=True)
        self.fill(old, body)
        outputs = [self.at(self.tensors[t], op, body, host=host) for t in loop.nexts]
        outputs += [self.left(t, op) for t in (*loop.ys, *loop.saved)]
        body.outputs += [body.adopt(t) for t in outputs]
        assert isinstance(op.kind, Repeat)
        self.add(op, replace(bound_record(op.kind, self.values), body=body), [*starts, *xs, *shared], new)

    def sliced(self, t: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a sliced operand, copied once if several loops of a pass read it in the other memory."""
        found, pass_ = self.found(t, op, new), _pass(op)
        loops = [reader for reader in t.graph.successors(t) if reader.loop is not None and _pass(reader) == pass_]
        sides = {*map(self.on_host, loops)}
        written = any(made.storage is t.storage for reader in loops for made in reader.results)
        # parameters are written back slice by slice; later loops read the copy of an activation, such as a gradient
        several = len(loops) > 1 and not (written and found.storage.host)
        shared = several or (written and t.storage.role == "activation")
        if not shared or not found.storage.pieces or sides != {not found.storage.host}:
            return found
        key = (found, pass_, new)
        if key not in self.copies:
            to = "device" if found.storage.host else "host"
            with opened(graph=new, levels=tuple(filter(None, op.scope.split("/"))), phase=op.phase):
                copied = each(found.sizes[0], lambda x: (transfer(x, self.link, to=to),), [found], name=f"to_{to}")
            (self.copies[key],) = copied
        return self.copies[key]

    def left(self, t: Tensor, op: Op) -> Tensor:
        """Return an output of an iteration, on the host if offloaded; an inner loop has moved its own results."""
        there = self.there(t)
        return self.away.get(t, there) if t in self.leaving else there

    def shared(self, found: Tensor, f: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a captured operand, copied before the loop if all readers are in the other memory.

        Each micro-batch has its own forward and backward pass, with their own copies.
        """
        sides = {self.on_host(reader) for reader in self.readers(f)}
        whole = len(sides) == 1 and not found.storage.pieces and not is_pass(f.graph)
        return self.at(found, op, new, host=sides.pop()) if whole else found


def _pass(op: Op) -> str:
    """Return the pass of an op: recomputed ops belong to the backward pass."""
    return "backward" if op.phase in _BACK else op.phase


def _is_view(op: Op) -> bool:
    """Whether an op neither reads nor writes memory, and only returns an operand in another form."""
    if op.body is not None or not op.operands or op.kind.overwrites() or isinstance(op.kind, Collective):
        return False
    shares = all(any(t.storage is x.storage for x in op.operands) for t in op.results)
    return shares and not any((*op.kind.reads(op), *op.kind.writes(op)))
