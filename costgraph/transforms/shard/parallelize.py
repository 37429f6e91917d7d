"""Parallelize a model: data, context, tensor, sequence and expert parallelism, ZeRO and pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf, prod
from typing import Annotated

from ...algebra.extremum import smaller
from ...algebra.polynomial import ONE, Poly
from ...errors import GraphError, ShapeError, UnsupportedError
from ...ir.graph import Graph, Mesh, Op, Split, Tensor, need_flag, need_graph, positive
from ...ir.strides import is_integral
from ...notation.validation import Rule
from ...ops.collectives import Receive
from ...ops.einsum import Einsum
from ...ops.kv_cache import Append
from ...ops.layout import KeepAlive, Rearrange, Slice
from ...ops.loops import Kernel
from ..offload import need_offloaded
from ..offload import offload as on_host
from ..pipeline_stages import in_stages, with_stage_reductions
from ..rewrite import Rewriter
from .fsdp_policy import FullyShard
from .grad_reduction import Buckets
from .shard import Placements, groups, shard

__all__ = [
    "SUMMED",
    "TENSOR",
    "axes_of",
    "is_known",
    "placed_by_name",
    "Heads",
    "heads",
    "inferred",
    "replicated",
    "with_states",
    "CONTEXTS",
    "SYSTEMS",
    "System",
    "parallelize",
]


# -- tensor-parallel plan ----------------------------------------------------------------------------------------------

#: Tensor-parallel placements for parameters of `costgraph.nn`, by name suffix: Shoeybi et al. 2019 (arXiv 1909.08053),
#: section 3. Column-parallel weights split heads, the inner width or the vocabulary; row-parallel weights, which
#: project back to the model width, split the contracted axis. `kv` equals `tp` unless there are more ranks than KV
#: heads, in which case several ranks share a head.
_NN: Mapping[str, str] = {
    "tokens/table": "(v tp) d",
    "head/weight": "d (v tp)",
    "head/bias": "(v tp)",
    "attention/q/weight": "d (h tp) k",
    "attention/q/bias": "(h tp) k",
    "attention/[kv]/weight": "d (g kv) k",
    "attention/[kv]/bias": "(g kv) k",
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
    "shared/gate_up/weight": "d (2 f tp)",
    "shared/gate/weight": "d (f tp)",
    "shared/up/weight": "d (f tp)",
    "shared/down/weight": "(f tp) d",
    "experts/gate_up": "e d (2 f tp)",
    "experts/gate_up_bias": "e (2 f tp)",
    "experts/down": "e (f tp) d",
    "attention/[kv]_cache.kept": "b (g kv) s k",
    "attention/norm_state.kept": "b (h tp) k",
    "attention/state.kept": "b (h tp) k v",
    "cross/[kv]_cache.kept": "b (h tp) s k",
}
#: Column-parallel weights in traced Hugging Face transformers. torch stores the output axis first, with all heads
#: flattened into it.
_COLUMN = (
    "[qkv]_proj", "gate_proj", "up_proj", "fc1", "intermediate/dense", "self/query", "self/key", "self/value",
    "*Attention/[qkv]", "DenseReluDense/wi*", "self_attention/query_key_value", "mlp/dense_h_to_4h",
)  # fmt: skip
_ROW = (
    "o_proj", "out_proj", "down_proj", "fc2", "output/dense", "*Attention/o", "DenseReluDense/wo",
    "self_attention/dense", "mlp/dense_4h_to_h",
)  # fmt: skip
_TABLES = ("embed_tokens", "word_embeddings", "wte", "shared", "lm_head", "embed_out")
#: Tensor-parallel placements by parameter name suffix, for `costgraph.nn` and for traced transformers. The notation is
#: that of `shard`: an axis in brackets with the mesh axes that split it.
TENSOR: Mapping[str, str] = {
    **_NN,
    **{f"{name}/weight": "(v tp) d" for name in _TABLES},
    **{f"{name}/weight": "(f tp) d" for name in _COLUMN},
    **{f"{name}/bias": "(f tp)" for name in _COLUMN},
    **{f"{name}/weight": "d (f tp)" for name in _ROW},
    "gate_up_proj/weight": "(2 f tp) d",
    "experts/gate_up_proj": "e (2 f tp) d",
    "experts/down_proj": "e d (f tp)",
    "relative_attention_bias/weight": "n (h tp)",
    "attn/c_attn/weight": "d (3 f tp)",
    "attn/c_attn/bias": "(3 f tp)",
    "mlp/c_fc/weight": "d (f tp)",
    "mlp/c_fc/bias": "(f tp)",
    "c_proj/weight": "(f tp) d",
}
#: Fused parameters that have no tensor-parallel placement, and the tensors of the same layer that stay replicated with
#: them: with grouped-query attention, equal parts of a fused QKV weight do not hold whole groups of heads.
_FUSED: Mapping[str, tuple[str, ...]] = {
    "attention/qkv/weight": ("attention/proj/weight", "attention/[kv]_cache.kept"),
    "qkv_proj/weight": ("o_proj/weight",),
    # the router is replicated
    "mlp/experts/gate_up_proj": ("mlp/gate/weight",),
}
#: Row-parallel layers, by name suffix: their outputs are all-reduced over `tp`.
SUMMED = (
    *(name.removesuffix("/weight") for name, text in _NN.items() if name.endswith("/weight") and text[0] == "("),
    *_ROW, "c_proj",
)  # fmt: skip


def placed_by_name(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield tensor-parallel placements for parameters, and for states, gradients and caches with the same shape."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    names = {t.name for t in sources}
    for t in (t for t in sources if t.role in ("param", "state", "gradient", "cache")):
        of, _, _ = t.name.rpartition(".") if t.role in ("state", "gradient") else (t.name, "", "")
        pattern = next((end for end in TENSOR if fnmatchcase(of, end) or fnmatchcase(of, f"*/{end}")), None)
        if pattern is None:
            continue
        layer = "/".join([*of.split("/")[: -1 - pattern.count("/")], ""])
        if any(pattern in suffixes and layer + fused in names for fused, suffixes in _FUSED.items()):
            continue
        if len(axes_of(TENSOR[pattern])) == t.ndim - t.storage.pieces:
            yield t.name, _as_stored(t, TENSOR[pattern])


def is_known(name: str, suffixes: Collection[str] = (*TENSOR, *_FUSED)) -> bool:
    """Whether a parameter belongs to a known layer, so that a missing placement is intended."""
    return any(fnmatchcase(name, end) or fnmatchcase(name, f"*/{end}") for end in suffixes)


def _as_stored(t: Tensor, text: str) -> str:
    """Return a placement in the axis order in which `quantize` stores a weight."""
    readers = list(t.graph.successors(t))
    kind = readers[0].kind if [op.name for op in readers] == [f"{t.name}.order"] else None
    if not isinstance(kind, Rearrange):
        return text
    words = dict(zip(kind.order, axes_of(text), strict=True))
    return " ".join(words[i] for i in range(len(words)))


def axes_of(text: str) -> list[str]:
    """Split a placement into its axes."""
    out: list[str] = []
    for word in text.split():
        if out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += f" {word}"
        else:
            out.append(word)
    return out


# -- KV heads ----------------------------------------------------------------------------------------------------------

Axes = tuple[tuple[str, Poly], ...]


@dataclass(frozen=True)
class Heads:
    """Mesh axes of tensor parallelism, and the placements on them."""

    axes: Axes
    """`tp`, or `kv` and `replica`: ranks with different KV heads, and ranks that share one."""
    joint: tuple[tuple[str, tuple[str, ...]], ...]
    """`tp` as the joint name of `kv` and `replica`."""
    split: Mapping[str, str]
    """Placements on these axes, by tensor name."""


def heads(graph: Graph, split: Mapping[str, str], tp: Poly) -> Heads:
    """Split the tensor-parallel axis into `kv` and `replica` if there are fewer KV heads than ranks.

    With G KV heads and tp > G ranks, each head is on tp/G ranks. `kv` (G ranks) splits keys and values, `kv` and
    `replica` together split the queries, whose heads are ordered by group. The gradient of a KV head is reduced over
    `replica`.
    """
    named = {t.name: t for g in graph.bodies() for t in g.tensors if t.name in split}
    counts = {}
    for name, text in split.items():
        index = next((i for i, word in enumerate(groups(text) or ()) if "kv" in word), None)
        if index is not None:
            counts[name] = named[name].sizes[named[name].storage.pieces + index]
    few = {n for n in counts.values() if _fewer(n, tp, graph)}
    if len(few) > 1:
        raise GraphError(
            f"parallelize: layers have {' and '.join(sorted(map(str, few)))} KV heads, fewer than tp={tp}; expected "
            f"the same number in all layers"
        )
    placed = {n: text if counts.get(n) in few else text.replace(" kv)", " tp)") for n, text in split.items()}
    if not few:
        return Heads((("tp", tp),), (), placed)
    (count,) = few
    share = tp / count
    if share.constant is not None and not isinstance(share.constant, int):
        raise ShapeError(
            f"parallelize: {count} KV heads on tp={tp} ranks; expected tp to be a multiple or a divisor of the heads"
        )
    return Heads((("kv", count), ("replica", share)), (("tp", ("kv", "replica")),), placed)


def _fewer(count: Poly, ranks: Poly, graph: Graph) -> bool:
    """Whether there are fewer heads than ranks, symbolically or under the graph's default sizes."""
    if len(count.terms) == 1 and is_integral(ranks / count):
        return ranks != count
    defaults = {name: ONE * n for name, n in graph.root.defaults.items()}
    few, many = count.bind(defaults).constant, ranks.bind(defaults).constant
    return few is not None and many is not None and few < many


