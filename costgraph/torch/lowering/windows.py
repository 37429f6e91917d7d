"""Convolutions and their gradients, pooling and its gradient: what torch has functions for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...graph.op import Op, OpKind
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.contraction import Einsum
from ...ops.pooling import Pool, Unpool, Windowed
from .functions import item
from .site import Site
from .table import lowering

__all__ = ["Sliding", "convolution", "sliding"]


class Sliding:
    """How windows slide in a pattern that is a convolution."""

    def __init__(self, batch: int, groups: int, indices: Sequence[Affine]) -> None:
        self.batch = batch
        """batch axes"""
        self.groups = groups
        self.stride = [d.terms[0][1] for d in indices]
        self.dilation = [d.terms[1][1] for d in indices]
        self.padding = [-d.offset for d in indices]

    def arguments(self) -> tuple[Any, ...]:
        """Return torch's arguments from the stride on."""
        rank = len(self.stride)
        return self.stride, self.padding, self.dilation, False, [0] * rank, self.groups


def _role(dims: Sequence[Axes | Affine]) -> str:
    """Tell the three tensors of a convolution apart by the form of their dimensions."""
    if any(isinstance(d, Affine) for d in dims):
        return "input"
    return "weight" if len(dims) > 1 and len(dims[0].names) == 2 and len(dims[1].names) == 1 else "output"


def sliding(pattern: Pattern, extents: dict[str, int], sizes: Mapping[str, Sequence[int]]) -> Sliding | None:
    """Return how windows slide if input, weight and output are those of one of torch's convolutions, else None."""
    parts = {_role(d): d for d in (*pattern.operands, pattern.result)}
    if set(parts) != {"input", "weight", "output"} or len(pattern.operands) != 2:
        return None
    x, w, y = parts["input"], parts["weight"], parts["output"]
    indices = [d for d in x if isinstance(d, Affine)]
    batch, rank = len(x) - len(indices) - 1, len(indices)
    if batch < 0 or rank > 3 or len(y) != len(x) or len(w) != rank + 2 or any(len(d.terms) != 2 for d in indices):
        return None
    group, out = (*w[0].names, None)[:2]
    expected = (
        tuple(x[:batch]) == tuple(y[:batch]),
        x[batch].names == (group, *w[1].names),
        y[batch].names == (group, out),
        [d.terms[0][0] for d in indices] == [n for d in y[batch + 1 :] for n in d.names],
        [d.terms[1][0] for d in indices] == [n for d in w[2:] for n in d.names],
        all(d.offset <= 0 for d in indices),
    )
    if not all(expected):
        return None
    found = Sliding(batch, extents[str(group)], indices)
    for d, n in zip(indices, sizes["input"][batch + 1 :], strict=True):
        (o, step), (k, gap) = d.terms
        if (n - 2 * d.offset - gap * (extents[k] - 1) - 1) // step + 1 != extents[o]:
            return None  # padded otherwise than torch does, on both sides by as much
    return found


_FUNCTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def convolution(site: Site[OpKind], einsum: Op | None = None, operands: Sequence[Any] = (), bias: Any = None) -> bool:
    """Lower a contraction that is a convolution or one of its two gradients; says whether it is one."""
    op = site.op if einsum is None else einsum
    assert isinstance(op.kind, Einsum)
    pattern, extents = op.kind.pattern, site.of(op.kind.extents)
    dims, tensors = (*pattern.operands, pattern.result), (*op.operands, op.results[0])
    if not any(isinstance(d, Affine) for part in dims for d in part):
        return False
    sizes = {_role(d): site.sizes(t) for d, t in zip(dims, tensors, strict=True)}
    found = sliding(pattern, extents, sizes)
    dtype, wanted = site.dtype(op.results[0]), _role(pattern.result)
    if found is None or any(t.domain is not None for t in tensors) or (bias is not None and wanted != "output"):
        return False
    if dtype.itemsize == 1 or not dtype.is_floating_point:
        return False
    given = zip(pattern.operands, operands or site.operands, strict=True)
    flat = {role: n if role == "weight" else (prod(n[: found.batch]), *n[found.batch :]) for role, n in sizes.items()}
    nodes = {_role(d): site.shaped(site.cast(v, dtype), flat[_role(d)]) for d, v in given}
    if wanted == "output":
        shift = None if bias is None else site.cast(bias, dtype)
        more = (shift, found.stride, found.padding, found.dilation, found.groups)
        site.own(_FUNCTIONS[len(found.stride)], nodes["input"], nodes["weight"], *more, shape=flat["output"])
        return True
    like = torch.empty(flat[wanted], dtype=dtype, device="meta")
    other = nodes["weight" if wanted == "input" else "input"]
    site.settle(site.call(gradient, wanted, flat[wanted], nodes["output"], other, *found.arguments(), like=like))
    return True


