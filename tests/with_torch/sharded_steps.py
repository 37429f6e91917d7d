"""Steps on meshes: a small llama and a mixture of experts with stated placements."""

from dataclasses import dataclass, field
from functools import cache, partial

from shared import load

import costgraph as cg
from costgraph.ir.graph import apply
from costgraph.ops.index import Scatter

#: Small sizes, divisible by four ranks on every axis.
SIZES = {"B": 4, "S": 4, "D": 8, "F": 16, "H": 4, "G": 4, "K": 2, "L": 2, "V": 16}


@dataclass(frozen=True)
class Case:
    """A step, one rank's graph, and its sizes."""

    graph: object
    sharded: object
    degrees: dict
    sizes: dict
    symbols: dict = field(default_factory=dict)
    """degrees that are symbols"""


def gradients_too(made):
    """Add the gradients of a step to its outputs."""
    with made:
        made.outputs.extend(made.gradients.values())
    return made


@cache
def step(name="llama-3-8b", optimizer="SGD", dtype="fp64"):
    """Return a step with its gradients as outputs."""
    model = load(name, symbolic=True, dtype=dtype)
    return gradients_too(cg.training_step(model, optimizer=getattr(cg, optimizer)()))


def parallel(name="llama-3-8b", sizes=SIZES, dp=1, cp=1, tp=1, optimizer="SGD", dtype="fp64", **options):
    """A zoo model on a 3D mesh."""
    graph = step(name, optimizer, dtype)
    degrees = {axis: n for axis, n in (("dp", dp), ("cp", cp), ("tp", tp)) if n > 1}
    return Case(graph, cg.parallelize(graph, dp=dp, cp=cp, tp=tp, strict=True, **options), degrees, sizes)


def gathered(policy, sizes=None, dtype="fp64", **degrees):
    """Parameters sharded over a policy's axes, the batch over all axes: with further axes, HSDP."""
    graph, batch, own = step(dtype=dtype), " ".join(degrees), " ".join(policy.axes)
    placements = {"tokens": f"(b {batch}) s", "targets": f"(b {batch}) s"}
    for t in (t for t in graph.tensors if t.producer is None and t.role == "param"):
        axes = [f"a{i}" for i in range(t.ndim - t.storage.pieces)]
        placements[t.name] = " ".join([f"({axes[0]} {own})", *axes[1:]])
    sharded = cg.shard(graph, cg.mesh(**degrees), placements, gather=policy, strict=True)
    return Case(graph, sharded, degrees, sizes or {**SIZES, "K": 4})


def experts(sizes=None, dtype="fp64"):
    """An einsum mixture of experts (GShard, Lepikhin et al. 2020): tokens and experts on one axis."""
    G, S, E, C, M, F = cg.dims("G S E C M F")
    with cg.Graph("experts", dtype=dtype) as g:
        # tokens have a gradient, as the output of a previous layer would
        x, mask = g.param("x", (G, S, M)), g.input("mask", (G, S, E, C))
        up, down = g.param("up", (E, M, F)), g.param("down", (E, F, M))
        sent = cg.einsum(mask, x, "g s e c, g s m -> g e c m")
        hidden = cg.relu(cg.einsum(sent, up, "g e c m, e m f -> g e c f"))
        back = cg.einsum(hidden, down, "g e c f, e f m -> g e c m")
        g.output(cg.reduce(cg.einsum(mask, back, "g s e c, g e c m -> g s m"), "g s m -> ", "sum"))
    graph = gradients_too(cg.training_step(g, optimizer=cg.SGD()))
    placements = {"x": "(g ep) s m", "mask": "(g ep) s e c", "up": "(e ep) m f", "down": "(e ep) f m"}
    sharded = cg.shard(graph, cg.mesh(ep=4), placements, strict=True)
    return Case(graph, sharded, {"ep": 4}, sizes or {"G": 4, "S": 5, "E": 8, "C": 3, "M": 7, "F": 2})