# -- inferred placements -----------------------------------------------------------------------------------------------
# Column and row parallelism for weights without a known name. A weight is column-parallel if every op between its
# matmul and the next ones keeps the output axis; the next matmuls contract this axis and are row-parallel.

#: Weights that stay replicated: routers, and down-projections to a latent that is normalized.
_REPLICATED = (
    "*router/weight",
    "*router/gate/weight",
    "*mlp/gate/weight",
    "*_a/weight",
    "*q_a_proj/weight",
    "*kv_a_proj_with_mqa/weight",
)

#: A tensor and the index of an axis.
_Axis = tuple[Tensor, int]


def replicated(graph: Graph, split: Collection[str], patterns: Collection[str]) -> list[str]:
    """Return the weight matrices that stay replicated, such as a fused QKV weight of grouped-query attention.

    Layers of `costgraph.nn` are left out, whose placements are complete. `split` are names of split weights, `patterns`
    match weights with a stated placement. A projection to or from one feature, such as a gate or a value head, is a
    vector.
    """
    matrices = [t.name for t in _products(_Flat(graph)) if ONE not in t.sizes[t.storage.pieces :]]
    names = [n for n in matrices if n not in split and not is_known(n, (*_NN, "attention/qkv/weight"))]
    return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in (*_REPLICATED, *patterns))]


