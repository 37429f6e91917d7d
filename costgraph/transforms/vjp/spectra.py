"""Gradients of Fourier transforms, and of views of complex numbers: torch's convention, that by the conjugate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algebra.polynomial import ONE
from ...graph.graph import apply, current_graph
from ...graph.tensor import Tensor
from ...ops.blocks import kernel
from ...ops.fill import Revised, pad
from ...ops.layout import contiguous_copy, slice_axis
from ...ops.pointwise import pointwise
from ...ops.spectra import Fourier, ViewAs, joined, real_part, view_as
from .common import also_saved
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES

_BACK = {"real": "complex", "complex": "real", "conjugate": "conjugate"}


@vjp(ViewAs)
def _view_as(pull: Pull[ViewAs]) -> Sequence[Tensor | None]:
    (g,) = pull.grads
    assert g is not None
    g = contiguous_copy(g) if pull.kind.what == "real" else g  # pairs side by side
    return [view_as(g, _BACK[pull.kind.what])]


def _applied(kind: Fourier, x: Tensor) -> Tensor:
    """Transform, and copy first where the axes that are not transformed are not one in memory."""
    workspace = joined(x, kind.axes)
    if current_graph().fused or not workspace:
        return apply(kind, [x], "fft")[0]
    with kernel("fft", workspace=workspace, backward="ops") as body:
        made = apply(kind, [x], "fft")[0]
    return body.export(made)


@vjp(Fourier)
def _fourier(pull: Pull[Fourier]) -> Sequence[Tensor | None]:
    """Transform the other way, with the same scale: by the conjugate of a matrix that is symmetric."""
    (g,), (x,), kind = pull.grads, pull.op.operands, pull.kind
    assert g is not None
    if x.dtype.kind != "complex":
        also_saved(pull, x)  # torch asks it for a size
    axis, back = kind.axes[-1], replace(kind, inverse=not kind.inverse, last=None)
    if kind.last is None:
        made = _applied(back, g)
        return [made if x.dtype.kind == "complex" else real_part(made)]
    if x.dtype.kind != "complex":  # the other half of the spectrum had no part in the result
        g = g if kind.last == x.sizes[axis] else pad(g, axis, 0, x.sizes[axis])
        return [real_part(_applied(back, g))]
    half = x.sizes[axis]
    made = _applied(replace(back, last=half), g)
    twice = kind.last - half  # points that stand for their mirror images as well
    if not twice:
        return [made]
    part = pointwise("mul", slice_axis(made, axis, 1, twice), 2, inplace=True)
    return apply(Revised(axes=(axis,), starts=(ONE,), steps=(1,)), [made, part], "revised")
