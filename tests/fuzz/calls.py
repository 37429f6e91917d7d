"""One valid call of every public function, class and method; the fuzzers replace its arguments."""

from dataclasses import fields
from functools import cache
from types import SimpleNamespace

from public import PUBLIC, RECORDS

import costgraph as cg
from costgraph.files.checkpoints import (
    Weight,
    Weights,
)
from costgraph.hardware import units
from costgraph.optimizers import Slot

B, S, D, F, H, K, L, V = cg.dims("B S D F H K L V")


def a(*args, **named):
    """Call arguments."""
    return args, named


@cache
def asked():
    """Read-only graphs and the results of queries on them."""
    with cg.Graph("lm") as lm:
        table = lm.param("table", (V, 8))
        x = cg.embedding(lm.input("ids", (B, S), dtype="int64"), table)

        def layer(x):
            y = x + cg.nn.self_attention(cg.rms_norm(x), 2, 4)
            return y + cg.nn.mlp(y, 16)

        logits = cg.nn.tied_head(cg.repeat(L, layer, x, name="layers"), table)
        lm.output(logits)
        lm.loss = "cross_entropy"
    step = cg.training_step(lm)
    with cg.Graph("loss") as loss:
        y = cg.relu(cg.linear(loss.input("x", (B, 6)), "b d -> b f", f=5, name="up"), inplace=False)
        loss.output(cg.reduce(y, "b f -> ", "mean"))
    with cg.Graph("three") as three:
        x = three.input("x", (B, 6))
        for i in range(3):
            with cg.scope(f"h/{i}"):
                x = cg.nn.mlp(x, 5)
        three.output(x)
    e = SimpleNamespace(lm=lm, step=step, loss=loss, three=three, hardware=cg.load_hardware("h100-sxm"))
    e.op, e.costs, e.timeline = next(loss.walk()), cg.costs(loss), cg.timeline(loss, B=2)
    e.roofline = cg.roofline(loss, e.hardware, B=2)
    e.found = cg.plan.search(
        lm, devices=2, hardware="h100-sxm", B=2, S=8, L=2, V=12, zero=1, dp=2, pp=1, accumulate=1, checkpoint="none"
    )
    e.report = cg.report(loss, e.hardware, B=2)
    e.throughput = cg.plan.throughput(cg.decode(lm), e.hardware, "B", [1, 2], S=8, L=2, V=11)
    e.search = cg.plan.search(lm, devices=1, hardware=e.hardware, B=1, S=8, L=2, V=11, zero=0, checkpoint="none")
    e.preflight = cg.plan.preflight(step, e.hardware, B=1, S=8, L=2, V=11)
    e.comparison = cg.compare(loss, loss)
    e.weights = Weights((Weight("up.weight", (5, 6), "fp32", 120),), "file")
    e.differing = cg.compare_weights(loss, Weights((), "file"))
    e.leading = cg.plan.leading_term(step, 10, S=8, L=2, V=11)
    e.latency = cg.plan.latency(cg.prefill(lm), cg.decode(lm), e.hardware, prompt=4, steps=2, B=1, L=2, V=11)
    e.first, e.next = cg.prefill(lm), cg.decode(lm)
    return e


def setting():
    """An open graph for declarations, and some of its tensors."""
    e = SimpleNamespace(g=cg.Graph("g"), **vars(asked()))
    e.x, e.w, e.n = e.g.input("x", (B, 6)), e.g.param("w", (6, 5)), e.g.input("n", (2, 3))
    e.seq, e.ids = e.g.input("seq", (B, S, 6)), e.g.input("ids", (B, S), dtype="int64")
    e.many, e.q, e.im = (
        e.g.input("many", (B,), dtype="int64"),
        e.g.input("q", (2, 4, 5, 6)),
        e.g.input("im", (B, 4, 8, 8)),
    )
    e.p, e.cos = e.g.input("p", (5,), dtype="int64"), e.g.input("cos", (5, 3))
    e.last, e.table, e.vectors = e.g.input("last", (B, 8, 8, 4)), e.g.param("table", (11, 6)), e.g.input("v", (B, 3, 6))
    e.up, e.chosen = e.g.input("up", (B, 6)), e.g.input("chosen", (B, 2), dtype="int64")
    e.weight, e.stack, e.ends = (
        e.g.input("weight", (B, 2)),
        e.g.param("stack", (4, 6, 5)),
        e.g.input("ends", (4,), "int32"),
    )
    return e