def _products(flat: _Flat) -> dict[Tensor, tuple[Op, int]]:
    """Return the weight matrices, each with its matmul and operand index."""
    products: dict[Tensor, tuple[Op, int]] = {}
    for op in flat.ops:
        for i, t in enumerate(op.operands):
            source = flat.source(t)
            matrix = isinstance(op.kind, Einsum) and source.role == "param" and source.ndim - source.storage.pieces == 2
            if matrix and len(op.operands) == 2:
                products.setdefault(source, (op, i))
    return products


def inferred(graph: Graph, placed: Collection[str], ranks: Poly) -> Iterator[tuple[str, str]]:
    """Yield placements of weights and biases without a known name, one column/row-parallel group at a time."""
    flat, taken = _Flat(graph), {*placed}
    for weight, (op, i) in _products(flat).items():
        rule = op.kind.placed(op)
        if weight.name in taken or is_known(weight.name) or rule is None:
            continue
        labels = rule.operands[i] or ()
        result_names = {n for result in rule.results for dim in result for n in dim}
        output_names = [n for names in labels for n in names if n in result_names]
        group = _Group(flat, ranks)
        if (
            len(output_names) == 1
            and group.spread(op, rule, output_names[0])
            and group.summed
            and taken.isdisjoint(group.names())
        ):
            yield from group.placements()
            taken |= group.names()


class _Flat:
    """The forward pass with kernels inlined, and aliases of tensors resolved."""

    def __init__(self, graph: Graph) -> None:
        self.ops: list[Op] = []
        self.aliases: dict[Tensor, Tensor] = {}
        """Maps a formal to the outer tensor, and a kernel result to the inner tensor."""
        self.users: dict[Tensor, list[Op]] = {}
        self.params: set[Tensor] = set()
        """Parameters that loops read."""
        self.ends: set[Tensor] = set()
        """Inputs, outputs and carries of graphs and loops."""
        for g in graph.bodies():
            if not g.fused:
                loop = None if g.owner is None else g.owner.loop
                escaping = g.outputs if loop is None else [*loop.nexts, *loop.ys]  # residuals inherit their placement
                self.ends |= {*escaping, *(f for f in g.formals if f.role != "param")}
                self.note(g)
        for op in self.ops:
            for t in dict.fromkeys(map(self.root, op.operands)):
                self.users.setdefault(t, []).append(op)
        self.ends = {*map(self.root, self.ends - self.params)}
        self.outputs = {*map(self.root, graph.outputs)} - {*self.users}
        self.producers = {self.root(t): op for op in self.ops for t in op.results}

    def note(self, graph: Graph) -> None:
        for op in graph.ops:
            if op.loop is not None:
                loop = op.loop
                self.ends |= {*loop.starts, *op.results}
                pairs = [*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True)]
                params = {f: t for f, t in pairs if self.root(t).role == "param"}
                self.aliases |= params
                self.params |= {*params}
                continue
            if isinstance(op.kind, Slice) and op.results[0].role == "param" and op.results[0].storage.pieces:
                self.aliases[op.results[0]] = op.operands[0]  # some layers of a stack
                continue
            if op.phase != "forward" or isinstance(op.kind, KeepAlive):
                continue
            if isinstance(op.kind, Kernel):
                body = op.kind.body
                self.aliases |= dict(zip(body.formals, op.operands, strict=False))
                self.aliases |= dict(zip(op.results, body.outputs, strict=False))
                self.note(body)
            else:
                self.ops.append(op)

    def root(self, t: Tensor) -> Tensor:
        while t in self.aliases:
            t = self.aliases[t]
        return t

    def source(self, t: Tensor) -> Tensor:
        """Return the parameter that a tensor is a view of, or the tensor itself."""
        t = self.root(t)
        while t.is_view and t.producer is not None and t.producer.operands:
            t = self.root(t.producer.operands[0])
        return t


