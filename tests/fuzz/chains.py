"""Random chains of transforms over zoo models, and the invariants that every chain satisfies.

`draw(rng)` draws a chain. `INVARIANTS` are functions that yield a text for each violation. A chain that the library
refuses with one of its errors, such as an adapter on a layer that already has one, violates none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import costgraph as cg

#: Models, and the layers that a chain may transform.
MODELS = {
    "llama-3.2-1b": (2, 4, 6), "gemma-2-2b": (2, 4), "gpt-oss-20b": (2, 4), "gpt2": (2, 3), "qwen3-0.6b": (2, 4),
    "lstm-ptb-small": (1, 2), "gru-ptb-small": (1, 2), "bert-base": (2, 4), "mixtral-8x7b": (2,), "t5-small": (2,),
    "olmo-2-1b": (2, 3), "phi-4-mini": (2,), "qwen1.5-moe-a2.7b": (2,), "gemma-3-1b": (6,), "deepseek-v2-lite": (3,),
}  # fmt: skip
RECURRENT = ("lstm-ptb-small", "gru-ptb-small")
SIZES = ({"B": 3, "S": 16, "M": 24}, {"B": 1, "S": 64, "M": 48}, {"B": 2, "S": 128, "M": 64})
QUESTIONS = {
    "flops": cg.flops,
    "matmul_flops": cg.matmul_flops,
    "bytes": cg.bytes_moved,
    "fused bytes": partial(cg.bytes_moved, fused=True),
    "peak": cg.peak_memory,
    "parameters": cg.param_count,
    "parameter bytes": cg.param_bytes,
}

Transform = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class Chain:
    """Ordered transforms of a model, and the sizes for evaluation."""

    model: str
    layers: int
    sizes: tuple[tuple[str, int], ...]
    transforms: tuple[Transform, ...]

    def __str__(self) -> str:
        """Return the program that builds the graph."""
        calls = [f"{name}({', '.join([*map(_text, args), *(f'{k}={_text(v)}' for k, v in named)])})"
                 for name, args, named in self.transforms]  # fmt: skip
        return " | ".join([f"{self.model} L={self.layers} {dict(self.sizes)}", *calls])

    @property
    def is_step(self) -> bool:
        """Whether the chain ends with a training step."""
        return any(name == "training_step" for name, _, _ in self.transforms)

    def point(self, graph: cg.Graph) -> dict[str, int]:
        """Return values for a graph's free sizes."""
        return {name: size for name, size in self.sizes if name in _names(graph)}


