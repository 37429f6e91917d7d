"""Families of kernels, declared with the library's own blocks: products, convolutions, streams, attention, others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Annotated

import costgraph as cg

from ...errors import UnsupportedError
from ...hardware.specs import Hardware, list_hardware, load_hardware
from ...ir.graph import Graph
from ...notation.validation import Count, Rule, Size, near, one_of
from ...transforms.loss import with_loss
from .record import Amount, Record, facts

__all__ = [
    "FAMILIES",
    "Case",
    "Family",
    "Printed",
    "Run",
    "device_of",
    "family",
    "measured_bytes",
    "measured_rate",
    "DIRECTIONS",
    "format_of",
]


# -- case --------------------------------------------------------------------------------------------------------------
# What a record is of, as graphs: each family of records has a function that says so.

#: Of units of time, in seconds.
_TIMES = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
#: Of units of memory, in bytes.
_BYTES = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9, "GB (GiB by arithmetic)": 2**30,
}  # fmt: skip
#: Of units of rates, in FLOP, bytes, tokens or samples in a second.
_RATES = {
    "TFLOP/s": Fraction(10**12), "GB/s": Fraction(10**9), "tok/s": Fraction(1), "samples/s": Fraction(1),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A graph with sizes, and how much of what a rate counts is done in one run of it."""

    graph: Graph
    sizes: Mapping[str, int]
    work: Fraction = Fraction(1)
    """FLOP, bytes, tokens or samples; 1 where a time was measured"""
    phases: tuple[str, ...] = ()
    """those that were measured; all of the graph where none is named"""
    times: int = 1
    """how often it ran"""
    then: Run | None = None
    """what ran behind it, in the same measurement"""

    def parts(self) -> Iterator[Run]:
        """Yield it and what ran behind it."""
        part: Run | None = self
        while part is not None:
            yield part
            part = part.then


@dataclass(frozen=True)
class Printed:
    """A share of a device's peak that a source prints, and what it follows from."""

    share: Fraction
    """of the peak"""
    flops: Fraction
    """FLOPs for one token or sample of the rate"""
    format: str
    """whose peak it is"""


@dataclass(frozen=True)
class Case:
    """What a record measured, as it is predicted."""

    runs: tuple[Run, ...] = ()
    """what was timed; of several the best one was reported"""
    repeated: bool = False
    """whether a run may find in a cache what the run before left there"""
    printed: Printed | None = None
    """a share of the peak beside the rate"""
    subject: str = ""
    """what limits are stated for, where it is not that of the family"""
    peak: Run | None = None
    """what ran while an allocator counted; nothing is timed then"""
    assumed: bool = False
    """whether some of what ran is not stated and was assumed, so that nothing is fitted to its time"""
    params: bool = False
    """whether the bytes are those of its parameters alone"""


@dataclass(frozen=True)
class Family:
    """A family of records: how one of them becomes a case, and what it belongs to."""

    name: str
    subject: str
    case: Callable[[Record], Case] = field(repr=False)


#: Families by name.
FAMILIES: dict[str, Family] = {}


def family(*names: str, subject: str) -> Callable[[Callable[[Record], Case]], Callable[[Record], Case]]:
    """Return a decorator that makes a function the one of families, whose records have the same inputs.

    `subject` is what they are measurements of: limits are stated for all families of a subject together.
    """

    def registered(case: Callable[[Record], Case]) -> Callable[[Record], Case]:
        for name in names:
            assert name not in FAMILIES, name
            FAMILIES[name] = Family(name, subject, case)
        return case

    return registered


def measured_bytes(record: Record) -> tuple[Fraction, Fraction]:
    """Return the bytes of a record, and its unit in bytes.

    UnsupportedError if the number is none of bytes.
    """
    if record.unit not in _BYTES:
        raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join(_BYTES)}")
    return Fraction(record.value) * _BYTES[record.unit], Fraction(_BYTES[record.unit])


