"""The walk over a graph: every op in program order, loops played out, fused bodies op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ...errors import BindingError, CostGraphError, GraphError, ShapeError, UnsupportedError
from ...ir.graph import Graph, Loop, Op, OpKind, Storage, Tensor, need_graph
from ...ops.loops import Empty, Env, Player, Turn
from .context import (
    LOWERINGS,
    Emitter,
    Groups,
    Indices,
    Leaf,
    Leaves,
    Numbers,
    Shared,
    Site,
    groups_of,
    laid_out,
    numbers_for,
    strided,
    torch_dtype,
)
from .external import replay, runs_on

__all__ = [
    "Walk",
    "kept",
    "taken",
    "lower",
    "random_inputs",
]


# -- walk --------------------------------------------------------------------------------------------------------------


def kept(first: Any, *others: Any) -> Any:
    """Return the first argument: the others are named here, and so live until now."""
    return first


def taken(x: torch.Tensor, name: str, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
    """Return an input after a look at it.

    BindingError if it has another shape, format or strides than in the graph.
    """
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != tuple(sizes) or x.dtype != dtype:
        found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise BindingError(f"input {name!r} is {found}, expected {dtype} {tuple(sizes)}")
    if not laid_out(x, strides):
        raise BindingError(f"input {name!r} has strides {x.stride()}, expected {tuple(strides)}")
    return x


@dataclass(frozen=True)
class Place:
    """Where an op stands."""

    slices: Mapping[Storage, Any]
    """nodes of the slices of stacks that are written, by the storage that the body has for them"""
    where: tuple[int, ...]
    """iterations around"""


class Walk(Player[Place]):
    """Lowers a graph and the bodies inside it.

    What has a storage for each iteration of a loop is a list, a sum before its first term None.
    """

    def __init__(
        self, graph: Graph, numbers: Numbers, device: torch.device, functions: Mapping[str, Callable[..., Any]],
        groups: Groups,
    ) -> None:  # fmt: skip
        super().__init__()
        self.numbers = numbers
        self.emitter = Emitter(device)
        self.indices = Indices(graph, numbers)
        self.leaves = Leaves(graph)
        self.shared = Shared(self.emitter, numbers, self.indices, groups, functions, self.body)
        self._stacks: dict[Storage, Any] = {}  # made before what is written into their slices

    def run(self, graph: Graph) -> None:
        """Lower the whole graph."""
        env: Env = {}
        for t in graph.tensors:
            if t.producer is None and t.role == "input":
                env[t] = self._input(t)
        self.ops(graph, env, Place({}, ()))
        outputs = [_nested(env[t]) for t in graph.outputs]
        made = outputs[0] if len(outputs) == 1 else tuple(outputs)
        # gradients live to the end of the step
        grads = [n for t in graph.gradients.values() for n in _flat(env[t])]
        if grads:
            made = self.emitter.call(kept, made, *grads)
        self.emitter.graph.output(made)

    def _input(self, t: Tensor) -> Any:
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        dtype, name = torch_dtype(f"input {t.name!r}", t.dtype), self.leaves.argument(t.name)
        node = self.emitter.source(self.emitter.graph.placeholder(name), sizes, strides, dtype)
        return self.emitter.call(taken, node, t.name, sizes, dtype, strides)

    def ops(self, graph: Graph, env: Env, place: Place) -> None:
        """Lower the ops of a graph."""
        for t in graph.tensors:
            if t.producer is None and t.role not in ("formal", "input"):
                env[t] = self._source(t, self.numbers.of(t.sizes), place.where, t.storage.pieces)
        self.play(graph.ops, env, place)

    def _source(self, t: Tensor, sizes: tuple[int, ...], where: tuple[int, ...], pieces: int) -> Any:
        """Return the node of a parameter, or of each of its layers."""
        if pieces:
            return [self._source(t, sizes[1:], (*where, i), pieces - 1) for i in range(sizes[0])]
        dtype = torch_dtype(f"{t.role} {t.name!r}", t.dtype)
        strides = self.numbers.of(t.strides[t.ndim - len(sizes) :])
        target = self.leaves.add(Leaf(t, sizes, strides, dtype, where, self.indices.limit(t)))
        return self.emitter.source(self.emitter.graph.get_attr(target), sizes, strides, dtype)

    def step(self, op: Op, env: Env, place: Place) -> None:
        """Emit the calls of an op."""
        rule = _rule_of(op, self.emitter.device)
        slices = place.slices
        there = {t: slices[t.storage] for t in op.results if t.storage in slices} | self._slices(op)
        site: Site[OpKind] = Site(op, self.shared, [env[t] for t in op.operands], there)
        try:
            rule(site)
        except CostGraphError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
            what = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"lower {op.name!r}: torch refuses it ({what}), expected operands that its kernels take"
            ) from error
        env |= {t: site.made[i] for i, t in enumerate(op.results)}
        if isinstance(op.kind, Empty):
            self._stacks[op.results[0].storage] = env[op.results[0]]

    def _slices(self, op: Op) -> dict[Tensor, Any]:
        """Return where the results of an op lie that an unrolled loop writes into a stack."""
        if isinstance(op.kind, Empty):  # which makes one, in each iteration anew
            return {}
        return {t: self._place(t) for t in op.results if t.storage in self._stacks and not t.is_view}

    def _place(self, t: Tensor) -> Any:
        """Return where a tensor lies in a stack."""
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        return self.emitter.call(strided, self._stacks[t.storage], sizes, strides, self.numbers(t.offset))

    def body(self, body: Graph, operands: Sequence[Any]) -> list[Any]:
        """Lower the ops of a fused body one by one and return its outputs."""
        inner: Env = dict(zip(body.formals, operands, strict=True))
        self.ops(body, inner, Place({}, ()))
        return [inner[t] for t in body.outputs]

    # -- loops -------------------------------------------------------------------------------------------------------

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterator[Turn]:
        """Yield every iteration."""
        count = self.around[-1].at if loop.until else self.numbers(loop.count)
        for turn in range(count):
            yield Turn(count - 1 - turn if loop.reverse else turn, count)

    def stack(self, loop: Loop, t: Tensor, env: Env, place: Place) -> Any:
        """Make a stack before its slices, if none is there."""
        if t.storage in self._stacks:
            return self._place(t)
        dtype = torch_dtype(repr(t.name), t.dtype)
        return self.emitter.call(torch.empty, self.numbers.of(t.sizes), dtype=dtype, device=self.emitter.device)

    def slice(self, loop: Loop, value: Any, turn: Turn, place: Place) -> Any:
        """Return one position along the first axis."""
        return self._at(value, turn.at)

    def iteration(self, loop: Loop, env: Env, turn: Turn, stacks: Sequence[Any], place: Place) -> None:
        """Lower the body, whose slices are written into the stacks."""
        slices = {t.storage: self._at(stack, turn.at) for t, stack in zip(loop.ys, stacks, strict=True)}
        self.ops(loop.body, env, Place(slices, (*place.where, turn.at)))

    def _at(self, v: Any, i: int) -> Any:
        if v is None or isinstance(v, list):
            return None if v is None else v[i]
        if not self.emitter.shadow(v).ndim:
            raise ShapeError("slice of a scalar, expected an axis of iterations")
        return self.emitter.call(torch.select, v, 0, i)


def _rule_of(op: Op, device: torch.device) -> Callable[[Site[Any]], None]:
    """Return what lowers an op: the call that a trace saw there, which no result was added to, or that of its kind."""
    call = op.call
    here = call is not None and runs_on(call, device)
    if call is not None and here and len(call.places) == len(op.results):
        return partial(replay, call=call)
    rule = LOWERINGS.get(type(op.kind))
    if call is not None and not here and rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: torch has {call.target} for CUDA alone ({call.rule}), expected device='cuda'"
        )
    if rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: op kind {op.kind.name!r} has no lowering, expected one from costgraph.torch.lowering"
        )
    return rule


def _nested(made: Any) -> Any:
    """Return a tensor, of one with a storage for each iteration a tuple of them."""
    return tuple(map(_nested, made)) if isinstance(made, list) else made


def _flat(made: Any) -> list[Any]:
    if isinstance(made, list):
        return [n for part in made for n in _flat(part)]
    return [] if made is None else [made]


# -- module ------------------------------------------------------------------------------------------------------------
# The public function: lowering of a whole graph.


def lower(
    graph: Graph,
    /,
    device: str | torch.device = "cpu",
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    mesh: Any = None,
    seed: int = 0,
    **dims: int,
) -> fx.GraphModule:
    """Turn a graph into a torch module that runs it op for op.

    Parameters
    ----------
    graph : Graph
        A model, or a whole training step.
    device : str or torch.device
        Where it runs: cpu, cuda or meta, which allocates nothing.
    functions : mapping of str to callable, optional
        What torch does for elementwise functions of one's own, by the name of their record, and for opaque ops, by
        their name. A function gets tensors (numbers where the graph has numbers) and returns a tensor, or a tuple of
        them.
    mesh : torch.distributed.device_mesh.DeviceMesh or mapping of str to ProcessGroup, optional
        Where a graph that `costgraph.shard` made runs: torch's mesh, or a process group for each axis, by the names of
        the axes. The module is that of this process's place there; all of them run it together.
    seed : int
        Of the random numbers that parameters are filled with.
    **dims : int
        A size for every dimension that has no default.

    Returns
    -------
    torch.fx.GraphModule
        `module(*inputs)` takes the inputs in the order of their declaration, dense, and returns the output, or a tuple
        of them. Parameters of the graph are parameters of the module, without `requires_grad`: gradients are part of
        a graph that has a backward pass. Buffers, caches, integers and optimizer state are buffers. A level of a name
        is a module and a dot an underscore; those of a loop's iterations are tensors of their own, numbered behind
        their name: `layers/up/weight` is `layers.up.weight.0` and so on. Set them by `module.load_state_dict`.

    Raises
    ------
    BindingError
        If a size is left open or is none; when the module runs, if an input has another shape or format.
    UnsupportedError
        If an op has no lowering, torch has no such number format, or an op of one's own is not in `functions`.
    GraphError
        If it is no graph, has no output, or torch knows no such device; if it is that of one rank and the mesh is
        missing, or has other axes or degrees.

    Notes
    -----
    Each op is one call, and its result lies in memory as the graph has it: a view is a view, a copy is a copy, an op
    in place writes in place, and the code gives a tensor up after the op that reads it last. Loops are played out.
    Outputs with a storage for each iteration are tuples. Collectives are torch's functional ones over the process group
    of their axis; one without an axis is played by one rank among ranks that all bring the same. A transfer copies on
    the device. What a run needs beyond the modelled peak, by cause:

    - a fused kernel that torch has no function for runs op by op, and what its ops pass to each other is in memory
      until it is read. torch's own are called for softmax, log-softmax, layer and root-mean-square norms and flash
      attention without a soft cap, for the gradients of all of these, and for products and convolutions with a bias;
      on a CPU, torch has none for a root-mean-square norm;
    - a contraction whose axes lie so that no matrix product reads or writes them where they are copies that operand,
      or its result, as torch.matmul does; an axis that one operand alone has is summed before; three operands and more
      are contracted in pairs; windows that are no convolution of torch's are contracted as views, and added up by
      index;
    - workspace of torch's kernels: convolutions, norms of wide rows, reductions such as any, all and argmax;
    - an operand in another number format than the op computes in is converted before, on a CPU by torch's kernels too,
      and formats of 8 bits are computed with in fp32;
    - an elementwise function that torch has no kernel for is a few calls, most of them in place;
    - an update in one kernel takes its steps over 65536 elements at a time;
    - indices that are computed are taken modulo the rows of their table: nothing says that they are within it;
    - a result that is written into a stack of slices is copied there, where the function cannot write to a place;
    - a mask of positions is a tensor of bools while it is used, for queries that are split a tensor of numbers; on CUDA
      attention over such queries runs op by op;
    - what passes by in a ring is put together, and its kernel runs op by op;
    - a collective along another axis than the first, or of several blocks of it, copies what it sends or what it gets.

    Examples
    --------
    >>> import torch
    >>> import costgraph as cg
    >>> from costgraph.torch import lower
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     x, w = g.input("x", (B, D)), g.param("w", (D, F))
    ...     g.output(cg.relu(cg.einsum(x, w, "b d, d f -> b f")))
    >>> module = lower(g, B=2, D=3, F=5)
    >>> module.load_state_dict({"w": torch.ones(3, 5)})
    <All keys matched successfully>
    >>> module(torch.ones(2, 3))[0, 0].item()
    3.0
    """
    need_graph("lower", graph)
    if not graph.outputs:
        raise GraphError(f"lower of graph {graph.name!r}: no output, expected one at least")
    place = _device(device)
    numbers = Numbers(graph, dims)
    walk = Walk(graph, numbers, place, dict(functions or {}), groups_of(graph, mesh, numbers))
    walk.run(graph)
    module = fx.GraphModule(walk.leaves.module(place, seed), walk.emitter.graph, class_name="Lowered")
    return module.eval()


def random_inputs(
    graph: Graph, /, device: str | torch.device = "cpu", *, seed: int = 0, **dims: int
) -> tuple[torch.Tensor, ...]:
    """Return random inputs for a lowered graph, in the order of their declaration.

    Parameters
    ----------
    graph : Graph
        As it is lowered.
    device : str or torch.device
        Where they are made.
    seed : int
        Of the random numbers.
    **dims : int
        A size for every dimension that has no default.

    Returns
    -------
    tuple of torch.Tensor
        Floats are normal with standard deviation 1; integers that look rows up are indices of the smallest table that
        they are used for, others 0 or 1.

    Raises
    ------
    BindingError, GraphError, UnsupportedError
        As `lower`.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.torch import lower, random_inputs
    >>> g, sizes = cg.models.load("mlp", dtype="fp32"), {"B": 2, "D": 3, "F": 5, "C": 7}
    >>> lower(g, **sizes)(*random_inputs(g, **sizes)).shape
    torch.Size([2, 7])
    """
    need_graph("random_inputs", graph)
    numbers, place = Numbers(graph, dims), _device(device)
    indices, generator = Indices(graph, numbers), torch.Generator().manual_seed(seed)
    out = []
    for t in graph.tensors:
        if t.producer is None and t.role == "input":
            dtype = torch_dtype(f"input {t.name!r}", t.dtype)
            leaf = Leaf(t, numbers.of(t.sizes), numbers.of(t.strides), dtype, (), indices.limit(t))
            out.append(numbers_for(leaf, place, generator))
    return tuple(out)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GraphError(f"device {device!r}: torch knows none such, expected cpu, cuda or meta") from error
