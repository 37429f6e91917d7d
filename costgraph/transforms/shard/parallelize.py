"""Placements of models of layers of `costgraph.nn`: data, context, tensor and sequence parallelism, ZeRO."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Annotated

from ...algebra.extremum import smaller
from ...algebra.polynomial import ONE, Poly
from ...errors import GraphError, UnsupportedError
from ...graph.arguments import need_flag, positive
from ...graph.graph import Graph, need_graph
from ...graph.placement import Mesh
from ...graph.tensor import Tensor
from ...notation.door import Rule
from ...ops.cached import Append
from ...ops.hops import Receive
from ..offload import need_offloaded
from ..offload import offload as on_host
from ..rewrite import Rewriter
from ..stages import in_stages, together
from .buckets import Buckets
from .fully import FullyShard
from .heads import Heads, heads
from .inferred import inferred, replicated, with_states
from .names import axes_of, placed_by_name
from .shard import Placements, shard

__all__ = ["CONTEXTS", "SYSTEMS", "System", "parallelize"]

#: Whose policies a step has, where systems differ.
SYSTEMS = ("torch", "megatron")
System = Annotated[str, Rule(" or ".join(SYSTEMS), lambda v: v in SYSTEMS)]
#: What attention may do along cp.
CONTEXTS = ("gather", "all_to_all", "ring")
Context = Annotated[str, Rule(" or ".join(CONTEXTS), lambda v: v in CONTEXTS)]
Stage = Annotated[int, Rule("0, 1, 2 or 3", lambda v: v in (0, 1, 2, 3) and not isinstance(v, bool))]


# over 40 lines, as each option is a parameter
def parallelize(
    graph: Graph,
    *,
    dp: object = 1,
    cp: object = 1,
    tp: object = 1,
    ep: object = 1,
    zero: Stage = 0,
    sequence: bool = False,
    context: Context = "gather",
    hold: bool | None = None,
    placements: Placements | None = None,
    pp: object = 1,
    schedule: str = "1f1b",
    micro_batches: object = 1,
    virtual: object = 1,
    layers: object = None,
    system: System = "torch",
    reduce_each: bool | None = None,
    buckets: Buckets | None = None,
    offload: str | Iterable[str] = (),
    strict: bool = False,
) -> Graph:
    """Turn the graph of a whole model into that of one rank, with placements of the layers that it is made of.

    Parameters
    ----------
    graph : Graph
        A forward pass, a step or a pass of inference.
    dp : sympy.Expr or int
        Ranks that have a part of the batch each: the first axis of every input, behind that of micro-batches, and of
        what inference keeps of it.
    cp : sympy.Expr or int
        Ranks that have a part of the sequence each: the second axis of inputs that are indices, tokens and targets, and
        positions of caches. A pass that goes on from earlier positions, as `decode`, has the new ones on all ranks.
    tp : sympy.Expr or int
        Ranks that have a part of each layer: heads and the inner width, by the names of parameters of `costgraph.nn`
        and of transformers, else inferred from the graph: a weight is split along the axis that its product makes where
        elementwise ops or attention heads take it to products that sum it. `sharding.replicated` of the result lists
        the weights of products that every rank has whole.
    ep : sympy.Expr or int
        Ranks that have a part of the experts each: of `dp * ep` parts of the batch, each `ep` ranks beside each other
        send their rows to one another.
    zero : int
        What is split over `dp` and `cp` as well: 1 optimizer states, 2 gradients too, 3 parameters too, which are
        gathered where an op reads them. Parameters that are not of experts are sharded over `ep` as well.
    sequence : bool
        Whether what layers hand on is split along the sequence, over `tp`.
    context : str
        What attention does along `cp`. gather: it puts keys and values of all ranks together for the queries of each.
        all_to_all: it has a part of the heads for the whole sequence, as `exchange` of `shard`. ring: keys and values
        pass by each rank, as `ring` of it.
    hold : bool, optional
        Whether the backward pass has what `sequence` gathers of activations over `tp`, as `hold` of `shard`; by default
        True, as with torch's `parallelize_module`, False with `system="megatron"`, which gathers again.
    placements : mapping of str to str, optional
        Others, as `shard` takes them, on a mesh of the axes dp, ep, cp and tp: they win.
    pp : sympy.Expr or int
        Stages of a pipeline, each with as many of the layers; the first one has what comes before them as well, the
        last one the head and the loss. A parameter that both ends read is on both, and its gradients are added up. Of a
        pass without gradients, as of inference, stages have the caches of their layers.
    schedule : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev: how many micro-batches a rank holds
        at a time, `costgraph.plan.in_flight`. The last five make gradients of weights behind what goes to other ranks.
    micro_batches : sympy.Expr or int
        Micro-batches of a step with stages, as many as `training_step` accumulates. Of a pass without gradients, how
        many batches of its size are on their way at a time, each with caches of its own.
    virtual : sympy.Expr or int
        Groups of layers of a rank, of interleaved and interleaved-zb; zbv and dualpipev have two. dualpipe has two
        whole stages on each rank, r and pp - 1 - r, and half of the micro-batches through each: every parameter is on
        two ranks, and its gradients are added up.
    layers : sequence of int, optional
        How many layers each stage has, in their order, where they are not as many.
    system : str
        Whose policies where systems differ. torch: those of DTensor, `fully_shard` and `ZeroRedundancyOptimizer`.
        megatron: gradients of micro-batches are added up on each rank and reduced once, in place where a step keeps
        them, those of norms over `tp` as well; with `zero=1`, its distributed optimizer, each rank is left its own part
        of them by a reduce-scatter, and parameters are gathered once they are updated. Products of layers add to what
        is kept of gradients themselves (`accumulation_fusion` of `shard`). Where gradients of weights come behind those
        that are handed back, torch keeps all that the forward pass has saved until they are there, as its autograd
        graph lives as long; megatron what their products read, as the `WeightGradStore` of zero bubbles does.
    reduce_each : bool, optional
        As in `shard`; by default True, False with `system="megatron"`.
    buckets : Buckets, optional
        As in `shard`.
    offload : str or iterable of str
        What lies on the host: optimizer, parameters, activations, as in `costgraph.offload`. Gradients that are reduced
        go there as they are.
    strict : bool
        As in `shard`; an error as well where `tp` leaves weights of products whole.

    Returns
    -------
    Graph
        Of one rank; of a pipeline, one of the first stage, and `stages` holds the graphs of the first, a middle and the
        last one, with `layers` those in the middle that differ. `peak_memory` and `flops` are then those of the largest
        stage, `seconds` of the step, other questions are asked of each.

    Raises
    ------
    GraphError, ShapeError
        If no parameter of the graph is one that `tp` or `ep` splits, or a degree is no positive integer.
    UnsupportedError
        If `system="megatron"` is asked for more than stage 1 of ZeRO, a graph is cut into stages that is no step with
        one loop over layers, or an op outside of them needs what two stages have.

    Notes
    -----
    Of a parameter that ZeRO splits, it is an axis that tensor parallelism leaves whole, the longest where sizes have
    defaults. torch's FSDP2 splits the first axis and fills it up where it does not divide. Ranks of `cp` have the same
    parameters, so that ZeRO splits these over both, as torchtitan does. ZeRO shards parameters that are not of experts
    over `ep` as well, as torchtitan does; experts stay on the ranks of `ep`.

    Megatron-LM (megatron/core at d98e8a6) reduces in `start_grad_sync` of distributed/param_and_grad_buffer.py, by
    buckets of many parameters, here by one collective each, of the same bytes, and gradients of norms in
    distributed/finalize_model_grads.py. Its table of tokens is given the gathered gradient of a split sequence, as
    `_ReduceScatterToSequenceParallelRegion` of tensor_parallel/mappings.py does, and adds up its own rows.

    The graph of a rank with several groups of layers goes through all of them and then hands on as often as it has to:
    its costs are those of the rank. What it holds of other micro-batches is held against lists of actions; of as many
    micro-batches as ranks, gradients that some groups have already while others wait for their first one are left out.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-70b"), precision="bf16-master")
    >>> rank = cg.parallelize(step, dp=64, tp=8, zero=3, sequence=True)
    >>> round(cg.peak_memory(rank, B=64, S=8192) / 1e9)
    49
    """
    need_graph("parallelize", graph)
    reduce_each = system == "torch" if reduce_each is None else reduce_each
    hold = system == "torch" if hold is None else hold
    need_flag("parallelize", sequence=sequence, hold=hold, reduce_each=reduce_each, strict=strict)
    if system == "megatron" and zero > 1:
        raise UnsupportedError(
            f"parallelize: zero={zero} beside system='megatron', whose distributed optimizer splits states: expected 0 "
            f"or 1"
        )
    given = {"dp": dp, "ep": ep, "cp": cp, "tp": tp}
    away = need_offloaded("parallelize: offload", offload)
    made = [
        together(
            _of_rank(
                stage.graph, given, zero, sequence, context, hold, placements, system, reduce_each, buckets, strict
            ),
            stage,
        )
        for stage in in_stages(graph, pp, schedule, micro_batches, virtual, layers, torch=system == "torch")
    ]
    made = [on_host(g, away) for g in made] if away else made
    if len(made) == 1:
        return made[0]
    whole = Rewriter().run(made[0], graph.name)
    whole.sharding, whole.parts = made[0].sharding, tuple(made)
    return whole


def _of_rank(
    graph: Graph,
    given: Mapping[str, object],
    zero: int,
    sequence: bool,
    context: str,
    hold: bool,
    placements: Mapping[str, str] | None,
    system: str,
    reduce_each: bool,
    buckets: Buckets | None,
    strict: bool,
) -> Graph:
    """Return the graph of one rank of a graph, with placements by the names of its layers."""
    tensor, mesh, places, gradients = _places(graph, given, zero, sequence, system)
    left = replicated(graph, places, placements or ()) if mesh["tp"] != ONE else []
    if strict and left:
        raise UnsupportedError(
            f"parallelize: tp leaves {len(left)} weights whole on every rank, such as {left[0]!r}: expected "
            f"placements= for these, or strict=False"
        )
    made = shard(
        graph, mesh, {**places, **(placements or {})},
        gather=_fully(graph, mesh) if zero >= 3 else (), gradients=gradients,
        exchange="cp" if context == "all_to_all" else (), ring="cp" if context == "ring" else (),
        hold=[axis for axis, _ in tensor.axes] if hold else (),
        reduce_each=reduce_each, accumulation_fusion=system == "megatron", buckets=buckets, strict=strict,
    )  # fmt: skip
    if made.sharding is not None:
        made.sharding = replace(made.sharding, replicated=tuple(left))
    return made


def _fully(graph: Graph, mesh: Mesh) -> FullyShard:
    """Return how ZeRO-3 gathers parameters: over all data-parallel ranks, but experts stay on the ranks of `ep`."""
    experts = _experts(graph, {}) if mesh["ep"] != ONE else ()
    sources = {t.name for g in graph.bodies() for t in g.tensors if t.role == "param"}
    return FullyShard(
        ("dp", "ep", "cp"), units=_numbered(graph), resident={name: ("ep",) for name, _ in experts if name in sources}
    )


def _numbered(graph: Graph) -> list[str]:
    """Return patterns of the layers of an unrolled graph: numbered scopes of several modules that are alike."""
    found: dict[str, dict[str, set[str]]] = {}
    for t in graph.tensors:
        levels = t.name.split("/") if t.role == "param" and t.producer is None else []
        at = next((i for i, level in enumerate(levels) if level.isdigit()), None)
        if at is not None:
            layers = found.setdefault("/".join([*levels[:at], "[0-9]*"]), {})
            layers.setdefault(levels[at], set()).add("/".join(levels[at + 1 :]))
    alike = {pattern: [*map(sorted, layers.values())] for pattern, layers in found.items()}
    nested = {pattern for pattern, names in alike.items() if any("/" in name for own in names for name in own)}
    return [p for p, names in alike.items() if p in nested and any(names.count(own) > 1 for own in names)]


def shares(graph: Graph, given: Mapping[str, object], zero: int, sequence: bool, system: str) -> Iterator[Poly]:
    """Yield how long an axis is on a rank of each that a graph of a rank would have split: elsewhere it is refused."""
    _, mesh, places, _ = _places(graph, given, zero, sequence, system)
    named = ((t, axes_of(places[t.name])) for g in graph.bodies() for t in g.tensors if t.name in places)
    for t, axes in named:
        for size, words in zip(t.sizes[t.storage.pieces :], axes, strict=False):
            ranks = prod((mesh[word] for word in words.strip("()").split() if word in mesh), start=ONE)
            if ranks != ONE:
                yield size / ranks


def _places(
    graph: Graph, given: Mapping[str, object], zero: int, sequence: bool, system: str
) -> tuple[Heads, Mesh, dict[str, str], dict[str, str]]:
    """Return axes of tensor parallelism, the mesh, where tensors of a graph lie by name, and where gradients do."""
    degrees = {axis: positive(f"parallelize: {axis}", n) for axis, n in given.items()}
    placed = {}
    if degrees["tp"] != ONE:
        placed = dict(placed_by_name(graph))
        placed |= with_states(graph, dict(inferred(graph, placed, degrees["tp"])))
    tensor = heads(graph, placed, degrees.pop("tp"))
    mesh, split = Mesh((*degrees.items(), *tensor.axes), tensor.joint), dict(tensor.split)
    _need_some("tp", mesh, split, graph)
    experts = dict(_experts(graph, split)) if mesh["ep"] != ONE else {}
    _need_some("ep", mesh, experts, graph)
    split |= experts
    lengths, continued = _caches(graph) if mesh["cp"] != ONE else ({}, False)
    if mesh["cp"] != ONE and not lengths:
        _need_positions(graph)
    if sequence or any(isinstance(op.kind, Receive) for op in graph.walk()):
        along = " ".join(["cp"] * (not continued) + ["tp"] * sequence)
        carries = list(_carries(graph))
        if sequence and mesh["tp"] != ONE and not carries:
            raise GraphError(
                f"parallelize: no loop of graph {graph.name!r} hands on what sequence=True splits, expected layers "
                f"in a loop, such as costgraph.fold makes of a trace"
            )
        split |= dict.fromkeys(carries, f"(b dp ep) (s {along}) d")
    split |= dict(_data(graph, split, lengths, "" if continued else "cp"))
    kept, gradients = _by_stage(graph, split, mesh, experts, zero, reduced=system == "megatron")
    return tensor, mesh, {**split, **kept}, gradients


def _by_stage(
    graph: Graph, split: Mapping[str, str], mesh: Mesh, experts: Collection[str], zero: int, *, reduced: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return where a stage of ZeRO has sources, and gradients; `reduced`: in the first one, their own part of these."""
    named = {t.name: t for t in graph.tensors if t.producer is None}
    over = {
        name: _with(("dp", "cp") if name in experts else ("dp", "ep", "cp"), t, split.get(name), graph, mesh)
        for name, t in named.items()
        if t.ndim > t.storage.pieces
    }
    from_on = {"state": 1, "gradient": 2, "param": 3}
    kept = {name: text for name, text in over.items() if zero >= from_on.get(named[name].role, inf)}
    apart = zero == 2 or (zero == 1 and reduced)
    return kept, {t.name: over[t.name] for t in graph.gradients if t.name in over and t.role == "param" and apart}