def measured_rate(record: Record) -> tuple[bool, Fraction]:
    """Return whether the number of a record is a rate, and its unit in seconds, or in what is done in a second.

    UnsupportedError if the number is neither a time nor a rate.
    """
    for is_rate, units in ((False, _TIMES), (True, _RATES)):
        if record.unit in units:
            return is_rate, units[record.unit]
    raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join([*_TIMES, *_RATES])}")


def device_of(name: str) -> Hardware:
    """Return a device of the list: a record is from outside, and names no files."""
    if name not in _devices():
        raise UnsupportedError(f"device {name!r} has no specification, {near(name, _devices())}expected one")
    return _devices()[name]


@cache
def _devices() -> dict[str, Hardware]:
    return {name: load_hardware(name) for name in list_hardware()}


# -- generation --------------------------------------------------------------------------------------------------------
# Families of generated text: steps, prompts, requests that are served together, and what is in memory meanwhile.

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


# -- kernels -----------------------------------------------------------------------------------------------------------


def format_of(name: str) -> cg.DType:
    """Return a number format by the name that records use: fp8 alone is E4M3, that of weights and activations."""
    return cg.dtype({"fp8": "fp8_e4m3"}.get(name, name))


def _sums(operands: cg.DType) -> str:
    """Return the format of a product: that of libraries, where operands are too narrow to be one."""
    if operands.kind == "int":
        return "int32"
    return "bf16" if operands.bits == 8 else operands.name


# -- products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    M: Size
    N: Size
    K: Size
    dtype: str
    op: Annotated[str, one_of(["gemm"])]


@dataclass(frozen=True)
class _BestProduct:
    best_of: Annotated[Sequence[Size], Rule("sizes, 100 at most", lambda sizes: 0 < len(sizes) <= 100)]
    dtype: str
    op: Annotated[str, one_of(["gemm"])]


@cache
def _product(operands: cg.DType) -> cg.Graph:
    M, N, K = cg.dims("M N K")
    with cg.Graph("product", dtype=operands.name) as g:
        a, b = g.input("a", (M, K)), g.input("b", (K, N))
        g.output(cg.einsum(a, b, "m k, k n -> m n", dtype=_sums(operands)))
    return g


def _multiplied(name: str, M: int, N: int, K: int) -> Run:
    # rates of products count 2 for each index point
    return Run(_product(format_of(name)), {"M": M, "N": N, "K": K}, Fraction(2 * M * N * K))


@family("squares", "mamf", "azure-gemm", "fp8-gemm", "deepbench-gemm", "simumax-gemm", subject="products")
def product(record: Record) -> Case:
    """Predict a product of two matrices, whose layouts change neither FLOPs nor bytes."""
    given = facts(record, _Product)
    return Case((_multiplied(given.dtype, given.M, given.N, given.K),), repeated=True)


@family("squares-best", subject="products")
def best_product(record: Record) -> Case:
    """Predict the best rate among square products of several sizes."""
    given = facts(record, _BestProduct)
    return Case(tuple(_multiplied(given.dtype, n, n, n) for n in dict.fromkeys(given.best_of)), repeated=True)


# -- convolutions --------------------------------------------------------------------------------------------------

DIRECTIONS = ("forward", "backward-weights", "backward-inputs")


