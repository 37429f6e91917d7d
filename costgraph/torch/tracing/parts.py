"""Parts of tensors that are written: where in a tensor they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...algebra.dominance import lower
from ...algebra.polynomial import ONE, Poly
from ...graph.strides import Sizes, is_integral
from ...graph.tensor import Tensor
from .events import Handle

__all__ = ["Part", "Written", "part_of"]

#: Axis, first position, step.
Place = tuple[int, Poly, int]


class Written(NamedTuple):
    """What was written to a storage last."""

    names: Mapping[Handle, Tensor]
    """tensors of the storage as they were before"""
    part: Tensor
    earlier: Written | None
    """what was written before that"""
    unseen: bool = False
    """whether a backward pass knows nothing of it"""


class Part(NamedTuple):
    """Where a part of a tensor lies."""

    places: Sequence[Place]
    """of each axis along which it is not whole"""
    sizes: Sizes
    """its shape, with all axes of the tensor"""


def part_of(part: Tensor, whole: Tensor, names: Iterable[Tensor]) -> Part | None:
    """Return of which positions of a tensor another one is.

    A part of several axes is one of tensors between, which a program that cuts one axis after the other has named. None
    if there are none such.
    """
    if not whole.ndim and not part.ndim:
        return Part([], ())
    found = _place_of(part, whole)
    if found is not None:
        return Part([found[0]], found[1])
    for name in names:
        own = _place_of(part, name) if name.ndim == whole.ndim and name.sizes != part.sizes else None
        rest = None if own is None else part_of(name, whole, names)
        if own is not None and rest is not None and own[0][0] not in [axis for axis, *_ in rest.places]:
            return Part([*rest.places, own[0]], own[1])
    return None


def _place_of(part: Tensor, whole: Tensor) -> tuple[Place, Sizes] | None:
    """Return of which axis a tensor is some positions, and its shape with that axis.

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
        # what lies in the storage is a part of all that is in it, whether that can be proved of its places or not
        if whole.region() == (whole.storage,) or all(n is not None and n >= 0 for n in bounds):
            return (axis, start, step), tuple(sizes)
    return None
