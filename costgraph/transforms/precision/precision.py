"""Number formats of training: a forward graph rewritten to the formats of a policy, with every cast an op."""

from __future__ import annotations

from difflib import get_close_matches

from ...algebra.symbols import shown
from ...dtypes import DTYPES
from ...errors import GraphError
from ...graph.graph import Graph, need_graph
from ...ops.blocks import Kernel
from ...ops.foreign import need_declared
from ...ops.stated import Opaque
from .autocast import WORDS, word
from .formats import Carries
from .policy import Policy, find_policy
from .scaled import ScaledRetyper

__all__ = ["apply_precision"]


def apply_precision(graph: Graph, policy: object, *, autocast_device: str | None = None) -> Graph:
    """Rewrite a forward graph to the number formats of a policy.

    Parameters
    ----------
    graph : Graph
        The forward pass; it stays as it is.
    policy : None, str, mapping or Policy
        As in `costgraph.transforms.precision.policy.find_policy`.
    autocast_device : str, optional
        cuda (by default) or cpu, whose lists of ops differ.

    Returns
    -------
    Graph
        What was declared in the graph's default format is in the policy's, and so is the default; what was declared
        in another one (tables in fp32, indices) stays. Where an op runs in another format than it is given, casts
        stand in front of it. As torch's autocast does, a parameter is cast once, where it lives: inside a Repeat once
        an iteration, and outside it if the iterations share it. Activations are cast at each use. A carry of a Repeat
        has the format that its body settles on. FLOPs stay the same, but for those that find and apply scales.

    Raises
    ------
    GraphError
        If the policy, a word, or a scope is unknown, or the graph holds more than a forward pass.
    UnsupportedError
        If the format of something changes whose bytes an opaque op states, or an op is a recorded call of a trace.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.transforms.precision.precision import apply_precision
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    >>> mixed = apply_precision(g, "bf16-mixed")
    >>> [op.name for op in mixed.ops], cg.param_bytes(mixed)
    (['linear/cast', 'linear/weight.cast', 'linear/matmul'], 4*D*F)
    """
    need_graph("apply_precision", graph)
    if policy is not None:
        need_declared("apply_precision", graph, "trace the module in these formats", floats=True)
    found = find_policy(policy, autocast_device=autocast_device)
    if graph.gradients or any(op.phase != "forward" for op in graph.walk()):
        raise GraphError(f"apply_precision: graph {graph.name!r} has more than a forward pass, expected that alone")
    _check_names(graph, found)
    carries = Carries()
    while True:
        carries.changed = False
        made = ScaledRetyper(found, graph, carries).run(graph)
        if not carries.changed:
            break
    with made:
        made.matmul_dtype = found.matmul_dtype or graph.matmul_dtype
        for body in made.bodies():
            body.dtype = graph.dtype if found.compute is None else DTYPES[found.compute]
    return made


def _check_names(graph: Graph, policy: Policy) -> None:
    """Refuse words and scopes that nothing in the graph answers to: a typing mistake would change nothing."""
    place = f"policy {policy.name!r}"
    own = {word(op) for op in graph.walk() if isinstance(op.kind, Opaque)}
    own |= {op.body.name for op in graph.walk() if op.body is not None and isinstance(op.kind, Kernel)}
    for name in policy.autocast or ():
        if name not in WORDS and name not in own:
            near = get_close_matches(name, [*WORDS, *own], n=4) or [*sorted(own), *WORDS]
            raise GraphError(f"{place}: op {shown(name)} is unknown, expected one of {', '.join(near)}")
    names = {t.name for t in graph.params} | {op.name for g in graph.bodies() if not g.fused for op in g.ops}
    for scope in policy.scopes:
        if not any(n == scope or n.startswith(f"{scope}/") for n in names):
            known = sorted({n.rpartition("/")[0] for n in names} - {""})
            raise GraphError(
                f"{place}: scope {shown(scope)} holds no op or parameter of graph {graph.name!r}, expected one such as "
                f"{', '.join(get_close_matches(scope, known, n=4, cutoff=0) or ['that of an op'])}"
            )