def states():
    """ZeRO-1 of two linear layers: states are sharded, updated parameters are all-gathered in place."""
    B, D, F = cg.dims("B D F")
    with cg.Graph("mlp", dtype="fp64") as g:
        h = cg.gelu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, bias=True, name="up"))
        y = cg.linear(h, "b f -> b d", d=D, name="down")
        g.output(cg.reduce(y * y, "b d -> ", "mean"))
    graph = gradients_too(cg.training_step(g, optimizer=cg.AdamW()))
    sharded = cg.parallelize(graph, dp=2, zero=1, strict=True)
    return Case(graph, sharded, {"dp": 2}, {"B": 6, "D": 4, "F": 10})


def buffers():
    """Megatron's policies: micro-batches accumulate into persistent gradient buffers, reduced in place once."""
    model = load("llama-3-8b", symbolic=True, dtype="fp64")
    graph = cg.training_step(model, optimizer=cg.AdamW(), accumulate=2, set_to_none=False)
    sharded = cg.parallelize(graph, dp=2, tp=2, zero=1, sequence=True, system="megatron", strict=True)
    return Case(graph, sharded, {"dp": 2, "tp": 2}, SIZES)


def buckets(**policy):
    """Gradient buckets of micro-batches: reduced and copied back each time, or reduced once and left there."""
    model = load("llama-3-8b", symbolic=True, dtype="fp64")
    graph = cg.training_step(model, optimizer=cg.AdamW(), accumulate=2)
    options = {"reduce_every_microbatch": not policy, "buckets": cg.Buckets(**policy), "strict": True}
    sharded = cg.parallelize(graph, dp=2, tp=2, zero=1, sequence=True, **options)
    return Case(graph, sharded, {"dp": 2, "tp": 2}, SIZES)


def lookups():
    """Row-sharded tables: lookups along rows and along columns, and writes, some of which skip a padding row."""
    V, D, N, B = cg.dims("V D N B")
    with cg.Graph("lookups", dtype="fp64") as g:
        table, new = g.input("table", (V, D)), g.input("new", (N, D))
        ids, columns = g.input("ids", (N,), dtype="int64"), g.input("columns", (B, N), dtype="int32")
        wide, sums = g.input("wide", (B, V)), g.input("sums", (B, N))
        rows = {"add": ids, "max": ids, "set": cg.ops.arange(N)}
        g.output(cg.embedding(ids, table), cg.ops.take_along(wide, columns))
        g.output(*(cg.ops.scatter(table, at, new, mode=mode, inplace=False) for mode, at in rows.items()))
        for padding_idx in (1, 8):
            g.output(*apply(Scatter(mode="add", padding_idx=padding_idx), [table, ids, new], "scatter"))
        g.output(cg.ops.scatter(wide, columns, sums, along=True, inplace=False))
        g.output(*(cg.reduce(wide, "b v -> b", how) for how in ("mean", "max", "min")))
    placements = {"table": "(v x) d", "wide": "b (v x)"}
    return Case(g, cg.shard(g, cg.mesh(x=2), placements), {"x": 2}, {"V": 10, "D": 3, "N": 7, "B": 5})


def traced():
    """A step of a traced module, with one weight sharded over both mesh axes and gathered along one."""
    import torch

    from costgraph.torch import trace

    mlp = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 6)]
    net = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.LayerNorm(8), *mlp)
    whole = trace(net.double(), torch.zeros(4, 3, dtype=torch.long), dims=[("B", None)])
    with whole as g:
        g.output(cg.reduce(g.outputs.pop() ** 2, "b s d -> ", "mean"))
    graph = gradients_too(cg.training_step(whole, optimizer=cg.SGD()))
    batch = next(t.name for t in graph.tensors if t.role == "input")
    placements = {batch: "(b dp) s", "0/weight": "(v tp) d", "2/weight": "(f tp dp) d", "2/bias": "(f tp)",
                  "4/weight": "o (f tp)"}  # fmt: skip
    sharded = cg.shard(graph, cg.mesh(dp=2, tp=2), placements, gather="dp", strict=True)
    return Case(graph, sharded, {"dp": 2, "tp": 2}, {"B": 4})


def decoding(**degrees):
    """A decode step with heads and cache positions sharded over ranks."""
    graph = cg.decode(load("llama-3-8b", symbolic=True, dtype="fp64"))
    return Case(graph, cg.parallelize(graph, **degrees, strict=True), degrees, {**SIZES, "S": 6})