def _text(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def _names(graph: cg.Graph) -> set[str]:
    from costgraph.ir.graph import known_names

    return set(known_names(graph))


@cache
def _model(name: str, layers: int) -> cg.Graph:
    graph = cg.models.load(name)
    graph.defaults = graph.defaults | {"L": layers}
    return graph


@cache
def _unrolled(name: str, layers: int, length: int) -> cg.Graph:
    graph = _model(name, layers)
    recurrent = any(op.loop is not None and str(op.loop.count) == "S" for op in graph.walk())
    return cg.unroll(graph, **({"S": length} if recurrent else {}))


# -- drawing -------------------------------------------------------------------------------------------------------


def _lora(rng: random.Random, layers: int) -> Transform:
    on = [
        "*", "*/q", "*/mlp/*", f"layers[{layers // 2}:]", "layers[-1]", f"layers/{layers - 1}", "layers[:1]/*/q",
        ("*/q", "layers[1:]"),
    ]  # fmt: skip
    dropout = rng.choice((0.0, 0.1))
    return "lora", (rng.choice((4, 8)), rng.choice(on)), (("dropout", dropout),)


def _quantize(rng: random.Random, layers: int) -> Transform:
    weights = rng.choice(("int8", "int4", "fp8_e4m3", "mxfp4", "nf4"))
    more: list[tuple[str, Any]] = []
    if weights == "int4" and rng.random() < 0.5:
        more.append(("group", 32))
    if weights == "int8" and rng.random() < 0.4:
        more.append(("activations", "int8"))
    if rng.random() < 0.4:
        skip = ("q", "mlp", "attention", f"layers[{layers // 2}:]", "layers/0", "lora_a", "layers[-1]/mlp")
        more.append(("skip", (rng.choice(skip),)))
    if rng.random() < 0.2:
        more.append(("embeddings", True))
    return "quantize", (weights,), tuple(more)


def _step(rng: random.Random, layers: int) -> Transform:
    optimizers = (
        cg.SGD(), cg.SGD(momentum=0.9), cg.AdamW(), cg.AdamW(implementation="fused"), cg.Adam(), cg.Adafactor(),
        cg.Lion(), cg.Muon(ns_steps=1), cg.RMSProp(implementation="for-loop"), cg.AdaGrad(),
    )  # fmt: skip
    more: list[tuple[str, Any]] = [
        ("optimizer", rng.choice(optimizers)),
        ("precision", rng.choice((None, "bf16", "bf16-mixed", "bf16-master", "megatron-bf16", "fp16-mixed", "fp8"))),
        ("checkpoint", rng.choice((*_policies(layers), None))),
        ("accumulate", rng.choice((1, 1, 3))),
    ]
    for flag, value in (("set_to_none", False), ("optimizer_in_backward", True), ("defer_accumulation", True)):
        if rng.random() < 0.1:
            more.append((flag, value))
    if rng.random() < 0.3:
        which = ("layers[:1]", "tokens", "*/norm", f"layers/{layers - 1}/mlp", "*/bias", "layers[1:]/*/norm")
        more.append((rng.choice(("freeze", "trainable")), rng.choice(which)))
    if rng.random() < 0.2:
        more.append(("clip", 1.0))
    return "training_step", (), tuple(more)


def _policies(layers: int) -> list[cg.Checkpoint]:
    blocks = [cg.every_block(), cg.every_block(early_stop=False), cg.every_block(keep=["matmul"])]
    blocks.append(cg.every_block(inside=cg.selective("mlp")))
    parts = [cg.selective("attention"), cg.selective("mlp"), cg.selective("attention", "mlp"), cg.selective("norm")]
    pairs = cg.every(2), cg.every(2, early_stop=False), cg.every(2, inside=cg.every_block())
    groups = pairs if layers % 2 == 0 else ()
    return [*blocks, *parts, *groups]


def draw(rng: random.Random) -> Chain:
    """Return a random chain."""
    name = rng.choice(list(MODELS))
    layers = rng.choice(MODELS[name])
    transforms: list[Transform] = []
    if rng.random() < 0.4:
        transforms.append(_lora(rng, layers))
    if rng.random() < 0.3:
        transforms.append(_quantize(rng, layers))
    end = rng.random()
    if end < 0.6:
        transforms.append(_step(rng, layers))
    elif end < 0.75:
        transforms.append((rng.choice(("prefill", "decode")), (), ()))
        if rng.random() < 0.3:
            transforms.append(("quantize", (), (("cache", rng.choice(("int8", "fp8_e4m3"))),)))
    if rng.random() < 0.25:
        transforms.append(("fuse", (), (("epilogues", rng.random() < 0.5),)))
    if rng.random() < 0.2:
        what = ("optimizer", "activations", "parameters") if end < 0.6 else ("parameters",)
        transforms.append(("offload", (rng.choice(what),), ()))
    sizes = SIZES[0] if name in RECURRENT else rng.choice(SIZES)  # every step of a recurrence is unrolled
    return Chain(name, layers, tuple(sizes.items()), tuple(transforms))


def applied(chain: Chain, graph: cg.Graph) -> cg.Graph:
    """Return the graph after all transforms of a chain."""
    for name, args, named in chain.transforms:
        graph = getattr(cg, name)(graph, *args, **dict(named))
    return graph


# -- invariants ----------------------------------------------------------------------------------------------------


def _answers(graph: cg.Graph, point: dict[str, int]) -> dict[str, Any]:
    return {name: ask(graph, **point) for name, ask in QUESTIONS.items()}


def _differences(a: dict[str, Any], b: dict[str, Any], how: str) -> Iterator[str]:
    for name, value in a.items():
        if value != b[name]:
            yield f"{how}: {name} is {value} and {b[name]}"


def looped_is_unrolled(chain: Chain) -> Iterator[str]:
    """Transforming the unrolled model, or unrolling the result, gives the costs of the looped result."""
    looped = applied(chain, _model(chain.model, chain.layers))
    wanted = _answers(looped, chain.point(looped))
    played = cg.unroll(looped, **chain.point(looped))
    yield from _differences(wanted, _answers(played, chain.point(played)), "unrolled at the end")
    names, recurrent = [name for name, _, _ in chain.transforms], chain.model in RECURRENT
    if "fuse" in names or (recurrent and {"prefill", "decode"} & {*names}):
        return  # fusion may cross layer boundaries; unrolled recurrent steps use no cache
    try:
        early = applied(chain, _unrolled(chain.model, chain.layers, dict(chain.sizes)["S"]))
    except cg.CostGraphError as error:
        yield f"unrolled first: refused, {str(error)[:200]}"
        return
    # a loop writes gradients of slices into a stacked buffer, where torch concatenates them
    if recurrent and chain.is_step:
        wanted = {name: value for name, value in wanted.items() if "bytes" not in name or "parameter" in name}
    yield from _differences(wanted, _answers(early, chain.point(early)), "unrolled first")


def bound_early_is_bound_late(chain: Chain) -> Iterator[str]:
    """Binding sizes at evaluation gives the same value as binding them in the graph."""
    graph = applied(chain, _model(chain.model, chain.layers))
    point = chain.point(graph)
    every = {**graph.defaults, **point}
    wanted = _answers(graph, point)
    given = graph.defaults
    try:
        for kept in ({}, given, {name: size for name, size in given.items() if name != "L"}):
            graph.defaults = kept
            formulas = {name: ask(graph) for name, ask in QUESTIONS.items()}
            late = {name: cg.evaluate(formula, **_only(formula, every)) for name, formula in formulas.items()}
            yield from _differences(wanted, late, f"bound late, but for {', '.join(kept) or 'none'}")
    except cg.BindingError as error:  # formulas may differ for few layers, and their errors say so
        if "holds from" not in str(error):
            raise
    finally:
        graph.defaults = given


def _only(formula: Any, point: dict[str, int]) -> dict[str, int]:
    names = {str(s) for s in getattr(formula, "free_symbols", ())}
    return {name: size for name, size in point.items() if name in names}


def saved_is_loaded(chain: Chain) -> Iterator[str]:
    """A saved and reloaded graph has the same costs and facts."""
    graph = applied(chain, _model(chain.model, chain.layers))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        cg.save(graph, path)
        try:
            back = cg.load(path)
        except cg.CostGraphError as error:
            yield f"loaded: refused, {str(error).removeprefix(str(path))[:200]}"
            return
    point = chain.point(graph)
    yield from _differences(_answers(graph, point), _answers(back, point), "loaded")
    yield from _differences(_facts(graph), _facts(back), "loaded")


def _facts(graph: cg.Graph) -> dict[str, Any]:
    known = [r.text for r in graph.relations.relations]
    return {"assumptions": known, "defaults": graph.defaults, "loss": graph.loss, "layers": graph.layers}


def more_checkpointing_saves_no_more(chain: Chain) -> Iterator[str]:
    """A checkpoint policy never saves more bytes than no policy, nor checkpointing every second layer more than
    every layer."""
    if not chain.is_step:
        return

    def kept(policy: cg.Checkpoint | None) -> Any:
        steps = [(n, a, (*(i for i in k if i[0] != "checkpoint"), ("checkpoint", policy)))
                 if n == "training_step" else (n, a, k) for n, a, k in chain.transforms if n != "offload"]  # fmt: skip
        try:
            graph = applied(
                Chain(chain.model, chain.layers, chain.sizes, tuple(steps)), _model(chain.model, chain.layers)
            )
            # saved_bytes counts one iteration per loop; the unrolled graph counts all iterations
            played = cg.unroll(graph, **chain.point(graph))
            return sum(cg.saved_bytes(played, **chain.point(played)).values())
        except cg.CostGraphError:
            return None

    none, block = kept(None), kept(cg.every_block())
    for policy in dict.fromkeys(dict(named).get("checkpoint") for name, _, named in chain.transforms):
        if policy is not None and (found := kept(policy)) is not None and found > none:
            yield f"{policy} keeps {found}, no policy {none}"
    if block is not None and block > none:
        yield f"every_block keeps {block}, no policy {none}"
    pairs = kept(cg.every(2)) if chain.layers % 2 == 0 else None
    if block is not None and pairs is not None and pairs > block:
        yield f"every(2) keeps {pairs}, every_block {block}"


INVARIANTS: tuple[Callable[[Chain], Iterator[str]], ...] = (
    looped_is_unrolled, bound_early_is_bound_late, saved_is_loaded, more_checkpointing_saves_no_more,
)  # fmt: skip


#: Refusals of chains that ask for something the model does not have, or that combine options which exclude each other.
NONSENSE = (
    "matches no parameter or scope", "matches no scope or op", "alternating layers per iteration", "names no loss",
    "optimizer_in_backward cannot be combined", "requires a gradient; expected at least one",
    "keeps no state between steps", "needs gradients in a wider format", "has no cache of keys and values",
    "expected at most",
)  # fmt: skip


def refusal(chain: Chain) -> str:
    """Return why the library refuses a chain, "" if it does not."""
    try:
        graph = applied(chain, _model(chain.model, chain.layers))
        _answers(graph, chain.point(graph))
    except cg.CostGraphError as error:
        return str(error)
    return ""


def draw_sensible(rng: random.Random) -> tuple[Chain, str]:
    """Return a random chain that makes sense for its model, deep enough for its formulas, and its refusal."""
    while True:
        chain = draw(rng)
        reason = refusal(chain)
        if least := re.search(r"holds only from L=(\d+)", reason):
            period = MODELS[chain.model][0]
            chain = replace(chain, layers=-(-int(least[1]) // period) * period)
            reason = refusal(chain)
        if not any(text in reason for text in NONSENSE):
            return chain, reason


def check(rng: random.Random) -> tuple[int, list[str], list[str]]:
    """Return how many chains were drawn, why they were refused, and the others' violations."""
    chain, reason = draw_sensible(rng)
    if reason:
        return 1, [reason], []
    violations = [f"{invariant.__name__}: {text}" for invariant in INVARIANTS for text in invariant(chain)]
    return 1, [], [str(chain), *violations] if violations else []
