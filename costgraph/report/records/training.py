"""Families of steps of training, of a whole model or one with adapters, on one device or on one of several."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated

import costgraph as cg

from ...errors import UnsupportedError
from ...notation.door import Rule
from ...notation.records import Size, one_of
from .case import Case, Run, family
from .record import Record, facts

#: What a layer of Llama keeps where every other product of it is kept: torchtitan counts them in the order of the
#: program (q, k, v, back, gate, up, down), keeps the odd ones, and attention (torchtitan/parallelisms/
#: parallelize_llama.py, `_apply_ac_to_transformer_block`, at the date of its records).
_KEPT = ("q/matmul", "v/matmul", "layers/attention", "gate/matmul", "down/matmul")
#: What is computed again, by the words of sources.
_AGAIN = {
    "none": None, "full": cg.every_block(), "every block": cg.every_block(),
    **dict.fromkeys(
        ("selective", "selective (every other matmul)", "per-op selective"), cg.every_block(keep=_KEPT)
    ),
}  # fmt: skip
#: Formats of parameters and products: FSDP2 keeps fp32 on each rank, and gathers and multiplies in bf16.
_POLICIES = {
    "fp32": "fp32", "bf16": "bf16", "bf16-true": "bf16", "bf16 FSDP2 mixed (fp32 params, bf16 compute)": "bf16-master",
}  # fmt: skip
#: States in blocks, by the words of an optimizer.
_STATES = {
    "bnb 8-bit": "bitsandbytes-8bit", "AdamW8bit": "bitsandbytes-8bit", "ao 8-bit": "torchao-8bit",
    "ao 4-bit": "torchao-4bit",
}  # fmt: skip
#: Adapters, where a source does not state them: queries and values, as Hu et al. 2021 (arXiv 2106.09685, section 4.2).
_RANK, _ADAPTED = 8, "*/attention/[qv]"
#: What is not narrow in a model with adapters.
_WIDE = ("head", "lora_a", "lora_b")


@dataclass(frozen=True)
class _Trained:
    """A step as its source describes it; batch and rates are those of one device."""

    model: str
    batch: Size
    seq: Size
    gpus: Size = 1
    precision: Annotated[str, one_of(_POLICIES)] = ""
    optimizer: str = "AdamW fused"
    method: Annotated[str, one_of(("full", "LoRA", "QLoRA"))] = "full"
    weights: str = ""
    activation_checkpointing: Annotated[str, one_of(_AGAIN)] = "none"
    sharding: str = ""
    recipe: str = ""
    compiled: bool = False
    float8: bool = False
    chunked_ce: Size = 1
    optimizer_in_backward: bool = False
    activation_offloading: bool = False
    packed: bool = True

    def graph(self, *, timed: bool) -> cg.Graph:
        """Return the step of one rank; products in float8 are told apart where a time was measured."""
        if not self.packed:
            raise UnsupportedError("inputs: packed False: sequences are as long as those of a set of data, not stated")
        narrow = self.float8 or self.recipe.startswith("float8")
        policy = _POLICIES.get(self.precision, "bf16-master" if self.sharding else "bf16")
        cp = re.fullmatch("FSDP 1 CP ([0-9]{1,4})", self.sharding)
        if self.gpus > 1 and not cp and self.sharding not in ("FSDP", "FSDP2"):
            raise UnsupportedError(f"inputs: sharding {self.sharding!r} on {self.gpus} devices, expected FSDP")
        g = _step(
            self.model, "fp8" if narrow and timed else policy, self.optimizer, self.method, self.weights,
            self.activation_checkpointing, self.chunked_ce, at_once=self.optimizer_in_backward,
        )  # fmt: skip
        if self.gpus > 1:
            g = cg.parallelize(g, dp=1 if cp else self.gpus, cp=self.gpus if cp else 1, zero=3)
        if self.activation_offloading:
            g = cg.offload(g, "activations")
        return cg.fuse(g) if self.compiled else g

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all ranks together."""
        return {"B": self.batch * (1 if "CP" in self.sharding else self.gpus), "S": self.seq}