@dataclass(frozen=True)
class _Convolution:
    """Of images W by H with C channels, N of them, by K filters of S by R."""

    W: Size
    H: Size
    C: Size
    N: Size
    K: Size
    S: Size
    R: Size
    pad_w: Count
    pad_h: Count
    stride_w: Size
    stride_h: Size
    dtype: str
    direction: Annotated[str, one_of(DIRECTIONS)]
    op: Annotated[str, one_of(["conv"])]
    out_w: Size | None = None
    out_h: Size | None = None

    def made(self) -> tuple[int, int]:
        """Return height and width of the result; UnsupportedError if the source has others."""
        spans = ((self.H, self.pad_h, self.R, self.stride_h), (self.W, self.pad_w, self.S, self.stride_w))
        found = tuple((size + 2 * pad - window) // stride + 1 for size, pad, window, stride in spans)
        stated = (self.out_h or found[0], self.out_w or found[1])
        if min(found) < 1 or found != stated:
            raise UnsupportedError(f"inputs: a result of {stated[0]} by {stated[1]}, expected {found[0]} by {found[1]}")
        return found[0], found[1]


@family("deepbench-conv", subject="convolutions")
def convolution(record: Record) -> Case:
    """Predict a convolution, or its gradient by its input or its weights: contractions of the same index points."""
    given = facts(record, _Convolution)
    high, wide = given.made()
    window, stride = (given.R, given.S), (given.stride_h, given.stride_w)
    padding, operands = (given.pad_h, given.pad_w), format_of(given.dtype)
    with cg.Graph("convolution", dtype=operands.name) as g:
        if given.direction != "backward-inputs":
            x = g.input("x", (given.N, given.C, given.H, given.W))
        if given.direction != "forward":
            dy = g.input("dy", (given.N, given.K, high, wide))
        if given.direction == "forward":
            g.output(cg.conv(x, "b c h w -> b o h w", window=window, stride=stride, padding=padding, o=given.K))
        elif given.direction == "backward-weights":
            h, w = (f"{o}*{s}+{r}-{p}" for o, s, r, p in zip("hw", stride, "rs", padding, strict=True))
            g.output(cg.einsum(x, dy, f"b c {h} {w}, b k h w -> k c r s", r=given.R, s=given.S))
        else:
            rest = [n - ((o - 1) * s - 2 * p + r) for n, o, s, p, r in
                    zip((given.H, given.W), (high, wide), stride, padding, window, strict=True)]  # fmt: skip
            g.output(cg.nn.conv_transpose(dy, "b k h w -> b c h w", window=window, stride=stride, padding=padding,
                                    output_padding=rest, c=given.C))  # fmt: skip
    points = 2 * prod((given.N, given.K, high, wide, given.C, given.R, given.S))
    return Case((Run(g, {}, Fraction(points)),), repeated=True)


# -- streams -------------------------------------------------------------------------------------------------------


#: Streams by name: how many arrays are read, and how many written. What a dot product or a sum writes is one number.
_STREAMS = {
    "init": (0, 1), "read": (1, 0), "dot": (2, 0), "copy": (1, 1), "scale": (1, 1), "mul": (1, 1), "add": (2, 1),
    "triad": (2, 1),
}  # fmt: skip


@dataclass(frozen=True)
class _Stream:
    op: Annotated[str, one_of(_STREAMS)]
    #: what BabelStream takes by default; its rate is that of every size beyond the caches
    elements: Size = 2**25
    dtype: str = "fp64"


@cache
def _stream(op: str, elements: cg.DType) -> cg.Graph:
    N, (read, written) = cg.dims("N"), _STREAMS[op]
    with cg.Graph("stream", dtype=elements.name) as g:
        arrays = [g.input(name, (N,)) for name in "ab"[:read]]
        with cg.kernel(op):
            scaled = [cg.ops.full((N,), 1.5, dtype=elements.name)] if not read else [arrays[-1] * 1.5]
            made = scaled[0] + arrays[0] if read > 1 else scaled[0]
            if not written:
                made = cg.reduce(made, "n -> ", "sum")
        g.output(made)
    return g


@family("bandwidth", subject="streams")
def stream(record: Record) -> Case:
    """Predict a stream over arrays, whose rate is that of the bytes it reads and writes."""
    given = facts(record, _Stream)
    elements = format_of(given.dtype)
    moved = sum(_STREAMS[given.op]) * given.elements * elements.bytes
    return Case((Run(_stream(given.op, elements), {"N": given.elements}, moved),), repeated=True)


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    B: Size
    S: Size
    heads: Size
    head_dim: Size
    causal: bool
    direction: Annotated[str, one_of(("forward", "backward", "forward+backward"))]
    dtype: str = "fp16"
    kv_heads: Size | None = None
    value_dim: Size | None = None


@cache
def _attention(elements: cg.DType, direction: str, *, causal: bool, shared: bool) -> cg.Graph:
    B, H, S, K, V = cg.dims("B H S K V")
    G = cg.dims("G") if shared else H
    with cg.Graph("attention", dtype=elements.name) as g:
        q, k, v = (g.param(*of) for of in (("q", (B, H, S, K)), ("k", (B, G, S, K)), ("v", (B, G, S, V))))
        y = cg.attention(q, k, v, causal=causal)
        g.output(y if direction == "forward" else cg.reduce(y, "b h s k -> ", "sum"))
    return g if direction == "forward" else cg.backward(g)


@family("attention", subject="attention")
def fused_attention(record: Record) -> Case:
    """Predict attention in one kernel; its rate counts the pairs that are seen, half of the square if causal."""
    given = facts(record, _Attention)
    shared, of_values = given.kv_heads not in (None, given.heads), given.value_dim or given.head_dim
    g = _attention(format_of(given.dtype), given.direction, causal=given.causal, shared=shared)
    sizes = {"B": given.B, "H": given.heads, "S": given.S, "K": given.head_dim, "V": of_values}
    sizes |= {"G": given.kv_heads} if shared and given.kv_heads else {}
    # Dao 2023 (arXiv 2307.08691), section 4.1: 4*S^2*K a head, 2.5 times that backward
    passes = {"forward": Fraction(1), "backward": Fraction(5, 2), "forward+backward": Fraction(7, 2)}[given.direction]
    pairs = Fraction(given.S**2, 2 if given.causal else 1)
    work = 2 * given.B * given.heads * (given.head_dim + of_values) * pairs * passes
    return Case((Run(g, sizes, work, ("backward",) if given.direction == "backward" else ()),), repeated=True)


# -- collectives ---------------------------------------------------------------------------------------------------

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def _is_printed(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[1-9][0-9]{0,5}[KMG]?", value) is not None


@dataclass(frozen=True)
class _Collective:
    op: Annotated[str, one_of(["all_reduce"])]
    size: Annotated[str, Rule("bytes such as 65K", _is_printed)]
    gpus: Size


@family("allreduce", subject="collectives")
def all_reduce(record: Record) -> Case:
    """Predict an all-reduce, of whose bytes a ring moves 2(n - 1)/n on each of n ranks: its rate counts these.

    Sizes of nccl-tests are powers of two, of which sources print the first digits: 65K is 65,536 bytes.
    """
    given = facts(record, _Collective)
    printed = int(given.size.rstrip("KMG")) * _SUFFIXES[given.size.lstrip("0123456789")]
    size = min((2**e for e in range(2, 50)), key=lambda n: abs(n - printed))
    with cg.Graph("all_reduce", dtype="fp32") as g:
        g.output(cg.ops.collective(g.input("x", (size // 4,)), given.op, given.gpus))
    return Case((Run(g, {}, Fraction(2 * (given.gpus - 1) * size, given.gpus)),), repeated=True)


# -- models ------------------------------------------------------------------------------------------------------------
# Families of whole models of the library's zoo: vision models, and passes of training of a decoder.

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


# -- traced ------------------------------------------------------------------------------------------------------------
# Families of programs of plain torch: traced, which needs torch, where a record of them is predicted.

_PHASES = {"forward": ("forward",), "backward": ("backward",), "full": ()}
#: Who runs the program as it is written; others bring kernels of their own.
_PLAIN = ("huggingface", "torch")


def _is_date(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None


@dataclass(frozen=True)
class _Called:
    kernel: str
    provider: str
    mode: Annotated[str, one_of(_PHASES)]
    dtype: str = ""
    measured: Annotated[str, Rule("a date, such as 2026-05-15", _is_date)] = ""


@family("liger", subject="kernels")
def called(record: Record) -> Case:
    """Predict a call of plain torch and its backward pass, in eager mode; caches are flushed before each run."""
    given = facts(record, _Called)
    if given.provider not in _PLAIN:
        raise UnsupportedError(f"inputs: provider {given.provider!r} has kernels of its own, expected plain torch")
    if find_spec("torch") is None:
        raise UnsupportedError("torch is not installed, expected it for a program that is traced")
    from ...torch.validation_programs import (
        PROGRAMS,
        UNTRACED,
        benchmarked,
        traced,
    )

    if given.kernel in UNTRACED:
        raise UnsupportedError(f"inputs: kernel {given.kernel!r}: {UNTRACED[given.kernel]}")
    if given.kernel not in PROGRAMS:
        raise UnsupportedError(f"inputs: kernel {given.kernel!r} has no plain program here, expected one that has")
    program = PROGRAMS[given.kernel].at(given.measured)
    if record.what != "peak memory":
        graph = traced(program, given.dtype)
        return Case(
            (Run(graph, program.bound(record.inputs), Fraction(1), _PHASES[given.mode]),), subject=program.subject
        )
    arch = device_of(record.device).arch
    if arch is None:
        raise UnsupportedError(f"device {record.device!r} states no compute capability, expected a GPU of NVIDIA")
    graph = benchmarked(program, given.dtype, given.mode, arch)
    # what was there before a backward pass is not counted
    phases = ("backward",) if given.mode == "backward" else ()
    return Case(subject=program.subject, peak=Run(graph, program.bound(record.inputs), phases=phases))


# -- training ----------------------------------------------------------------------------------------------------------
# Families of steps of training, of a whole model or one with adapters, on one device or on one of several.

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
_TRAINING_POLICIES = {
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
    precision: Annotated[str, one_of(_TRAINING_POLICIES)] = ""
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
        policy = _TRAINING_POLICIES.get(self.precision, "bf16-master" if self.sharding else "bf16")
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
def training_memory_of(record: Record) -> Case:
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


# -- recurrent ---------------------------------------------------------------------------------------------------------
# Family of recurrent layers, whose input is added to each gate as it is: one product of the state a step.

#: Products of the state with matrices of its own size, of which one a gate.
_GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True)
class _Layer:
    op: Annotated[str, one_of(_GATES)]
    hidden: Size
    N: Size
    timesteps: Size
    dtype: str
    direction: Annotated[str, one_of(DIRECTIONS)]


@cache
def _layer(gates: int, elements: cg.DType, direction: str) -> cg.Graph:
    """Return a pass over all steps; of a step the product, and a kernel that makes a state of its gates."""
    N, H, T = cg.dims("N H T")
    with cg.Graph("recurrent", dtype=elements.name) as g:
        if direction == "backward-weights":  # of all steps at once
            states, grads = g.input("states", (T, N, H)), g.input("grads", (T, N, gates, H))
            g.output(cg.einsum(states, grads, "t n h, t n g k -> g h k"))
            return g
        weight = g.param("weight", (gates, H, H))

        def forward(state: cg.Tensor, x: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor]:
            made = cg.einsum(state, weight, "n h, g h k -> n g k")
            with cg.kernel("cell"):
                new = cg.reduce(cg.tanh(made + x[:, None]), "n g k -> n k", "sum")
            return new, new

        def backward(grad: cg.Tensor, saved: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor]:
            with cg.kernel("cell"):
                gates_grad = grad[:, None] * saved
            new = cg.einsum(gates_grad, weight, "n g k, g h k -> n h")
            return new, new

        state = g.input("state", (N, H))
        if direction == "forward":
            made = cg.scan(T, forward, state, g.input("x", (T, N, H)))
        else:
            made = cg.scan(T, backward, state, g.input("saved", (T, N, gates, H)))
        _, outputs = made
        assert isinstance(outputs, cg.Tensor)
        g.output(outputs)
    return g


@family("deepbench-rnn", subject="recurrent layers")
def recurrent(record: Record) -> Case:
    """Predict a recurrent layer, or its gradient by its states or its weights."""
    given = facts(record, _Layer)
    g = _layer(_GATES[given.op], format_of(given.dtype), given.direction)
    return Case((Run(g, {"N": given.N, "H": given.hidden, "T": given.timesteps}),), repeated=True)
