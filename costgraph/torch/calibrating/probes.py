"""What is run to see how fast a device is: streams through memory, products, elementwise work and empty launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import conv2d

__all__ = ["FORMATS", "Probe", "elementwise", "launches", "products", "streams"]

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats whose matrix rate is measured everywhere; tf32 is a way of CUDA devices to multiply fp32."""

_LAUNCHES = 1000


@dataclass(frozen=True)
class Probe:
    """A call that shows a rate."""

    key: tuple[str, str, str]
    """what the rate is of (`bandwidth`, `matmul`, `pointwise`, `transcendental` or `launch`), which one of these, and
    the size"""
    how: str
    """what runs, for people"""
    amount: int
    """bytes, FLOPs or launches of one call"""
    call: Callable[[], Any]
    """what is timed"""
    family: str
    """what is the same but for the size"""


def streams(pool: torch.Tensor, sizes: list[int]) -> Iterator[Probe]:
    """Yield streams through working sets, of sizes in bytes, that are the first bytes of a pool.

    Bytes are those that the cost model counts, each operand read once and each result written once. What a processor
    moves besides (a line that is read before it is overwritten) is part of how fast it appears. The pool is fp32, of
    rank one, as large as the largest set; written to before, as memory that never was is no memory.
    """
    for size in sizes:
        x = pool[: size // 4]
        n, h, t = len(x), len(x) // 2, len(x) // 3
        a, b, c = (x[i * t : (i + 1) * t] for i in range(3))
        total, largest = x.new_empty(()), x.new_empty(())
        yield from (
            _stream("read", "sum", 4 * n, size, partial(torch.sum, x, 0, out=total)),
            _stream("read", "amax", 4 * n, size, partial(torch.amax, x, 0, out=largest)),
            _stream("write", "fill", 4 * n, size, partial(x.fill_, 0.5)),
            _stream("copy", "copy", 8 * h, size, partial(x[:h].copy_, x[h : 2 * h])),
            _stream("triad", "a = b + 2 c", 12 * t, size, partial(torch.add, b, c, alpha=2, out=a)),
            # written where it was read: a processor that fetches a line before it writes to it has it by then
            _stream("update", "a = 1 a in place", 8 * n, size, partial(x.mul_, 1.0)),
        )


def _stream(what: str, how: str, moved: int, size: int, call: Callable[[], Any]) -> Probe:
    return Probe(("bandwidth", what, str(size)), how, moved, call, f"{what} by {how}")


def products(device: torch.device, sizes: list[int]) -> Iterator[Probe]:
    """Yield square matrix products by format, smaller ones first, both ways a weight may lie, and a convolution.

    Entries are random: a device that saves power on zeros multiplies them faster than data.
    """
    formats = [*FORMATS, "tf32"] if device.type == "cuda" else [*FORMATS]
    for name in formats:
        precision = "high" if name == "tf32" else "highest"
        dtype = FORMATS.get(name, torch.float32)
        for n in sizes:
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            for way, right in (("a @ b", b), ("a @ b.T", b.T)):
                call = partial(_product, precision, a, right)
                yield Probe(("matmul", name, str(n)), f"{way} of {n} x {n}", 2 * n**3, call, f"{name} {way}")
        # cuDNN takes tf32 for fp32 convolutions unless told not to, and fp64 ones are nobody's
        if name in ("bf16", "fp16") or (name == "fp32" and device.type == "cpu"):
            yield _convolution(device, name, dtype)


def _convolution(device: torch.device, name: str, dtype: torch.dtype) -> Probe:
    # of another library than products, and faster than those on some processors
    b, c, edge = (2, 256, 28) if device.type == "cpu" else (64, 256, 56)
    image = torch.randn(b, c, edge, edge, device=device).to(dtype)
    window = torch.randn(c, c, 3, 3, device=device).to(dtype)
    flops = 2 * b * c * c * 9 * (edge - 2) ** 2
    how = f"3 x 3 convolution of {b} images of {edge} x {edge} with {c} channels"
    return Probe(("matmul", name, "convolution"), how, flops, partial(conv2d, image, window), f"{name} convolution")


def _product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def elementwise(device: torch.device, sizes: list[int]) -> Iterator[Probe]:
    """Yield elementwise work in fp32 on sets of some bytes that stay in a cache: arithmetic, and transcendentals.

    FLOPs as the cost model counts them: one for each sum and product, one for each transcendental.
    """
    for size in sizes:
        n = size // 16
        x, y, z, out = (torch.rand(n, device=device) + 0.5 for _ in range(4))
        yield _elementwise("pointwise", "add", n, 1, partial(torch.add, x, y, out=out))
        yield _elementwise("pointwise", "addcmul", n, 2, partial(torch.addcmul, x, y, z, out=out))
        for name in ("exp", "log", "tanh", "erf", "sin"):
            yield _elementwise("transcendental", name, n, 1, partial(getattr(torch, name), x, out=out))


def _elementwise(kind: str, name: str, n: int, each: int, call: Callable[[], Any]) -> Probe:
    return Probe((kind, name, str(16 * n)), f"{name} of {n} elements", each * n, call, name)


def launches(device: torch.device) -> Iterator[Probe]:
    """Yield ops that do next to nothing, one after the other."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    yield Probe(
        ("launch", "op", "1"), f"{_LAUNCHES} sums of one element, one after the other", _LAUNCHES, run, "launch"
    )