@cache
def _step(
    model: str, policy: str, optimizer: str, method: str, weights: str, again: str, chunks: int, *, at_once: bool
) -> cg.Graph:
    """Return a step on one device."""
    g = cg.models.load(model, dtype="fp32" if policy == "fp32" else "bf16")
    if method != "full":
        g = cg.lora(g, _RANK, _ADAPTED)
    if method == "QLoRA":
        g = cg.quantize(g, "nf4_double", skip=_WIDE)
    elif weights == "nf4":
        g = cg.quantize(g, "nf4", skip=_WIDE)
    elif weights:
        raise UnsupportedError(f"inputs: weights {weights!r}, expected nf4, or formats that are not narrow")
    states = next((found for words, found in _STATES.items() if words in optimizer), None)
    adam = cg.AdamW(implementation="fused", states=states)
    return cg.training_step(
        g, _loss(g, chunks), adam, None if policy in ("fp32", "bf16") else policy, _AGAIN[again],
        optimizer_in_backward=at_once,
    )  # fmt: skip


def _loss(g: cg.Graph, chunks: int) -> Callable[..., cg.Tensor]:
    """Return the loss of a model: that of logits in fp32, as torchtitan and torchtune convert them first."""
    if g.loss != "cross_entropy":
        return lambda *made: cg.reduce(made[-1], " ".join(f"a{i}" for i in range(made[-1].ndim)) + " -> ", "mean")
    return cg.chunked_cross_entropy(chunks, dtype="fp32")


@family("training-memory", subject="memory of training")
def held(record: Record) -> Case:
    """Predict the bytes at the peak of a step, or those of the weights alone."""
    given = facts(record, _Trained)
    whole = str(record.inputs.get("what", "")).startswith("weights")
    return Case(peak=Run(given.graph(timed=False), given.sizes), params=whole)


@family("training-speed", subject="training")
def timed(record: Record) -> Case:
    """Predict a whole step of one rank, with what it sends; a rate is that of one device."""
    given = facts(record, _Trained)
    work = given.batch * (1 if record.unit == "samples/s" else given.seq)
    if "CP" in given.sharding:
        return Case((Run(given.graph(timed=True), given.sizes, Fraction(work, given.gpus)),), assumed=True)
    return Case((Run(given.graph(timed=True), given.sizes, Fraction(work)),), assumed=True)


@dataclass(frozen=True)
class _OnHost:
    """A step whose optimizer runs on the host, with all else split among ranks; each has sequences of its own."""

    model: str
    B: Size
    S: Size
    gpus: Size
    zero: Annotated[int, Rule("3", lambda stage: stage == 3)] = 3
    activation_checkpointing: bool = False
    liger: bool = False

    def graph(self) -> cg.Graph:
        """Return the step of one rank."""
        return _on_host(self.model, self._chunks() if self.liger else 1, self.gpus, again=self.activation_checkpointing)

    def _chunks(self) -> int:
        """Return the parts that Liger's loss takes (ops/fused_linear_cross_entropy.py): of V/D, to a power of two."""
        sizes, tokens = cg.models.load(self.model).defaults, self.B * self.S
        rows = -(-tokens // -(-sizes["V"] // sizes["D"]))
        found = -(-tokens // 2 ** (rows - 1).bit_length())
        return next(n for n in range(found, 0, -1) if not self.S % n)  # of equal length, the last one included


@cache
def _on_host(model: str, chunks: int, ranks: int, *, again: bool) -> cg.Graph:
    step = cg.training_step(
        cg.models.load(model, dtype="bf16"), cg.chunked_cross_entropy(chunks), precision="bf16-master",
        checkpoint=cg.every_block() if again else None,
    )  # fmt: skip
    return cg.offload(cg.parallelize(step, dp=ranks, zero=3), "optimizer")


@family("stas-zero3", subject="training")
def on_host(record: Record) -> Case:
    """Predict a step with its optimizer on the host, of which transfers have a time and updates have none."""
    given = facts(record, _OnHost)
    sizes = {"B": given.B * given.gpus, "S": given.S}
    if record.what == "peak memory":
        return Case(subject="memory of training", peak=Run(given.graph(), sizes))
    one = cg.models.load(given.model)
    own = Fraction(3 * cg.matmul_flops(one, B=given.B, S=given.S))  # causal halves, without what is computed again
    return Case((Run(given.graph(), sizes, own),), assumed=True)