class _Group:
    """Axes that must be sharded together."""

    def __init__(self, flat: _Flat, ranks: Poly) -> None:
        self.flat, self.ranks = flat, ranks
        self.axes: set[_Axis] = set()
        self.blocks: dict[Tensor, Poly] = {}
        """Tensors that are sliced into equal blocks, and the number of blocks."""
        self.summed = False
        """Whether a matmul contracts the axis."""
        self.pending: list[Tensor] = []

    def names(self) -> set[str]:
        return {t.name for t, _ in self.axes if t.role == "param" and t.producer is None}

    def spread(self, op: Op, rule: Split, name: str) -> bool:
        """Shard a named axis of an op and every axis tied to it; return False if one cannot be sharded."""
        if not self.split(op, rule, name):
            return False
        done: set[tuple[Op, int, _Axis]] = set()
        while self.pending:
            t = self.pending.pop()
            if t in self.flat.outputs:  # logits stay sharded, as with a known head
                self.summed = True
                continue
            if t in self.flat.ends:
                return False
            near = [*self.flat.users.get(t, ()), *([self.flat.producers[t]] if t in self.flat.producers else [])]
            if t.role != "param" and t not in self.flat.producers:
                return False
            for axis in [a for a in self.axes if a[0] is t]:
                for o in near:
                    if (o, 0, axis) not in done:
                        done.add((o, 0, axis))
                        if not self.split_along(o, t, axis[1]):
                            return False
        return True

    def split_along(self, op: Op, t: Tensor, dim: int) -> bool:
        """Shard an op along a tensor's axis."""
        kind, rule = op.kind, op.kind.placed(op)
        if isinstance(kind, Slice) and kind.axis == dim:
            size, part = op.operands[0].sizes[dim], op.results[0].sizes[dim]
            if not is_integral(size / part) or not is_integral(kind.start / part):
                return False
            self.blocks[self.flat.root(op.operands[0])] = size / part
            return self.add(op.operands[0], dim) and self.add(op.results[0], dim)
        if rule is None:
            return False
        tensors = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
        names = {
            name
            for o, labels in tensors
            if labels is not None and self.flat.root(o) is t and dim < len(labels)
            for name in [next((n for n in labels[dim] if rule.extents[n] != ONE), None)]
        }
        names.discard(None)
        return len(names) == 1 and self.split(op, rule, str(names.pop()))

    def split(self, op: Op, rule: Split, name: str) -> bool:
        """Shard a named axis of an op in all its tensors, as the outermost factor."""
        if name in rule.whole or any(name in dim for dim in (rule.fixed or ())):
            return False
        tensors = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
        in_result = any(name in dim for labels in rule.results for dim in labels)
        if not in_result:
            reads = [self.flat.source(t).role for t in op.operands]
            if not isinstance(op.kind, Einsum) or "param" not in reads:
                return False
            self.summed = True
        for t, labels in tensors:
            for i, dim in enumerate(labels or ()):
                if name in dim:
                    if next((n for n in dim if rule.extents[n] != ONE), None) != name or not self.divides(
                        rule.extents[name]
                    ):
                        return False
                    if not self.add(t, i):
                        return False
        return True

    def divides(self, size: Poly) -> bool:
        part = (size / self.ranks).constant
        return part is None or part == int(part)

    def add(self, t: Tensor, dim: int) -> bool:
        t = self.flat.root(t)
        if (t, dim) in self.axes:
            return True
        if any(o is t for o, _ in self.axes):  # a tensor may be sharded along one axis only
            return False
        self.axes.add((t, dim))
        self.pending.append(t)
        return True

    def placements(self) -> Iterator[tuple[str, str]]:
        """Yield placements; a parameter that is sliced into equal blocks is sharded block by block."""
        blocks = {t.sizes[d]: n for t, n in self.blocks.items() for o, d in self.axes if o is t}
        params = [a for a in self.axes if a[0].role == "param" and a[0].producer is None]
        for t, dim in sorted(params, key=lambda a: a[0].name):
            words = [f"a{i}" for i in range(t.ndim - t.storage.pieces)]
            count = blocks.get(t.sizes[dim + t.storage.pieces])  # axes of a slice of a stack
            words[dim] = f"(a{dim} tp)" if count is None or count == ONE else f"({count} a{dim} tp)"
            yield t.name, " ".join(words)


