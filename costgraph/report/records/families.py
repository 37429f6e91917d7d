"""Families of published measurements: build the graphs, sizes and phases that each kind of record measured.

Covers matmuls, convolutions, memory streams, attention, collectives, recurrent layers, vision models, training steps,
text generation and traced torch programs.
"""

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


# -- cases -------------------------------------------------------------------------------------------------------------

#: Time units in seconds.
_TIMES = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
#: Memory units in bytes.
_BYTES = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9, "GB (GiB by arithmetic)": 2**30,
}  # fmt: skip
#: Rate units in FLOPs, bytes, tokens or samples per second.
_RATES = {
    "TFLOP/s": Fraction(10**12), "GB/s": Fraction(10**9), "tok/s": Fraction(1), "samples/s": Fraction(1),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A graph with sizes, and the work of one execution."""

    graph: Graph
    sizes: Mapping[str, int]
    work: Fraction = Fraction(1)
    """FLOPs, bytes, tokens or samples that a rate counts; 1 for times"""
    phases: tuple[str, ...] = ()
    """measured phases, by default all"""
    times: int = 1
    """number of executions"""
    then: Run | None = None
    """next run in the same measurement"""

    def parts(self) -> Iterator[Run]:
        """Yield this run and its followers."""
        part: Run | None = self
        while part is not None:
            yield part
            part = part.then


@dataclass(frozen=True)
class Printed:
    """A printed share of the device's peak rate, and the basis of its computation."""

    share: Fraction
    """fraction of the peak rate"""
    flops: Fraction
    """FLOPs per token or sample of the rate"""
    format: str
    """number format of the peak rate"""


@dataclass(frozen=True)
class Case:
    """A record as runs to predict."""

    runs: tuple[Run, ...] = ()
    """timed alternatives; the best one was reported"""
    repeated: bool = False
    """whether a run may find data of the previous one in cache"""
    printed: Printed | None = None
    """printed share of the peak rate"""
    subject: str = ""
    """group for limits, by default the family's"""
    peak: Run | None = None
    """run whose peak memory was measured; nothing is timed"""
    assumed: bool = False
    """whether part of the setup was assumed, which excludes its time from calibration"""
    params: bool = False
    """whether the measured bytes are parameters only"""


@dataclass(frozen=True)
class Family:
    """A kind of record, and the function that converts it to a case."""

    name: str
    subject: str
    case: Callable[[Record], Case] = field(repr=False)


#: Families by name.
FAMILIES: dict[str, Family] = {}


def family(*names: str, subject: str) -> Callable[[Callable[[Record], Case]], Callable[[Record], Case]]:
    """Register a function for families with the same inputs.

    `subject` groups families: limits apply to all families of a subject together.
    """

    def registered(case: Callable[[Record], Case]) -> Callable[[Record], Case]:
        for name in names:
            assert name not in FAMILIES, name
            FAMILIES[name] = Family(name, subject, case)
        return case

    return registered


def measured_bytes(record: Record) -> tuple[Fraction, Fraction]:
    """Return the bytes of a record, and its unit in bytes.

    Raises UnsupportedError for other units.
    """
    if record.unit not in _BYTES:
        raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join(_BYTES)}")
    return Fraction(record.value) * _BYTES[record.unit], Fraction(_BYTES[record.unit])


def measured_rate(record: Record) -> tuple[bool, Fraction]:
    """Return whether a record has a rate, and its unit in seconds or per second.

    Raises UnsupportedError for other units.
    """
    for is_rate, units in ((False, _TIMES), (True, _RATES)):
        if record.unit in units:
            return is_rate, units[record.unit]
    raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join([*_TIMES, *_RATES])}")


def device_of(name: str) -> Hardware:
    """Return a built-in device; untrusted records must not name files."""
    if name not in _devices():
        raise UnsupportedError(f"device {name!r} has no specification, {near(name, _devices())}expected one")
    return _devices()[name]


@cache
def _devices() -> dict[str, Hardware]:
    return {name: load_hardware(name) for name in list_hardware()}


# -- text generation ---------------------------------------------------------------------------------------------------

#: Formats by their published names, with the elements per scale and the scale format.
_FORMATS: dict[str, tuple[str, int | None, str | None]] = {
    "fp8": ("fp8_e4m3", None, None), "nf4": ("nf4", None, None), "nf4-dq": ("nf4_double", None, None),
}  # fmt: skip
#: Maximum ratio between a rank's parameters and an even share; norms are replicated, some axes split unevenly.
_UNEVEN = 1.1