def _record(made):
    return lambda e: a(**{f.name: getattr(made(e), f.name) for f in fields(made(e)) if f.init})


def _of_graph(e):
    return a(e.lm, B=2, S=8, L=2, V=11)


def _formula(e):
    return a(12 * B * S**2, B=2, S=3)


FUNCTIONS = {
    "dims": lambda e: a("B S"),
    "einsum": lambda e: a(e.x, e.w, "b d, d f -> b f"),
    "rearrange": lambda e: a(e.x, "b (d c) -> c d b", d=3),
    "reshape": lambda e: a(e.n, (6,)),
    "slice_axis": lambda e: a(e.n, 1, 0, 2),
    "split": lambda e: a(e.n, [1, 2], 1),
    "expand": lambda e: a(e.n, "s d -> b s d", b=4),
    "concat": lambda e: a([e.n, e.n], 0),
    "stack": lambda e: a([e.n, e.n]),
    "roll": lambda e: a(e.n, 1),
    "contiguous_copy": lambda e: a(e.n),
    "matmul": lambda e: a(e.x, e.w),
    "transpose": lambda e: a(e.x),
    "pointwise": lambda e: a("add", e.x, 1.0),
    "cast": lambda e: a(e.x, "bf16"),
    "reduce": lambda e: a(e.x, "b d -> b", "sum"),
    "gather": lambda e: a(e.w, e.many),
    "take_along": lambda e: a(e.weight, e.chosen),
    "scatter": lambda e: a(e.table, e.many, e.up),
    "sort": lambda e: a(e.x),
    "stop_gradient": lambda e: a(e.x),
    "segment_softmax": lambda e: a(e.x, e.many, 3),
    "conv_transpose": lambda e: a(e.im, "b c h w -> b o h w", window=3, o=4),
    "zeros": lambda e: a((B, 6)),
    "full": lambda e: a((B, 6), 2.5),
    "where": lambda e: a(e.x, e.up, 0.5),
    **dict.fromkeys(("exp", "log", "sqrt"), lambda e: a(e.x)),
    **dict.fromkeys(
        ("maximum", "minimum", "equal", "less", "less_equal", "greater", "greater_equal"), lambda e: a(e.x, e.up)
    ),
    "arange": lambda e: a(5),
    "dropout": lambda e: a(e.x, 0.1),
    "opaque": lambda e: a("op", [e.x], [((B,), "fp32")], flops=B, reads=[B], writes=[B], workspace=4 * B),
    "transfer": lambda e: a(e.x),
    "collective": lambda e: a(e.x, "all_reduce", 8),
    "keep_alive": lambda e: a(e.x, e.w),
    "cache": lambda e: a(e.seq, "b t d", along="t"),
    "initial_state": lambda e: a((B, 6)),
    "conv": lambda e: a(e.im, "b c h w -> b o h w", window=3, o=4),
    "pool": lambda e: a(e.im, "max", window=2),
    "adaptive_pool": lambda e: a(e.im, (2, 2)),
    "upsample": lambda e: a(e.im, 2),
    "attention": lambda e: a(e.q, e.q, e.q),
    "self_attention": lambda e: a(e.seq, 2, 3),
    "cross_attention": lambda e: a(e.seq, e.seq, 2, 3),
    "latent_attention": lambda e: a(
        e.seq, 2, latent=4, nope=3, rotated=6, value=3, rope=(e.g.input("c", (S, 3)), e.g.input("s", (S, 3)))
    ),
    "linear": lambda e: a(e.x, "b d -> b f", f=4),
    "mlp": lambda e: a(e.x, 4),
    "gated_mlp": lambda e: a(e.x, 4),
    "embedding": lambda e: a(e.ids, e.table),
    "patch_embedding": lambda e: a(e.im, 2, 6),
    "relative_bias": lambda e: a(e.p, e.p, 2),
    "tied_head": lambda e: a(e.x, e.table),
    "timestep_embedding": lambda e: a(e.many, 6),
    "embedding_bag": lambda e: a(e.ids, e.table),
    "dot_interaction": lambda e: a(e.vectors),
    "softmax": lambda e: a(e.x),
    "log_softmax": lambda e: a(e.x),
    "layer_norm": lambda e: a(e.x),
    "rms_norm": lambda e: a(e.x),
    "batch_norm": lambda e: a(e.im),
    "group_norm": lambda e: a(e.im, 2),
    "rotary": lambda e: a(e.q, e.cos, e.cos),
    "rotary_tables": lambda e: a(e.p, 6),
    "cross_entropy": lambda e: a(e.x, e.many),
    "binary_cross_entropy": lambda e: a(e.x, e.up),
    "relu": lambda e: a(e.x),
    "gelu": lambda e: a(e.x),
    "silu": lambda e: a(e.x),
    "sigmoid": lambda e: a(e.x),
    "tanh": lambda e: a(e.x),
    "moe": lambda e: a(e.x, 4, 2, 5),
    "experts": lambda e: a(e.x, e.weight, e.chosen, 4, 5),
    "router": lambda e: a(e.x, 4, 2),
    "dispatch": lambda e: a(e.chosen, 4),
    "grouped_matmul": lambda e: a(e.x, e.stack, e.ends, 1),
    "top_k": lambda e: a(e.x, 2),
    "repeat": lambda e: a(3, cg.relu, e.x),
    "scan": lambda e: a(2, lambda c, x: (c + x, x), e.g.input("c", (3,)), e.n),
    "layers": lambda e: a(L, {"one": cg.relu, "two": cg.tanh}, e.x, ["one", "two"]),
    "recurrence": lambda e: a(lambda h, x: (h * 0.9 + x, h), e.x, e.seq),
    "causal_conv": lambda e: a(e.seq, 4),
    "cumulative_sum": lambda e: a(e.seq),
    "token_shift": lambda e: a(e.seq),
    "head_norm": lambda e: a(e.q),
    "lstm": lambda e: a(e.seq, 5),
    "gru": lambda e: a(e.seq, 5),
    "window_partition": lambda e: a(e.last, 4, 2),
    "window_merge": lambda e: a(cg.nn.window_partition(e.last, 4, 2), e.last, 4, 2),
    "window_bias": lambda e: a(4, 2),
    "patch_merging": lambda e: a(e.last),
    "inverted_residual": lambda e: a(e.im, 8, 4),
    "squeeze_excitation": lambda e: a(e.im, 2),
    "stochastic_depth": lambda e: a(e.im, 0.1),
    "kernel": lambda e: a("k"),
    "scope": lambda e: a("k"),
    "scan_kernel": lambda e: a("k", "ops"),
    "vjp": lambda e: a(type("AKindOfTests", (cg.ir.graph.OpKind,), {"name": "a_kind_of_tests"})),
    **dict.fromkeys(
        (
            "flops",
            "matmul_flops",
            "bytes_moved",
            "intensity",
            "param_count",
            "param_bytes",
            "cache_bytes",
            "costs",
            "peak_memory",
            "timeline",
            "lifetimes",
            "report",
        ),
        _of_graph,
    ),
    **dict.fromkeys(
        (
            "activation_memory",
            "bytes_per_param",
            "state_bytes",
            "saved_state_bytes",
            "hardware_flops",
            "model_flops",
            "step_tokens",
            "saved_bytes",
        ),
        lambda e: a(e.step, B=2, S=8, L=2, V=11),
    ),
    "tiling": lambda e: a(next(op for op in e.lm.walk() if op.kind.name == "einsum"), cache=4096, B=2, S=8, L=2, V=11),
    "compare": lambda e: a(e.loss, e.loss, B=2),
    "compare_weights": lambda e: a(e.loss, e.weights),
    "roofline": lambda e: a(e.lm, "h100-sxm", B=2, S=8, L=2, V=11),
    "seconds": lambda e: a(e.lm, "h100-sxm", B=2, S=8, L=2, V=11),
    "crossover": lambda e: a(e.lm, "h100-sxm", "B", S=8, L=2, V=11),
    "largest": lambda e: a(e.lm, "B", memory=1e6, S=8, L=2, V=11),
    "latency": lambda e: a(e.first, e.next, "h100-sxm", prompt=4, steps=2, B=1, L=2, V=11),
    "throughput": lambda e: a(e.next, "h100-sxm", "B", [1, 2], S=8, L=2, V=11),
    "preflight": lambda e: a(e.step, "h100-sxm", devices=1, B=1, S=8, L=2, V=11),
    "run": lambda e: a(e.step, "h100-sxm", 1e9, B=1, S=8, L=2, V=11),
    "search": lambda e: a(e.lm, devices=2, hardware="h100-sxm", B=2, S=8, L=2, V=12, zero=1, checkpoint="none"),
    "crossovers": lambda e: a(e.found, "S", (8, 16)),
    "leading_term": lambda e: a(e.step, 10, S=8, L=2, V=11),
    "mfu": lambda e: a(e.step, 0.5, "h100-sxm", B=2, S=8, L=2, V=11),
    "hfu": lambda e: a(e.step, 0.5, "h100-sxm", B=2, S=8, L=2, V=11),
    "training_flops": lambda e: a(e.step, 1e9, S=8, L=2, V=11),
    "training_tokens": lambda e: a(e.step, 1e3, "h100-sxm", S=8, L=2, V=11),
    "training_seconds": lambda e: a(1e20, "h100-sxm", mfu=0.4, dtype="bf16"),
    "training_days": lambda e: a(1e20, "h100-sxm", mfu=0.4, dtype="bf16"),
    "schedule": lambda e: a("1f1b", 2, 3),
    **dict.fromkeys(("in_flight", "sends"), lambda e: a("1f1b", 4, 8, 1, 2)),
    "disaggregated": lambda e: a(e.first, e.next, e.hardware, prompt=4, steps=2, sequences=(1, 2), L=2, V=11),
    "bubble": lambda e: a("1f1b", 4, 8, 1, forward=2),
    "simulate": lambda e: a(cg.plan.schedule("1f1b", 3, 5), forward=2),
    "largest_params": lambda e: a("h100-sxm", 16),
    "dataset_bytes": lambda e: a(1e9, 2),
    "dataset_tokens": lambda e: a(1e9, 2),
    "backward": lambda e: a(e.loss),
    "training_step": lambda e: a(e.loss),
    "lora": lambda e: a(e.loss),
    "chunked_cross_entropy": lambda e: a(2),
    "mesh": lambda e: a(dp=2, tp=3),
    "shard": lambda e: a(e.loss, cg.mesh(tp=2), {}),
    "parallelize": lambda e: a(e.loss, dp=2),
    "offload": lambda e: a(e.loss, "parameters"),
    "communication": lambda e: a(e.loss),
    "explore": lambda e: a(e.loss, e.folder / "page.html", views=["forward"]),
    "checkpoint_for": lambda e: a(e.lm, memory=1e9, B=2, S=8, L=2, V=11),
    "best_interval": lambda e: a(e.lm, B=2, S=8, L=4, V=11),
    "every": lambda e: a(2),
    "every_block": lambda e: a(keep=("matmul",)),
    "from_start": lambda e: a(),
    "selective": lambda e: a("up"),
    "apply_precision": lambda e: a(e.loss, "bf16"),
    "quantize": lambda e: a(e.lm, "int8"),
    "prefill": lambda e: a(e.lm),
    "decode": lambda e: a(e.lm),
    "fuse": lambda e: a(e.loss),
    "fold": lambda e: a(e.three, "h", "L"),
    "unroll": lambda e: a(e.lm, L=2),
    "evaluate": _formula,
    "sweep": lambda e: a({"f": (12 * B * S**2, "FLOP")}, B=[2, 3], S=3),
    "compile": lambda e: a(12 * B * S**2),
    "regimes": lambda e: a(cg.Max(B, S)),
    "in_terms_of": lambda e: a(cg.Max(12 * B * S**2, S), N=B * S),
    "dtype": lambda e: a("bf16"),
    "bits_per_element": lambda e: a("mxfp4"),
    "list_hardware": lambda e: a(),
    "load_hardware": lambda e: a("h100-sxm"),
    "list_networks": lambda e: a(),
    "load_network": lambda e: a("meta-24k"),
    "load": lambda e: a(e.folder / "g.json"),
    "read_weights": lambda e: a(e.folder / "m.safetensors"),
    "save": lambda e: a(e.loss, e.folder / "saved.json"),
}