def with_states(graph: Graph, split: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield placements for parameters, and for gradients and states with the same shape."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    sizes = {t.name: t.sizes[t.storage.pieces :] for t in sources if t.name in split}
    for t in sources:
        of = t.name.rpartition(".")[0] if t.role in ("state", "gradient") else t.name
        if of in split and sizes.get(of) == t.sizes[t.storage.pieces :]:
            yield t.name, split[of]


# -- parallelize -------------------------------------------------------------------------------------------------------

#: Systems whose policies a training step can follow.
SYSTEMS = ("torch", "megatron")
System = Annotated[str, Rule(" or ".join(SYSTEMS), lambda v: v in SYSTEMS)]
#: Context-parallel attention algorithms.
CONTEXTS = ("gather", "all_to_all", "ring")
Context = Annotated[str, Rule(" or ".join(CONTEXTS), lambda v: v in CONTEXTS)]
Stage = Annotated[int, Rule("0, 1, 2 or 3", lambda v: v in (0, 1, 2, 3) and not isinstance(v, bool))]


# longer than 40 lines: each option is a parameter
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
    keep_gathered: bool | None = None,
    placements: Placements | None = None,
    pp: object = 1,
    schedule: str = "1f1b",
    micro_batches: object = 1,
    virtual_stages: object = 1,
    layers: object = None,
    system: System = "torch",
    reduce_every_microbatch: bool | None = None,
    buckets: Buckets | None = None,
    offload: str | Iterable[str] = (),
    strict: bool = False,
) -> Graph:
    """Turn the graph of a whole model into the graph of one rank.

    Parameters
    ----------
    graph : Graph
        A forward pass, a training step or an inference pass.
    dp : sympy.Expr or int
        Data-parallel ranks. They split the batch: the first axis of inputs (the second, if the first one counts
        micro-batches) and KV caches.
    cp : sympy.Expr or int
        Context-parallel ranks. They split the sequence: the second axis of integer inputs (tokens and targets) and the
        positions of KV caches. In a pass that continues a sequence, such as `decode`, all ranks have the new positions.
    tp : sympy.Expr or int
        Tensor-parallel ranks. They split heads and inner widths, by the parameter names of `costgraph.nn` and Hugging
        Face transformers. Other weights are inferred from the graph: column parallelism if elementwise ops or attention
        heads connect the matmul to others that contract its output axis. `sharding.replicated` of the result lists
        weights that stay replicated.
    ep : sympy.Expr or int
        Expert-parallel ranks, which split the experts. The batch is split over `dp * ep` ranks, and groups of `ep`
        neighbouring ranks exchange tokens.
    zero : int
        ZeRO stage over `dp` and `cp`: 1 shards optimizer states, 2 gradients as well, 3 parameters as well, which are
        all-gathered before use. Parameters that are not experts are sharded over `ep` as well.
    sequence : bool
        Whether activations between layers are split along the sequence over `tp` (sequence parallelism).
    context : str
        Attention along `cp`. gather: all-gather keys and values. all_to_all: exchange the sequence for heads, as
        `exchange` of `shard`. ring: pass keys and values around a ring, as `ring` of `shard`.
    keep_gathered : bool, optional
        Whether activations that `sequence` all-gathers over `tp` are saved for the backward pass, as in `shard`. By
        default True, as with torch's `parallelize_module`; False with `system="megatron"`, which gathers them again.
    placements : mapping of str to str, optional
        Placements that take precedence, in the notation of `shard`, on a mesh with axes dp, ep, cp and tp.
    pp : sympy.Expr or int
        Pipeline stages with equal numbers of layers. The first stage also has the ops before the layers, the last one
        the head and the loss. A parameter that both ends read is on both, and its gradients are all-reduced. In
        inference, each stage has the KV caches of its layers.
    schedule : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev. It sets the number of in-flight
        micro-batches, see `costgraph.plan.in_flight`. The last five split the backward pass: weight gradients are
        computed after the input gradients are sent.
    micro_batches : sympy.Expr or int
        Micro-batches of a pipelined step, equal to the accumulation steps of `training_step`. In inference, the number
        of batches in flight, each with its own KV caches.
    virtual_stages : sympy.Expr or int
        Model chunks per rank (virtual stages) for interleaved and interleaved-zb; zbv and dualpipev have two. dualpipe
        has two whole stages on each rank, r and pp - 1 - r, with half of the micro-batches each: every parameter is on
        two ranks, and its gradients are all-reduced.
    layers : sequence of int, optional
        Layers of each stage, in order, if stages differ.
    system : str
        Policies to follow. torch: DTensor, `fully_shard` and `ZeroRedundancyOptimizer`. megatron: each rank accumulates
        its partial gradients over micro-batches and reduces them once, in place if the step keeps its gradients; the
        same holds for norm gradients over `tp`. With `zero=1` (distributed optimizer), gradients are reduce-scattered
        and updated parameters all-gathered. Matmuls accumulate into the gradient buffers (`accumulation_fusion` of
        `shard`). With a split backward pass, torch keeps all saved tensors until the weight gradients exist, as its
        autograd graph does; megatron keeps only their operands, as the `WeightGradStore` of zero bubbles does.
    reduce_every_microbatch : bool, optional
        As in `shard`; by default True, False with `system="megatron"`.
    buckets : Buckets, optional
        As in `shard`.
    offload : str or iterable of str
        Tensors in host memory: optimizer, parameters, activations, as in `costgraph.offload`. Reduced gradients are
        transferred as they are.
    strict : bool
        As in `shard`; also raise an error if `tp` leaves a weight matrix replicated.

    Returns
    -------
    Graph
        The per-rank graph. With a pipeline it is the first stage's, and `stages` holds the first, middle and
        last stage; with `layers`, all middle stages that differ. `peak_memory` and `flops` are those of the largest
        stage and `seconds` is for the whole step; ask other questions of each stage.

    Raises
    ------
    GraphError, ShapeError
        If `tp` or `ep` splits no parameter of the graph, or a degree is not a positive integer.
    UnsupportedError
        If `system="megatron"` is combined with ZeRO above stage 1, a pipelined graph is not a step with one loop over
        layers, or an op outside the layers needs tensors of two stages.

    Notes
    -----
    ZeRO shards an axis that tensor parallelism leaves whole, the longest if sizes have defaults; torch's FSDP2 shards
    the first axis, with padding. Ranks of `cp` have the same parameters, so ZeRO shards over `cp` as well, and over
    `ep` for parameters that are not experts, as in torchtitan.

    Megatron-LM (megatron/core at d98e8a6) reduces gradients in `start_grad_sync` of
    distributed/param_and_grad_buffer.py, in buckets of many parameters; here each parameter has its own collective,
    with the same bytes. Norm gradients are reduced in distributed/finalize_model_grads.py. With sequence parallelism,
    the token embedding receives the all-gathered gradient, as in `_ReduceScatterToSequenceParallelRegion` of
    tensor_parallel/mappings.py, and accumulates its own rows.

    The graph of a rank with several model chunks runs through all of them before it sends anything; costs are those
    of the rank. In-flight micro-batches are validated against action lists. With as many micro-batches as ranks,
    gradients of chunks that finish before others start are left out.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-70b"), precision="bf16-master")
    >>> rank = cg.parallelize(step, dp=64, tp=8, zero=3, sequence=True)
    >>> round(cg.peak_memory(rank, B=64, S=8192) / 1e9)
    49
    """
    need_graph("parallelize", graph)
    reduce_every_microbatch = system == "torch" if reduce_every_microbatch is None else reduce_every_microbatch
    keep_gathered = system == "torch" if keep_gathered is None else keep_gathered
    need_flag(
        "parallelize",
        sequence=sequence,
        keep_gathered=keep_gathered,
        reduce_every_microbatch=reduce_every_microbatch,
        strict=strict,
    )
    if system == "megatron" and zero > 1:
        raise UnsupportedError(
            f"parallelize: zero={zero} with system='megatron', whose distributed optimizer shards optimizer states "
            f"only; expected 0 or 1"
        )
    degrees = {"dp": dp, "ep": ep, "cp": cp, "tp": tp}
    host_kinds = need_offloaded("parallelize: offload", offload)
    graphs = [
        with_stage_reductions(
            _of_rank(
                stage.graph,
                degrees,
                zero,
                sequence,
                context,
                keep_gathered,
                placements,
                system,
                reduce_every_microbatch,
                buckets,
                strict,
            ),
            stage,
        )
        for stage in in_stages(graph, pp, schedule, micro_batches, virtual_stages, layers, torch=system == "torch")
    ]
    graphs = [on_host(g, host_kinds) for g in graphs] if host_kinds else graphs
    if len(graphs) == 1:
        return graphs[0]
    combined = Rewriter().run(graphs[0], graph.name)
    combined.sharding, combined.parts = graphs[0].sharding, tuple(graphs)
    return combined


