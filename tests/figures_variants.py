"""Figures for model variants: training options, inference formats, sharding, and times on hardware.

Model sizes are bound to their published values; batch and sequence stay symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from figures_text import answer, asked, numbers
from figures_zoo import ops, points, regimes, training_step

import costgraph as cg
from costgraph import optimizers

#: Models in the subset `net`, one per architecture.
MODELS = (
    "gpt2",
    "llama-3.2-1b",  # grouped-query attention
    "gemma-2-2b",  # alternating attention windows
    "mixtral-8x7b",  # mixture of experts
    "deepseek-v2-lite",  # latent attention, mixture of experts
    "mamba-130m",  # state-space model
    "gru-ptb-small",  # recurrence
    "bert-base",  # encoder
    "t5-small",  # encoder and decoder
    "resnet18",  # convolutions
    "swin-t",  # shifted windows
    "dit-s-2",  # diffusion transformer
)

#: Models whose times on hardware, timelines and lifetimes are recorded.
TIMED = ("gpt2", "llama-3.2-1b", "mixtral-8x7b", "mamba-130m", "gru-ptb-small", "bert-base", "t5-small", "resnet18")

Variants = Mapping[str, Callable[[cg.Graph], cg.Graph]]


def step(**options: object) -> Callable[[cg.Graph], cg.Graph]:
    """Return a function that derives a training step with these options."""
    return partial(training_step, **options)


CHECKPOINTS: Variants = {
    "every block": step(checkpoint=cg.every_block()),
    "every 2 blocks": step(checkpoint=cg.every(2)),
    "every 2 blocks, nested": step(checkpoint=cg.every(2, inside=cg.every_block())),
    "selective": step(checkpoint=cg.selective("attention")),
    "keep matmul": step(checkpoint=cg.every_block(keep=["matmul"])),
    "from start": step(checkpoint=cg.from_start()),
}
PRECISIONS: Variants = {
    f"precision {name}": step(precision=name)
    for name in ("fp32", "bf16-master", "bf16-mixed", "fp16-mixed", "megatron-bf16", "fp8")
}
OPTIMIZERS: Variants = {
    **{f"optimizer {name}": step(optimizer=make()) for name, make in sorted(optimizers.OPTIMIZERS.items())},
    "optimizer sgd with momentum": step(optimizer=cg.SGD(momentum=0.9, nesterov=True, weight_decay=0.1)),
    **{f"adamw {name}": step(optimizer=cg.AdamW(implementation=name)) for name in optimizers.IMPLEMENTATIONS},
    **{
        f"adamw {name}": step(optimizer=cg.AdamW(implementation="fused", states=name))
        for name in sorted(optimizers.STATES)
    },
}
OPTIONS: Variants = {
    "micro-batches": step(accumulate=4),
    "deferred accumulation": step(accumulate=4, defer_accumulation=True, precision="megatron-bf16"),
    "micro-batches in megatron-bf16": step(accumulate=4, precision="megatron-bf16", checkpoint=cg.every_block()),
    "clip": step(clip=1.0),
    "gradients kept": step(set_to_none=False),
    "optimizer in backward": step(optimizer_in_backward=True),
    "trainable norms": step(trainable="*norm*"),
    "chunked loss": lambda model: training_step(model, loss=cg.chunked_cross_entropy(17)) if model.loss else model,
    "lora": lambda model: training_step(cg.lora(model, 8)),
    "qlora": lambda model: training_step(
        cg.quantize(cg.lora(model, 8), "nf4_double", skip=["lora_a", "lora_b"]), checkpoint=cg.every_block()
    ),
}
OFFLOADED: Variants = {
    "optimizer and parameters": lambda model: cg.offload(
        training_step(model, precision="bf16-master"), ["optimizer", "parameters"]
    ),
    "activations": lambda model: cg.offload(training_step(model), "activations"),
}
FORMATS: Variants = {
    "int4": lambda model: cg.quantize(model, "int4", group=128),
    "w8a8": lambda model: cg.quantize(model, "int8", "int8"),
    "fp8": lambda model: cg.quantize(model, "fp8_e4m3", "fp8_e4m3"),
    "mxfp4": lambda model: cg.quantize(model, "mxfp4", embeddings=True),
    "Q4_K_M": lambda model: cg.quantize(model, "Q4_K_M"),
    "decode, fp8 cache": lambda model: cg.quantize(cg.decode(model), "int8", cache="fp8_e4m3"),
}
INFERENCE: Variants = {
    "fused": cg.fuse,
    "fused epilogues": partial(cg.fuse, epilogues=True),
    "fused step": lambda model: cg.fuse(training_step(model)),
    "decode 2": partial(cg.decode, tokens=2, logits="last"),
    "chunk of 16": partial(cg.prefill, chunk=16),
    "last logits": partial(cg.prefill, logits="last"),
    "precision bf16": partial(cg.apply_precision, policy="bf16"),
    "unrolled": lambda model: cg.unroll(model, L=4, S=5),
}
SHARDED: Variants = {
    "tp, sequence": lambda model: cg.parallelize(training_step(model), dp=2, tp=2, sequence=True),
    "zero 3": lambda model: cg.parallelize(training_step(model, checkpoint=cg.every_block()), dp=2, zero=3),
    "decode, tp": lambda model: cg.parallelize(cg.decode(model), tp=2),
}
EXPERTS: Variants = {
    "ep": lambda model: cg.parallelize(training_step(model), dp=2, ep=2, zero=1),
    "ep, tp": lambda model: cg.parallelize(training_step(model), ep=2, tp=2, sequence=True),
}
DEGREES_AND_SYSTEMS: Variants = {
    "tp": lambda model: cg.parallelize(training_step(model), tp=2),
    "zero 1": lambda model: cg.parallelize(training_step(model), dp=2, zero=1),
    "zero 2": lambda model: cg.parallelize(
        training_step(model, accumulate=2), dp=2, zero=2, reduce_every_microbatch=False
    ),
    "buckets": lambda model: cg.parallelize(training_step(model), dp=2, buckets=cg.Buckets()),
    "offload": lambda model: cg.parallelize(training_step(model), dp=2, zero=3, offload="optimizer"),
    "megatron": lambda model: cg.parallelize(
        training_step(model, accumulate=2, precision="megatron-bf16"), dp=2, tp=2, zero=1, sequence=True,
        system="megatron",
    ),
    "cp": lambda model: cg.parallelize(training_step(model), cp=2),
    "ring": lambda model: cg.parallelize(training_step(model), cp=2, context="ring"),
    "ulysses": lambda model: cg.parallelize(training_step(model), cp=2, context="all_to_all"),
    "open degrees": lambda model: cg.parallelize(training_step(model), dp=cg.dims("dp"), tp=cg.dims("tp"), zero=3),
    "shard": lambda model: cg.shard(model, cg.mesh(dp=2), {"tokens": "(b dp) s"}),
    "fully shard": lambda model: cg.shard(
        training_step(model, precision="bf16-mixed"), cg.mesh(dp=2),
        {"tokens": "(b dp) s", "targets": "(b dp) s", "*mlp/up/weight": "(d dp) f"},
        gather=cg.FullyShard("dp", prefetch=False, param_dtype="bf16"),
    ),
    "decode, cp": lambda model: cg.parallelize(cg.decode(model), cp=2),
    "decode, stages": lambda model: cg.parallelize(cg.decode(model), pp=2, micro_batches=2),
    **{
        f"stages, {schedule}": lambda model, schedule=schedule, virtual=virtual: cg.parallelize(
            training_step(model, accumulate=8), pp=2, micro_batches=8, schedule=schedule, virtual_stages=virtual
        )
        for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2))
    },
}  # fmt: skip

#: Formats that stand in where a device has no rate.
FALLBACK = {"fp8_e4m3": "bf16", "fp8_e5m2": "bf16", "int4": "int8", "bf16": "bf16", "fp32": "bf16"}
#: Small point for sharded graphs, with sizes that the degrees divide and values for symbolic degrees.
DIVISIBLE = {"B": 8, "S": 16, "M": 8, "dp": 4, "tp": 2}


def brief(graph: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the basic figures: FLOPs, bytes, the peak with its regimes, op costs, and the time on an H100."""
    at = points(graph, defaults)["small"]
    for key, question in {"flops": cg.flops, "bytes": cg.bytes_moved, "param bytes": cg.param_bytes}.items():
        yield key, answer(question, graph)
    yield "peak", answer(cg.peak_memory, graph)
    yield "peak regimes", answer(regimes, graph, "phase")
    yield "peak small", answer(cg.peak_memory, graph, **at)
    yield "ops small", answer(ops, graph, "phase", "dtype", "direction", **at)
    yield "seconds small", answer(lambda: numbers(cg.seconds(graph, "h100-sxm", fallback=FALLBACK, **at)))