def attention(options, placement="b (s cp) d", forward=False, sizes=None, **shard):
    """Attention with a sharded sequence."""
    B, S, D, H, G, K = cg.dims("B S D H G K")
    with cg.Graph("attention", dtype="fp64") as g:
        y = cg.nn.self_attention(g.input("x", (B, S, D)), H, K, groups=G, **options)
        g.output(y if forward else cg.reduce(y * y, "b s d -> ", "sum"))
    graph = g if forward else gradients_too(cg.training_step(g, optimizer=cg.SGD()))
    degrees = {axis: 2 if "cp tp" in placement else 4 for axis in ("cp", "tp") if axis in placement}
    sharded = cg.shard(graph, cg.mesh(**degrees), {"x": placement}, strict=True, **shard)
    return Case(graph, sharded, degrees, sizes or {"B": 2, "S": 12, "D": 5, "H": 4, "G": 2, "K": 3})


MIXTRAL = {"B": 4, "S": 3, "D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 3, "k": 2, "L": 2, "V": 8}
GPT_OSS = {**MIXTRAL, "W": 2}
CASES = {
    "states": states,
    "buffers": buffers,
    "lookups": lookups,
    "experts": experts,
    "zero 3, tensor and sequence": partial(parallel, dp=2, tp=2, sequence=True, zero=3),
    "context, in a ring": partial(attention, {}, ring="cp"),
    "context, in a ring, forward": partial(attention, {}, forward=True, ring="cp"),
    "windows of a context": partial(attention, {"window": 4}),
}
MORE = {
    "buckets": buckets,
    "buckets that gradients stay in": lambda: buckets(view=True),
    "zero 3, on the host": partial(parallel, dp=2, zero=3, offload=("optimizer", "parameters", "activations")),
    "hybrid": partial(gathered, cg.FullyShard("own"), rep=2, own=2),
    "context": partial(parallel, cp=2, tp=2),
    "context, in a ring, of a model": partial(parallel, cp=4, context="ring", sizes={**SIZES, "S": 8}),
    "mixtral": partial(parallel, "mixtral-8x22b", MIXTRAL, dp=2, tp=2),
    "gpt-oss": partial(parallel, "gpt-oss-120b", GPT_OSS, dp=2, tp=2),
    "tensor": partial(parallel, tp=2),
    "context, by heads": partial(parallel, cp=2, tp=2, context="all_to_all"),
    "tensor and sequence": partial(parallel, tp=4, sequence=True),
    "context of two": partial(parallel, cp=2, sizes={**SIZES, "S": 6}),
    "context in a ring of two": partial(parallel, cp=2, tp=2, sequence=True, context="ring", zero=3),
    "context, forward": partial(attention, {}, forward=True),
    "context, all keys": partial(attention, {"causal": False}, ring="cp"),
    "context, windows on both sides": partial(attention, {"window": 3, "causal": False}, ring="cp"),
    "context, sinks": partial(attention, {"sinks": True, "softcap": 5.0, "window": 2}, ring="cp"),
    "context, eager": partial(attention, {"kernel": "eager"}),
    "context, eager windows": partial(attention, {"kernel": "eager", "window": 5}, forward=True),
    "context over two axes": partial(attention, {}, "b (s cp tp) d", ring="tp"),
    "context, gpt-oss": partial(parallel, "gpt-oss-120b", {**GPT_OSS, "S": 4}, cp=2, context="ring"),
    "zero 1": partial(parallel, dp=2, zero=1, optimizer="AdamW"),
    "zero 2": partial(parallel, dp=4, zero=2, optimizer="AdamW"),
    "zero 3": partial(parallel, dp=2, zero=3, optimizer="AdamW"),
    "zero 3 of four": partial(parallel, dp=4, zero=3, optimizer="AdamW"),
    "kept in groups": partial(gathered, cg.FullyShard(("node", "own"), reshard_after_forward="own"), node=2, own=2),
    "each parameter, kept": partial(gathered, cg.FullyShard("dp", reshard_after_forward=False, by_unit=False), dp=4),
    "all at once": partial(parallel, dp=2, tp=2, sequence=True, zero=3, optimizer="AdamW"),
    "decoding": partial(decoding, tp=2),
    "decoding over split caches": partial(decoding, cp=2, tp=2),
    "traced": traced,
}
