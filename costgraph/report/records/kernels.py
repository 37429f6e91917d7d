"""Families of kernels, declared with the library's own blocks: products, convolutions, streams, attention, others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from typing import Annotated

import costgraph as cg

from ...errors import UnsupportedError
from ...notation.door import Rule
from ...notation.records import Count, Size, one_of
from .case import Case, Run, family
from .record import Record, facts

__all__ = ["DIRECTIONS", "format_of"]


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
