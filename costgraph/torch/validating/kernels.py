"""Single ops, each declared with the public names, and beside it the call of torch that does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import costgraph as cg

from ..lowering.formats import FORMATS
from .case import Case, Function, Program

__all__ = ["KERNELS", "Kernel"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """One op on tensors, as it is declared and as torch calls it."""

    axes: Mapping[str, str]
    """names of the axes of each input; `V: N` are N indices below V"""
    build: Callable[..., cg.Tensor]
    """declares it, given the inputs"""
    call: Callable[..., Any]
    """runs it, given tensors: inputs, then weights"""
    into: Callable[..., Any] | None = None
    """runs it, given its result and the tensors: where torch can write into a tensor that is there"""
    weights: Mapping[str, str] = field(default_factory=dict)
    """names of the axes of what the declaration makes itself"""
    fixed: tuple[str, ...] = ()
    """sizes that the call needs as numbers"""

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of its dimensions."""
        parsed = [_parsed(text) for text in (*self.axes.values(), *self.weights.values())]
        names = [name for most, axes in parsed for name in (*axes, most) if name and not name.isdigit()]
        return tuple(dict.fromkeys(names))

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph, its sizes symbols."""
        with cg.Graph(case.subject, dtype=case.dtype) as graph:
            inputs = []
            for name, text in self.axes.items():
                most, axes = _parsed(text)
                inputs.append(graph.input(name, [*map(_size, axes)], dtype="int64" if most else None))
            graph.output(self.build(*inputs))
        return graph

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the call on random numbers."""
        parsed = [_parsed(text) for text in (*self.axes.values(), *self.weights.values())]
        values = tuple(_values(most, axes, case, device) for most, axes in parsed)
        names = [[None if a.isdigit() or a in self.fixed else a for a in axes] for _, axes in parsed]
        into = None
        if self.into is not None and device.type == "cpu":
            into = partial(self.into, self.call(*values), *values)
        return Program(Function(self.call), values, names, into=into)


def _parsed(text: str) -> tuple[str, list[str]]:
    most, _, axes = text.rpartition(":")
    return most, axes.split()


def _size(axis: str) -> Any:
    return int(axis) if axis.isdigit() else cg.dims(axis)


def _values(most: str, axes: list[str], case: Case, device: torch.device) -> torch.Tensor:
    shape = [int(a) if a.isdigit() else case.sizes[a] for a in axes]
    if most:
        return torch.randint(case.sizes[most], shape, device=device)
    return torch.randn(shape, device=device).to(FORMATS[case.dtype])


# -- what is run ---------------------------------------------------------------------------------------------------

_CELLS = {"x": "R C"}
_HEADS = {"q": "B H S K", "k": "B H S K", "v": "B H S K"}


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(2, 3)
    scaled = scores * q.shape[-1] ** -0.5
    del scores
    shares = torch.softmax(scaled, -1)
    del scaled
    return shares @ v


def _attention(causal: bool) -> Kernel:
    return Kernel(
        _HEADS,
        lambda q, k, v: cg.attention(q, k, v, causal=causal, kernel="flash"),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


def _conv(window: int) -> Kernel:
    size, padding = (window, window), window // 2
    return Kernel(
        {"x": "B C X X"},
        lambda x: cg.conv(x, "b c h w -> b o h w", window=size, padding=padding, o=cg.dims("O")),
        lambda x, w: functional.conv2d(x, w, padding=padding),
        weights={"w": f"O C {window} {window}"},
    )


def _depthwise(window: int) -> Kernel:
    size, padding, C = (window, window), window // 2, cg.dims("C")
    return Kernel(
        {"x": "B C X X"},
        lambda x: cg.conv(x, "b c h w -> b o h w", window=size, padding=padding, groups=C, o=C),
        lambda x, w: functional.conv2d(x, w, padding=padding, groups=w.shape[0]),
        weights={"w": f"C 1 {window} {window}"},
        fixed=("C",),
    )


def _rows(pattern: str, how: str, call: Callable[..., Any], into: Callable[..., Any]) -> Kernel:
    return Kernel(_CELLS, lambda x: cg.reduce(x, pattern, how), call, into)


KERNELS: dict[str, Kernel] = {
    "matmul": Kernel(
        {"a": "M K", "b": "K N"},
        lambda a, b: cg.einsum(a, b, "m k, k n -> m n"),
        torch.mm,
        lambda out, a, b: torch.mm(a, b, out=out),
    ),
    "batched matmul": Kernel(
        {"a": "B M K", "b": "B K N"},
        lambda a, b: cg.einsum(a, b, "b m k, b k n -> b m n"),
        torch.bmm,
        lambda out, a, b: torch.bmm(a, b, out=out),
    ),
    "linear": Kernel(
        {"x": "M K"},
        lambda x: cg.linear(x, "m k -> m n", n=cg.dims("N"), bias=True),
        functional.linear,
        weights={"w": "N K", "b": "N"},
    ),
    "add": Kernel(
        {"x": "R C", "y": "R C"}, lambda x, y: x + y, torch.add, lambda out, x, y: torch.add(x, y, out=out)
    ),
    "relu": Kernel(_CELLS, cg.relu, torch.relu, lambda out, x: torch.clamp_min(x, 0, out=out)),
    "gelu": Kernel(_CELLS, cg.gelu, functional.gelu, lambda out, x: aten.gelu.out(x, out=out)),
    "silu": Kernel(_CELLS, cg.silu, functional.silu, lambda out, x: aten.silu.out(x, out=out)),
    "exp": Kernel(_CELLS, lambda x: cg.ops.pointwise("exp", x), torch.exp, lambda out, x: torch.exp(x, out=out)),
    "transpose": Kernel(
        _CELLS,
        lambda x: cg.ops.contiguous_copy(cg.rearrange(x, "r c -> c r")),
        lambda x: x.t().contiguous(),
        lambda out, x: out.copy_(x.t()),
    ),
    "sum of rows": _rows("r c -> r", "sum", lambda x: x.sum(1), lambda out, x: torch.sum(x, 1, out=out)),
    "sum of columns": _rows("r c -> c", "sum", lambda x: x.sum(0), lambda out, x: torch.sum(x, 0, out=out)),
    "max of rows": _rows("r c -> r", "max", lambda x: x.amax(1), lambda out, x: torch.amax(x, 1, out=out)),
    "softmax": Kernel(
        _CELLS,
        lambda x: cg.softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda out, x: aten._softmax.out(x, -1, False, out=out),
    ),
    "layer norm": Kernel(_CELLS, cg.layer_norm, lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
                         weights={"w": "C", "b": "C"}, fixed=("C",)),
    "rms norm": Kernel(_CELLS, cg.rms_norm, lambda x, w: functional.rms_norm(x, w.shape, w),
                       weights={"w": "C"}, fixed=("C",)),
    "cross entropy": Kernel(
        {"logits": "R C", "targets": "C: R"}, cg.cross_entropy, lambda x, y: functional.cross_entropy(x, y)
    ),
    "embedding": Kernel(
        {"ids": "V: R", "table": "V C"},
        cg.embedding,
        functional.embedding,
        lambda out, ids, table: torch.index_select(table, 0, ids, out=out),
    ),
    "attention eager": Kernel(_HEADS, lambda q, k, v: cg.attention(q, k, v, causal=False, kernel="eager"), _eager),
    "attention flash": _attention(causal=False),
    "attention flash causal": _attention(causal=True),
    "convolution 1x1": _conv(1),
    "convolution 3x3": _conv(3),
    "convolution depthwise 3x3": _depthwise(3),
}  # fmt: skip
"""Subjects that are single ops, by name."""