@dataclass(frozen=True)
class _Model:
    """A model with separate formats for weights, activations and KV cache, on one or more devices."""

    model: str
    weights: str
    tensor_parallel: Size = 1
    activations: str = ""
    cache: str = ""

    def step(self) -> cg.Graph:
        """Return the decode step of one rank."""
        return _generation(self.model, self.weights, self.activations, self.cache, "", self.tensor_parallel)

    def prompts(self, logits: str = "last") -> cg.Graph:
        """Return the prefill pass of one rank."""
        return _generation(self.model, self.weights, self.activations, self.cache, logits, self.tensor_parallel)


@cache
def _generation(model: str, weights: str, activations: str, kept: str, logits: str, ranks: int) -> cg.Graph:
    """Return a model for generation; formats such as `int4-g32` have an element type and a group size."""
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
    """Return one rank's tensor-parallel part: heads, feed-forward width and vocabulary are sharded."""
    g = cg.parallelize(whole, tp=ranks)
    sizes = {"B": 1, "S": 1}
    own, even = (float(cg.param_bytes(each, **sizes)) for each in (g, whole))
    if own * ranks > _UNEVEN * even:
        raise UnsupportedError(
            f"inputs: tensor_parallel {ranks}: a rank has {own * ranks / even:.1f} times its part of {whole.name!r}, "
            f"expected layers that are split: heads that share keys stand in one tensor with them"
        )
    return g


# -- decode and prefill ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Steps(_Model):
    """Decode steps; without a prompt the first step, which is the cheapest."""

    B: Size
    prompt: Count = 0
    new_tokens: Size = 1


@family("decode", subject="decode")
def generated(record: Record) -> Case:
    """Predict the middle decode step, because the cost is linear in the position."""
    given = facts(record, _Steps)
    middle = given.prompt + (given.new_tokens + 1) // 2
    run = Run(given.step(), {"B": given.B, "S": middle}, Fraction(given.B))
    return Case((run,), assumed=record.inputs.get("prompt") is None)


@family("decode-memory", subject="memory of generation")
def held(record: Record) -> Case:
    """Predict model size or peak memory of a decode step."""
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
    """Predict the prefill pass."""
    given = facts(record, _Prompts)
    sizes = {"B": given.B, "S": given.prompt}
    return Case((Run(given.prompts(given.logits), sizes, Fraction(given.B * given.prompt)),))


# -- request batches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Served(_Model):
    prompt: Size
    new_tokens: Size


@dataclass(frozen=True, kw_only=True)
class _Batch(_Served):
    B: Size


@family("serving", subject="serving")
def batch(record: Record) -> Case:
    """Predict a static batch of equal requests: prefill, then all decode steps."""
    given = facts(record, _Batch)
    return _answered(record, given, given.B)


