"""Lower a whole graph: ops in program order, loops unrolled, fused bodies op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ...errors import BindingError, CostGraphError, GraphError, ShapeError, UnsupportedError
from ...ir.graph import Graph, Loop, Op, OpKind, Storage, Tensor, need_graph
from ...ops.loops import Empty, Env, LoopExecutor, PlayedIteration
from .context import (
    LOWERINGS,
    ConcreteSizes,
    Emitter,
    Groups,
    Indices,
    Leaf,
    Leaves,
    LoweringContext,
    LoweringState,
    groups_of,
    has_strides,
    random_values,
    strided,
    torch_dtype,
)
from .kernels import replay, runs_on

__all__ = [
    "GraphLowering",
    "keep_alive",
    "check_input",
    "lower",
    "random_inputs",
]


# -- walk --------------------------------------------------------------------------------------------------------------


def keep_alive(first: Any, *others: Any) -> Any:
    """Return the first argument; the others stay alive until this call."""
    return first


def check_input(
    x: torch.Tensor, name: str, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
) -> torch.Tensor:
    """Return an input after validation.

    BindingError if its shape, dtype or strides differ from the graph's.
    """
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != tuple(sizes) or x.dtype != dtype:
        description = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise BindingError(f"input {name!r} is {description}, expected {dtype} {tuple(sizes)}")
    if not has_strides(x, strides):
        raise BindingError(f"input {name!r} has strides {x.stride()}, expected {tuple(strides)}")
    return x


@dataclass(frozen=True)
class OpPosition:
    """Context of an op."""

    slices: Mapping[Storage, Any]
    """nodes of stack slices to write, by storage in the loop body"""
    iterations: tuple[int, ...]
    """enclosing loop iterations"""


class GraphLowering(LoopExecutor[OpPosition]):
    """Lowers a graph and its nested bodies.

    Tensors with a storage per loop iteration are lists; a sum without terms yet is None.
    """

    def __init__(
        self, graph: Graph, numbers: ConcreteSizes, device: torch.device, functions: Mapping[str, Callable[..., Any]],
        groups: Groups,
    ) -> None:  # fmt: skip
        super().__init__()
        self.numbers = numbers
        self.emitter = Emitter(device)
        self.indices = Indices(graph, numbers)
        self.leaves = Leaves(graph)
        self.shared = LoweringState(self.emitter, numbers, self.indices, groups, functions, self.body)
        self._stacks: dict[Storage, Any] = {}  # allocated before their slices are written

    def run(self, graph: Graph) -> None:
        """Lower the whole graph."""
        env: Env = {}
        for t in graph.tensors:
            if t.producer is None and t.role == "input":
                env[t] = self._input(t)
        self.ops(graph, env, OpPosition({}, ()))
        outputs = [_nested(env[t]) for t in graph.outputs]
        output = outputs[0] if len(outputs) == 1 else tuple(outputs)
        # gradients stay alive to the end of the step
        grads = [n for t in graph.gradients.values() for n in _flat(env[t])]
        if grads:
            output = self.emitter.call(keep_alive, output, *grads)
        self.emitter.graph.output(output)

    def _input(self, t: Tensor) -> Any:
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        dtype, name = torch_dtype(f"input {t.name!r}", t.dtype), self.leaves.argument(t.name)
        node = self.emitter.source(self.emitter.graph.placeholder(name), sizes, strides, dtype)
        return self.emitter.call(check_input, node, t.name, sizes, dtype, strides)

    def ops(self, graph: Graph, env: Env, position: OpPosition) -> None:
        """Lower the ops of a graph."""
        for t in graph.tensors:
            if t.producer is None and t.role not in ("formal", "input"):
                env[t] = self._source(t, self.numbers.of(t.sizes), position.iterations, t.storage.pieces)
        self.play(graph.ops, env, position)

    def _source(self, t: Tensor, sizes: tuple[int, ...], iterations: tuple[int, ...], pieces: int) -> Any:
        """Return the node of a parameter, or a list with one per iteration."""
        if pieces:
            return [self._source(t, sizes[1:], (*iterations, i), pieces - 1) for i in range(sizes[0])]
        dtype = torch_dtype(f"{t.role} {t.name!r}", t.dtype)
        strides = self.numbers.of(t.strides[t.ndim - len(sizes) :])
        target = self.leaves.add(Leaf(t, sizes, strides, dtype, iterations, self.indices.limit(t)))
        return self.emitter.source(self.emitter.graph.get_attr(target), sizes, strides, dtype)

    def step(self, op: Op, env: Env, position: OpPosition) -> None:
        """Append the calls of an op."""
        rule = _rule_of(op, self.emitter.device)
        slices = position.slices
        stack_slices = {t: slices[t.storage] for t in op.results if t.storage in slices} | self._slices(op)
        site: LoweringContext[OpKind] = LoweringContext(op, self.shared, [env[t] for t in op.operands], stack_slices)
        try:
            rule(site)
        except CostGraphError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"lower {op.name!r}: torch rejects the call ({reason}), expected operands that its kernels support"
            ) from error
        env |= {t: site.results[i] for i, t in enumerate(op.results)}
        if isinstance(op.kind, Empty):
            self._stacks[op.results[0].storage] = env[op.results[0]]

    def _slices(self, op: Op) -> dict[Tensor, Any]:
        """Return the stack slices to which an unrolled loop writes the results of an op."""
        if isinstance(op.kind, Empty):  # allocates a stack, once per iteration
            return {}
        return {t: self._stack_slice(t) for t in op.results if t.storage in self._stacks and not t.is_view}

    def _stack_slice(self, t: Tensor) -> Any:
        """Return a tensor's slice of a stack."""
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        return self.emitter.call(strided, self._stacks[t.storage], sizes, strides, self.numbers(t.offset))

    def body(self, body: Graph, operands: Sequence[Any]) -> list[Any]:
        """Lower the ops of a fused body and return its outputs."""
        inner: Env = dict(zip(body.formals, operands, strict=True))
        self.ops(body, inner, OpPosition({}, ()))
        return [inner[t] for t in body.outputs]

    # -- loops -------------------------------------------------------------------------------------------------------

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterator[PlayedIteration]:
        """Yield the iterations."""
        count = self.around[-1].at if loop.until else self.numbers(loop.count)
        for turn in range(count):
            yield PlayedIteration(count - 1 - turn if loop.reverse else turn, count)

    def stack(self, loop: Loop, t: Tensor, env: Env, position: OpPosition) -> Any:
        """Return a stack, allocated before its slices unless it exists."""
        if t.storage in self._stacks:
            return self._stack_slice(t)
        dtype = torch_dtype(repr(t.name), t.dtype)
        return self.emitter.call(torch.empty, self.numbers.of(t.sizes), dtype=dtype, device=self.emitter.device)

    def slice(self, loop: Loop, value: Any, turn: PlayedIteration, position: OpPosition) -> Any:
        """Return one position of the first axis."""
        return self._select(value, turn.at)

    def iteration(
        self, loop: Loop, env: Env, turn: PlayedIteration, stacks: Sequence[Any], position: OpPosition
    ) -> None:
        """Lower the body, which writes its slices into the stacks."""
        slices = {t.storage: self._select(stack, turn.at) for t, stack in zip(loop.ys, stacks, strict=True)}
        self.ops(loop.body, env, OpPosition(slices, (*position.iterations, turn.at)))

    def _select(self, v: Any, i: int) -> Any:
        if v is None or isinstance(v, list):
            return None if v is None else v[i]
        if not self.emitter.shadow(v).ndim:
            raise ShapeError("slice of a scalar, expected a tensor with an iteration axis")
        return self.emitter.call(torch.select, v, 0, i)