def _of_rank(
    graph: Graph,
    degrees: Mapping[str, object],
    zero: int,
    sequence: bool,
    context: str,
    keep_gathered: bool,
    placements: Mapping[str, str] | None,
    system: str,
    reduce_every_microbatch: bool,
    buckets: Buckets | None,
    strict: bool,
) -> Graph:
    """Return the per-rank graph of a pipeline stage."""
    tensor, mesh, places, gradients = _all_placements(graph, degrees, zero, sequence, system)
    unsplit = replicated(graph, places, placements or ()) if mesh["tp"] != ONE else []
    if strict and unsplit:
        raise UnsupportedError(
            f"parallelize: tp leaves {len(unsplit)} weights replicated on every rank, such as {unsplit[0]!r}; pass "
            f"placements= for them, or strict=False"
        )
    local = shard(
        graph, mesh, {**places, **(placements or {})},
        gather=_zero3_policy(graph, mesh) if zero >= 3 else (), gradients=gradients,
        exchange="cp" if context == "all_to_all" else (), ring="cp" if context == "ring" else (),
        keep_gathered=[axis for axis, _ in tensor.axes] if keep_gathered else (),
        reduce_every_microbatch=reduce_every_microbatch, accumulation_fusion=system == "megatron", buckets=buckets,
        strict=strict,
    )  # fmt: skip
    if local.sharding is not None:
        local.sharding = replace(local.sharding, replicated=tuple(unsplit))
    return local


