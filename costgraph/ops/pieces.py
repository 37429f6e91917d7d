"""What iterations of a loop leave behind, one storage each, and sums that they add to."""

from __future__ import annotations

from collections.abc import Sequence

from ..dtypes import DType
from ..errors import ShapeError
from ..graph.graph import Graph, apply
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from . import rules
from .layout import contiguous_copy
from .reach import alike
from .registry import register

__all__ = ["ABSENT", "ACCUMULATE", "absent", "accumulate", "pieces_of", "slice_of"]


def pieces_of(operands: Sequence[Tensor], attrs: Attrs, t: Tensor) -> Result:
    """Return what an iteration leaves behind in a storage of its own, or has written into one of an operand's."""
    body, first, count = attrs["body"], attrs["carries"], attrs["count"]
    for i, f in enumerate(body.formals[first : first + attrs["xs"]], first):
        if f.storage is t.storage and operands[i].storage.pieces > 0:
            outer = operands[i]
            if t.sizes != f.sizes or t.strides != f.strides:
                raise ShapeError(f"{t!r} is a part of what an iteration was given, expected all of it")
            return Result(outer.sizes, t.dtype, outer.strides, of=i, offset=outer.offset, domain=outer.domain)
    domain = None if t.domain is None else (t.domain[0], t.domain[1] + 1, t.domain[2] + 1)
    return Result((count, *t.sizes), t.dtype, domain=domain, pieces=t.storage.pieces + 1)


def _summed(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    so_far, term = operands
    if so_far.sizes != term.sizes or so_far.dtype != term.dtype:
        raise ShapeError(f"accumulate {term!r} into {so_far!r}: expected one shape and format")
    domain = alike(operands)
    return [Result(so_far.sizes, so_far.dtype, so_far.strides, of=0, offset=so_far.offset, domain=domain)]


def _one_each(op: Op) -> rules.Flops:
    """Count an addition for each element."""
    return rules.Flops(pointwise=rules.points(op.results[0]))


# What a loop adds to before there is anything: it takes no memory, and the first term becomes it.
ABSENT = register(
    OpKind(
        "absent",
        lambda operands, attrs: [
            Result(attrs["sizes"], attrs["dtype"], pieces=attrs["pieces"], domain=attrs.get("domain"))
        ],
        flops=rules.free,
        reads=rules.nothing,
        writes=rules.nothing,
    )
)
# In the iteration in which there is nothing yet to add to, the term is the sum and nothing is done.
ACCUMULATE = register(OpKind("accumulate", _summed, _one_each, rules.whole, rules.all_results, restricted=True))


def absent(sizes: Sizes, dtype: DType, pieces: int = 0, *, name: str = "absent") -> Tensor:
    """Return a sum before its first term: a carry of a loop that `accumulate` adds to; it takes no memory."""
    return apply(ABSENT, [], {"sizes": sizes, "dtype": dtype, "pieces": pieces}, name)[0]


def accumulate(so_far: Tensor, term: Tensor, *, name: str = "accumulate") -> Tensor:
    """Add a term in place: one FLOP an element. Where the sum is still absent the term becomes it, at no cost."""
    return apply(ACCUMULATE, [so_far, contiguous_copy(term)], {"inplace": True}, name)[0]


def slice_of(body: Graph, t: Tensor, name: str) -> Tensor:
    """Add an input of a loop's body that stands for one position along the first axis of a tensor."""
    inner = body.formal(t, name, t.sizes[1:], t.strides[1:], max(t.storage.pieces - 1, 0))
    inner.domain = None if t.domain is None else (t.domain[0], t.domain[1] - 1, t.domain[2] - 1)
    return inner