def _rule_of(op: Op, device: torch.device) -> Callable[[LoweringContext[Any]], None]:
    """Return an op's lowering: the traced call if it has all results, else the lowering of its kind."""
    call = op.call
    available = call is not None and runs_on(call, device)
    if call is not None and available and len(call.places) == len(op.results):
        return partial(replay, call=call)
    rule = LOWERINGS.get(type(op.kind))
    if call is not None and not available and rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: torch has {call.target} only for CUDA ({call.rule}), expected device='cuda'"
        )
    if rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: op kind {op.kind.name!r} has no lowering, expected one registered "
            f"with costgraph.torch.lowering.lowering"
        )
    return rule


def _nested(nodes: Any) -> Any:
    """Return a tensor, or nested tuples of tensors for storages per iteration."""
    return tuple(map(_nested, nodes)) if isinstance(nodes, list) else nodes


def _flat(nodes: Any) -> list[Any]:
    if isinstance(nodes, list):
        return [n for item in nodes for n in _flat(item)]
    return [] if nodes is None else [nodes]


# -- lower -------------------------------------------------------------------------------------------------------------


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
    """Lower a graph to a torch module that runs it op by op.

    Parameters
    ----------
    graph : Graph
        A model, or a whole training step.
    device : str or torch.device
        Device to run on: cpu, cuda, or meta, which allocates nothing.
    functions : mapping of str to callable, optional
        Torch implementations for custom elementwise functions, by function name, and opaque ops, by op name. A
        function takes tensors (or numbers, where the graph has numbers) and returns a tensor or a tuple of tensors.
    mesh : torch.distributed.device_mesh.DeviceMesh or mapping of str to ProcessGroup, optional
        Device mesh of a graph partitioned by `costgraph.shard`: torch's mesh, or a process group per axis name. The
        module is that of this process; all processes run their modules together.
    seed : int
        Seed of the random parameters.
    **dims : int
        A size for every dimension without a default.

    Returns
    -------
    torch.fx.GraphModule
        `module(*inputs)` takes contiguous inputs in the order of declaration and returns the output, or a tuple of
        outputs. Graph parameters become module parameters without `requires_grad`: gradients belong to the graph if it
        has a backward pass. Buffers, caches, integers and optimizer state become buffers. Levels of a name become
        submodules, dots become underscores, and loop iterations become numbered tensors: `layers/up/weight` is
        `layers.up.weight.0` and so on. Set them with `module.load_state_dict`.

    Raises
    ------
    BindingError
        If a size is missing or invalid; at run time, if an input has another shape, dtype or strides.
    UnsupportedError
        If an op has no lowering, torch lacks a number format, or a custom op is missing in `functions`.
    GraphError
        If `graph` is not a graph, has no output, or the device is unknown; if the mesh of a sharded graph is missing,
        or has other axes or degrees.

    Notes
    -----
    Each op is one call whose result has the graph's memory layout: views are views, copies are copies, in-place ops
    write in place. Tensors are released after their last use. Loops are unrolled; outputs with a storage per iteration
    are tuples. Collectives are torch's functional ones over the process group of their axis; without a mesh, one rank
    is simulated among identical ranks. Transfers copy on the device. A run may exceed the modelled peak memory:

    - Fused kernels without a torch function run op by op, with their intermediates in memory. Torch functions are used
      for softmax, log-softmax, layer norm, RMS norm and flash attention without a soft cap, for the gradients of all
      these, and for matmuls and convolutions with a bias. On a CPU, torch has no RMS norm kernel.
    - Contractions copy an operand or the result if the axes do not form a matmul, as in torch.matmul. Axes of only one
      operand are summed first; three or more operands are contracted in pairs. Windows that are no torch convolution
      are contracted as strided views, and their gradients are added by index.
    - Torch kernels need workspace: convolutions, norms of wide rows, reductions such as any, all and argmax.
    - Operands in another dtype than the op's are cast first, on a CPU by torch's kernels too; 8-bit floats compute in
      fp32.
    - Elementwise functions without a torch kernel take a few calls, mostly in place.
    - Fused optimizer updates process 65536 elements at a time.
    - Computed indices are taken modulo the row count, since they may be out of range.
    - Results written to a stack of slices are copied if the function has no `out=`.
    - Attention masks are temporary bool tensors, or additive ones for split queries, whose attention runs op by op on
      CUDA.
    - Tensors passed around a ring are gathered first, and their kernel runs op by op.
    - Collectives along another axis than the first, or over several blocks of it, copy their input or output.

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
        raise GraphError(f"lower of graph {graph.name!r}: no output, expected at least one")
    target = _device(device)
    numbers = ConcreteSizes(graph, dims)
    walk = GraphLowering(graph, numbers, target, dict(functions or {}), groups_of(graph, mesh, numbers))
    walk.run(graph)
    module = fx.GraphModule(walk.leaves.module(target, seed), walk.emitter.graph, class_name="Lowered")
    return module.eval()


def random_inputs(
    graph: Graph, /, device: str | torch.device = "cpu", *, seed: int = 0, **dims: int
) -> tuple[torch.Tensor, ...]:
    """Return random inputs for a lowered graph, in the order of their declaration.

    Parameters
    ----------
    graph : Graph
        The graph to be lowered.
    device : str or torch.device
        Device of the inputs.
    seed : int
        Seed of the random numbers.
    **dims : int
        A size for every dimension without a default.

    Returns
    -------
    tuple of torch.Tensor
        Floats are normal with standard deviation 1. Integers that index tables are valid for the smallest one; others
        are 0 or 1.

    Raises
    ------
    BindingError, GraphError, UnsupportedError
        As in `lower`.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.torch import lower, random_inputs
    >>> g, sizes = cg.models.load("mlp", dtype="fp32"), {"B": 2, "D": 3, "F": 5, "C": 7}
    >>> lower(g, **sizes)(*random_inputs(g, **sizes)).shape
    torch.Size([2, 7])
    """
    need_graph("random_inputs", graph)
    numbers, target = ConcreteSizes(graph, dims), _device(device)
    indices, generator = Indices(graph, numbers), torch.Generator().manual_seed(seed)
    out = []
    for t in graph.tensors:
        if t.producer is None and t.role == "input":
            dtype = torch_dtype(f"input {t.name!r}", t.dtype)
            leaf = Leaf(t, numbers.of(t.sizes), numbers.of(t.strides), dtype, (), indices.limit(t))
            out.append(random_values(leaf, target, generator))
    return tuple(out)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GraphError(f"device {device!r}: unknown to torch, expected cpu, cuda or meta") from error
