"""What a page shows of a graph: it itself, steps of training, passes of inference, the part of one rank or stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...algebra.symbols import shorten, shown, size_or_name
from ...errors import CostGraphError, FormatError
from ...graph.arguments import need_choice
from ...graph.graph import Graph
from ...optimizers import OPTIMIZERS
from ...transforms.checkpoint import read_checkpoint
from ...transforms.inference.inference import decode, prefill
from ...transforms.shard.parallelize import CONTEXTS, parallelize
from ...transforms.training import training_step

__all__ = ["views_of"]

_PASSES: Mapping[str, Callable[[Graph], Graph]] = {"forward": lambda g: g, "prefill": prefill, "decode": decode}
_DEGREES = ("dp", "tp", "cp", "ep", "pp")
#: What `parallelize` takes beside degrees; without a value it is a flag.
_RANKS = ("zero", "sequence", "context", "reduce_each", "schedule")
_WORDS = {"zero": ("0", "1", "2", "3"), "reduce_each": ("yes", "no"), "context": CONTEXTS}
_STEP = ("optimizer", "precision", "checkpoint", "accumulate", "clip")
#: Steps of the whole model by their options: views of ranks share one.
_Steps = dict[frozenset[tuple[str, str]], Graph]
_DEFAULT = (
    "forward", "train precision=bf16", "train precision=bf16 checkpoint=every-block",
    "train optimizer=sgd precision=bf16", "prefill", "decode", "train precision=bf16 dp=dp tp=tp",
    "train precision=bf16 dp=dp zero=1", "train precision=bf16 dp=dp zero=2", "train precision=bf16 dp=dp zero=3",
    "train precision=bf16 accumulate=8 pp=4",
)  # fmt: skip


def views_of(graph: Graph, wanted: object = None) -> dict[str, Graph]:
    """Return graphs by the name of the view; of the default ones those that the graph has.

    Those that are wanted are graphs, or words such as `train optimizer=adamw precision=bf16 checkpoint=every-block dp=8
    tp=T zero=3`; an error if a word is none of these, or a transform refuses the graph.
    """
    if isinstance(wanted, Mapping):
        found = dict(wanted)
        if not found or not all(isinstance(k, str) and isinstance(v, Graph) for k, v in found.items()):
            raise FormatError(f"explore: views is {shown(wanted)}, expected graphs by the name of the view")
        return found
    if wanted is None:
        return dict(_those_it_has(graph))
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise FormatError(f"explore: views is {shown(wanted)}, expected a list such as ['forward', 'decode']")
    steps: _Steps = {}
    found = {text: _view(graph, text, steps) for text in list(wanted)}
    if not found:
        raise FormatError("explore: views is empty, expected one view at least")
    return found


def _those_it_has(graph: Graph) -> Iterable[tuple[str, Graph]]:
    steps: _Steps = {}
    for text in _DEFAULT:
        try:
            yield text, _view(graph, text, steps)
        except CostGraphError:  # a graph without a loss, without tokens, or that is a step itself
            continue


def _view(graph: Graph, text: object, steps: _Steps) -> Graph:
    if not isinstance(text, str) or not text.strip():
        raise FormatError(f"explore: view {shown(text)}, expected one such as {', '.join(map(repr, _DEFAULT))}")
    word, *rest = text.split()
    options = dict(part.partition("=")[::2] for part in rest)
    known = (*_DEGREES, *_RANKS, *(_STEP if word == "train" else ()))
    for name, value in options.items():
        if name not in known or bool(value) == (name == "sequence"):
            flags = (k if k == "sequence" else f"{k}=" for k in known)
            raise FormatError(f"explore: view {shorten(text)}: {shorten(name)}, expected {', '.join(flags)}")
    if word == "train":
        key = frozenset((k, v) for k, v in options.items() if k in _STEP)
        found = steps[key] = steps.get(key) or _step(graph, options)
    elif word in _PASSES:
        found = _PASSES[word](graph)
    else:
        raise FormatError(f"explore: view {shorten(text)}: expected {', '.join(_PASSES)} or train, then options")
    return _rank(found, options) if options.keys() & {*_DEGREES, *_RANKS} else found


def _step(graph: Graph, options: Mapping[str, str]) -> Graph:
    name = options.get("optimizer", "adamw")
    if name not in OPTIMIZERS:
        raise FormatError(f"explore: optimizer={shorten(name)}, expected one of {', '.join(OPTIMIZERS)}")
    policy = read_checkpoint(options.get("checkpoint", "none"))
    accumulate = size_or_name(options.get("accumulate", "1"), "accumulate")
    try:
        clip = float(options["clip"]) if "clip" in options else None
    except ValueError:
        raise FormatError(f"explore: clip={shorten(options['clip'])}, expected a number") from None
    return training_step(graph, None, OPTIMIZERS[name](), options.get("precision"), policy, accumulate, clip=clip)


def _rank(found: Graph, options: Mapping[str, str]) -> Graph:
    given: dict[str, Any] = {name: size_or_name(options[name], name) for name in _DEGREES if name in options}
    given |= {name: options[name] for name in ("context", "schedule") if name in options}
    for name, words in _WORDS.items():
        if name in options:
            need_choice(f"explore: {name}", options[name], words)
    if "zero" in options:
        given["zero"] = int(options["zero"])
    if "reduce_each" in options:
        given["reduce_each"] = options["reduce_each"] == "yes"
    micro_batches = size_or_name(options.get("accumulate", "1"), "accumulate")
    return parallelize(found, sequence="sequence" in options, micro_batches=micro_batches, **given)
