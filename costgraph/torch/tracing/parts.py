"""Parts of tensors that are written: where in a tensor they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...algebra.dominance import lower
from ...algebra.polynomial import ONE, Poly
from ...graph.strides import Sizes, is_integral
from ...graph.tensor import Tensor
from .events import Handle

__all__ = ["Written", "chain_of"]

#: Axis, first position, step, and the shape of the part with that axis.
Place = tuple[int, Poly, int, Sizes]


class Written(NamedTuple):
    """What was written to a storage last."""

    names: Mapping[Handle, Tensor]
    """tensors of the storage as they were before"""
    part: Tensor


def chain_of(part: Tensor, whole: Tensor, names: Iterable[Tensor]) -> list[tuple[Tensor, Place]]:
    """Return the tensors from a part to the whole, each some positions of one axis of the next, and where these are.

    A part of several axes is one of tensors between, which a program that cuts one axis after the other has named.
    Nothing if there are none such.
    """
    place = _place_of(part, whole)
    if place is not None:
        return [(whole, place)]
    for name in names:
        place = _place_of(part, name) if name.ndim == whole.ndim and name.sizes != part.sizes else None
        rest = [] if place is None else chain_of(name, whole, names)
        if place is not None and rest:
            return [(name, place), *rest]
    return []


def _place_of(part: Tensor, whole: Tensor) -> Place | None:
    """Return of which axis a tensor is some positions: axis, first position, step, shape with that axis.

    None where it is none, or where it differs along several axes.
    """
    known = whole.graph.root.relations
    for axis in range(whole.ndim) if part.dtype == whole.dtype else ():
        sizes, strides = list(part.sizes), list(part.strides)
        if part.ndim == whole.ndim - 1:
            sizes.insert(axis, ONE)
            strides.insert(axis, whole.strides[axis])
        if len(sizes) != whole.ndim or not whole.strides[axis]:
            continue
        others = [i for i in range(whole.ndim) if i != axis]
        alike = all(sizes[i] == whole.sizes[i] and (sizes[i] == ONE or strides[i] == whole.strides[i]) for i in others)
        step = 1 if sizes[axis] == ONE else (strides[axis] / whole.strides[axis]).constant
        start = (part.offset - whole.offset) / whole.strides[axis]
        if not alike or not isinstance(step, int) or not is_integral(start):
            continue
        bounds = [lower(n, known) for n in (start, whole.sizes[axis] - start - (sizes[axis] - 1) * step - 1)]
        if all(n is not None and n >= 0 for n in bounds):
            return axis, start, step, tuple(sizes)
    return None