def _zero3_policy(graph: Graph, mesh: Mesh) -> FullyShard:
    """Return the FSDP policy of ZeRO-3: gather over all data-parallel ranks, but keep experts on the ranks of `ep`."""
    experts = _expert_placements(graph, {}) if mesh["ep"] != ONE else ()
    sources = {t.name for g in graph.bodies() for t in g.tensors if t.role == "param"}
    return FullyShard(
        ("dp", "ep", "cp"),
        units=_unit_patterns(graph),
        resident={name: ("ep",) for name, _ in experts if name in sources},
    )


def _unit_patterns(graph: Graph) -> list[str]:
    """Return name patterns for the layers of an unrolled graph: numbered scopes with equal parameters."""
    layers_by_pattern: dict[str, dict[str, set[str]]] = {}
    for t in graph.tensors:
        levels = t.name.split("/") if t.role == "param" and t.producer is None else []
        index = next((i for i, level in enumerate(levels) if level.isdigit()), None)
        if index is not None:
            layers = layers_by_pattern.setdefault("/".join([*levels[:index], "[0-9]*"]), {})
            layers.setdefault(levels[index], set()).add("/".join(levels[index + 1 :]))
    names_by_pattern = {pattern: [*map(sorted, layers.values())] for pattern, layers in layers_by_pattern.items()}
    nested = {
        pattern for pattern, names in names_by_pattern.items() if any("/" in name for layer in names for name in layer)
    }
    return [
        p for p, names in names_by_pattern.items() if p in nested and any(names.count(layer) > 1 for layer in names)
    ]


def shares(graph: Graph, degrees: Mapping[str, object], zero: int, sequence: bool, system: str) -> Iterator[Poly]:
    """Yield the local length of each axis that the mesh splits; a fractional length is an error."""
    _, mesh, places, _ = _all_placements(graph, degrees, zero, sequence, system)
    named = ((t, axes_of(places[t.name])) for g in graph.bodies() for t in g.tensors if t.name in places)
    for t, axes in named:
        for size, words in zip(t.sizes[t.storage.pieces :], axes, strict=False):
            ranks = prod((mesh[word] for word in words.strip("()").split() if word in mesh), start=ONE)
            if ranks != ONE:
                yield size / ranks


def _all_placements(
    graph: Graph, requested: Mapping[str, object], zero: int, sequence: bool, system: str
) -> tuple[Heads, Mesh, dict[str, str], dict[str, str]]:
    """Return tensor-parallel axes, the mesh, placements by tensor name, and placements of gradients."""
    degrees = {axis: positive(f"parallelize: {axis}", n) for axis, n in requested.items()}
    placed = {}
    if degrees["tp"] != ONE:
        placed = dict(placed_by_name(graph))
        placed |= with_states(graph, dict(inferred(graph, placed, degrees["tp"])))
    tensor = heads(graph, placed, degrees.pop("tp"))
    mesh, split = Mesh((*degrees.items(), *tensor.axes), tensor.joint), dict(tensor.split)
    _need_some("tp", mesh, split, graph)
    experts = dict(_expert_placements(graph, split)) if mesh["ep"] != ONE else {}
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
                f"parallelize: no loop of graph {graph.name!r} carries a tensor that sequence=True can shard; expected "
                f"layers in a loop, such as costgraph.fold builds from a trace"
            )
        split |= dict.fromkeys(carries, f"(b dp ep) (s {along}) d")
    split |= dict(_data_placements(graph, split, lengths, "" if continued else "cp"))
    zero_placements, gradients = _zero_placements(graph, split, mesh, experts, zero, reduced=system == "megatron")
    return tensor, mesh, {**split, **zero_placements}, gradients


