"""Placements of models whose layers are those of `costgraph.nn`: data, tensor and sequence parallelism, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from ...algebra.polynomial import ONE, Poly
from ...errors import GraphError
from ...graph.arguments import need_flag, positive
from ...graph.graph import Graph, need_graph
from ...graph.placement import Mesh
from ...graph.tensor import Tensor
from ...notation.door import Rule
from .shard import Placements, shard

__all__ = ["TENSOR", "parallelize"]

#: Where tensor parallelism has parameters of the layers of `costgraph.nn`, by the ends of their names: Shoeybi et al.
#: 2019 (arXiv 1909.08053), section 3. Heads, the inner width and the vocabulary are split; what goes back to the width
#: of the model is split along what it sums.
TENSOR: Mapping[str, str] = {
    "tokens/table": "(v tp) d",
    "head/weight": "d (v tp)",
    "head/bias": "(v tp)",
    "attention/[qkv]/weight": "d (h tp) k",
    "attention/[qkv]/bias": "(h tp) k",
    "attention/kqv/weight": "d n (h tp) k",
    "attention/kqv/bias": "n (h tp) k",
    "attention/q_b/weight": "c (h tp) k",
    "attention/kv_b/weight": "c (h tp) k",
    "attention/proj/weight": "(e tp) d",
    "cross/[qkv]/weight": "d (h tp) k",
    "cross/[qkv]/bias": "(h tp) k",
    "cross/proj/weight": "(e tp) d",
    "mlp/gate_up/weight": "d (2 f tp)",
    "mlp/gate/weight": "d (f tp)",
    "mlp/up/weight": "d (f tp)",
    "mlp/up/bias": "(f tp)",
    "mlp/down/weight": "(f tp) d",
    "mlp/ffw1/weight": "d (f tp)",
    "mlp/ffw1/bias": "(f tp)",
    "mlp/ffw2/weight": "(f tp) d",
    "shared/gate/weight": "d (f tp)",
    "shared/up/weight": "d (f tp)",
    "shared/down/weight": "(f tp) d",
    "experts/gate_up": "e d (2 f tp)",
    "experts/gate_up_bias": "e (2 f tp)",
    "experts/down": "e (f tp) d",
}
#: Parameters beside which others of the same layer stay whole: queries that share keys stand with these in one tensor,
#: no equal parts of which are heads with their keys.
BESIDE: Mapping[str, str] = {"attention/qkv/weight": "attention/proj/weight"}

Stage = Annotated[int, Rule("0, 1, 2 or 3", lambda v: v in (0, 1, 2, 3) and not isinstance(v, bool))]


def parallelize(
    graph: Graph,
    *,
    dp: object = 1,
    tp: object = 1,
    zero: Stage = 0,
    sequence: bool = False,
    placements: Placements | None = None,
    strict: bool = False,
) -> Graph:
    """Turn the graph of a whole model into that of one rank, with placements of the layers of `costgraph.nn`.

    Parameters
    ----------
    graph : Graph
        A forward pass, a step or a pass of inference.
    dp : sympy.Expr or int
        Ranks that have a part of the batch each: the first axis of every input, behind that of micro-batches.
    tp : sympy.Expr or int
        Ranks that have a part of each layer: heads and the inner width, as `TENSOR` says by name.
    zero : int
        What is split over `dp` as well: 1 optimizer states, 2 gradients too, 3 parameters too, which are gathered
        where an op reads them.
    sequence : bool
        Whether what layers hand on is split along the sequence, over `tp`.
    placements : mapping of str to str, optional
        Others, as `shard` takes them, on a mesh of the axes dp and tp: they win.
    strict : bool
        As in `shard`.

    Returns
    -------
    Graph
        Of one rank.

    Raises
    ------
    GraphError, ShapeError
        If no parameter of the graph is one that `tp` splits, or a degree is no positive integer.

    Notes
    -----
    Of a parameter that ZeRO splits, it is an axis that tensor parallelism leaves whole, the longest where sizes have
    defaults. torch's FSDP2 splits the first axis and fills it up where it does not divide.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-70b"), precision="bf16-master")
    >>> rank = cg.parallelize(step, dp=64, tp=8, zero=3, sequence=True)
    >>> round(cg.peak_memory(rank, B=64, S=8192) / 1e9)
    34
    """
    need_graph("parallelize", graph)
    need_flag("parallelize", sequence=sequence)
    mesh = Mesh((("dp", positive("parallelize: dp", dp)), ("tp", positive("parallelize: tp", tp))))
    split = dict(_split(graph)) if mesh["tp"] != ONE else {}
    if mesh["tp"] != ONE and not split:
        raise GraphError(
            f"parallelize: no parameter of graph {graph.name!r} has a name that tp splits, expected layers of "
            f"costgraph.nn, or placements for shard"
        )
    if sequence:
        split |= dict(_carries(graph))
    split |= dict(_data(graph))
    named = {t.name: t for t in graph.tensors if t.producer is None}
    over = {name: _with_dp(t, split.get(name), graph) for name, t in named.items() if t.ndim > t.storage.pieces}
    kept = {name: text for name, text in over.items() if named[name].role == "state" and zero >= 1}
    kept |= {name: text for name, text in over.items() if named[name].role == "param" and zero >= 3}
    gradients = {t.name: over[t.name] for t in graph.gradients if t.name in over and t.role == "param" and zero == 2}
    return shard(
        graph, mesh, {**split, **kept, **(placements or {})},
        gather="dp" if zero >= 3 else (), gradients=gradients, strict=strict,
    )  # fmt: skip


def _split(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield where tensor parallelism has parameters, and what an optimizer keeps of them in their shape."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    names = {t.name for t in sources}
    for t in (t for t in sources if t.role in ("param", "state")):
        of, _, _ = t.name.rpartition(".") if t.role == "state" else (t.name, "", "")
        found = next((end for end in TENSOR if fnmatchcase(of, end) or fnmatchcase(of, f"*/{end}")), None)
        if found is None:
            continue
        fused = next((beside for beside, end in BESIDE.items() if end == found), None)
        if fused is not None and of.removesuffix(found) + fused in names:
            continue
        if len(_axes(TENSOR[found])) == t.ndim - t.storage.pieces:
            yield t.name, TENSOR[found]


def _carries(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield what layers hand on: carries of the forward pass of which the second axis is the sequence of an input."""
    inputs = {t.sizes[-2:] for t in graph.tensors if t.role == "input" and t.ndim >= 2}
    for g in graph.bodies():
        for op in g.ops:
            for t in op.loop.carries if op.loop is not None and op.phase == "forward" else ():
                if t.ndim == 3 and t.sizes[:2] in inputs:
                    yield t.name, "(b dp) (s tp) d"


