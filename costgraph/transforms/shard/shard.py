"""From the graph of all devices to that of one rank: placements that propagate, and the collectives that follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Annotated

from ...algebra.polynomial import ONE, poly
from ...algebra.symbols import is_name, shown
from ...errors import CostGraphError, GraphError, PatternError, ShapeError, UnsupportedError
from ...graph.arguments import need_flag, positive
from ...graph.graph import Graph
from ...graph.placement import Factors, Mesh, Placement, Sharding, tidy
from ...graph.tensor import Tensor
from ...notation.door import Rule
from ...ops.collectives import need_of_all
from .buckets import Buckets, in_buckets
from .fully import FullyShard
from .last import LastApart
from .ring import in_rings
from .sharder import Sharder
from .tensors import Stated

__all__ = ["groups", "mesh", "shard"]

#: Placements by the name of a tensor, or by a pattern of names.
Placements = Annotated[
    Mapping[str, str],
    Rule(
        "a mapping of names to placements such as 'd (f tp)'",
        lambda v: isinstance(v, Mapping) and all(isinstance(text, str) for pair in v.items() for text in pair),
    ),
]


def mesh(**axes: object) -> Mesh:
    """Arrange devices in a grid with named axes.

    Parameters
    ----------
    **axes : sympy.Expr, int or tuple of str
        Number of ranks of each axis, the outermost first: `mesh(dp=8, tp=cg.dims("T"))`. Neighbouring axes may have a
        name together, `mesh(kv=2, replica=4, tp=("kv", "replica"))`: placements may say it, and what ranks do along all
        of them is one collective.

    Returns
    -------
    Mesh
        What `shard` takes.

    Raises
    ------
    GraphError, ShapeError
        If there is no axis, a number of ranks is no positive integer, or axes together are no neighbours.

    Examples
    --------
    >>> import costgraph as cg
    >>> print(cg.mesh(dp=8, tp=cg.dims("T")))
    mesh(dp=8, tp=T)
    """
    if not axes or not all(map(is_name, axes)):
        raise GraphError(f"mesh: axes {shown(list(axes))}, expected a name and a number of ranks at least")
    joint = {name: n for name, n in axes.items() if isinstance(n, tuple)}
    sizes = {name: positive(f"mesh: {name}", n) for name, n in axes.items() if name not in joint}
    order = [*sizes]
    for name, parts in joint.items():
        at = order.index(parts[0]) if len(parts) > 1 and parts[0] in sizes else 0
        if not parts or tuple(order[at : at + len(parts)]) != parts or len(parts) < 2:
            raise GraphError(f"mesh: {name} is {shown(parts)}, expected neighbouring axes among {', '.join(order)}")
    return Mesh(tuple(sizes.items()), tuple(joint.items()))


# over 40 lines, as each option is a parameter
def shard(
    graph: Graph,
    mesh: Mesh,
    placements: Placements,
    *,
    gather: str | Iterable[str] | FullyShard = (),
    gradients: Placements | None = None,
    exchange: str | Iterable[str] = (),
    ring: str | Iterable[str] = (),
    hold: str | Iterable[str] = (),
    reduce_each: bool = True,
    accumulation_fusion: bool = False,
    buckets: Buckets | None = None,
    strict: bool = False,
) -> Graph:
    """Turn the graph of a whole model into the graph of one rank of a mesh: local sizes, and collectives as ops.

    Placements propagate from what is stated through every op, forward and backward: an op's rule says which axes of
    its operands and results belong together. A contraction over an axis that is split leaves parts of a sum; what is
    not linear has them reduced before it, to where its other operands lie. What is stated of parameters, gradients and
    optimizer states is all there is: data, tensor and sequence parallelism and ZeRO are what follows from it.

    Parameters
    ----------
    graph : Graph
        A forward pass, a step or a pass of inference, declared or traced; it stays as it is.
    mesh : Mesh
        The devices. An axis of one rank changes nothing.
    placements : mapping of str to str
        By the name of a tensor, or a pattern of sources such as `"layers/*/weight"`, later entries win: its axes as in
        einops, those that are split in brackets with axes of the mesh, `"d (f tp)"`. Each rank has one block of
        consecutive elements; of several axes of the mesh the first one splits into the larger blocks. A number before
        the name, `"d (2 f tp)"`, says that it is two tensors beside each other, each of which is split. Stated of
        parameters, inputs, buffers, optimizer states (`"*.exp_avg"`) and, where a choice is left, of tensors that ops
        make: that the carry of the layers is split along the sequence is sequence parallelism. What is not named is
        whole on every rank.
    gather : str, iterable of str or FullyShard
        Axes of the mesh along which parameters are put together where a pass reads them and given back after it:
        ZeRO-3, or fully sharded data parallelism; a `FullyShard` says how, by default as torch's `fully_shard` does.
        Along other axes they stay, and activations come to them.
    gradients : mapping of str to str, optional
        Where gradients are kept, by the name of what they are of; by default where that is. Split where parameters are
        whole is ZeRO-2.
    exchange : str or iterable of str
        Axes of the mesh that split heads inside a kernel of attention where they split the sequence outside of it, by
        all-to-alls: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). By default queries stay as they are
        split, and keys and values are put together.
    ring : str or iterable of str
        Axes of the mesh along which kernels of attention pass keys and values around in place of that, and the sums of
        their gradients, each used as it passes by: ring attention (Liu et al. 2023, arXiv 2310.01889).
    hold : str or iterable of str
        Axes of the mesh along which the backward pass has what the forward pass has gathered of activations, as
        autograd saves what DTensor has redistributed. By default it is gathered again, as Megatron's
        `LinearWithGradAccumulationAndAsyncCommunication` does, which saves the part of each rank
        (megatron/core/tensor_parallel/layers.py).
    reduce_each : bool
        Whether gradients of each micro-batch of a step are reduced. If not, a rank adds up its own parts, whole ones
        where `gather` splits them, and reduces the sum behind the last micro-batch, as with `no_sync` of torch's
        DistributedDataParallel. Units of a `FullyShard` reduce theirs within it, as with
        `set_requires_gradient_sync(False)` of `fully_shard`; in a pipeline, or in buffers that a step keeps, behind it.
    accumulation_fusion : bool
        Whether products of layers add gradients to buffers that a step keeps in one kernel, while parts are added up
        there: `gradient_accumulation_fusion` of Megatron-LM. What autograd is handed in place of a gradient is one
        tensor for each shape and format, there from one step to the next: `get_dummy_wgrad` of TransformerEngine
        (pytorch/module/base.py).
    buckets : Buckets, optional
        How gradients are reduced that every rank has whole, in buffers of several; by default each by itself, as soon
        as it is complete.
    strict : bool
        True where it is an error that an op cannot keep the placement of an operand, which is put together before it,
        or that two operands are split otherwise, and one of them is moved; by default `graph.sharding.resharded` tells
        of it. What comes to a parameter that stays, or lacks the axis that the op is split along, is not in there.

    Returns
    -------
    Graph
        Of one rank. Its questions are those of any graph; `communication` lists what it sends, and `sharding` says
        where its tensors lie. Degrees of the mesh are dimensions of it.

    Raises
    ------
    GraphError, PatternError, ShapeError
        If a name is no tensor of the graph, a text is no placement, or an axis cannot be split into equal parts.
    UnsupportedError
        If ranks would have to meet where they cannot, a placement cannot be kept while `strict` is set, or gradients
        cannot be reduced in buckets.

    Notes
    -----
    The words are those of torch's DTensor (`torch/distributed/tensor/placement_types.py`): shard, replicate, partial.
    Sizes that a degree has to divide are conditions of the graph, looked at when they are bound. Collectives make a
    new tensor, as torch's functional ones do, but for buffers of units.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, T = cg.dims("B D F T")
    >>> with cg.Graph("mlp") as g:
    ...     h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f"))
    ...     g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    >>> s = cg.shard(g, cg.mesh(tp=T), {"up": "d (f tp)", "down": "(f tp) d"})
    >>> cg.matmul_flops(s), cg.param_count(s), [m.collective for m in cg.communication(s)]
    (4*B*D*F/T, 2*D*F/T, ['all_reduce'])
    """
    need_of_all("shard", graph)
    need_flag("shard", reduce_each=reduce_each, accumulation_fusion=accumulation_fusion, strict=strict)
    used = _used(mesh)
    policy = gather if isinstance(gather, FullyShard) else FullyShard(gather)
    if not reduce_each:
        _need_parts(policy, graph)
    gathered, exchanged = _axes("gather", policy.axes, used, mesh), _axes("exchange", exchange, used, mesh)
    around, held = _axes("ring", ring, used, mesh), _axes("hold", hold, used, mesh)
    reduced = _axes("buckets", buckets.axes, used, mesh) if buckets is not None else frozenset[str]()
    places = _found(graph, used, mesh, placements)
    asked = _found(graph, used, mesh, gradients or {})
    # passes of a pipeline are those of other ranks as well, each in its turn
    if gathered and policy.by_unit and not reduce_each and graph.waiting is None:
        apart = LastApart()
        graph = apart.run(graph)
        places, asked = apart.said(places), apart.said(asked)
    whole = {t: Placement(((),) * t.ndim) for t in graph.gradients}
    resident = _resident(graph, policy)
    stated = Stated(
        mesh=used,
        places=places,
        gradients={g: asked.get(t, places.get(t, whole[t])) for t, g in graph.gradients.items()},
        staying={
            g: places.get(t, whole[t]).axes - gathered | places.get(t, whole[t]).axes & resident.get(t, frozenset())
            for t, g in graph.gradients.items()
        },
        gathered=gathered,
        resident=resident,
        policy=policy if gathered else None,
        exchanged=exchanged,
        held=held,
        reduce_each=reduce_each,
        fused=accumulation_fusion,
    )
    made = _placed(graph, stated, strict=strict)
    made = in_rings(made, around) if around else made
    return made if buckets is None or not reduced else in_buckets(made, buckets, reduced)


def _resident(graph: Graph, policy: FullyShard) -> dict[Tensor, frozenset[str]]:
    """Return the parameters that stay sharded along some of the axes that a policy gathers, and these axes."""
    out: dict[Tensor, frozenset[str]] = {}
    assert not isinstance(policy.resident, Mapping)
    for pattern, axes in policy.resident:
        found = [t for t in graph.params if t.name == pattern or fnmatchcase(t.name, pattern)]
        if not found:
            raise GraphError(
                f"FullyShard: resident {shown(pattern)} is no parameter of graph {graph.name!r}, expected a name or a "
                f"pattern"
            )
        out |= {t: out.get(t, frozenset()) | frozenset(axes) for t in found}
    return out


def _need_parts(policy: FullyShard, graph: Graph) -> None:
    """Refuse to add up parts of gradients in a format in which they are not reduced."""
    odd = next((g for g in graph.gradients.values() if policy.reduce_dtype not in (None, g.dtype.name)), None)
    if odd is not None:
        raise UnsupportedError(
            f"shard: reduce_each=False beside reduce_dtype={policy.reduce_dtype!r}, expected gradients that are "
            f"reduced in the format in which they are added up, {odd.dtype.name}"
        )


def _axes(what: str, given: str | Iterable[str], used: Mesh, mesh: Mesh) -> frozenset[str]:
    """Return axes of a mesh that are named, those of one rank left out."""
    axes = frozenset([given] if isinstance(given, str) else given)
    odd = sorted(axes - {*mesh}, key=str)
    if odd:
        raise GraphError(f"shard: {what} along {shown(odd[0])}, expected axes of {mesh}")
    return axes & {*used}


def _used(mesh: Mesh) -> Mesh:
    """Return a mesh without axes of one rank, but for those that are part of several together."""
    joint = tuple((name, parts) for name, parts in mesh.joint if mesh[name] != ONE)
    kept = {a for _, parts in joint for a in parts}
    return Mesh(tuple((name, n) for name, n in mesh.axes if n != ONE or name in kept), joint)


def _placed(graph: Graph, stated: Stated, *, strict: bool) -> Graph:
    """Return the graph of one rank, which says where its tensors lie and what was moved unasked."""
    sharder, made = _sharded(graph, stated)
    if strict and sharder.moved:
        raise UnsupportedError(f"shard: {sharder.moved[0]}, expected placements that every op can keep")
    at = sharder.at
    sources = [t for g in made.bodies() for t in g.tensors if t.producer is None and t.role != "formal"]
    made.sharding = Sharding(
        mesh=stated.mesh,
        places={t.name: at[t] for t in sources},
        outputs=tuple(at[t] for t in made.outputs),
        gradients={t.name: at[g] for t, g in made.gradients.items()},
        resharded=tuple(dict.fromkeys(sharder.moved)),
    )
    return made


def _sharded(graph: Graph, stated: Stated) -> tuple[Sharder, Graph]:
    """Make the graph of one rank; once more where stacks turn out to lie as their slices do, which come later.

    So do buffers of gradients: along which axes what is added to them is a part of a sum is known then.
    """
    while True:
        sharder = Sharder(stated)
        try:
            made = sharder.run(graph)
        except CostGraphError:
            if not sharder.stacks:  # else what is to be made otherwise was written to in a copy
                raise
        terms = {} if stated.kept else sharder.terms
        if not sharder.stacks and not terms:
            return sharder, made
        stacks, kept = {**stated.stacks, **sharder.stacks}, {**stated.kept, **terms}
        products = stated.products or sharder.products
        stated = replace(stated, stacks=stacks, kept=kept, places={**stated.places, **kept}, products=products)


def _found(graph: Graph, used: Mesh, mesh: Mesh, stated: Placements) -> dict[Tensor, Placement]:
    """Return the placement of each tensor that is named."""
    named = {t.name: t for g in graph.bodies() for t in g.tensors if not g.fused}
    sources = [t for t in named.values() if t.producer is None and t.role != "formal"]
    out: dict[Tensor, Placement] = {}
    for key, text in stated.items():
        matched = [named[key]] if key in named else [t for t in sources if fnmatchcase(t.name, key)]
        if not matched:
            raise GraphError(f"shard: {shown(key)} is no tensor of graph {graph.name!r}, expected a name or a pattern")
        out |= {t: _read(t, text, used, mesh) for t in matched}
    return out


def _read(t: Tensor, text: str, used: Mesh, mesh: Mesh) -> Placement:
    """Read a placement of a tensor; axes of which each position is a storage of its own have no say in it."""
    pieces = t.storage.pieces
    place = f"shard: {text!r} of {t!r}"
    found = groups(text)
    if found is None or len(found) != t.ndim - pieces:
        raise PatternError(f"{place}: expected a place for each of {t.ndim - pieces} axes")
    out: list[Factors] = [()] * pieces
    seen: set[str] = set()
    for group, size in zip(found, t.sizes[pieces:], strict=True):
        blocks = int(group[0]) if group[0].isdigit() else 1
        names = [n for n in group[group[0].isdigit() and len(group) > 1 :] if n not in mesh]
        axes = [a for n in group if n in mesh for a in mesh.parts(n)]
        if len(names) != 1 or blocks < 1 or seen & {*axes} or len(axes) > len({*axes}):
            words = f"({' '.join(group)})" if len(group) > 1 else group[0]
            raise PatternError(f"{place}: {words}, expected a name and axes of {mesh}, each once")
        seen |= {*axes}
        part = size / prod((used[a] for a in axes if a in used), start=poly(blocks))
        if part.constant is not None and not isinstance(part.constant, int):
            raise ShapeError(
                f"{place}: ({' '.join(group)}) is {size} in parts of {part}, expected a size that the ranks divide"
            )
        out.append(tidy([poly(blocks), *(a for a in axes if a in used), part]))
    return Placement(tuple(out))


def groups(text: str) -> list[list[str]] | None:
    """Return the words of each axis, None where the text is none of a placement."""
    if not re.fullmatch(r"(\s*(\w+|\((\s*\w+)+\s*\)))*\s*", text, re.ASCII):
        return None
    return [found.strip("()").split() for found in re.findall(r"\w+|\([^()]*\)", text)]
