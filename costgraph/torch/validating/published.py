"""Programs of plain torch whose times others have published, traced with symbolic sizes and the gradients they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import UnsupportedError
from ...graph.graph import Graph
from ..tracing import trace

__all__ = ["PROGRAMS", "Program", "traced"]

Tensors = Any
_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Program:
    """A call of plain torch, and what it is called with."""

    subject: str
    """what limits are stated for"""
    call: Callable[..., Any]
    """of the tensors, to one or several results"""
    tensors: Mapping[str, str]
    """axes of each, by name; those of indices and of what wants no gradient are marked with ids and fixed"""
    made: Sequence[str] = ()
    """axes of the results, whose gradients are given; none of a loss"""
    sizes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """facts that have the size of an axis, of which the first is taken that is stated; `B*T` is a product of two. By
    default it is the fact of the axis' own name"""
    format: str = ""
    """number format where nothing states one"""

    def bound(self, facts: Mapping[str, object]) -> dict[str, int]:
        """Return the size of each axis from facts of a record.

        Raises
        ------
        UnsupportedError
            If one is missing or no positive whole number.
        """
        axes = dict.fromkeys(axis for text in self.tensors.values() for axis in _axes(text))
        return {axis: _size(facts, self.sizes.get(axis, (axis,))) for axis in axes}


def _axes(text: str) -> list[str]:
    return [word for word in text.split() if word not in ("ids", "fixed", "1")]


def _size(facts: Mapping[str, object], choices: Sequence[str]) -> int:
    for choice in choices:
        found = [facts.get(name) for name in choice.split("*")]
        if all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**63 for n in found):
            return prod(n for n in found if isinstance(n, int))
    raise UnsupportedError(f"inputs: no size {' or '.join(choices)}, expected a positive whole number")


class _Given(torch.autograd.Function):
    """A loss whose gradients by some tensors are given: neither pass costs anything."""

    @staticmethod
    def forward(ctx: Any, *both: torch.Tensor) -> torch.Tensor:
        """Keep the gradients, which are the second half."""
        ctx.save_for_backward(*both[len(both) // 2 :])
        return both[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return what was given."""
        given = ctx.saved_tensors
        return (*given, *(None for _ in given))


class _Called(nn.Module):
    """A program as a module that returns a loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Call, and start the backward pass from gradients that are given."""
        many = len(self.program.tensors)
        found = self.program.call(*tensors[:many])
        if not self.program.made:
            return found  # type: ignore[no-any-return]  # a loss
        results = found if isinstance(found, tuple) else (found,)
        return _Given.apply(*results, *tensors[many:])  # type: ignore[no-any-return, no-untyped-call]  # torch has no types


@cache
def traced(name: str, format: str) -> Graph:
    """Return forward and backward pass of a program, its sizes symbols.

    Parameters
    ----------
    name : str
        Of PROGRAMS.
    format : str
        Number format as torch names it, such as bfloat16; that of the program where it is empty.

    Raises
    ------
    UnsupportedError
        If there is no such format.
    """
    program = PROGRAMS[name]
    if (chosen := format or program.format) not in _FORMATS:
        raise UnsupportedError(f"inputs: dtype {chosen!r}, expected one of {', '.join(_FORMATS)}")
    texts = [*program.tensors.values(), *(f"{text} fixed" for text in program.made)]
    axes = dict.fromkeys(axis for text in texts for axis in _axes(text))
    # even, as half of an axis may be asked for, and no two alike
    hints = {axis: 2 * (11 + i) for i, axis in enumerate(axes)}
    tensors = [_tensor(text.split(), hints, _FORMATS[chosen]) for text in texts]
    names = [[None if axis == "1" else axis for axis in text.split() if axis not in ("ids", "fixed")] for text in texts]
    return trace(_Called(program), *tensors, dims=names, train=True, name=name, device="cuda")


def _tensor(words: Sequence[str], hints: Mapping[str, int], format: torch.dtype) -> torch.Tensor:
    shape = [1 if word == "1" else hints[word] for word in words if word not in ("ids", "fixed")]
    if "ids" in words:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    return torch.empty(shape, dtype=format, device="meta", requires_grad="fixed" not in words)


# -- programs ------------------------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `LlamaRMSNorm` of transformers."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def _added_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual, and its norm."""
    total = residual + x
    return _rms_norm(total, weight), total


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, 1e-6)


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `LlamaMLP` of transformers."""

    def call(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = act(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(inner, down)

    return call


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `apply_rotary_pos_emb` of transformers, on heads that lie behind positions in memory."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple((x * cos + _turned(x) * sin).transpose(1, 2) for x in (q, k))


_MLP: dict[str, Any] = {
    "tensors": {"x": "R D", "gate": "F D", "up": "F D", "down": "D F"}, "made": ("R D",),
    "sizes": {"R": ("bsz*T", "B*T", "BT"), "D": ("hidden_size",), "F": ("intermediate_size",)},
}  # fmt: skip
_ROWS = {"R": ("B*T", "BT")}
_NORM = {"M": ("M", "BT"), "H": ("H", "N", "hidden_size")}

#: By the name of the kernel that they are the plain form of.
PROGRAMS: dict[str, Program] = {
    "rms_norm": Program("norms", _rms_norm, {"x": "M H", "weight": "H"}, ("M H",), _NORM),
    "fused_add_rms_norm": Program(
        "norms", _added_norm, {"x": "M H", "residual": "M H", "weight": "H"}, ("M H", "M H"), _NORM
    ),
    "layer_norm": Program("norms", _layer_norm, {"x": "M H", "weight": "H", "bias": "H"}, ("M H",), _NORM),
    "softmax": Program("softmax", lambda x: functional.softmax(x, -1), {"x": "M N"}, ("M N",)),
    "relu_squared": Program("pointwise", lambda x: functional.relu(x).square(), {"x": "M N"}, ("M N",)),
    "cross_entropy": Program(
        "losses", functional.cross_entropy, {"x": "R V", "targets": "R ids"}, (), _ROWS, "float32"
    ),
    "fused_linear_cross_entropy": Program(
        "losses", _head_loss, {"x": "R H", "weight": "V H", "targets": "R ids"}, (),
        {"R": ("BT", "B*T"), "H": ("H", "hidden_size"), "V": ("V", "vocab_size")},
    ),
    "embedding": Program("lookups", functional.embedding, {"ids": "B T ids", "table": "V D"}, ("B T D",)),
    "swiglu": Program("mlp", _gated(functional.silu), **_MLP),
    "tiled_swiglu": Program("mlp", _gated(functional.silu), **_MLP),
    "geglu": Program("mlp", _gated(_gelu_tanh), **_MLP),
    "tiled_geglu": Program("mlp", _gated(_gelu_tanh), **_MLP),
    "rope": Program(
        "pointwise", _rotary, {"q": "1 T Q K", "k": "1 T G K", "cos": "1 T K fixed", "sin": "1 T K fixed"},
        ("1 T Q K", "1 T G K"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",), "K": ("head_dim",)},
    ),
}  # fmt: skip