def _data(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield inputs with their batch split: the first axis, or the second where micro-batches are slices of it."""
    sliced = {t for op in graph.ops if op.loop is not None for t in op.loop.xs}
    for t in graph.tensors:
        if t.producer is None and t.role == "input" and t.ndim > (t in sliced):
            axes = [f"a{i}" for i in range(t.ndim)]
            axes[t in sliced] = f"(a{int(t in sliced)} dp)"
            yield t.name, " ".join(axes)


def _with_dp(t: Tensor, text: str | None, graph: Graph) -> str:
    """Return a placement with an axis split over dp as well: the longest that is whole, else within the first."""
    sizes = t.sizes[t.storage.pieces :]
    groups = _axes(text) if text else [f"a{i}" for i in range(len(sizes))]
    whole = [i for i, group in enumerate(groups) if "(" not in group]
    at = max(whole, key=lambda i: (_length(sizes[i], graph), -i), default=0)
    groups[at] = f"({groups[at].strip('()')} dp)"
    return " ".join(groups)


def _axes(text: str) -> list[str]:
    """Return the axes of a placement."""
    out: list[str] = []
    for word in text.split():
        if out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += f" {word}"
        else:
            out.append(word)
    return out


def _length(size: Poly, graph: Graph) -> float:
    """Return a size under the defaults of a graph, 0 where one is open."""
    bound = size.bind({name: ONE * n for name, n in graph.root.defaults.items()})
    return float(bound.constant) if bound.constant is not None else 0.0
