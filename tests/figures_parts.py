"""Figures for planning, serving, hardware, number formats, files, traces and lowered programs."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from config_files import FILES, file_of
from figures_text import answer, asked, digest, numbers, shortened, text
from figures_zoo import COSTS, figures_of, ops, training_step

import costgraph as cg

Figures = Iterator[tuple[str, str]]
HERE = Path(__file__).parent


# -- planning --------------------------------------------------------------------------------------------------


def planning() -> Figures:
    """Yield figures for planning a run: days, tokens, schedules, searches and checkpointing policies."""
    plan, model = cg.plan, cg.models.load("llama-3.2-1b")
    step = training_step(model, precision="bf16", checkpoint=cg.every_block())
    sizes = {"B": 2, "S": 2048}
    n, m, p, v, r = cg.dims("n m p v r")
    work = plan.training_flops(step, 15e12, S=2048)
    yield "training flops", numbers(work)
    yield "training flops of a count", numbers(plan.training_flops(70e9, 15e12))
    for question in (plan.training_seconds, plan.training_days):
        yield question.__name__, numbers(question(work, "h100-sxm", devices=n, mfu=0.5, dtype="bf16"))
    yield "training tokens", numbers(plan.training_tokens(step, 86400, "h100-sxm", devices=8, mfu=0.5, S=2048))
    yield "leading term", numbers(plan.leading_term(step, n))
    yield "largest params", numbers([plan.largest_params("h100-sxm", 16, devices=8), plan.largest_params(n, 12)])
    yield "data", numbers([plan.dataset_tokens(2.8e12, 2), plan.dataset_bytes(n, 4)])
    yield "best interval", answer(plan.best_interval, model)
    yield "preflight", answer(lambda: numbers(plan.preflight(
        step, "h100-sxm", devices=8, tokens=1e12, mfu=0.4, most_days=90, **sizes
    ).rows))  # fmt: skip
    rank = cg.parallelize(step, dp=8, zero=3)
    for overlap in ("none", "ideal", "streams"):
        yield f"run, overlap {overlap}", answer(lambda o=overlap: numbers(plan.run(
            rank, "h100-sxm", 1e12, price=2, overlap=o, B=16, S=2048
        )))  # fmt: skip
    yield "run in a pipeline", answer(lambda: numbers(plan.run(
        step, "h100-sxm", 1e12, schedule="1f1b", pp=4, micro_batches=16, **sizes
    )))  # fmt: skip
    yield "checkpoint policy", answer(lambda: str(plan.checkpoint_for(model, memory=20e9, B=4, S=2048)))
    for name, chunks in SCHEDULES.items():
        open_chunks = v if chunks == v else chunks
        for until in ("input", "weights"):
            yield f"{name} in flight until {until}", answer(plan.in_flight, name, p, m, open_chunks, r, until)
        yield f"{name} bubble", answer(plan.bubble, name, p, m, open_chunks)
        yield f"{name} sends", answer(plan.sends, name, p, m, open_chunks, r)
        yield f"{name} schedule", answer(lambda n=name, c=chunks: _schedule(n, 4, 8, 2 if c == v else c))
    for key, options in SEARCHES.items():
        yield f"search {key}", answer(lambda o=options: numbers(_search(model, **o).rows))
    found = _search(model, tp=(1, 8), pp=1, zero=3, checkpoint="every-block", accumulate=1)
    yield "crossovers", answer(lambda: numbers(plan.crossovers(found, "S", (512, 65536), multiple_of=512).rows))


SCHEDULES: Mapping[str, object] = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1"), 1),
    **dict.fromkeys(("interleaved", "interleaved-zb"), cg.dims("v")),
    **dict.fromkeys(("zbv", "dualpipe", "dualpipev"), 2),
}
SEARCHES: Mapping[str, Mapping[str, object]] = {
    "degrees": {"tp": (1, 2), "pp": 1, "zero": (1, 3), "checkpoint": "none"},
    "stages": {"tp": 1, "pp": 2, "zero": 1, "schedule": ("1f1b", "interleaved"), "checkpoint": "none"},
    "megatron": {"tp": 2, "pp": 1, "zero": 1, "sequence": True, "system": "megatron", "precision": "megatron-bf16"},
    "offload": {"tp": 1, "pp": 1, "zero": 3, "offload": ("none", "optimizer"), "micro_batch": 1},
}


def _search(model: cg.Graph, **options: object) -> cg.plan.Search:
    sizes = {"B": 16, "S": 2048}
    return cg.plan.search(
        model, **{"devices": 8, "hardware": "h100-sxm", "precision": "bf16", "progress": False, **sizes, **options}
    )


def _schedule(name: str, pp: int, micro_batches: int, virtual: int) -> str:
    actions = cg.plan.schedule(name, pp, micro_batches, virtual, sends=True)
    played = cg.plan.simulate(cg.plan.schedule(name, pp, micro_batches, virtual), forward=7, backward_input=5)
    lines = [" ".join(str(part) for part in action) for rank in actions for action in rank]
    return f"{numbers(played)} | {len(lines)} actions {digest(lines)}"


def serving() -> Figures:
    """Yield throughput, latency and disaggregation, the largest batch, and where decoding becomes compute-bound."""
    sizes = {"S": 2048}
    for name in ("llama-3.2-1b", "deepseek-v2-lite", "mamba-130m"):
        model = cg.models.load(name)
        prompt, step = cg.prefill(model, logits="last"), cg.decode(model)
        packed = cg.quantize(step, "int8", "int8")
        for key, graph in {"step": step, "step in int8": packed, "step, tp": cg.parallelize(step, tp=2)}.items():
            yield f"{name} {key} throughput", answer(lambda g=graph: numbers(cg.plan.throughput(
                g, "h100-sxm", "B", [1, 8, 64], **sizes
            ).rows))  # fmt: skip
            yield f"{name} {key} largest", answer(cg.largest, graph, "B", hardware="h100-sxm", **sizes)
        yield f"{name} crossover", answer(lambda s=step: numbers(cg.crossover(s, "h100-sxm", "B", **sizes)))
        yield f"{name} latency", answer(lambda p=prompt, s=step: numbers(cg.plan.latency(
            p, s, "h100-sxm", prompt=512, steps=63, B=2
        )))  # fmt: skip
        yield f"{name} disaggregated", answer(lambda p=prompt, s=step: numbers(cg.plan.disaggregated(
            p, s, "h100-sxm", prompt=512, steps=63, sequences=(1, 16)
        )))  # fmt: skip


# -- hardware, formats and formulas ----------------------------------------------------------------------------


def hardware() -> Figures:
    """Yield the rates of every device and network, format widths, and collective times."""
    for name in cg.list_hardware():
        device = cg.load_hardware(name)
        tables = (device.peak, device.vector, device.bandwidth, device.memory, device.measured_memory, device.tables)
        yield name, numbers(tables)
        yield f"{name} ridge", answer(lambda d=device: numbers([d.ridge("bf16"), d.capacity()]))
    for name in cg.list_networks():
        yield f"network {name}", numbers(cg.load_network(name).levels)
    for name, dtype in sorted(cg.DTYPES.items()):
        yield f"format {name}", text(cg.bits_per_element(dtype))
    for name in ("int4_g128_fp16_zero", "int8_row_fp32", "fp8_e4m3_b128x128_fp32", "mxfp4", "q4_k"):
        yield f"format {name}", answer(cg.bits_per_element, name)
    for kind, ranks in itertools.product(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), (8, 512)):
        with cg.Graph("sent", dtype="bf16") as graph:
            graph.output(cg.ops.collective(graph.input("x", (2**20,)), kind, ranks=ranks))
        for device, network in (("h100-sxm", None), ("h100-sxm", "meta-24k"), ("tpu-v4", "tpu-v4"), ("gb300", None)):
            yield (
                f"{kind} of {ranks} on {device}, {network}",
                answer(lambda g=graph, d=device, n=network: numbers(cg.seconds(g, d, network=n))),
            )


def formulas() -> Figures:
    """Yield evaluated, compiled and swept formulas, tilings, and counts from the interpreter."""
    from costgraph import testing

    model = cg.models.load("gpt2")
    step = cg.decode(model)
    peak, unknown = cg.peak_memory(step), cg.load_hardware("h100-sxm").symbolic()
    at = {"B": 4, "S": 256}
    yield "evaluated", numbers([cg.evaluate(f, **at) for f in (peak, cg.flops(step), cg.cache_bytes(step))])
    yield "compiled", numbers(cg.compile(peak)(B=[1, 2, 64], S=128).tolist())
    yield "seconds on open hardware", numbers(cg.seconds(model, unknown))
    yield "ridge", numbers(unknown.ridge("bf16"))
    swept = cg.sweep({"peak": (peak, "B"), "s": (cg.seconds(step, "h100-sxm"), "s")}, B=[1, 8], S=[64, 512])
    yield "swept", numbers([float(x) for x in [*swept.peak.values.ravel(), *swept.s.values.ravel()]])
    B, S, D, F = cg.dims("B S D F")
    yield "in terms of", answer(lambda: text(cg.in_terms_of(4 * B * D * F + 3 * D, P=D * F)))
    m, n, k, M = cg.dims("m n k M")
    with cg.Graph("product", dtype="fp32") as product:
        product.output(product.input("a", (m, k)) @ product.input("b", (k, n)))
    with cg.Graph("attention", dtype="fp32") as attention:
        attention.output(cg.attention(*(attention.input(x, (1, 1, S, D)) for x in "qkv"), causal=False))
    for name, graph in {"product": product, "attention": attention}.items():
        (op,) = (op for op in graph.ops if op.kind.name in ("einsum", "kernel"))
        found = cg.tiling(op, cache=M)
        yield f"tiling {name}", numbers([found.bound, found.traffic, found.blocks])
    with cg.Graph("layers", dtype="bf16") as layers:
        body = lambda x: x + cg.nn.mlp(cg.layer_norm(x), F)  # noqa: E731  # as users write it
        layers.output(cg.reduce(cg.repeat(3, body, layers.input("x", (B, D)), name="layers"), "b d -> ", "mean"))
    for name, graph in {"forward": layers, "step": cg.training_step(layers)}.items():
        counted = testing.run(graph, B=2, D=3, F=5)
        yield f"counted {name}", numbers([counted.flops, counted.peak])
        yield f"compared {name}", numbers(cg.compare(graph, cg.unroll(graph)))


# -- files -----------------------------------------------------------------------------------------------------


def files() -> Figures:
    """Yield digests of saved graphs, and figures for loaded graphs and weights."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("gpt2", "mixtral-8x7b", "resnet18"):
            for key, graph in (("forward", cg.models.load(name)), ("step", training_step(cg.models.load(name)))):
                path = Path(folder) / f"{name}-{key}.json"
                cg.save(graph, path)
                yield f"{name} {key} saved", digest([path.read_text(encoding="utf-8")])
                again = cg.load(path)
                yield f"{name} {key} loaded", answer(ops, again, "op", "kind")
                yield f"{name} {key} peak", answer(cg.peak_memory, again)
        import torch
        from safetensors.torch import save_file

        with cg.Graph("layer", dtype="bf16") as layer:
            layer.output(cg.linear(layer.input("x", cg.dims("B D")), "b d -> b f", f=7, bias=True, name="up"))
        weights = Path(folder) / "weights.safetensors"
        save_file({"up.weight": torch.zeros(7, 5, dtype=torch.bfloat16), "other": torch.zeros(3)}, weights)
        yield "weights", numbers(cg.read_weights(weights))
        yield "weights compared", answer(lambda: numbers(cg.compare_weights(layer, weights, D=5)))
    for path in sorted(HERE.glob("files_of_version_*/*.json")):
        graph = cg.load(path)
        for key, question in COSTS.items():
            yield f"{path.parent.name}/{path.name} {key}", answer(question, graph)


