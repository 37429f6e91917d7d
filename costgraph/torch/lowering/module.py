"""The public function: lowering of a whole graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ...errors import GraphError
from ...graph.graph import Graph, need_graph
from .emitter import Numbers
from .formats import torch_dtype
from .groups import groups_of
from .indices import Indices
from .sources import Leaf, numbers_for
from .walk import Walk

__all__ = ["lower", "random_inputs"]


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
