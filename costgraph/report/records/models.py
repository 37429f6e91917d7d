"""Families of whole models of the library's zoo: vision models, and passes of training of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated

import costgraph as cg

from ...errors import UnsupportedError
from ...notation.records import Size, one_of
from ...transforms.losses import with_loss
from .case import Case, Printed, Run, family
from .record import Amount, Record, facts

#: Policies by the words of sources.
_POLICIES = {
    "fp32": "fp32", "bf16": "bf16", "amp_bf16": "bf16-mixed", "amp_fp16": "fp16-mixed", "amp_fp8": "fp8",
    "bf16 autocast": "bf16-mixed", "fp16 autocast": "fp16-mixed",
}  # fmt: skip

#: Of the multiply-adds of a model that a source prints and those of the zoo's: sources count norms and biases as well.
_ANOTHER_MODEL = 0.1


# -- vision --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vision:
    zoo: str
    image: Size
    batch: Size
    precision: Annotated[str, one_of(_POLICIES)]
    phase: Annotated[str, one_of(("infer", "train"))]
    compiled: bool = False
    gmacs: Amount | None = None


@cache
def _multiply_adds(name: str, image: int) -> float:
    return float(cg.matmul_flops(_declared(name), B=1, R=image)) / 2


@cache
def _declared(name: str) -> cg.Graph:
    return cg.models.load(name, dtype="fp32")


@cache
def _vision(name: str, precision: str, phase: str, *, compiled: bool) -> cg.Graph:
    g = _declared(name)
    if phase == "train":
        return cg.training_step(g, optimizer=cg.SGD(momentum=0.9), precision=_POLICIES[precision])
    found = cg.apply_precision(g, _POLICIES[precision])
    return cg.fuse(found) if compiled else found


@family("timm-infer", "timm-train", subject="vision")
def vision(record: Record) -> Case:
    """Predict a vision model on square images; how images lie in memory changes neither FLOPs nor bytes."""
    given = facts(record, _Vision)
    g = _vision(given.zoo, given.precision, given.phase, compiled=given.compiled)
    stated, own = given.gmacs, _multiply_adds(given.zoo, given.image) / 1e9
    if stated is not None and abs(own / float(stated) - 1) > _ANOTHER_MODEL:
        raise UnsupportedError(f"inputs: gmacs {stated}, expected the {own:.2f} of {given.zoo}: another model")
    return Case((Run(g, {"B": given.batch, "R": given.image}, Fraction(given.batch)),))


# -- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoder:
    """A pass of training of a decoder with learned positions, on each of many devices."""

    d_model: Size
    n_heads: Size
    n_layers: Size
    expansion: Size
    vocab: Size
    seq: Size
    microbatch: Size
    precision: Annotated[str, one_of(_POLICIES)]
    activation_checkpointing: bool
    params: Size
    reported_mfu: Amount | None = None


@cache
def _passes(name: str, precision: str, *, checkpointed: bool) -> cg.Graph:
    """Return forward and backward pass: what the optimizer and the network do is spread over devices."""
    g = with_loss(cg.models.load(name, dtype="fp32", symbolic=True))
    policy = cg.every_block() if checkpointed else None
    return cg.backward(cg.apply_precision(g, _POLICIES[precision]), checkpoint=policy)


@family("foundry", subject="training")
def decoder(record: Record) -> Case:
    """Predict forward and backward pass of a micro-batch of GPT-2's architecture, which the parameters tell."""
    given = facts(record, _Decoder)
    g = _passes("gpt2", given.precision, checkpointed=given.activation_checkpointing)
    sizes = {"D": given.d_model, "H": given.n_heads, "L": given.n_layers, "F": given.d_model * given.expansion,
             "V": given.vocab, "P": given.seq, "S": given.seq, "B": given.microbatch}  # fmt: skip
    own = cg.param_count(g, active=False, **sizes)
    if own != given.params:
        raise UnsupportedError(f"inputs: params {given.params:,}, expected {own:,}: another architecture")
    tokens = Fraction(given.microbatch * given.seq)
    printed = None
    if given.reported_mfu is not None:
        flops = Fraction(cg.model_flops(g, count="full", **sizes)) / tokens
        rate = "fp8" if given.precision == "amp_fp8" else "bf16"
        printed = Printed(Fraction(given.reported_mfu) / 100, flops, rate)
    return Case((Run(g, sizes, tokens),), printed=printed)