def _zero_placements(
    graph: Graph, split: Mapping[str, str], mesh: Mesh, experts: Collection[str], zero: int, *, reduced: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return ZeRO placements of sources and gradients; with `reduced`, stage 1 shards gradients as well."""
    named = {t.name: t for t in graph.tensors if t.producer is None}
    over = {
        name: _with_axes(("dp", "cp") if name in experts else ("dp", "ep", "cp"), t, split.get(name), graph, mesh)
        for name, t in named.items()
        if t.ndim > t.storage.pieces
    }
    from_on = {"state": 1, "gradient": 2, "param": 3}
    zero_placements = {name: text for name, text in over.items() if zero >= from_on.get(named[name].role, inf)}
    shard_gradients = zero == 2 or (zero == 1 and reduced)
    return zero_placements, {
        t.name: over[t.name] for t in graph.gradients if t.name in over and t.role == "param" and shard_gradients
    }


def _need_some(axis: str, mesh: Mesh, placements: Mapping[str, str], graph: Graph) -> None:
    if mesh[axis] != ONE and not placements:
        raise GraphError(
            f"parallelize: {axis} splits no parameter of graph {graph.name!r}, expected layers of costgraph.nn or of "
            f"transformers, pairs of matmuls, or placements passed to shard"
        )


def _expert_placements(graph: Graph, split: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield placements of expert parameters, their gradients and states, split along the first axis over `ep`."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    params = {t.name: t.sizes[t.storage.pieces :] for t in sources if t.role == "param"}
    for t in (t for t in sources if t.role in ("param", "state", "gradient")):
        of = t.name if t.role == "param" else t.name.rpartition(".")[0]
        sizes = t.sizes[t.storage.pieces :]
        if of.split("/")[-2:-1] == ["experts"] and params.get(of) == sizes:
            _, *others = axes_of(split.get(t.name, " ".join(f"a{i}" for i in range(len(sizes)))))
            yield t.name, " ".join(["(e ep)", *others])


def _received(graph: Graph) -> list[Tensor]:
    """Return the tensors that a pipeline stage receives."""
    return [op.results[0] for op in graph.walk() if isinstance(op.kind, Receive)]


def _carries(graph: Graph) -> Iterator[str]:
    """Yield carries between layers in the forward pass whose second axis is the sequence of an input."""
    inputs = {t.sizes[-2:] for t in graph.tensors if t.role == "input" and t.ndim >= 2}
    inputs |= {t.sizes[-3:-1] for t in graph.tensors if t.role == "input" and t.ndim >= 3}  # embeddings, not indices
    inputs |= {t.sizes[:2] for t in _received(graph)}
    for g in graph.bodies():
        for op in g.ops:
            for t in op.loop.carries if op.loop is not None and op.phase == "forward" else ():
                if t.ndim == 3 and t.sizes[:2] in inputs:
                    yield t.name


def _caches(graph: Graph) -> tuple[dict[str, int], bool]:
    """Return position axes of caches whose length is the sequence, and whether the pass continues a sequence.

    Other caches, such as convolution states, have a constant length or a parameter's size.
    """
    params = (t for g in graph.bodies() for t in g.tensors if t.role == "param")
    param_symbols = {name for t in params for size in t.sizes for name in size.names()}
    axes, continued = dict[str, int](), False
    for op in graph.walk():
        if not isinstance(op.kind, Append) or op.operands[0].role != "cache":
            continue
        length, new = (t.sizes[op.kind.axis] for t in op.operands)
        grows = smaller(new, length) != length
        if length.names() - param_symbols - (new.names() if grows else set()):
            axes[op.operands[0].name] = op.kind.axis
            continued |= grows
    return axes, continued


def _need_positions(graph: Graph) -> None:
    """Raise an error for single-token inputs without a cache along the sequence."""
    one = next((t for t in graph.tensors if t.role == "input" and t.ndim == 2 and t.sizes[1] == ONE), None)
    if one is not None and any(t.role == "cache" for g in graph.bodies() for t in g.tensors):
        raise GraphError(
            f"parallelize: {one!r} of graph {graph.name!r} has a single position, and the graph has no cache with a "
            f"sequence axis; expected a sequence that cp can split"
        )


def _data_placements(
    graph: Graph, split: Mapping[str, str], lengths: Mapping[str, int], along: str
) -> Iterator[tuple[str, str]]:
    """Yield placements of inputs and caches, with the batch split over `dp` and `ep` and the sequence over `cp`.

    Inputs that a loop slices have a leading axis of micro-batches.
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
            index = lengths[t.name]
            axes[index] = f"({axes[index].strip('()')} cp)"
        yield t.name, " ".join(axes)


def _with_axes(axes: Sequence[str], t: Tensor, text: str | None, graph: Graph, mesh: Mesh) -> str:
    """Return a placement with one more axis sharded: the longest whole axis that the ranks divide, if there is one."""
    sizes = t.sizes[t.storage.pieces :]
    groups = axes_of(text) if text else [f"a{i}" for i in range(len(sizes))]
    unsplit = [i for i, group in enumerate(groups) if "(" not in group and sizes[i] != ONE]
    if not unsplit and sizes[0] == ONE:
        return " ".join(groups)
    ranks = prod((mesh[axis] for axis in axes), start=ONE)
    index = max(unsplit, key=lambda i: (_divides(ranks, sizes[i], graph), _length(sizes[i], graph), -i), default=0)
    groups[index] = f"({groups[index].strip('()')} {' '.join(axes)})"
    return " ".join(groups)


def _length(size: Poly, graph: Graph) -> float:
    """Return a size under the graph's defaults, infinity if it stays symbolic."""
    bound = size.bind({name: ONE * n for name, n in graph.root.defaults.items()})
    return float(bound.constant) if bound.constant is not None else inf


def _divides(ranks: Poly, size: Poly, graph: Graph) -> bool:
    """Whether the ranks may divide a size; False only if both are known and do not."""
    defaults = {name: ONE * n for name, n in graph.root.defaults.items()}
    part = (size / ranks).bind(defaults).constant
    return part is None or part == int(part)