def configs() -> Figures:
    """Yield figures for models from transformers configurations."""
    for name in sorted(FILES):
        graph = cg.models.from_config(file_of(name))
        for key, question in {"params": cg.param_count, "flops": cg.flops, "peak": cg.peak_memory}.items():
            yield f"{name} {key}", answer(question, graph)


# -- torch -----------------------------------------------------------------------------------------------------


def traces() -> Figures:
    """Yield figures for traced modules, training steps and transformers models, and for a folded trace."""
    import torch
    from torch import nn

    from costgraph.torch import dispatched, from_config, trace

    class Loss(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return (y[0] if isinstance(y, tuple) else y).float().square().mean()

    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, batch_first=True, norm_first=True)
    stack = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(6)))
    images = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    modules: dict[str, tuple[nn.Module, tuple[int, ...], tuple[str | None, ...]]] = {
        "mlp": (nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)), (3, 16), ("B", None)),
        "stack": (stack, (3, 5, 16), ("B", "S", None)),
        "encoder": (layer, (3, 5, 16), ("B", "S", None)),
        "lstm": (nn.LSTM(16, 8, batch_first=True), (3, 5, 16), ("B", "S", None)),
        "gru": (nn.GRU(16, 8, batch_first=True), (3, 5, 16), ("B", "S", None)),
        "images": (images, (3, 3, 16, 16), ("B", None, None, None)),
    }
    for name, (module, shape, dims) in modules.items():
        graph = trace(module, torch.zeros(shape), dims=[dims])
        yield from _prefixed(name, figures_of(graph, COSTS, {}))
    adam = {
        "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
        "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
        "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    }
    for name, (module, shape, dims) in modules.items():
        if name in ("lstm", "gru"):
            dims = ("B", None, None)
        for key, optimizer in adam.items() if name in ("mlp", "stack") else [("AdamW", adam["AdamW"])]:
            yield from _prefixed(f"{name} trained by {key}", _brief(
                lambda m=module, s=shape, d=dims, o=optimizer: trace(
                    Loss(m), torch.zeros(s), dims=[d], train=True, optimizer=o
                )
            ))  # fmt: skip
    folded = cg.fold(trace(stack, torch.zeros(3, 5, 16), dims=[("B", "S", None)]))
    yield from _prefixed("folded", figures_of(folded, COSTS, {"L": 6}))
    there = trace(
        Loss(layer).bfloat16(), torch.zeros(3, 5, 16, dtype=torch.bfloat16), dims=[("B", "S", None)], train=True,
        device="cuda",
    )  # fmt: skip
    yield from _prefixed("encoder on cuda", _brief(lambda: there))
    yield "encoder on cuda dispatched", digest(f"{row.op} {row.call}" for row in dispatched(there))
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "BertModel"):
        yield from _prefixed(name, _brief(lambda n=name: from_config(file_of(n), device="cpu")))


