"""How contractions are drawn: products, windows, convolutions, what their gradients are, and scores of attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..algebra.polynomial import poly
from ..graph.tensor import Tensor
from ..nn.conv import conv
from ..notation.pattern import parse_pattern
from ..ops.contraction import Einsum
from ..ops.einsum import contract, einsum
from ..ops.layout import rearrange
from ..ops.pointwise import pointwise
from ..ops.reduce import reduce
from .sketch import LARGEST, MOST_POINTS, Sketch, together

__all__ = ["contraction", "merged", "names_of"]


def contraction(s: Sketch) -> Sequence[Tensor]:
    """Draw a contraction."""
    return s.one_of([_product, _product, _product, _windows, _restricted, _convolution, _spread])(s)


def names_of(count: int, first: str = "a") -> list[str]:
    """Return names of axes."""
    return [f"{first}{i}" for i in range(count)]


def _product(s: Sketch) -> Sequence[Tensor]:
    """Two or three operands that share some axes, in any order, merged and split."""
    operands = [s.tensor(lambda t: s.elements(t) <= 30)]
    known: dict[str, Any] = {}
    patterns = [_named(s, operands[0], known)]
    for _ in range(s.one_of([1, 1, 1, 2])):
        fits = s.others(lambda t: all(together(t.dtype, o.dtype) for o in operands))
        kept = s.some(list(known), 0)[:2]
        shape = (*(known[n] for n in kept), *s.shape(s.number(0, 1), 6))
        least = min(operands, key=lambda o: o.dtype.bits)
        other = s.one_of(fits) if fits and s.chance(1) else s.fresh(shape, s.partner(least))
        before = dict(known)
        pattern = _named(s, other, known, kept)
        if prod(map(s.value, known.values())) > MOST_POINTS:
            known.clear()
            known.update(before)
            continue
        operands.append(other)
        patterns.append(pattern)
    if len(operands) == 1:
        operands.append(s.fresh((), s.partner(operands[0])))
        patterns.append([])
    left = s.some(list(known))
    while prod(s.value(known[n]) for n in left) > LARGEST:
        left.pop()
    result = merged(s, s.order(left))
    return [einsum(*operands, f"{', '.join(' '.join(p) for p in patterns)} -> {' '.join(result)}")]


def _named(s: Sketch, t: Tensor, known: dict[str, Any], shared: Sequence[str] = ()) -> list[str]:
    """Name the axes of an operand: as one of the same size is named already, or anew."""
    out: list[str] = []
    for size in t.sizes:
        same = [n for n, k in known.items() if poly(k) == size and (n not in out or s.chance(4))]
        wanted = [n for n in same if n in shared]
        name = s.one_of(wanted or same) if same and (wanted or s.chance(1)) else f"a{len(known)}"
        known.setdefault(name, size)
        out.append(name)
    return out


def merged(s: Sketch, names: Sequence[str]) -> list[str]:
    """Merge two neighbours at times."""
    if len(names) > 1 and s.chance(2):
        at = s.number(0, len(names) - 2)
        return [*names[:at], f"({names[at]} {names[at + 1]})", *names[at + 2 :]]
    return list(names)


def _windows(s: Sketch) -> Sequence[Tensor]:
    """A window that slides over one axis, by an index such as a*2+r*3-1."""
    width, stride, dilation = s.number(1, 4), s.number(1, 3), s.number(1, 3)
    reach = (width - 1) * dilation
    padding = s.number(0, reach)
    batch, length = s.shape(s.number(0, 1), 5), s.size()
    if s.value(length) + 2 * padding - reach < 1:
        length = poly(length).expr + reach
    x = s.fresh((*batch, length), s.one_of(["fp32", "bf16"]))
    if x.ndim == 2 and s.chance(1):
        x = rearrange(rearrange(x, "a b -> b a"), "b a -> a b")
    w = s.fresh((width,), "fp32")
    at = "+".join(s.order([f"o*{stride}", f"r*{dilation}"])) + (f"-{padding}" if padding else "")
    names = names_of(len(batch))
    kept = s.order([*names, "o"]) if s.chance(1) else names
    return [einsum(x, w, f"{' '.join([*names, at])}, r -> {' '.join(kept)}")]


def _convolution(s: Sketch) -> Sequence[Tensor]:
    width, padding = s.number(1, 3), s.number(0, 1)
    groups = s.one_of([1, 1, 2])
    shape = (s.size(), groups * s.number(1, 2), *(s.number(width, width + 2) for _ in range(s.number(1, 2))))
    spread = "h w"[: 2 * len(shape) - 5]
    if s.value(shape[0]) * prod(shape[1:]) > LARGEST:
        shape = (1, *shape[1:])
    x = s.fresh(shape, "fp32", "input")
    y = conv(
        x,
        f"b c {spread} -> b o {spread}",
        window=(width,) * (len(shape) - 2),
        stride=s.number(1, 2),
        padding=min(padding, width),
        groups=groups,
        bias=s.chance(2),
        o=2 * groups,
    )
    return [y]


def _spread(s: Sketch) -> Sequence[Tensor]:
    """What the gradient of a window or a diagonal is: an index or a name twice in the result."""
    x, w = s.fresh((s.size(), s.size()), "fp32"), s.fresh((s.number(1, 3),), s.one_of(["fp32", "bf16"]))
    extents = dict(zip("nor", (*x.sizes, *w.sizes), strict=True))
    stride, dilation, padding, left = s.number(1, 3), s.number(1, 2), s.number(0, 2), s.number(0, 2)
    full = x.sizes[1] * stride + w.sizes[0] * dilation + left
    index = f"o*{stride}+r*{dilation}" + (f"-{padding}" if padding else "")
    text, sizes = s.one_of([
        (f"n o, r -> n {index}", (x.sizes[0], full)), (f"n o, r -> {index}", (full,)),
        ("n o, r -> n n o", (x.sizes[0], *x.sizes)),
        (f"n o, r -> (n r) o*{stride + 1}", (x.sizes[0] * w.sizes[0], x.sizes[1] * (stride + 1) + left)),
    ])  # fmt: skip
    kind = Einsum(pattern=parse_pattern(text, scattered=True), extents=extents, dtype=x.dtype, sizes=sizes)
    return [contract([x, w], kind)]


def _restricted(s: Sketch) -> Sequence[Tensor]:
    """Scores of a causal or a windowed attention, and what reads them."""
    scores = s.scores()
    out = [scores]
    if s.chance(1):
        out.append(pointwise(s.one_of(["exp", "gelu", "square"]), out[-1]))
    if s.chance(1):
        assert scores.domain is not None
        names = names_of(scores.ndim)
        key = names[scores.domain[2]]
        v = s.fresh((scores.shape[scores.domain[2]], 2), "fp32")
        out.append(einsum(out[-1], v, f"{' '.join(names)}, {key} d -> {' '.join(n for n in names if n != key)} d"))
    elif s.chance(1):
        out.append(reduce(out[-1], s.one_of(["... a b -> ... a", "... a b -> ... b"]), s.one_of(["sum", "max"])))
    return out
