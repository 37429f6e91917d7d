"""Gradients of Fourier transforms, and of views of complex numbers: torch's convention, that by the conjugate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algebra.polynomial import ONE
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.fill import Revised, pad
from ...ops.layout import contiguous_copy, slice_axis
from ...ops.pointwise import pointwise
from ...ops.spectra import Fourier, ViewAs, real_part, view_as
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES

_BACK = {"real": "complex", "complex": "real", "conjugate": "conjugate"}


@vjp(ViewAs)
def _view_as(pull: Pull[ViewAs]) -> Sequence[Tensor | None]:
    (g,) = pull.grads
    assert g is not None
    g = contiguous_copy(g) if pull.kind.what == "real" else g  # pairs side by side
    return [view_as(g, _BACK[pull.kind.what])]


@vjp(Fourier)
def _fourier(pull: Pull[Fourier]) -> Sequence[Tensor | None]:
    """Transform the other way, with the same scale: by the conjugate of a matrix that is symmetric."""
    (g,), (x,), kind = pull.grads, pull.op.operands, pull.kind
    assert g is not None
    axis, back = kind.axes[-1], replace(kind, inverse=not kind.inverse, last=None)
    if kind.last is None:
        made = apply(back, [g], "fft")[0]
        return [made if x.dtype.kind == "complex" else real_part(made)]
    if x.dtype.kind != "complex":  # the other half of the spectrum had no part in the result
        g = g if kind.last == x.sizes[axis] else pad(g, axis, 0, x.sizes[axis])
        return [real_part(apply(back, [g], "fft")[0])]
    half = x.sizes[axis]
    made = apply(replace(back, last=half), [g], "fft")[0]
    twice = kind.last - half  # points that stand for their mirror images as well
    if not twice:
        return [made]
    part = pointwise("mul", slice_axis(made, axis, 1, twice), 2, inplace=True)
    return apply(Revised(axes=(axis,), starts=(ONE,), steps=(1,)), [made, part], "revised")