@family("serving-max", subject="serving")
def most(record: Record) -> Case:
    """Predict the largest number of in-flight requests that fits into memory, each half answered on average.

    A paged KV cache allocates only used pages, so the average length counts. Larger batches have a higher throughput,
    because a step reads the weights once for all requests.
    """
    given = facts(record, _Served)
    sizes = {"S": given.prompt + (given.new_tokens + 1) // 2}
    found = cg.largest(given.step(), "B", hardware=device_of(record.device), **sizes)
    if not found:
        raise UnsupportedError(f"inputs: {given.model} does not fit {record.device}, expected room for one request")
    return _answered(record, given, found)


def _answered(record: Record, given: _Served, requests: int) -> Case:
    """Return prefill and all decode steps; a rate is for all devices, or per device."""
    middle = given.prompt + (given.new_tokens + 1) // 2
    steps = Run(given.step(), {"B": requests, "S": middle}, times=given.new_tokens)
    share = given.tensor_parallel if record.quantity.endswith("/GPU") else 1
    work = Fraction(requests * given.new_tokens, share)
    return Case((Run(given.prompts(), {"B": requests, "S": given.prompt}, work, then=steps),), assumed=True)


# -- matmuls, convolutions, streams and attention ----------------------------------------------------------------------


def format_of(name: str) -> cg.DType:
    """Return a number format by its published name; fp8 alone means E4M3, as for weights and activations."""
    return cg.dtype({"fp8": "fp8_e4m3"}.get(name, name))


def _sums(operands: cg.DType) -> str:
    """Return the output format of a matmul in libraries, which is wider for narrow operands."""
    if operands.kind == "int":
        return "int32"
    return "bf16" if operands.bits == 8 else operands.name


# -- matmuls -----------------------------------------------------------------------------------------------------------


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
    # matmul rates count 2 FLOPs per index point
    return Run(_product(format_of(name)), {"M": M, "N": N, "K": K}, Fraction(2 * M * N * K))


@family("squares", "mamf", "azure-gemm", "fp8-gemm", "deepbench-gemm", "simumax-gemm", subject="products")
def product(record: Record) -> Case:
    """Predict a matmul; layouts change neither FLOPs nor bytes."""
    given = facts(record, _Product)
    return Case((_multiplied(given.dtype, given.M, given.N, given.K),), repeated=True)


@family("squares-best", subject="products")
def best_product(record: Record) -> Case:
    """Predict the best rate among several square matmuls."""
    given = facts(record, _BestProduct)
    return Case(tuple(_multiplied(given.dtype, n, n, n) for n in dict.fromkeys(given.best_of)), repeated=True)


# -- convolutions ------------------------------------------------------------------------------------------------------

DIRECTIONS = ("forward", "backward-weights", "backward-inputs")


@dataclass(frozen=True)
class _Convolution:
    """Convolution of N images (W x H, C channels) with K filters (S x R)."""

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
        """Return the output height and width; raise UnsupportedError if the source states other ones."""
        spans = ((self.H, self.pad_h, self.R, self.stride_h), (self.W, self.pad_w, self.S, self.stride_w))
        found = tuple((size + 2 * pad - window) // stride + 1 for size, pad, window, stride in spans)
        stated = (self.out_h or found[0], self.out_w or found[1])
        if min(found) < 1 or found != stated:
            raise UnsupportedError(f"inputs: a result of {stated[0]} by {stated[1]}, expected {found[0]} by {found[1]}")
        return found[0], found[1]


@family("deepbench-conv", subject="convolutions")
def convolution(record: Record) -> Case:
    """Predict a convolution or its gradient; all three are contractions over the same index points."""
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


# -- memory streams ----------------------------------------------------------------------------------------------------


#: Streams by name, with the number of arrays read and written. Dot products and sums write one number.
_STREAMS = {
    "init": (0, 1), "read": (1, 0), "dot": (2, 0), "copy": (1, 1), "scale": (1, 1), "mul": (1, 1), "add": (2, 1),
    "triad": (2, 1),
}  # fmt: skip


@dataclass(frozen=True)
class _Stream:
    op: Annotated[str, one_of(_STREAMS)]
    #: BabelStream's default; any size beyond the caches has the same rate
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
    """Predict a stream, whose rate counts bytes read and written."""
    given = facts(record, _Stream)
    elements = format_of(given.dtype)
    moved = sum(_STREAMS[given.op]) * given.elements * elements.bytes
    return Case((Run(_stream(given.op, elements), {"N": given.elements}, moved),), repeated=True)


# -- attention ---------------------------------------------------------------------------------------------------------


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
    """Predict fused attention; its rate counts unmasked pairs, half of the square if causal."""
    given = facts(record, _Attention)
    shared, of_values = given.kv_heads not in (None, given.heads), given.value_dim or given.head_dim
    g = _attention(format_of(given.dtype), given.direction, causal=given.causal, shared=shared)
    sizes = {"B": given.B, "H": given.heads, "S": given.S, "K": given.head_dim, "V": of_values}
    sizes |= {"G": given.kv_heads} if shared and given.kv_heads else {}
    # Dao 2023 (arXiv 2307.08691), section 4.1: 4*S^2*K per head, backward 2.5 times as many
    passes = {"forward": Fraction(1), "backward": Fraction(5, 2), "forward+backward": Fraction(7, 2)}[given.direction]
    pairs = Fraction(given.S**2, 2 if given.causal else 1)
    work = 2 * given.B * given.heads * (given.head_dim + of_values) * pairs * passes
    return Case((Run(g, sizes, work, ("backward",) if given.direction == "backward" else ()),), repeated=True)


# -- collectives -------------------------------------------------------------------------------------------------------

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
    """Predict an all-reduce; the bus bandwidth counts the 2(n - 1)/n of its bytes that a ring sends per rank.

    Sizes in nccl-tests are powers of two, printed with decimal suffixes: 65K is 65,536 bytes.
    """
    given = facts(record, _Collective)
    printed = int(given.size.rstrip("KMG")) * _SUFFIXES[given.size.lstrip("0123456789")]
    size = min((2**e for e in range(2, 50)), key=lambda n: abs(n - printed))
    with cg.Graph("all_reduce", dtype="fp32") as g:
        g.output(cg.ops.collective(g.input("x", (size // 4,)), given.op, given.gpus))
    return Case((Run(g, {}, Fraction(2 * (given.gpus - 1) * size, given.gpus)),), repeated=True)


# -- models ------------------------------------------------------------------------------------------------------------

#: Precision policies by their published names.
_POLICIES = {
    "fp32": "fp32", "bf16": "bf16", "amp_bf16": "bf16-mixed", "amp_fp16": "fp16-mixed", "amp_fp8": "fp8",
    "bf16 autocast": "bf16-mixed", "fp16 autocast": "fp16-mixed",
}  # fmt: skip

#: Maximum relative difference between published and computed multiply-adds; sources include norms and biases.
_ANOTHER_MODEL = 0.1


# -- vision models -----------------------------------------------------------------------------------------------------


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
    """Predict a vision model on square images; the memory format changes neither FLOPs nor bytes."""
    given = facts(record, _Vision)
    g = _vision(given.zoo, given.precision, given.phase, compiled=given.compiled)
    stated, own = given.gmacs, _multiply_adds(given.zoo, given.image) / 1e9
    if stated is not None and abs(own / float(stated) - 1) > _ANOTHER_MODEL:
        raise UnsupportedError(f"inputs: gmacs {stated}, expected the {own:.2f} of {given.zoo}: another model")
    return Case((Run(g, {"B": given.batch, "R": given.image}, Fraction(given.batch)),))


# -- decoder training passes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoder:
    """Forward and backward pass of a decoder with learned positions, on each of many devices."""

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
    """Return forward and backward pass, without optimizer and network, which are distributed."""
    g = with_loss(cg.models.load(name, dtype="fp32", symbolic=True))
    policy = cg.every_block() if checkpointed else None
    return cg.backward(cg.apply_precision(g, _POLICIES[precision]), checkpoint=policy)


@family("foundry", subject="training")
def decoder(record: Record) -> Case:
    """Predict forward and backward pass of a micro-batch of a GPT-2 architecture with the given dimensions."""
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


# -- traced torch programs ---------------------------------------------------------------------------------------------

_PHASES = {"forward": ("forward",), "backward": ("backward",), "full": ()}
#: Providers that run the program unmodified; others have custom kernels.
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
    """Predict a call of plain eager torch with its backward pass; caches are flushed before each run."""
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
    # memory allocated before the backward pass is not counted
    phases = ("backward",) if given.mode == "backward" else ()
    return Case(subject=program.subject, peak=Run(graph, program.bound(record.inputs), phases=phases))


# -- training steps ----------------------------------------------------------------------------------------------------

#: Residuals of a Llama layer with selective checkpointing of every other matmul: torchtitan counts matmuls in program
#: order (q, k, v, back, gate, up, down) and saves odd ones and attention (torchtitan/parallelisms/
#: parallelize_llama.py, `_apply_ac_to_transformer_block`, at the date of its records).
_KEPT = ("q/matmul", "v/matmul", "layers/attention", "gate/matmul", "down/matmul")
#: Checkpointing policies by their published names.
_AGAIN = {
    "none": None, "full": cg.every_block(), "every block": cg.every_block(),
    **dict.fromkeys(
        ("selective", "selective (every other matmul)", "per-op selective"), cg.every_block(keep=_KEPT)
    ),
}  # fmt: skip
#: Formats of parameters and matmuls: FSDP2 shards fp32 parameters, and gathers and computes in bf16.
_TRAINING_POLICIES = {
    "fp32": "fp32", "bf16": "bf16", "bf16-true": "bf16", "bf16 FSDP2 mixed (fp32 params, bf16 compute)": "bf16-master",
}  # fmt: skip
#: Block-quantized optimizer states by the optimizer's published name.
_STATES = {
    "bnb 8-bit": "bitsandbytes-8bit", "AdamW8bit": "bitsandbytes-8bit", "ao 8-bit": "torchao-8bit",
    "ao 4-bit": "torchao-4bit",
}  # fmt: skip
#: Default LoRA rank and targets: query and value, as in Hu et al. 2021 (arXiv 2106.09685, section 4.2).
_RANK, _ADAPTED = 8, "*/attention/[qv]"
#: Modules that stay in high precision with adapters.
_WIDE = ("head", "lora_a", "lora_b")


@dataclass(frozen=True)
class _Trained:
    """A training step as published; batch and rates are per device."""

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
        """Return the step of one rank; float8 matmuls need their own format only if a time was measured."""
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
        """Global sizes."""
        return {"B": self.batch * (1 if "CP" in self.sharding else self.gpus), "S": self.seq}


@cache
def _step(
    model: str, policy: str, optimizer: str, method: str, weights: str, again: str, chunks: int, *, at_once: bool
) -> cg.Graph:
    """Return a single-device step."""
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
    """Return the loss function; torchtitan and torchtune cast logits to fp32 first."""
    if g.loss != "cross_entropy":
        return lambda *made: cg.reduce(made[-1], " ".join(f"a{i}" for i in range(made[-1].ndim)) + " -> ", "mean")
    return cg.chunked_cross_entropy(chunks, dtype="fp32")


@family("training-memory", subject="memory of training")
def training_memory_of(record: Record) -> Case:
    """Predict peak memory of a step, or weight memory."""
    given = facts(record, _Trained)
    whole = str(record.inputs.get("what", "")).startswith("weights")
    return Case(peak=Run(given.graph(timed=False), given.sizes), params=whole)


@family("training-speed", subject="training")
def timed(record: Record) -> Case:
    """Predict the step time of one rank, with communication; a rate is per device."""
    given = facts(record, _Trained)
    work = given.batch * (1 if record.unit == "samples/s" else given.seq)
    if "CP" in given.sharding:
        return Case((Run(given.graph(timed=True), given.sizes, Fraction(work, given.gpus)),), assumed=True)
    return Case((Run(given.graph(timed=True), given.sizes, Fraction(work)),), assumed=True)


@dataclass(frozen=True)
class _OnHost:
    """A step with the optimizer on the host, and everything else sharded; each rank has its own sequences."""

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
        """Return Liger's number of loss chunks (ops/fused_linear_cross_entropy.py): V/D, with power-of-two sizes."""
        sizes, tokens = cg.models.load(self.model).defaults, self.B * self.S
        rows = -(-tokens // -(-sizes["V"] // sizes["D"]))
        found = -(-tokens // 2 ** (rows - 1).bit_length())
        return next(n for n in range(found, 0, -1) if not self.S % n)  # equal chunks


@cache
def _on_host(model: str, chunks: int, ranks: int, *, again: bool) -> cg.Graph:
    step = cg.training_step(
        cg.models.load(model, dtype="bf16"), cg.chunked_cross_entropy(chunks), precision="bf16-master",
        checkpoint=cg.every_block() if again else None,
    )  # fmt: skip
    return cg.offload(cg.parallelize(step, dp=ranks, zero=3), "optimizer")


@family("stas-zero3", subject="training")
def on_host(record: Record) -> Case:
    """Predict a step with the optimizer on the host; transfers have a time, host updates do not."""
    given = facts(record, _OnHost)
    sizes = {"B": given.B * given.gpus, "S": given.S}
    if record.what == "peak memory":
        return Case(subject="memory of training", peak=Run(given.graph(), sizes))
    one = cg.models.load(given.model)
    own = Fraction(3 * cg.matmul_flops(one, B=given.B, S=given.S))  # causal attention halved, without recomputation
    return Case((Run(given.graph(), sizes, own),), assumed=True)


# -- recurrent layers --------------------------------------------------------------------------------------------------
# The input projection is excluded: inputs are added to the gates, and each step has one matmul with the state.

#: Number of gates, each with a square matrix for the state.
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
    """Return a pass over all steps: per step a matmul, and a kernel that computes the state from the gates."""
    N, H, T = cg.dims("N H T")
    with cg.Graph("recurrent", dtype=elements.name) as g:
        if direction == "backward-weights":  # all steps at once
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
    """Predict a recurrent layer, or its gradient with respect to states or weights."""
    given = facts(record, _Layer)
    g = _layer(_GATES[given.op], format_of(given.dtype), given.direction)
    return Case((Run(g, {"N": given.N, "H": given.hidden, "T": given.timesteps}),), repeated=True)
