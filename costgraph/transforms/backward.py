"""The backward pass: extend a graph with a scalar loss by the gradients of its parameters and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import GraphError
from ..ir.graph import Graph, Op, Tensor, current_graph, opened
from ..ops.collectives import need_of_all
from ..ops.fill import fill
from .checkpoint import Checkpoint, policy_of
from .reverse_mode import (
    BackwardHooks,
    Leaf,
    ReverseMode,
    active_in,
    hoist,
    keep_branch_residuals,
    peel,
    protect_saved,
    pull_kernel,
    pull_loop,
    recompute,
)
from .views import rebase_views

__all__ = [
    "backward",
    "differentiate",
    "loss_of",
    "prepared",
    "pull_back",
]


def backward(graph: Graph, /, *, checkpoint: Checkpoint | bool | None = None) -> Graph:
    """Add the backward pass: gradients of all parameters and inputs that require one.

    Parameters
    ----------
    graph : Graph
        With one scalar output, the loss; it is not modified.
    checkpoint : Checkpoint or bool, optional
        Activation checkpointing policy, such as `costgraph.selective("attention")`. True means `every_block()`.

    Returns
    -------
    Graph
        With the same outputs and, in `gradients`, each source's gradient, which lives to the end. Parameters of a
        Repeat are declared outside it, one storage per iteration.

    Raises
    ------
    GraphError
        If there is not exactly one scalar output, or nothing requires a gradient.
    UnsupportedError
        If an op has no vector-Jacobian rule, or is an external call recorded by a trace.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, K = cg.dims("B D F K")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     h = cg.relu(x @ g.param("w1", (D, F)))
    ...     g.output(cg.reduce(h @ g.param("w2", (F, K)), "b k -> ", "mean"))
    >>> cg.matmul_flops(cg.backward(g)) - cg.matmul_flops(g)  # dw1, dw2 and dh, but no dx
    2*B*D*F + 4*B*F*K
    """
    need_of_all("backward", graph)
    policy = policy_of(checkpoint, "backward")
    new = prepared(graph, policy)
    loss = loss_of(new)
    sources = [t for t in new.tensors if t.producer is None and t.requires_grad]
    if not sources:
        raise GraphError(
            f"backward of graph {graph.name!r}: nothing requires a gradient, expected a trainable parameter"
        )
    with new:
        walk = differentiate(new, new.ops, loss, dict.fromkeys(sources, Leaf()), policy)
        new.gradients = {t: walk.final[t] for t in sources if t in walk.final}
    return new


def prepared(graph: Graph, policy: Checkpoint) -> Graph:
    """Return a copy of a forward graph to which a backward pass can be added."""
    new = hoist(peel(policy.prepared(graph), policy.stops_early_in))
    active = active_in(new.ops, (t for t in new.tensors if t.producer is None and t.requires_grad))
    return keep_branch_residuals(protect_saved(rebase_views(new, active)), _hooks(policy))


def differentiate(
    home: Graph, ops: Sequence[Op], loss: Tensor, leaves: Mapping[Tensor, Leaf], policy: Checkpoint
) -> ReverseMode:
    """Add the backward pass of `ops` to the graph or body that contains them.

    `leaves` maps the tensors to differentiate to how their gradients are stored; the result has these in `final`.
    `policy` selects the recomputed ops.
    """
    with opened(graph=home, levels=(), phase="backward"):
        walk = ReverseMode(_hooks(policy), active_in(ops, leaves), lambda t: t, leaves=leaves)
        walk.put(loss, fill((), 1, loss.dtype, name="ones"))
        walk.run(ops)
    return walk


def pull_back(
    output: Tensor, grad: Tensor, inputs: Sequence[Tensor], saved: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Add the vector-Jacobian product of a separate graph to the open one.

    Given the gradient of `output`, return the gradients of `inputs`, None for zero. `saved` maps tensors from the
    graph that computes `output` to the open graph.
    """
    ops = list(output.graph.ops)
    walk = ReverseMode(_hooks(Checkpoint()), active_in(ops, inputs), saved, fused=current_graph().fused)
    walk.put(output, grad)
    walk.run(ops)
    return [walk.take(t) for t in inputs]


def _hooks(policy: Checkpoint) -> BackwardHooks:
    within = None if policy.inside is None else _hooks(policy.inside)
    return BackwardHooks(
        pull_kernel, pull_loop, recompute, policy.runs, policy.keeps, policy.early_stop, policy.start, within
    )


def loss_of(graph: Graph) -> Tensor:
    """Return a graph's scalar output."""
    scalars = [t for t in graph.outputs if not t.sizes and t.dtype.kind == "float"]
    if len(scalars) != 1:
        raise GraphError(f"backward of graph {graph.name!r}: {len(scalars)} scalar outputs, expected one, the loss")
    return scalars[0]