def gradient(wanted: str, sizes: Sequence[int], grad: torch.Tensor, other: torch.Tensor, *more: Any) -> torch.Tensor:
    """Return the gradient of the input or of the weight of a convolution: its own shape is all that is read of it."""
    shape_alone = grad.new_empty(1).expand(list(sizes))
    x, w = (shape_alone, other) if wanted == "input" else (other, shape_alone)
    mask = [wanted == "input", wanted == "weight", False]
    made: torch.Tensor = torch.ops.aten.convolution_backward(grad, x, w, None, *more, mask)[mask.index(True)]
    return made.contiguous()


# -- pooling -----------------------------------------------------------------------------------------------------


def _spans(site: Site[Windowed]) -> tuple[list[int], list[int], list[int], int]:
    """Return window, stride and padding of the sliding axes, and how many other axes there are."""
    extents, dims = site.of(site.kind.extents), site.kind.pattern.operands[0]
    indices = [d for d in dims if isinstance(d, Affine)]
    window = [extents[d.terms[1][0]] for d in indices]
    return window, [d.terms[0][1] for d in indices], [-d.offset for d in indices], len(dims) - len(indices)


def _flat(site: Site[OpKind], node: Any, other: int) -> Any:
    """View what torch pools: one channel of a batch, then the sliding axes."""
    sizes = tuple(site.shadow(node).shape)
    return site.shaped(node, (prod(sizes[:other]), 1, *sizes[other:]))


@lowering(Pool)
def _pool(site: Site[Pool]) -> None:
    window, stride, padding, other = _spans(site)
    x = _flat(site, site.operands[0], other)
    sizes = (site.shadow(x).shape[0], 1, *site.sizes(site.op.results[0])[other:])
    if site.kind.operation == "max":
        made = site.call(max_pool, x, window, stride, padding, like=_pooled(site, sizes))
        for i in range(len(site.op.results)):
            site.settle(site.call(item, made, i), i)
    else:
        like = torch.empty(sizes, dtype=site.shadow(x).dtype, device="meta")
        site.settle(site.call(mean_pool, x, window, stride, padding, site.kind.inside, like=like))


def _pooled(site: Site[OpKind], sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = site.dtype(site.op.results[0])
    return torch.empty(sizes, dtype=dtype, device="meta"), torch.empty(sizes, dtype=torch.int64, device="meta")


def max_pool(
    x: torch.Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of windows, and where they stand among the sliding axes."""
    functions = torch.nn.functional
    rank = len(window)
    function = {1: functions.max_pool1d, 2: functions.max_pool2d, 3: functions.max_pool3d}[rank]
    made: tuple[torch.Tensor, torch.Tensor] = function(
        _wide(x), list(window), list(stride), list(padding), return_indices=True
    )
    return made[0].to(x.dtype), made[1]


def mean_pool(
    x: torch.Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], inside: bool
) -> torch.Tensor:
    """Return the means of windows, of what lies inside alone or padding counted."""
    functions = torch.nn.functional
    function = {1: functions.avg_pool1d, 2: functions.avg_pool2d, 3: functions.avg_pool3d}[len(window)]
    made: torch.Tensor = function(_wide(x), list(window), list(stride), list(padding), count_include_pad=not inside)
    return made.to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize == 1 or not x.is_floating_point() else x


@lowering(Unpool)
def _unpool(site: Site[Unpool]) -> None:
    window, stride, padding, other = _spans(site)
    x = _flat(site, site.operands[1], other)
    nodes = [_flat(site, v, other) for v in (site.operands[0], *site.operands[2:])]
    shadow = site.shadow(x)
    like = torch.empty(shadow.shape, dtype=shadow.dtype, device="meta")
    if site.kind.operation == "max":
        site.settle(site.call(max_unpool, *nodes, x, like=like))
    else:
        site.settle(site.call(mean_unpool, *nodes, x, window, stride, padding, site.kind.inside, like=like))


def max_unpool(grad: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Add the gradient of each window at the place of its maximum."""
    made = grad.new_zeros(x.shape)
    made.flatten(2).scatter_add_(2, indices.flatten(2), grad.flatten(2))
    return made


def mean_unpool(
    grad: torch.Tensor,
    x: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    inside: bool,
) -> torch.Tensor:
    """Give each element of a window its share of the gradient."""
    rank, aten = len(window), torch.ops.aten
    more: tuple[Any, ...] = (list(window), list(stride), list(padding), False, not inside, None)
    made: torch.Tensor
    if rank == 1:  # torch has it for two axes and three
        more = ([1, *window], [1, *stride], [0, *padding], False, not inside, None)
        made = aten.avg_pool2d_backward(grad.unsqueeze(2), x.unsqueeze(2), *more).squeeze(2)
    else:
        made = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[rank](grad, x, *more)
    return made.contiguous()