def _need_some(axis: str, mesh: Mesh, found: Mapping[str, str], graph: Graph) -> None:
    if mesh[axis] != ONE and not found:
        raise GraphError(
            f"parallelize: {axis} splits no parameter of graph {graph.name!r}, expected layers of costgraph.nn or of "
            f"transformers, pairs of products, or placements for shard"
        )


def _experts(graph: Graph, split: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield where parameters of experts lie, and what an optimizer keeps of them in their shape: one for each first."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    params = {t.name: t.sizes[t.storage.pieces :] for t in sources if t.role == "param"}
    for t in (t for t in sources if t.role in ("param", "state", "gradient")):
        of = t.name if t.role == "param" else t.name.rpartition(".")[0]
        sizes = t.sizes[t.storage.pieces :]
        if of.split("/")[-2:-1] == ["experts"] and params.get(of) == sizes:
            _, *others = axes_of(split.get(t.name, " ".join(f"a{i}" for i in range(len(sizes)))))
            yield t.name, " ".join(["(e ep)", *others])


def _received(graph: Graph) -> list[Tensor]:
    """Return what a stage of a pipeline gets from its neighbours."""
    return [op.results[0] for op in graph.walk() if isinstance(op.kind, Receive)]


def _carries(graph: Graph) -> Iterator[str]:
    """Yield what layers hand on: carries of the forward pass of which the second axis is the sequence of an input."""
    inputs = {t.sizes[-2:] for t in graph.tensors if t.role == "input" and t.ndim >= 2}
    inputs |= {t.sizes[-3:-1] for t in graph.tensors if t.role == "input" and t.ndim >= 3}  # of vectors, not of indices
    inputs |= {t.sizes[:2] for t in _received(graph)}
    for g in graph.bodies():
        for op in g.ops:
            for t in op.loop.carries if op.loop is not None and op.phase == "forward" else ():
                if t.ndim == 3 and t.sizes[:2] in inputs:
                    yield t.name


def _caches(graph: Graph) -> tuple[dict[str, int], bool]:
    """Return the axes of positions of caches as long as a sequence, and whether a pass goes on from earlier ones.

    Of other caches, what a convolution has seen, the length is a number or a size of parameters.
    """
    params = (t for g in graph.bodies() for t in g.tensors if t.role == "param")
    known = {name for t in params for size in t.sizes for name in size.names()}
    found, continued = dict[str, int](), False
    for op in graph.walk():
        if not isinstance(op.kind, Append) or op.operands[0].role != "cache":
            continue
        held, new = (t.sizes[op.kind.axis] for t in op.operands)
        more = smaller(new, held) != held
        if held.names() - known - (new.names() if more else set()):
            found[op.operands[0].name] = op.kind.axis
            continued |= more
    return found, continued


def _need_positions(graph: Graph) -> None:
    """Refuse to split a step of one position of a graph without a cache of others."""
    one = next((t for t in graph.tensors if t.role == "input" and t.ndim == 2 and t.sizes[1] == ONE), None)
    if one is not None and any(t.role == "cache" for g in graph.bodies() for t in g.tensors):
        raise GraphError(
            f"parallelize: {one!r} of graph {graph.name!r} has one position, and no cache of it holds others, expected "
            f"positions that cp splits"
        )


def _data(graph: Graph, split: Mapping[str, str], lengths: Mapping[str, int], along: str) -> Iterator[tuple[str, str]]:
    """Yield inputs with their batch split, and the sequence of indices; the first axis may be that of micro-batches.

    What inference keeps is split with the batch as well, and positions of it as a sequence is.
    """
    sliced = {t for op in graph.ops if op.loop is not None for t in op.loop.xs}
    inputs = [t for t in graph.tensors if t.producer is None and t.role == "input" and t.ndim > (t in sliced)]
    batches = {t.sizes[t in sliced] for t in inputs} | {t.sizes[0] for t in _received(graph) if t.ndim}
    caches = [t for g in graph.bodies() for t in g.tensors if t.role == "cache" and t.producer is None and t.ndim]
    for t in (*inputs, *(t for t in caches if t.name in lengths or t.sizes[0] in batches)):
        first = int(t in sliced)
        axes = axes_of(split[t.name]) if t.name in split else [f"a{i}" for i in range(t.ndim)]
        if t.role == "input" or t.sizes[0] in batches:
            axes[first] = f"({axes[first].strip('()')} dp ep)"
        if t.role == "input" and t.dtype.kind == "int" and t.ndim == first + 2:
            axes[first + 1] = f"(a{first + 1} {along})"
        if t.name in lengths:
            at = lengths[t.name]
            axes[at] = f"({axes[at].strip('()')} cp)"
        yield t.name, " ".join(axes)


def _with(axes: Sequence[str], t: Tensor, text: str | None, graph: Graph, mesh: Mesh) -> str:
    """Return a placement with an axis split over others as well: the longest that is whole, else within the first.

    Where sizes have defaults, it is one that the ranks divide, if there is one.
    """
    sizes = t.sizes[t.storage.pieces :]
    groups = axes_of(text) if text else [f"a{i}" for i in range(len(sizes))]
    whole = [i for i, group in enumerate(groups) if "(" not in group and sizes[i] != ONE]
    if not whole and sizes[0] == ONE:
        return " ".join(groups)
    ranks = prod((mesh[axis] for axis in axes), start=ONE)
    at = max(whole, key=lambda i: (_divides(ranks, sizes[i], graph), _length(sizes[i], graph), -i), default=0)
    groups[at] = f"({groups[at].strip('()')} {' '.join(axes)})"
    return " ".join(groups)


def _length(size: Poly, graph: Graph) -> float:
    """Return a size under the defaults of a graph, without end where one is open: known ones beside it are windows."""
    bound = size.bind({name: ONE * n for name, n in graph.root.defaults.items()})
    return float(bound.constant) if bound.constant is not None else inf


def _divides(ranks: Poly, size: Poly, graph: Graph) -> bool:
    """Whether ranks may divide a size: not where both are known, and they do not."""
    known = {name: ONE * n for name, n in graph.root.defaults.items()}
    part = (size / ranks).bind(known).constant
    return part is None or part == int(part)
