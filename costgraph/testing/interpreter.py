"""An interpreter that executes a graph on NumPy arrays index point by index point and counts what it does.

It is slow and simple, and shares no formula with the library: FLOPs are counted as they are done, bytes as addresses
that are touched, memory as buffers that come and go. What it takes from a graph are facts: the order of the ops, their
patterns and sizes, number formats, and the workspace that kernels state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import BindingError, GraphError, UnsupportedError
from ..graph.graph import Graph, need_graph
from ..graph.loop import Loop
from ..graph.op import Op, OpKind
from ..graph.sizes import bindings, known_names
from ..graph.tensor import Storage, Tensor
from ..ops.blocks import Kernel
from ..ops.keep import Keep
from ..ops.pieces import Absent, Accumulate, taken
from ..ops.stacks import Empty
from ..transforms.rewrite import flat, members
from .arithmetic import tally
from .meanings import MEANINGS, Meaning
from .replay import Event, peak_of
from .values import Array, At, Buffer, Sizes, Value, array_of, position_of, storage_bytes

__all__ = ["Counted", "Run", "run"]


@dataclass
class Counted:
    """What one op did, in all of its iterations together."""

    tally: Any = field(default_factory=tally)
    """FLOPs by kind"""
    read: Any = 0
    """bytes of the different elements that each execution read"""
    written: Any = 0
    """bytes of the different elements that each execution wrote"""
    repeats: bool = False
    """whether an index looked up a row twice: formulas count it as often as it is looked up"""
    widest: Any = 0
    """bytes read, of the widest part alone where different parts of one storage are read"""
    most: Any = 0
    """bytes read, parts of one storage that overlap counted for each operand"""


@dataclass
class Run:
    """What was counted while a graph ran."""

    sizes: Sizes
    """numbers for formulas at the point"""
    outputs: tuple[Array, ...] = ()
    """results of the graph"""
    gradients: dict[str, Array] = field(default_factory=dict)
    """gradients of parameters and inputs by their names, those of a Repeat's iterations stacked"""
    ops: dict[str, Counted] = field(default_factory=dict)
    """what each op did, by its name"""
    values: list[tuple[Tensor, Value]] = field(default_factory=list)
    """every tensor that was made, in order"""
    events: list[Event] = field(default_factory=list)
    """every op that ran, with the buffers that it made and touched"""
    buffers: list[Buffer] = field(default_factory=list)
    """what is there throughout"""
    params: int = 0
    """elements of all parameters"""
    param_bytes: Fraction = Fraction(0)
    """bytes of all parameters"""
    touched: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses read by any op, in what is there throughout"""

    def _sum(self, kind: str) -> Any:
        return sum(getattr(c.tally, kind) for c in self.ops.values())

    @property
    def matmul(self) -> Any:
        """FLOPs of contractions, as executed."""
        return self._sum("matmul")

    @property
    def full(self) -> Any:
        """FLOPs of contractions, with every domain ignored."""
        return self._sum("full")

    @property
    def pointwise(self) -> Any:
        """FLOPs of single arithmetic operations."""
        return self._sum("pointwise")

    @property
    def transcendental(self) -> Any:
        """FLOPs of exp, log, sqrt and the like."""
        return self._sum("transcendental")

    @property
    def flops(self) -> Any:
        """FLOPs of all kinds."""
        return self.matmul + self.pointwise + self.transcendental

    @property
    def bytes_moved(self) -> Any:
        """Bytes that the ops read and wrote, each a kernel of its own."""
        return _whole(sum(c.read + c.written for c in self.ops.values()))

    @property
    def repeats(self) -> bool:
        """Whether an index looked up a row twice: then the formulas are upper bounds of bytes."""
        return any(c.repeats for c in self.ops.values())

    @cached_property
    def peak(self) -> Any:
        """Most bytes live at once."""
        return _whole(peak_of(self.events, self.buffers, self._kept)[0])

    _kept: list[Buffer] = field(default_factory=list)


def run(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    meanings: Mapping[type[OpKind], Meaning] | None = None,
    **dims: int,
) -> Run:
    """Execute a graph index point by index point and count.

    Parameters
    ----------
    graph : Graph
        What runs.
    inputs : mapping of str to array, optional
        Values of inputs and parameters by name; by default random numbers from 0.5 to 2, and 0, 1, 2, ... for integer
        formats.
    seed : int
        Of the random numbers.
    meanings : mapping of type to callable, optional
        What op kinds do, instead of `costgraph.testing.MEANINGS`.
    **dims : int
        A size for every dimension that has no default; small primes show most.

    Returns
    -------
    Run
        FLOPs by kind, bytes moved, peak memory, parameters and the values of the outputs.

    Raises
    ------
    BindingError, UnsupportedError
        If a dimension has no size, or an op kind has no meaning.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(cg.einsum(g.input("x", (B, D)), g.param("w", (D, F)), "b d, d f -> b f")))
    >>> counted = testing.run(g, B=2, D=3, F=5)
    >>> counted.matmul, counted.pointwise, counted.bytes_moved, counted.peak
    (60, 10, 204, 164)
    >>> cg.matmul_flops(g, B=2, D=3, F=5), cg.bytes_moved(g, B=2, D=3, F=5), cg.peak_memory(g, B=2, D=3, F=5)
    (60, 204, 164)
    """
    need_graph("run", graph)
    values = bindings(graph, dims)  # refuses what the graph's assumptions do
    point = {name: int(p.constant) for name, p in values.items() if p.constant is not None}
    open_ = sorted(known_names(graph) - point.keys())
    if open_:
        raise BindingError(f"run of graph {graph.name!r}: {', '.join(open_)} not bound, expected a size for each")
    sources = {t.name for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"}
    if inputs is not None and not inputs.keys() <= sources:
        odd = sorted(set(inputs) - sources)[0]
        raise GraphError(
            f"run of graph {graph.name!r}: value for {odd!r}, expected one of {', '.join(sorted(sources))}"
        )
    interpreter = _Interpreter(Sizes(point), dict(inputs or {}), seed, MEANINGS if meanings is None else meanings)
    env: dict[Tensor, Any] = {}
    with np.errstate(all="ignore"):
        interpreter.graph(graph, env, "", {}, inside=False)
    out = interpreter.out
    out.outputs = tuple(array_of(env[t]) for t in graph.outputs)
    out.gradients = {t.name: array_of(env[g]) for t, g in graph.gradients.items()}
    out._kept = [v.buffer for t in (*graph.outputs, *graph.gradients.values()) for v in members(env[t])]
    return out


class _Interpreter:
    """Runs a graph, the bodies inside it included."""

    def __init__(
        self, sizes: Sizes, inputs: dict[str, Any], seed: int, meanings: Mapping[type[OpKind], Meaning]
    ) -> None:
        self.sizes = sizes
        self.inputs = inputs
        self.random = np.random.default_rng(seed)
        self.meanings = meanings
        self.out = Run(sizes)
        self.new: list[Buffer] = []  # made since the last op ran
        self.index = [0]  # iterations of the loops around
        self.stacks: dict[Storage, Value] = {}  # made before what is written into their slices

    def graph(
        self, graph: Graph, env: dict[Tensor, Any], where: str, placed: dict[Any, Value], *, inside: bool
    ) -> list[dict[Buffer, set[int]]]:
        """Run the ops of a graph; returns the addresses that each of them reads."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                env[t] = self.source(t, where)
        reads = []
        for op in graph.ops:
            self.out.ops.setdefault(op.name, Counted())
            if (loop := op.loop) is not None:
                self.loop(loop, env, where)
                continue
            if isinstance(op.kind, Absent) or (isinstance(op.kind, Accumulate) and env[op.operands[0]] is None):
                env[op.results[0]] = None if isinstance(op.kind, Absent) else env[op.operands[1]]
                if isinstance(op.kind, Absent) or not op.kind.lent:
                    continue
                op = taken(op)
            if isinstance(op.kind, Keep) and isinstance(env[op.operands[0]], list):  # of what iterations have left
                env[op.results[0]] = env[op.operands[0]]
                self.out.events.append(Event(op.name + where, self.new, [v.buffer for v in flat(op, env) if v]))
                self.new = []
                continue
            there = placed | self.slices(op)
            if isinstance(op.kind, Kernel):
                at = self.kernel(op, env, where, there, inside=inside)
            else:
                at = At(op, self.sizes, flat(op, env), there, inside, where)
                if type(op.kind) not in self.meanings:
                    what, expected = f"op kind {op.kind.name!r} of {op.name!r}", "one from costgraph.testing.meaning"
                    raise UnsupportedError(f"{what} has no meaning, expected {expected}")
                self.meanings[type(op.kind)](at)
            self.finish(at, env, inside=inside)
            if isinstance(op.kind, Empty):
                self.stacks[op.results[0].storage] = env[op.results[0]]
            reads.append(at.read_at)
        return reads

    def slices(self, op: Op) -> dict[Any, Value]:
        """Return where the results of an op lie that an unrolled loop writes into a stack."""
        if isinstance(op.kind, Empty):  # which makes one, in each iteration anew
            return {}
        return {t: place for t in op.results if (place := self.place(t)) is not None}

    def place(self, t: Tensor) -> Value | None:
        """Return where a tensor lies in a stack, None if it does not."""
        stack = self.stacks.get(t.storage)
        if stack is None or t.touched != t.numel:  # what repeats elements is a view: no op writes it
            return None
        shape, start = tuple(self.sizes(n) for n in t.sizes), self.sizes(t.offset)
        part = stack.array.reshape(-1)[start : start + int(np.prod(shape))].reshape(shape)
        return Value(part, stack.buffer)

    def source(self, t: Tensor, where: str) -> Any:
        """Make an input, parameter, buffer or cache; one of each iteration for those of a Repeat's body."""
        shape = tuple(self.sizes(n) for n in t.sizes)
        array = self.numbers(t, shape)
        return self.stored(t, array, where, t.storage.pieces)

    def stored(self, t: Tensor, array: Array, where: str, pieces: int) -> Any:
        """Put an array into a buffer, or into one for each position of its first axes."""
        if pieces:
            return [self.stored(t, part, f"{where}[{i}]", pieces - 1) for i, part in enumerate(array)]
        steps = [self.sizes(s) for s in t.strides[t.ndim - array.ndim :]]
        order = sorted(range(array.ndim), key=lambda axis: -steps[axis])
        memory = np.array(array.transpose(order), order="C")
        buffer = Buffer(t.name + where, storage_bytes(array.shape, t.dtype), memory, True, host=t.storage.host)
        self.out.buffers.append(buffer)
        if t.role == "param":
            self.out.params += buffer.array.size
            self.out.param_bytes += buffer.bytes
        value = Value(memory.transpose(np.argsort(order)), buffer)
        self.out.values.append((t, value))
        return value

    def numbers(self, t: Tensor, shape: tuple[int, ...]) -> Array:
        """Return given numbers, or some."""
        if t.name in self.inputs:
            array = np.array(self.inputs[t.name], dtype=float)
            if array.shape != shape:
                raise BindingError(f"value of {t.name!r} has shape {array.shape}, expected {shape}")
            return array
        if t.dtype.kind == "float":
            return self.random.uniform(0.5, 2, shape)
        top = 2 if t.dtype.kind == "bool" else max(int(np.prod(shape)), 1)
        return np.arange(int(np.prod(shape)), dtype=float).reshape(shape) % top

    def kernel(
        self, op: Op, env: dict[Tensor, Any], where: str, placed: dict[Any, Value], *, inside: bool
    ) -> At[OpKind]:
        """Run a fused body: what its ops pass to each other is no memory."""
        body = op.body
        assert body is not None
        at: At[OpKind] = At(op, self.sizes, [env[t] for t in op.operands], placed, inside, where)
        inner = {**env, **dict(zip(body.formals, at.operands, strict=True))}
        memory = {v.buffer for v in at.operands}
        parts = self.graph(body, inner, where, {}, inside=True)
        changed = {body.formals[i].storage: at.operands[i] for i in op.kind.overwrites()}
        for i, t in enumerate(body.outputs):
            v = inner[t]
            if t.storage in changed:
                at.made[i] = changed[t.storage]
            else:
                parts.append({v.buffer: {v.address(index) for index in v.points()}})
            for index in v.points():
                at.write(v.array[index], *index, to=i)
        for part in parts:
            for buffer in memory & part.keys():
                at.read_at.setdefault(buffer, set()).update(part[buffer])
        widest = {b: max((p[b] for p in parts if b in p), key=len) for b in at.read_at}
        at.stated["widest"] = _bytes(widest)
        at.repeats = any(self.out.ops[inner_op.name].repeats for inner_op in body.walk())
        return at

    def loop(self, loop: Loop, env: dict[Tensor, Any], where: str) -> None:
        """Run a body as often as the count says."""
        state, xs, shared = ([env[t] for t in part] for part in (loop.starts, loop.xs, loop.shared))
        stacks = []
        for t in loop.stacks:
            stack = self.place(t)
            if stack is None:
                shape = tuple(self.sizes(n) for n in t.sizes)
                buffer = Buffer(t.name + where, storage_bytes(shape, t.dtype), np.full(shape, np.nan), held=set())
                buffer.host = t.storage.host
                self.new.append(buffer)
                stack = Value(buffer.array, buffer)
            stacks.append(stack)
        count = self.index[-1] if loop.until else self.sizes(loop.count)
        left: list[list[Any]] = [[None] * count for _ in loop.pieces]
        given = (*loop.carries, *loop.slices, *loop.captured)
        for turn in range(count):
            i = count - 1 - turn if loop.reverse else turn
            inner = {**env, **dict(zip(given, [*state, *(position_of(v, i) for v in xs), *shared], strict=True))}
            written = zip(loop.ys, stacks, strict=True)
            placed = {t.storage: Value(v.array[i, ...], v.buffer) for t, v in written}
            self.index.append(i)
            self.graph(loop.body, inner, f"{where}[{i}]", placed, inside=False)
            self.index.pop()
            state = [inner[t] for t in loop.nexts]
            for pieces, t in zip(left, loop.saved, strict=True):
                pieces[i] = inner[t]
        whole = (loop.revised(i) for i in range(len(left)))
        kept = [pieces if x is None else env[x] for pieces, x in zip(left, whole, strict=True)]
        env |= dict(zip((*loop.lasts, *loop.stacks, *loop.pieces), [*state, *stacks, *kept], strict=True))

    def finish(self, at: At[OpKind], env: dict[Tensor, Any], *, inside: bool) -> None:
        """Add up what an op did, and note which buffers it needed."""
        for i, t in enumerate(at.op.results):
            env[t] = at.result(i)
            self.out.values.append((t, env[t]))
        counted = self.out.ops[at.op.name]
        counted.tally += at.tally
        counted.repeats |= at.repeats
        if inside:
            return
        for buffer, addresses in at.read_at.items():
            if buffer.throughout:
                self.out.touched.setdefault(buffer, set()).update(addresses)
        read = at.stated.get("reads", _bytes(at.read_at))
        counted.read += read
        widest, most = _parts(at)
        counted.widest += at.stated.get("widest", widest if "reads" not in at.stated else read)
        counted.most += max(read, most) if "reads" not in at.stated else read
        counted.written += at.stated.get("writes", _bytes(at.written_at))
        # what is absent is kept as well, and what iterations have left
        known = {v.buffer for given in at.operands if given is not None for v in members(given)}
        made = [v.buffer for v in at.made.values() if v.buffer not in known]
        touched = [*known, *(v.buffer for v in at.made.values())]
        workspace = 0 if at.op.on_host else self.sizes(at.op.workspace)
        self.out.events.append(Event(at.op.name + at.where, self.new + made, touched, workspace))
        self.new = []


def _parts(at: At[OpKind]) -> tuple[Any, Any]:
    """Return the bytes that an op reads, of the widest part of each storage, and of all its different parts."""
    parts: dict[Buffer, set[frozenset[int]]] = {}
    for i, addresses in at.read_by.items():
        parts.setdefault(at.operands[i].buffer, set()).add(frozenset(addresses))
    widest = sum(max(map(len, found)) * buffer.element for buffer, found in parts.items())
    return widest, sum(sum(map(len, found)) * buffer.element for buffer, found in parts.items())


def _whole(amount: Any) -> Any:
    """Return an int where there is no part of a byte."""
    return int(amount) if Fraction(amount).denominator == 1 else amount


def _bytes(addresses: Mapping[Buffer, set[int]]) -> Any:
    return sum(len(found) * buffer.element for buffer, found in addresses.items())
