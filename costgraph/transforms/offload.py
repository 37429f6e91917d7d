"""CPU offload: keep optimizer state, parameters or saved activations in host memory, with transfers to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    apply,
    is_pass,
    need_graph,
    opened,
)
from ..ir.strides import contiguous
from ..ops.collectives import Collective, Send
from ..ops.fill import DenseFactory
from ..ops.layout import KeepAlive
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
        raise UnsupportedError(
            f"offload: graph {graph.name!r} already has tensors on the host; expected a graph without any"
        )
    offloaded = set[str]()
    result = map_stages(graph, lambda stage: _Offloader(chosen, link, offloaded).run(stage))
    missing = next((name for name in OFFLOADED if name in chosen - offloaded), None)
    if missing is not None:
        raise GraphError(
            f"offload: graph {graph.name!r} has no {missing} to offload; expected "
            f"{'a graph with parameters' if missing == 'parameters' else 'a training step'}"
        )
    return result


def need_offloaded(place: str, what: str | Iterable[str]) -> frozenset[str]:
    """Return the kinds to offload; raise GraphError for names that are not in `OFFLOADED`."""
    names = [what] if isinstance(what, str) else [*what]
    unknown = next((name for name in names if name not in OFFLOADED), None)
    if unknown is not None:
        raise GraphError(f"{place}: {shown(unknown)}, expected one of {', '.join(OFFLOADED)}")
    return frozenset(names)


class _Offloader(Rewriter):
    """Copies a graph with a memory for each tensor; `side` and `host` are True for the host."""

    lies = True

    def __init__(self, kinds: frozenset[str], link: str, done: set[str]) -> None:
        super().__init__()
        self.kinds, self.link, self.done = kinds, link, done
        self.copies: dict[tuple[Tensor, str, Graph], Tensor] = {}
        """Copy of a new tensor in the other memory, by pass."""
        self.host_copies: dict[Tensor, Tensor] = {}
        """Host copy of an old tensor, read by later passes."""
        self.returned_to_host: set[Tensor] = set()
        """Old tensors that iterations return on the host."""
        self.operands: dict[Tensor, Tensor] = {}
        """Operands by formal, for the kernel being copied."""
        self.side = False
        """Whether the kernel being copied runs on the host."""

    def chosen(self, kind: str) -> bool:
        """Whether a kind is offloaded; records that the graph has it."""
        self.done |= self.kinds & {kind}
        return kind in self.kinds

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
                formals = (*op.loop.slices, *op.loop.captured)
                for f, outer in zip(formals, op.operands[len(op.loop.carries) :], strict=True):
                    if outer is t:
                        yield from self.readers(f)
            elif _is_view(op):
                for result in op.results if op.operands[0] is t else ():
                    yield from self.readers(result, further=False)
            elif not isinstance(op.kind, KeepAlive):
                yield op
        owner = t.graph.owner
        if further and owner is not None and owner.loop is not None:
            for i, result in enumerate(t.graph.outputs):
                if result is t:
                    yield from [owner] if i < len(owner.loop.carries) else self.readers(owner.results[i])

    def goes_to_host(self, t: Tensor) -> bool:
        """Whether all later passes read a tensor on the host."""
        producer = t.producer
        if producer is None or t.role != "activation" or _is_view(producer):
            return False
        users = list(self.readers(t))
        if "activations" in self.kinds and producer.phase == "forward":
            backward_users = [op for op in users if op.phase in _BACK]
            returned = producer.loop is not None and t not in producer.loop.lasts and len(backward_users) < len(users)
            return bool(backward_users) and not returned and self.chosen("activations")
        return producer.phase in _BACK and bool(users) and all(map(self.on_host, users))

    # -- placement ---------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        copy: Tensor = super().source(old, new, suffix)
        copy.storage.host = old.role in _ROLES and self.chosen(_ROLES[old.role])
        return copy

    def operand(self, t: Tensor, op: Op, new: Graph) -> Tensor:
        """Return an op's new operand, on the host if it was offloaded."""
        if op.phase == "forward":
            return self.current(t)
        view = t.producer
        operand: Tensor | None = self.host_copies.get(t)
        if (
            operand is None
            and view is not None
            and view.phase == "forward"
            and view.graph is op.graph
            and _is_view(view)
        ):
            base = self.operand(view.operands[0], op, new)
            if base.storage.host:  # view the copy: a view of the original would keep it on the device
                operand = self.host_copies[t] = new.add_op(view.kind, [base], view.name, op.phase).results[0]
        return self.current(t) if operand is None else operand

    def current(self, t: Tensor) -> Tensor:
        """Return the new tensor in the memory where it was computed."""
        tensor: Tensor = self.tensors[t]
        return tensor

    def in_memory(self, t: Tensor, op: Op, new: Graph, *, host: bool) -> Tensor:
        """Return a new tensor in the given memory: itself, or a copy shared by an op's pass."""
        if t.storage.host == host:
            return t
        key = (t, _pass(op), new)
        if key not in self.copies:
            self.copies[key] = self.transferred([t], op, new, host=host)
        return self.copies[key]

    def transferred(self, tensors: Sequence[Tensor], op: Op, new: Graph, *, host: bool) -> Tensor:
        """Transfer the last of `tensors`, into the first if there are two."""
        to = "host" if host else "device"
        kind = Transfer(link=self.link, to=to, into=len(tensors) > 1)
        copy = new.add_op(kind, tensors, f"{tensors[-1].name}.to_{to}", op.phase)
        copy.scope = op.scope
        return copy.results[0]

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if new.fused:
            copied = self.copy(op, new, suffix)
            if self.side and isinstance(copied.kind, DenseFactory):
                copied.state(host=True)
            return
        if op.loop is not None:
            self.loop(op, op.loop, new)
        elif _is_view(op) or isinstance(op.kind, KeepAlive):
            self.view(op, new)
        else:
            self.single(op, new)
        for t in op.results:
            self.send(t, op, new)

    def send(self, t: Tensor, op: Op, new: Graph) -> None:
        """Send a tensor to the host if it is offloaded."""
        owner = t.graph.owner
        returned = owner is not None and t in t.graph.outputs[len(owner.loop.carries) :]  # type: ignore[union-attr]
        if self.tensors[t].storage.pieces or not (t in self.returned_to_host if returned else self.goes_to_host(t)):
            return
        self.host_copies[t] = self.in_memory(self.tensors[t], op, new, host=True)
        if op.phase != "forward":
            self.tensors[t] = self.host_copies[t]

    def view(self, op: Op, new: Graph) -> None:
        """Add a view or `KeepAlive` of a tensor in whichever memory has it; a mere `KeepAlive` fetches nothing."""
        operands = [self.operand(t, op, new) for t in op.operands]
        operands = [self.copies.get((t, _pass(op), new), t) if t.storage.host else t for t in operands]
        sides = {self.on_host(reader) for t in op.results for reader in self.readers(t)}
        if len(sides) == 1 and not isinstance(op.kind, KeepAlive) and op.results[0].numel == op.operands[0].numel:
            operands = [self.in_memory(operands[0], op, new, host=sides.pop()), *operands[1:]]  # all readers are there
        self.add(op, bound_record(op.kind, self.values), operands, new)

    def single(self, op: Op, new: Graph) -> None:
        """Add an op where it runs, with transfers of its operands and of the values it writes back."""
        host, kind = self.on_host(op), op.kind
        read, written = op.kind.reads(op), op.kind.overwrites()
        originals = [self.operand(t, op, new) for t in op.operands]
        operands = []
        for i, t in enumerate(originals):
            if t.storage.host != host and i in written and read[i] == ZERO:
                empty = Empty(sizes=t.sizes, dtype=t.dtype, host=host)
                operands.append(new.add_op(empty, [], f"{t.name}.new", op.phase).results[0])
            else:
                operands.append(self.in_memory(t, op, new, host=host))
        if isinstance(kind, Collective) and kind.inplace and originals[0].storage.host:
            raise UnsupportedError(
                f"offload: {op.name!r} assembles a parameter on the host from the shards of all ranks; expected "
                f"parameters that are sharded (zero=3) or replicated"
            )
        if isinstance(kind, DenseFactory):
            kind = replace(kind, host=host)
        if isinstance(kind, Kernel):
            kind = replace(kind, body=self.kernel_body(kind.body, operands, new))
        new_op = self.add(op, kind, operands, new)
        for i in written:
            if originals[i].storage.host != host and originals[i].role in SOURCES:
                self.write_back(op, op.operands[i], originals[i], new_op, new)

    def write_back(self, op: Op, old: Tensor, original: Tensor, new_op: Op, new: Graph) -> None:
        """Write the result of an in-place op on a copy back into the original."""
        for t, result in zip(op.results, new_op.results, strict=True):
            if t.storage is old.storage:
                self.returned(t, self.transferred([original, result], op, new, host=original.storage.host), result, op)

    def returned(self, old: Tensor, original: Tensor, copy: Tensor, op: Op) -> None:
        """Record a write-back to the original; a copy on the host serves later ops in the same pass."""
        self.tensors[old] = original
        if copy.storage.host:
            self.copies[original, _pass(op), original.graph] = copy

    def kernel_body(self, old: Graph, operands: Sequence[Tensor], new: Graph) -> Graph:
        """Copy a kernel's body, whose tensors are all in one memory."""
        self.operands = dict(zip(old.formals, operands, strict=True))
        self.side = any(t.storage.host for t in operands)
        return self.body(old, new, "")

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        copy = super().formal(old, body, suffix)
        copy.storage.host = self.side
        if old in self.operands:
            copy.strides, copy.offset = self.operands[old].strides, self.operands[old].offset
        return copy

    # -- loops -------------------------------------------------------------------------------------------------------

    def loop(self, op: Op, loop: Loop, new: Graph) -> None:
        """Add a loop; slices are fetched in each iteration, captured tensors before it."""
        host, old = self.on_host(op), loop.body
        self.returned_to_host |= {
            t for t, r in zip(old.outputs, op.results, strict=True) if r.producer and self.goes_to_host(r)
        }
        starts = [self.in_memory(self.operand(t, op, new), op, new, host=host) for t in loop.starts]
        xs = [self.sliced(t, op, new) for t in loop.xs]
        shared = [
            self.shared(self.operand(t, op, new), f, op, new) for t, f in zip(loop.shared, loop.captured, strict=True)
        ]
        body = new.start_body(old.name, fused=False)
        for f, outer in zip(old.formals, [*starts, *xs, *shared], strict=True):
            strides = contiguous(f.sizes) if f in loop.carries else outer.strides[outer.ndim - f.ndim :]
            formal = body.formal(outer, f.name, f.sizes, strides, f.storage.pieces)
            formal.offset, formal.domain = outer.offset if f in loop.captured else f.offset, f.domain
            self.tensors[f] = formal
        for f in loop.carries:
            if f in self.returned_to_host:
                self.host_copies[f] = self.in_memory(self.tensors[f], op, body, host=True)
        self.fill(old, body)
        outputs = [self.in_memory(self.tensors[t], op, body, host=host) for t in loop.nexts]
        outputs += [self.iteration_output(t, op) for t in (*loop.ys, *loop.saved)]
        body.outputs += [body.adopt(t) for t in outputs]
        assert isinstance(op.kind, Repeat)
        self.add(op, replace(bound_record(op.kind, self.values), body=body), [*starts, *xs, *shared], new)
        for t, x in zip(loop.xs, xs, strict=True):
            original = self.operand(t, op, new)
            if x is not original and original.role in SOURCES:
                self.write_back_stack(t, original, op, new)

    def write_back_stack(self, old: Tensor, original: Tensor, op: Op, new: Graph) -> None:
        """Write a copied stack that a loop overwrote back into the original."""
        for t in op.results:
            if t.storage is old.storage:
                copy, to = self.current(t), "host" if original.storage.host else "device"
                into = Transfer(link=self.link, to=to, into=True)
                with _opened_like(op, new):
                    (written,) = each(
                        original.sizes[0], lambda *slices: (apply(into, slices, "transfer")[0],),  # noqa: B023
                        [original, copy], name=f"to_{to}",
                    )  # fmt: skip
                self.returned(t, written, copy, op)

    def sliced(self, t: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a sliced operand, copied once if several loops in a pass read it from the other memory."""
        operand, pass_ = self.operand(t, op, new), _pass(op)
        loops = list(_loops_of_pass(t, pass_))
        sides = {*map(self.on_host, loops)}
        written = any(result.storage is t.storage for reader in loops for result in reader.results)
        # parameters on the host are written back slice by slice; later loops read the copy of an activation
        several = len(loops) > 1 and not (written and operand.storage.host)
        key = (operand, pass_, new)
        shared = several or key in self.copies or (written and t.storage.role == "activation")
        if not shared or not operand.storage.pieces or sides != {not operand.storage.host}:
            return operand
        if key not in self.copies:
            to = "device" if operand.storage.host else "host"
            with _opened_like(op, new):
                copies = each(operand.sizes[0], lambda x: (transfer(x, self.link, to=to),), [operand], name=f"to_{to}")
            (self.copies[key],) = copies
        return self.copies[key]

    def iteration_output(self, t: Tensor, op: Op) -> Tensor:
        """Return an output of an iteration, on the host if offloaded; an inner loop has moved its own results."""
        computed = self.current(t)
        return self.host_copies.get(t, computed) if t in self.returned_to_host else computed

    def shared(self, operand: Tensor, f: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a captured operand, copied before the loop if all readers are in the other memory.

        Each micro-batch has its own forward and backward pass, with their own copies.
        """
        sides = {self.on_host(reader) for reader in self.readers(f)}
        before_loop = len(sides) == 1 and not operand.storage.pieces and not is_pass(f.graph)
        return self.in_memory(operand, op, new, host=sides.pop()) if before_loop else operand


def _pass(op: Op) -> str:
    """Return the pass of an op: recomputed ops belong to the backward pass."""
    return "backward" if op.phase in _BACK else op.phase


def _loops_of_pass(t: Tensor, pass_: str) -> Iterator[Op]:
    """Yield the loops of a pass that read a tensor, or what such a loop made of it in place."""
    for reader in t.graph.successors(t):
        if reader.loop is not None and _pass(reader) == pass_:
            yield reader
            for result in reader.results:
                if result.storage is t.storage:
                    yield from _loops_of_pass(result, pass_)


def _opened_like(op: Op, new: Graph) -> AbstractContextManager[None]:
    """Add ops to a graph in the scope and phase of another op."""
    return opened(graph=new, levels=tuple(filter(None, op.scope.split("/"))), phase=op.phase)


def _is_view(op: Op) -> bool:
    """Whether an op neither reads nor writes memory, and only returns an operand in another form."""
    if op.body is not None or not op.operands or op.kind.overwrites() or isinstance(op.kind, Collective):
        return False
    shares = all(any(t.storage is x.storage for x in op.operands) for t in op.results)
    return shares and not any((*op.kind.reads(op), *op.kind.writes(op)))