CLASSES = {
    "Graph": lambda e: a("g", "fp32"),
    "Domain": lambda e: a(True, 4),
    "DType": _record(lambda e: cg.dtype("fp16")),
    "Policy": lambda e: a("lean", params="fp32", grads="bf16"),
    "Checkpoint": lambda e: a(blocks=True),
    "FullyShard": lambda e: a("dp", units="layers/*"),
    "Buckets": lambda e: a("dp", cap=1000),
    "Hardware": _record(lambda e: e.hardware),
    "Network": _record(lambda e: cg.load_network("meta-24k")),
    "Max": lambda e: a(B, S),
    "Min": lambda e: a(B, S),
    **dict.fromkeys(("SGD", "Adam", "AdamW", "AdaGrad", "RMSProp", "Lion", "Adafactor", "Muon"), lambda e: a()),
    # constructors for result objects
    "Report": _record(lambda e: e.report),
    "Compared": _record(lambda e: e.comparison.rows[0]),
    "Comparison": _record(lambda e: e.comparison),
    "Weight": _record(lambda e: e.weights.rows[0]),
    "Weights": _record(lambda e: e.weights),
    "WeightComparison": _record(lambda e: e.differing),
    "WeightDifference": _record(lambda e: e.differing.rows[0]),
    "Preflight": _record(lambda e: e.preflight),
    "PreflightCheck": _record(lambda e: e.preflight.rows[0]),
    "Latency": _record(lambda e: e.latency),
    "LeadingTerm": _record(lambda e: e.leading),
    "Run": _record(lambda e: cg.plan.run(e.step, "h100-sxm", 10, B=1, S=8, L=2, V=11)),
    "Plan": _record(lambda e: e.search.rows[0]),
    "Search": _record(lambda e: e.search),
    "Crossovers": _record(lambda e: cg.plan.crossovers(e.found, "S", (8, 16))),
    "Disaggregated": _record(
        lambda e: cg.plan.disaggregated(e.first, e.next, e.hardware, prompt=4, steps=2, sequences=(1, 2), L=2, V=11)
    ),
    "Simulated": _record(lambda e: cg.plan.simulate(cg.plan.schedule("1f1b", 3, 5))),
    "Throughput": _record(lambda e: e.throughput),
    "ThroughputRow": _record(lambda e: e.throughput.rows[0]),
    "StateBytes": _record(lambda e: cg.state_bytes(e.step)),
    "Cost": _record(lambda e: e.costs.total()),
    "Costs": _record(lambda e: e.costs),
    "Roofline": _record(lambda e: e.roofline),
    "Timeline": _record(lambda e: e.timeline),
    "VJPContext": lambda e: a(e.op, (e.x,), (True,), lambda t: t),
}