def lowered() -> Figures:
    """Yield the aten calls in lowered programs, and the rounded sums of their results."""
    import torch

    from costgraph.torch import lower, measure, random_inputs

    torch.set_num_threads(1)
    sizes = {"B": 2, "S": 7, "D": 12, "H": 4, "G": 2, "K": 4, "F": 13, "L": 2, "V": 23, "P": 11, "C": 5, "E": 24,
             "N": 5, "R": 3, "Fe": 7, "k": 2, "W": 3}  # fmt: skip
    for name in ("mlp", "gpt2", "llama-3.2-1b", "mixtral-8x7b", "mamba-130m"):
        model = cg.models.load(name, symbolic=True, dtype="fp32")
        for key, derive in {"forward": lambda g: g, "step": training_step, "decode": cg.decode}.items():
            yield from _prefixed(f"{name} {key}", _run(lambda m=model, d=derive: d(m), sizes, lower, random_inputs))
    x = torch.zeros(64, 96)
    found = measure(lambda: (x @ x.T).relu(), least=1, most=1)
    yield "measured", numbers([found.flops, found.peak, found.left])


def _run(derive: Callable[[], cg.Graph], sizes: Mapping[str, int], lower: Callable, random_inputs: Callable) -> Figures:
    """Yield the calls in a lowered graph and the results of running it."""
    try:
        graph = derive()
        dims = {k: v for k, v in sizes.items() if k in cg.costs(graph).names}
        program = lower(graph, **dims)
        calls = Counter(str(node.target) for node in program.graph.nodes if "aten" in str(node.target))
        yield "calls", f"{calls.total()} calls {digest(f'{k} {n}' for k, n in sorted(calls.items()))}"
        results = program(*random_inputs(graph, **dims))
        results = results if isinstance(results, tuple | list) else [results]
        yield "results", " | ".join(f"{float(r.double().sum()):.5g}" for r in results)
    except cg.CostGraphError as error:
        yield "", type(error).__name__


def _brief(derive: Callable[[], cg.Graph]) -> Figures:
    try:
        graph = derive()
    except cg.CostGraphError as error:
        yield "", type(error).__name__
        return
    for key, question in {"flops": cg.flops, "bytes": cg.bytes_moved, "peak": cg.peak_memory}.items():
        yield key, answer(question, graph)
    yield "ops", answer(ops, graph, "phase", "dtype", "direction")


def _prefixed(prefix: str, figures: Figures) -> Figures:
    for key, value in figures:
        yield f"{prefix} {key}".strip(), value


PARTS: Mapping[str, Callable[[], Figures]] = {
    "configs": configs,
    "files": files,
    "formulas": formulas,
    "hardware": hardware,
    "lowered": lowered,
    "planning": planning,
    "serving": serving,
    "traces": traces,
}


def figures(name: str, seconds: float) -> dict[str, str]:
    """Return the figures for a part by key."""
    return {key: shortened(value) for key, value in asked("", seconds, PARTS[name]).items()}