def trained(graph: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield figures for a training step."""
    yield from brief(graph, defaults)
    questions = {"saved bytes": cg.saved_bytes, "state bytes": cg.state_bytes, "saved state": cg.saved_state_bytes}
    for key, question in questions.items():
        yield key, answer(lambda question=question: numbers(question(graph)))
    yield "model flops", answer(cg.model_flops, graph)


def offloaded(graph: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield figures for a training step with tensors on the host."""
    yield from trained(graph, defaults)
    yield "host peak", answer(cg.peak_memory, graph, side="host")


def cached(graph: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield figures for an inference pass."""
    yield from brief(graph, defaults)
    yield "cache bytes", answer(cg.cache_bytes, graph)


def sharded(graph: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield figures for one rank, or for each pipeline stage, with messages and their times."""
    stages = graph.stages if len(graph.stages) > 1 else ()
    for prefix, rank in {"": graph, **{f"stage {i} ": stage for i, stage in enumerate(stages)}}.items():
        at = points(rank, {**DIVISIBLE, **defaults})["small"]
        if not stages or prefix:
            yield f"{prefix}messages", answer(lambda r=rank: numbers(cg.communication(r)))
            yield (
                f"{prefix}messages small",
                answer(lambda r=rank, at=at: numbers(cg.communication(r, hardware="h100-sxm", **at))),
            )
            yield f"{prefix}ops small", answer(ops, rank, "phase", "dtype", "direction", **at)
        yield f"{prefix}flops", answer(cg.flops, rank)
        yield f"{prefix}peak", answer(cg.peak_memory, rank)
        yield f"{prefix}peak small", answer(cg.peak_memory, rank, **at)
        if not prefix:
            yield (
                "seconds small",
                answer(lambda r=rank, at=at: numbers(cg.seconds(r, "h100-sxm", fallback=FALLBACK, **at))),
            )


#: Device, point, and whether the roofline is hierarchical.
ROOFLINES = (("h100-sxm", "small", False), ("a100-80-sxm", "large", True), ("tpu-v5p", "large", False))


def on_hardware(model: cg.Graph, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield times, timelines, lifetimes and size limits for a forward pass and a training step."""
    whole = training_step(model, precision="bf16")
    for name, graph in (("forward", model), ("step", whole)):
        at = points(graph, defaults)
        for device, place, levels in ROOFLINES:
            key = f"{name} roofline {device} {place}{' hierarchical' if levels else ''}"
            yield (
                key,
                answer(
                    lambda g=graph, d=device, at=at[place], levels=levels: numbers(
                        cg.roofline(g, d, hierarchical=levels, fallback=FALLBACK, **at)
                    )
                ),
            )
        yield f"{name} seconds", answer(lambda g=graph: numbers(cg.seconds(g, "h100-sxm")))
        yield f"{name} seconds at least", answer(lambda g=graph: numbers(cg.seconds(g, "h100-sxm", "lower")))
        yield f"{name} crossover", answer(lambda g=graph, at=at: numbers(cg.crossover(
            g, "h100-sxm", "B", **{k: v for k, v in at["small"].items() if k != "B"}
        )))  # fmt: skip
        yield f"{name} largest batch", answer(lambda g=graph, at=at: numbers(cg.largest(
            g, "B", hardware="h100-sxm", **{k: v for k, v in at["small"].items() if k != "B"}
        )))  # fmt: skip
        yield f"{name} timeline", answer(lambda g=graph, at=at: numbers(cg.timeline(g, **at["small"]).rows))
        yield f"{name} lifetimes", answer(lambda g=graph, at=at: numbers(cg.lifetimes(g, **at["small"])))
        yield f"{name} peak of the allocator", answer(cg.peak_memory, graph, allocator="cuda", **at["small"])
        yield f"{name} peak with cuda", answer(cg.peak_memory, graph, device="cuda", **at["small"])
        yield f"{name} report", answer(lambda g=graph: numbers(cg.report(g)))
        yield f"{name} report small", answer(lambda g=graph, at=at: numbers(cg.report(g, "h100-sxm", **at["small"])))
        yield f"{name} bytes with a cache", answer(cg.bytes_moved, graph, cache="4 MiB", **at["small"])
    yield "mfu", answer(lambda: numbers([
        use(whole, 2.5, "h100-sxm", **points(whole, defaults)["small"]) for use in (cg.mfu, cg.hfu)
    ]))  # fmt: skip
    yield "unrolled equals folded", answer(lambda: numbers(cg.compare(model, cg.unroll(model))))


Questions = Callable[[cg.Graph, Mapping[str, int]], Iterator[tuple[str, str]]]


def variants(name: str) -> dict[str, tuple[Variants, Questions]]:
    """Return groups of variants, each with the function that yields its figures.

    GPT-2 gets every training option and Llama every sharding; for all models that would take too long.
    """
    steps = {key: CHECKPOINTS[key] for key in ("every block", "every 2 blocks")}
    steps |= {key: PRECISIONS[key] for key in ("precision bf16-mixed", "precision fp8")}
    passes, ranks, host = {**INFERENCE, **FORMATS}, SHARDED, {}
    if name == "gpt2":
        steps, host = {**CHECKPOINTS, **PRECISIONS, **OPTIMIZERS, **OPTIONS}, OFFLOADED
    elif name == "llama-3.2-1b":
        steps, ranks, host = {**CHECKPOINTS, **OPTIONS}, {**SHARDED, **DEGREES_AND_SYSTEMS}, OFFLOADED
    elif name == "mixtral-8x7b":
        steps, ranks = {**steps, "optimizer muon": OPTIMIZERS["optimizer muon"]}, {**SHARDED, **EXPERTS}
    elif name in ("resnet18", "swin-t"):  # slow, and some variants are refused
        steps = {"every block": CHECKPOINTS["every block"]}
        passes = {"fused": INFERENCE["fused"], "w8a8": FORMATS["w8a8"]}
    groups = {"train": (steps, trained), "infer": (passes, cached), "shard": (ranks, sharded)}
    return {**groups, "offload": (host, offloaded)}


def figures(name: str, seconds: float) -> dict[str, str]:
    """Return the figures for all variants by key."""
    model, found = cg.models.load(name), {}
    defaults = model.defaults
    for group, (graphs, questions) in variants(name).items():
        for key, derive in graphs.items():
            found |= asked(f"{group} {key}:", seconds, lambda d=derive, q=questions: q(d(model), defaults))
    if name in TIMED:
        found |= asked("hardware", seconds, lambda: on_hardware(model, defaults))
    return found
