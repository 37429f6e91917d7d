"""Fourier transforms, and views of complex numbers."""

from __future__ import annotations

from ....algebra.polynomial import ONE
from ....graph.graph import apply, current_graph
from ....graph.tensor import Tensor
from ....nn.kernels import one_kernel
from ....ops.fill import fill
from ....ops.layout import concat, reshape
from ....ops.pointwise import pointwise
from ....ops.spectra import SCALES, Fourier, view_as
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS

_VIEWS = {"view_as_real": "real", "view_as_complex": "complex", "_conj": "conjugate"}


@translation(*_VIEWS)
def viewed(call: Call) -> Tensor:
    """The same memory, read otherwise; of a number in a product, another number."""
    if isinstance(call["self"], complex):
        return fill((), call["self"].conjugate(), call.out.dtype)
    return view_as(call["self"], _VIEWS[call.name])


@translation("complex", "polar")
def put_together(call: Call) -> Tensor | None:
    """Numbers of their parts, or of their moduli and angles."""
    first, second = call.arguments.values()
    if first.sizes != second.sizes:
        return None

    def body(*parts: Tensor) -> Tensor:
        modulus, angle = map(current_graph().adopt, parts)  # in this order they are its operands
        return _of_parts(*(pointwise("mul", modulus, pointwise(part, angle)) for part in ("cos", "sin")))

    if call.name == "polar":
        return one_kernel("polar", body, first, second, backward="polar")
    return _of_parts(first, second)


def _of_parts(*parts: Tensor) -> Tensor:
    """Return complex numbers of their real and imaginary parts."""
    return view_as(concat([reshape(t, (*t.sizes, ONE)) for t in parts], -1), "complex")


@translation("_fft_c2c", "_fft_r2c", "_fft_c2r")
def transformed(call: Call) -> Tensor:
    """A transform along some axes, of which one side may have half of the last one."""
    x: Tensor = call["self"]
    if not call["dim"]:
        return pointwise("copy", x)
    axes = tuple(d % x.ndim for d in call["dim"])
    half = call.name == "_fft_c2r" or (call.name == "_fft_r2c" and call["onesided"])
    kind = Fourier(
        axes=axes,
        inverse=call.name == "_fft_c2r" or (call.name == "_fft_c2c" and not call["forward"]),
        scale=SCALES[call["normalization"]],
        last=call.out.sizes[axes[-1]] if half else None,
    )
    return apply(kind, [x], "fft")[0]
