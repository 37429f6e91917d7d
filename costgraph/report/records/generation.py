"""Families of generated text: steps, prompts, requests that are served together, and what is in memory meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated

import costgraph as cg

from ...errors import UnsupportedError
from ...notation.records import Count, Size, one_of
from .case import Case, Run, device_of, family
from .record import Record, facts

#: Formats by the words of sources, with how many elements share a scale, and its format.
_FORMATS: dict[str, tuple[str, int | None, str | None]] = {
    "fp8": ("fp8_e4m3", None, None), "nf4": ("nf4", None, None), "nf4-dq": ("nf4_double", None, None),
}  # fmt: skip
#: Of what a rank would hold if all were split evenly, what it may hold: norms, and what is uneven by little.
_UNEVEN = 1.1


@dataclass(frozen=True)
class _Model:
    """A model whose weights, activations and caches are in formats of their own, on one device or on several."""

    model: str
    weights: str
    tensor_parallel: Size = 1
    activations: str = ""
    cache: str = ""

    def step(self) -> cg.Graph:
        """Return one step of one rank."""
        return _generation(self.model, self.weights, self.activations, self.cache, "", self.tensor_parallel)

    def prompts(self, logits: str = "last") -> cg.Graph:
        """Return the pass over prompts of one rank."""
        return _generation(self.model, self.weights, self.activations, self.cache, logits, self.tensor_parallel)


@cache
def _generation(model: str, weights: str, activations: str, kept: str, logits: str, ranks: int) -> cg.Graph:
    """Return a model as it generates; formats are named as `int4-g32` is: elements, then those that share a scale."""
    wide = next((name for name in (weights, activations) if name in ("fp16", "bf16", "fp32")), "bf16")
    g = cg.models.load(model, dtype=wide)
    g = cg.prefill(g, logits=logits) if logits else cg.decode(g)
    if ranks > 1:
        g = _rank(g, ranks)
    plain, _, shared = weights.partition("-g")
    own = (plain, int(shared) if shared.isdecimal() and len(shared) < 10 else None, None)
    name, group, scale = _FORMATS.get(weights, own)
    others = (_FORMATS[text][0] if text in _FORMATS else text for text in (activations, kept))
    narrow = [None if text in ("", wide) else text for text in (name, *others)]
    if narrow[0] is None:
        group, narrow[1] = None, None
    return cg.quantize(g, *narrow, group=group, scale=scale) if any(narrow) else g


def _rank(whole: cg.Graph, ranks: int) -> cg.Graph:
    """Return what one of several ranks has of a model: heads, the inner width and the vocabulary are split."""
    g = cg.parallelize(whole, tp=ranks)
    sizes = {"B": 1, "S": 1}
    own, even = (float(cg.param_bytes(each, **sizes)) for each in (g, whole))
    if own * ranks > _UNEVEN * even:
        raise UnsupportedError(
            f"inputs: tensor_parallel {ranks}: a rank has {own * ranks / even:.1f} times its part of {whole.name!r}, "
            f"expected layers that are split: heads that share keys stand in one tensor with them"
        )
    return g


# -- steps and prompts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Steps(_Model):
    """Steps of generation; where no prompt is stated the first one, which has no more than any other one."""

    B: Size
    prompt: Count = 0
    new_tokens: Size = 1


@family("decode", subject="decode")
def generated(record: Record) -> Case:
    """Predict a step of generation, in the middle of what was generated: its cost is linear in the position."""
    given = facts(record, _Steps)
    middle = given.prompt + (given.new_tokens + 1) // 2
    run = Run(given.step(), {"B": given.B, "S": middle}, Fraction(given.B))
    return Case((run,), assumed=record.inputs.get("prompt") is None)


@family("decode-memory", subject="memory of generation")
def held(record: Record) -> Case:
    """Predict the bytes of a model, or those at the peak of a step of it."""
    given = facts(record, _Steps)
    sizes = {"B": given.B, "S": given.prompt + given.new_tokens}
    return Case(peak=Run(given.step(), sizes), params=record.quantity == "model size")


@dataclass(frozen=True, kw_only=True)
class _Prompts(_Model):
    B: Size
    prompt: Size
    logits: Annotated[str, one_of(("all", "last"))] = "last"


@family("prefill", subject="prefill")
def prompted(record: Record) -> Case:
    """Predict the pass over a prompt."""
    given = facts(record, _Prompts)
    sizes = {"B": given.B, "S": given.prompt}
    return Case((Run(given.prompts(given.logits), sizes, Fraction(given.B * given.prompt)),))


# -- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Served(_Model):
    prompt: Size
    new_tokens: Size


@dataclass(frozen=True, kw_only=True)
class _Batch(_Served):
    B: Size


@family("serving", subject="serving")
def batch(record: Record) -> Case:
    """Predict a batch of requests of equal length that begin and end together: the prompts, then step by step."""
    given = facts(record, _Batch)
    return _answered(record, given, given.B)


@family("serving-max", subject="serving")
def most(record: Record) -> Case:
    """Predict as many requests in flight as memory holds, each with half of its answer on average.

    What holds them in pages hands out what is in use, so that the average is what decides; no more of them make more
    tokens in a second, as each reads its own cache and all of them together read the weights once.
    """
    given = facts(record, _Served)
    sizes = {"S": given.prompt + (given.new_tokens + 1) // 2}
    found = cg.largest(given.step(), "B", hardware=device_of(record.device), **sizes)
    if not found:
        raise UnsupportedError(f"inputs: {given.model} does not fit {record.device}, expected room for one request")
    return _answered(record, given, found)


def _answered(record: Record, given: _Served, requests: int) -> Case:
    """Return prompts and all steps; a rate is one of all devices together, or of each."""
    middle = given.prompt + (given.new_tokens + 1) // 2
    steps = Run(given.step(), {"B": requests, "S": middle}, times=given.new_tokens)
    share = given.tensor_parallel if record.quantity.endswith("/GPU") else 1
    work = Fraction(requests * given.new_tokens, share)
    return Case((Run(given.prompts(), {"B": requests, "S": given.prompt}, work, then=steps),), assumed=True)
