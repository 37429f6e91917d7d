"""What a page shows of a graph: it itself, steps of training, passes of inference, the part of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...algebra.symbols import dims, is_name, read_size, shorten, shown
from ...errors import CostGraphError, FormatError
from ...graph.graph import Graph
from ...optimizers import OPTIMIZERS
from ...transforms.checkpoint import read_checkpoint
from ...transforms.inference.inference import decode, prefill
from ...transforms.shard.parallelize import parallelize
from ...transforms.training import training_step

__all__ = ["views_of"]

_PASSES: Mapping[str, Callable[[Graph], Graph]] = {"forward": lambda g: g, "prefill": prefill, "decode": decode}
_DEGREES = ("dp", "tp", "cp", "ep")
_DEFAULT = (
    "forward", "train precision=bf16", "train precision=bf16 checkpoint=every-block",
    "train optimizer=sgd precision=bf16", "prefill", "decode", "train precision=bf16 dp=dp tp=tp",
)  # fmt: skip


def views_of(graph: Graph, wanted: object = None) -> dict[str, Graph]:
    """Return graphs by the name of the view; of the default ones those that the graph has.

    Parameters
    ----------
    graph : Graph
        A forward pass, or anything whose default view is itself.
    wanted : mapping of str to Graph or sequence of str, optional
        Graphs, or words such as `train optimizer=adamw precision=bf16 checkpoint=every-block dp=8 tp=T`.

    Returns
    -------
    dict of str to Graph
        In order, one at least.

    Raises
    ------
    CostGraphError
        If a word is none of these, or a transform refuses the graph.
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
    found = {text: _view(graph, text) for text in list(wanted)}
    if not found:
        raise FormatError("explore: views is empty, expected one view at least")
    return found


def _those_it_has(graph: Graph) -> Iterable[tuple[str, Graph]]:
    for text in _DEFAULT:
        try:
            yield text, _view(graph, text)
        except CostGraphError:  # a graph without a loss, without tokens, or that is a step itself
            continue


def _view(graph: Graph, text: object) -> Graph:
    if not isinstance(text, str) or not text.strip():
        raise FormatError(f"explore: view {shown(text)}, expected one such as {', '.join(map(repr, _DEFAULT))}")
    word, *rest = text.split()
    options = dict(part.partition("=")[::2] for part in rest)
    known = (*_DEGREES, *(("optimizer", "precision", "checkpoint") if word == "train" else ()))
    for name, value in options.items():
        if name not in known or not value:
            raise FormatError(f"explore: view {shorten(text)}: {shorten(name)}, expected {'=, '.join(known)}=")
    if word == "train":
        found = _step(graph, options)
    elif word in _PASSES:
        found = _PASSES[word](graph)
    else:
        raise FormatError(f"explore: view {shorten(text)}: expected {', '.join(_PASSES)} or train, then options")
    degrees: dict[str, Any] = {name: _degree(options[name], name) for name in _DEGREES if name in options}
    return parallelize(found, **degrees) if degrees else found


def _step(graph: Graph, options: Mapping[str, str]) -> Graph:
    name = options.get("optimizer", "adamw")
    if name not in OPTIMIZERS:
        raise FormatError(f"explore: optimizer={shorten(name)}, expected one of {', '.join(OPTIMIZERS)}")
    policy = read_checkpoint(options.get("checkpoint", "none"))
    return training_step(graph, None, OPTIMIZERS[name](), options.get("precision"), policy)


def _degree(text: str, name: str) -> Any:
    return dims(text) if is_name(text) else read_size(text, name)
