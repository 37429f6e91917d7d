"""Kernels whose costs are stated, and what their gradients cost: torch has one kernel each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....errors import UnsupportedError
from ....graph.graph import apply
from ....graph.strides import contiguous
from ....graph.tensor import Tensor
from ....ops.stated import Backward, Opaque
from ..call import Call, Counts, Spec
from ..rules.table import RULES
from ..rules.workspaces import workspace_of
from .table import translation

__all__ = ["like", "pulled", "stated"]

#: Forward kernels: arguments, and places of results, that the kernel of their gradients reads.
_READ: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "adaptive_max_pool2d": ((), (1,)), "adaptive_max_pool3d": ((), (1,)),
    "col2im": ((), ()),
    "grid_sampler_2d": (("input", "grid"), ()), "grid_sampler_3d": (("input", "grid"), ()),
    **dict.fromkeys(("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
                     "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
                     "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), ((), ())),
}  # fmt: skip
#: Kernels of gradients that torch has under another name, and that move elements alone: of `col2im` the windows.
_COPIES = frozenset({"col2im_backward"})


def like(t: Tensor) -> Spec:
    """Return how a tensor looks."""
    return Spec(t.sizes, t.strides, t.dtype)


def _seen(call: Call, **more: Any) -> Call:
    """Return a call as rules see it."""
    given = {k: like(v) if isinstance(v, Tensor) else v for k, v in call.arguments.items()}
    return replace(call, arguments={**given, **more})


def _counted(call: Call) -> Counts:
    counts = Counts() if call.name in _COPIES else RULES[call.name](call)
    if counts is None:
        raise UnsupportedError(f"{call.name}: no rule says what it costs, expected other arguments")
    return replace(counts, workspace=counts.workspace + workspace_of(call))


def stated(call: Call) -> Sequence[Tensor]:
    """Return what a kernel makes, and state what it costs: operands and results are touched whole."""
    return _made(call, None)


@translation(*_READ)
def pulled(call: Call) -> Sequence[Tensor]:
    """Return what a kernel makes that there is a kernel of gradients for, and state what both cost.

    One that no table has reads the gradient alone.
    """
    names = [k for k, v in call.arguments.items() if isinstance(v, Tensor)]
    read, made = _READ.get(call.name, ((), ()))
    back, places = _counted(_backward_of(call)), tuple(map(names.index, read))
    flops = back.matmul, back.pointwise, back.transcendental
    return _made(call, Backward(*flops, places, made, None, None, back.workspace))


def _made(call: Call, backward: Backward | None) -> Sequence[Tensor]:
    counts = _counted(_seen(call))
    kind = Opaque(
        matmul=counts.matmul,
        pointwise=counts.pointwise,
        transcendental=counts.transcendental,
        outputs=tuple((t.sizes, t.dtype) for t in call.results),
        backward=backward,
    )
    return apply(kind, [t for t in call.arguments.values() if isinstance(t, Tensor)], call.name)


def _backward_of(call: Call) -> Call:
    """Return the call of the kernel of the gradients of all operands, all of them dense."""
    given = _seen(call, grad_output=_dense(call.out))
    results = tuple(_dense(v) for v in call.arguments.values() if isinstance(v, Tensor))
    return replace(given, name=f"{call.name}_backward", inplace=False, results=results)


def _dense(t: Tensor | Spec) -> Spec:
    return Spec(t.sizes, contiguous(t.sizes), t.dtype)


@translation(*(f"{name}_backward" for name in _READ))
def stated_backward(call: Call) -> Sequence[Tensor] | None:
    """Return the gradients that one kernel makes; None where not all of them are asked for."""
    return stated(call) if all(call.get("output_mask") or (True,)) else None