#: For each class: a constructor, then the arguments of each method.
METHODS = {
    "Report": (
        lambda e: e.report,
        {
            "sorted": lambda e: a("flops"), "to_json": lambda e: a(e.folder / "r.json"),
            "to_csv": lambda e: a(e.folder / "r.csv"), "plot": lambda e: a(e.folder / "r.svg"),
        },
    ),
    "Weights": (lambda e: e.weights, {"by_format": lambda e: a()}),
    "Comparison": (lambda e: e.comparison, {"differing": lambda e: a(), "total": lambda e: a("matmul")}),
    "Search": (lambda e: e.search, {"pareto": lambda e: a()}),
    "Throughput": (lambda e: e.throughput, {"plot": lambda e: a(e.folder / "t.svg")}),
    "Roofline": (lambda e: e.roofline, {"plot": lambda e: a(e.folder / "f.svg")}),
    "Timeline": (lambda e: e.timeline, {"plot": lambda e: a(e.folder / "m.svg")}),
    "Costs": (
        lambda e: e.costs,
        {
            "filter": lambda e: a(kind="matmul"), "group": lambda e: a("scope", 1), "total": lambda e: a(),
            "bind": lambda e: a(B=2),
        },
    ),
    "FullyShard": (lambda e: cg.FullyShard("dp"), {"between": lambda e: a("")}),
    "Checkpoint": (
        lambda e: cg.every_block(keep=("matmul",)),
        {
            "prepared": lambda e: a(e.lm),
            "runs": lambda e: a(e.loss.ops),
            "keeps": lambda e: a(next(iter(e.loss.ops))),
            "stops_early_in": lambda e: a(next(iter(e.loss.ops))),
            "recomputes": lambda e: a(e.loss),
        },
    ),
    "Policy": (
        lambda e: cg.Policy("p"), {"scope_format": lambda e: a("up"), "formats_of": lambda e: a(e.w)},
    ),
    "DType": (lambda e: cg.dtype("fp16"), {"round": lambda e: a(1.5)}),
    "Domain": (
        lambda e: cg.Domain(True, 4),
        dict.fromkeys(("points", "queries_used", "keys_used", "reached"), lambda e: a(e.seq.sizes[1], e.seq.sizes[1])),
    ),
    "Hardware": (
        lambda e: e.hardware,
        {
            "rate": lambda e: a("bf16"), "ridge": lambda e: a("bf16"), "capacity": lambda e: a(),
            "nearest_rate": lambda e: a("bf16"), "symbolic": lambda e: a(), "bindings": lambda e: a(),
            "attained": lambda e: a(), "link": lambda e: a("pcie"), "part": lambda e: a(0.5),
            "at_clock": lambda e: a(0.8),
        },
    ),
    "Graph": (
        lambda e: e.g,
        {
            "copy": lambda e: a(), "walk": lambda e: a(), "bodies": lambda e: a(), "freeze": lambda e: a(),
            "validate": lambda e: a(), "input": lambda e: a("z", (B, 3)), "param": lambda e: a("z", (B, 3)),
            "buffer": lambda e: a("z", (B, 3)), "output": lambda e: a(e.x), "assume": lambda e: a("B >= 2"),
            "explore": lambda e: a(e.folder / "page.html", views=["forward"]),
        },
    ),
    "Muon": (lambda e: cg.Muon(), {"update": lambda e: a([_slot(e)])}),
}  # fmt: skip


def _slot(e):
    return Slot(e.w, e.g.input("w.grad", (6, 5)))


#: Every call by name: the callable and its arguments.
CALLS = {
    **{name: (lambda e, name=name: (PUBLIC | RECORDS)[name], given) for name, given in (FUNCTIONS | CLASSES).items()},
    **{
        f"{name}.{method}": (lambda e, owner=owner, method=method: getattr(owner(e), method), given)
        for name, (owner, methods) in METHODS.items()
        for method, given in methods.items()
    },
    "models.load": (lambda e: cg.models.load, lambda e: a("mlp")),
    "models.names": (lambda e: cg.models.names, lambda e: a()),
    "units.quantity": (lambda e: units.quantity, lambda e: a(80, "GB")),
    "units.exact": (lambda e: units.exact, lambda e: a(0.5)),
    "units.format_bytes": (lambda e: units.format_bytes, lambda e: a(80)),
    "units.format_quantity": (lambda e: units.format_quantity, lambda e: a(80, "GB")),
    "units.Quantity": (lambda e: units.Quantity, lambda e: a(80, "B")),
}
