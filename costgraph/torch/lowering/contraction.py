"""Lower contractions to convolutions and matmuls, and pooling to torch's functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch

from ...ir.graph import Op, OpKind
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.einsum import Einsum
from ...ops.reduce import Pool, PoolBackward, PoolingBase
from .context import LoweringContext, lowering, strided
from .elementwise import item, mask_of, masked_operand

__all__ = [
    "ConvWindows",
    "convolution",
    "conv_windows",
    "linear",
]


# -- convolutions and pooling ------------------------------------------------------------------------------------------


class ConvWindows:
    """Convolution parameters found in a pattern."""

    def __init__(self, batch: int, groups: int, indices: Sequence[Affine]) -> None:
        self.batch = batch
        """number of batch axes"""
        self.groups = groups
        self.stride = [d.terms[0][1] for d in indices]
        self.dilation = [d.terms[1][1] for d in indices]
        self.padding = [-d.offset for d in indices]

    def arguments(self) -> tuple[Any, ...]:
        """Return torch's arguments from `stride` on."""
        rank = len(self.stride)
        return self.stride, self.padding, self.dilation, False, [0] * rank, self.groups


def _role(dims: Sequence[Axes | Affine]) -> str:
    """Classify a convolution tensor by its dimensions."""
    if any(isinstance(d, Affine) for d in dims):
        return "input"
    return "weight" if len(dims) > 1 and len(dims[0].names) == 2 and len(dims[1].names) == 1 else "output"


def conv_windows(pattern: Pattern, extents: dict[str, int], sizes: Mapping[str, Sequence[int]]) -> ConvWindows | None:
    """Return the parameters if input, weight and output form a torch convolution, else None."""
    dims_by_role = {_role(d): d for d in (*pattern.operands, pattern.result)}
    if set(dims_by_role) != {"input", "weight", "output"} or len(pattern.operands) != 2:
        return None
    x, w, y = dims_by_role["input"], dims_by_role["weight"], dims_by_role["output"]
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
    windows = ConvWindows(batch, extents[str(group)], indices)
    for d, n in zip(indices, sizes["input"][batch + 1 :], strict=True):
        (o, step), (k, gap) = d.terms
        if (n - 2 * d.offset - gap * (extents[k] - 1) - 1) // step + 1 != extents[o]:
            return None  # torch pads both sides equally
    return windows


_FUNCTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def convolution(
    site: LoweringContext[OpKind], einsum: Op | None = None, operands: Sequence[Any] = (), bias: Any = None
) -> bool:
    """Lower a contraction as a convolution or a convolution gradient; return whether it is one."""
    op = site.op if einsum is None else einsum
    assert isinstance(op.kind, Einsum)
    pattern, extents = op.kind.pattern, site.of(op.kind.extents)
    dims, tensors = (*pattern.operands, pattern.result), (*op.operands, op.results[0])
    if not any(isinstance(d, Affine) for tensor_dims in dims for d in tensor_dims):
        return False
    sizes = {_role(d): site.sizes(t) for d, t in zip(dims, tensors, strict=True)}
    windows = conv_windows(pattern, extents, sizes)
    dtype, target = site.dtype(op.results[0]), _role(pattern.result)
    if windows is None or any(t.domain is not None for t in tensors) or (bias is not None and target != "output"):
        return False
    if dtype.itemsize == 1 or not dtype.is_floating_point:
        return False
    dims_and_nodes = zip(pattern.operands, operands or site.operands, strict=True)
    flat = {
        role: n if role == "weight" else (prod(n[: windows.batch]), *n[windows.batch :]) for role, n in sizes.items()
    }
    nodes = {_role(d): site.shaped(site.cast(v, dtype), flat[_role(d)]) for d, v in dims_and_nodes}
    if target == "output":
        shift = None if bias is None else site.cast(bias, dtype)
        arguments = (shift, windows.stride, windows.padding, windows.dilation, windows.groups)
        site.own(_FUNCTIONS[len(windows.stride)], nodes["input"], nodes["weight"], *arguments, shape=flat["output"])
        return True
    like = torch.empty(flat[target], dtype=dtype, device="meta")
    other = nodes["weight" if target == "input" else "input"]
    site.settle(site.call(gradient, target, flat[target], nodes["output"], other, *windows.arguments(), like=like))
    return True


def gradient(role: str, sizes: Sequence[int], grad: torch.Tensor, other: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the gradient of a convolution's input or weight; only its shape is read."""
    shape_only = grad.new_empty(1).expand(list(sizes))
    x, w = (shape_only, other) if role == "input" else (other, shape_only)
    mask = [role == "input", role == "weight", False]
    grads: torch.Tensor = torch.ops.aten.convolution_backward(grad, x, w, None, *arguments, mask)[mask.index(True)]
    return grads.contiguous()


# -- pooling -----------------------------------------------------------------------------------------------------


def _window_parameters(site: LoweringContext[PoolingBase]) -> tuple[list[int], list[int], list[int], int]:
    """Return window, stride and padding per conv_windows axis, and how many other axes there are."""
    extents, dims = site.of(site.kind.extents), site.kind.pattern.operands[0]
    indices = [d for d in dims if isinstance(d, Affine)]
    window = [extents[d.terms[1][0]] for d in indices]
    return window, [d.terms[0][1] for d in indices], [-d.offset for d in indices], len(dims) - len(indices)


def _flat(site: LoweringContext[OpKind], node: Any, other: int) -> Any:
    """View a tensor as batched single channels for torch's pooling."""
    sizes = tuple(site.shadow(node).shape)
    return site.shaped(node, (prod(sizes[:other]), 1, *sizes[other:]))


@lowering(Pool)
def _pool(site: LoweringContext[Pool]) -> None:
    window, stride, padding, other = _window_parameters(site)
    x = _flat(site, site.operands[0], other)
    sizes = (site.shadow(x).shape[0], 1, *site.sizes(site.op.results[0])[other:])
    if site.kind.operation == "max":
        maxima = site.call(max_pool, x, window, stride, padding, like=_pooled(site, sizes))
        for i in range(len(site.op.results)):
            site.settle(site.call(item, maxima, i), i)
    else:
        like = torch.empty(sizes, dtype=site.shadow(x).dtype, device="meta")
        site.settle(site.call(mean_pool, x, window, stride, padding, site.kind.exclude_padding, like=like))


def _pooled(site: LoweringContext[OpKind], sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = site.dtype(site.op.results[0])
    return torch.empty(sizes, dtype=dtype, device="meta"), torch.empty(sizes, dtype=torch.int64, device="meta")


def max_pool(
    x: torch.Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return window maxima, and their flat indices along the conv_windows axes."""
    functions = torch.nn.functional
    rank = len(window)
    function = {1: functions.max_pool1d, 2: functions.max_pool2d, 3: functions.max_pool3d}[rank]
    maxima: tuple[torch.Tensor, torch.Tensor] = function(
        _wide(x), list(window), list(stride), list(padding), return_indices=True
    )
    return maxima[0].to(x.dtype), maxima[1]


def mean_pool(
    x: torch.Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], exclude_padding: bool
) -> torch.Tensor:
    """Return window means, without padding if `exclude_padding`."""
    functions = torch.nn.functional
    function = {1: functions.avg_pool1d, 2: functions.avg_pool2d, 3: functions.avg_pool3d}[len(window)]
    means: torch.Tensor = function(
        _wide(x), list(window), list(stride), list(padding), count_include_pad=not exclude_padding
    )
    return means.to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize == 1 or not x.is_floating_point() else x


@lowering(PoolBackward)
def _pool_backward(site: LoweringContext[PoolBackward]) -> None:
    window, stride, padding, other = _window_parameters(site)
    x = _flat(site, site.operands[1], other)
    nodes = [_flat(site, v, other) for v in (site.operands[0], *site.operands[2:])]
    shadow = site.shadow(x)
    like = torch.empty(shadow.shape, dtype=shadow.dtype, device="meta")
    if site.kind.operation == "max":
        site.settle(site.call(max_pool_backward, *nodes, x, like=like))
    else:
        site.settle(
            site.call(mean_pool_backward, *nodes, x, window, stride, padding, site.kind.exclude_padding, like=like)
        )


def max_pool_backward(grad: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Add each window's gradient at its maximum."""
    scattered = grad.new_zeros(x.shape)
    scattered.flatten(2).scatter_add_(2, indices.flatten(2), grad.flatten(2))
    return scattered


def mean_pool_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    exclude_padding: bool,
) -> torch.Tensor:
    """Distribute the gradient evenly over each window."""
    rank, aten = len(window), torch.ops.aten
    arguments: tuple[Any, ...] = (list(window), list(stride), list(padding), False, not exclude_padding, None)
    result: torch.Tensor
    if rank == 1:  # torch has 2d and 3d only
        arguments = ([1, *window], [1, *stride], [0, *padding], False, not exclude_padding, None)
        result = aten.avg_pool2d_backward(grad.unsqueeze(2), x.unsqueeze(2), *arguments).squeeze(2)
    else:
        result = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[rank](grad, x, *arguments)
    return result.contiguous()


# -- contraction -------------------------------------------------------------------------------------------------------

Dims = Sequence[Axes | Affine]


@dataclass(frozen=True)
class NamedAxesNode:
    """A node with one axis per name."""

    node: Any
    names: tuple[str, ...]


@lowering(Einsum)
def _einsum(site: LoweringContext[Einsum]) -> None:
    if convolution(site):
        return
    pattern, extents = site.kind.pattern, site.of(site.kind.extents)
    inherited = any(t.domain is not None for t in site.op.operands)
    operands = [labelled(site, masked_operand(site, i, 0.0), d, extents) for i, d in enumerate(pattern.operands)]
    scattered = site.kind.sizes is not None
    kept_axes = pattern.result_names if not scattered else tuple(dict.fromkeys(pattern.result_names))
    if not inherited:
        operands = _masked(site, operands, kept_axes, extents)
    dtype = site.dtype(site.op.results[0])
    if dtype.is_floating_point and dtype.itemsize == 1:
        dtype = torch.float32
    elif dtype == torch.bool:
        dtype = torch.uint8
    operands = [NamedAxesNode(site.cast(o.node, dtype), o.names) for o in operands]
    while len(operands) > 2:
        operands = _contract_cheapest_pair(site, operands, kept_axes, extents)
    if scattered:
        present_axes = tuple(n for n in kept_axes if any(n in o.names for o in operands))
        contracted = product(site, operands, present_axes, extents)
        axes = tuple((n, extents[n]) for n in kept_axes)
        sizes = site.sizes(site.op.results[0])
        site.own(fold_windows, contracted.node, present_axes, axes, _index_expressions(pattern.result, extents), sizes)
    else:
        product(site, operands, kept_axes, extents, into_result=True)


def labelled(site: LoweringContext[OpKind], node: Any, dims: Dims, extents: Mapping[str, int]) -> NamedAxesNode:
    """View an operand with one axis per name: split merged axes, and extract windows and diagonals by strides."""
    names = tuple(dict.fromkeys(n for d in dims for n in d.names))
    plain = all(isinstance(d, Axes) for d in dims) and len(names) == sum(len(d.names) for d in dims)
    if plain:
        return NamedAxesNode(site.shaped(node, tuple(extents[n] for n in names)), names)
    shadow = site.shadow(node)
    pads, starts = [], []
    for d, size in zip(dims, shadow.shape, strict=True):
        last = sum(c * (extents[n] - 1) for n, c in d.terms) + d.offset if isinstance(d, Affine) else size - 1
        first = d.offset if isinstance(d, Affine) else 0
        pads.append((max(-first, 0), max(last - size + 1, 0)))
        starts.append(max(first, 0))
    if any(p != (0, 0) for p in pads):
        node = site.call(torch.constant_pad_nd, node, [p for pair in reversed(pads) for p in pair], 0)
        shadow = site.shadow(node)
    strides = dict.fromkeys(names, 0)
    for d, step in zip(dims, shadow.stride(), strict=True):
        for n, factor in _factors(d, extents):
            strides[n] += factor * step
    offset = sum(s * step for s, step in zip(starts, shadow.stride(), strict=True))
    return NamedAxesNode(
        site.call(strided, node, tuple(extents[n] for n in names), tuple(strides[n] for n in names), offset), names
    )


def _factors(d: Axes | Affine, extents: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return each axis's step along a dimension."""
    if isinstance(d, Affine):
        return list(d.terms)
    return [(n, prod(extents[m] for m in d.names[i + 1 :])) for i, n in enumerate(d.names)]


def _index_expressions(dims: Dims, extents: Mapping[str, int]) -> tuple[Any, ...]:
    """Return index expressions per dimension, as (axis, factor) pairs and an offset."""
    return tuple((tuple(_factors(d, extents)), d.offset if isinstance(d, Affine) else 0) for d in dims)


def fold_windows(
    x: torch.Tensor,
    present_axes: Sequence[str],
    axes: Sequence[tuple[str, int]],
    index_expressions: Sequence[Any],
    sizes: Sequence[int],
) -> torch.Tensor:
    """Add elements at positions given by index expressions, as for window gradients."""
    shape = [n for _, n in axes]
    grid = {
        name: torch.arange(n, device=x.device).reshape([-1 if m == name else 1 for m, _ in axes]) for name, n in axes
    }
    in_bounds = torch.ones(shape, dtype=torch.bool, device=x.device)
    flat = torch.zeros(shape, dtype=torch.int64, device=x.device)
    for (factors, offset), size in zip(index_expressions, sizes, strict=True):
        position = torch.full(shape, offset, device=x.device)
        for name, factor in factors:
            position += factor * grid[name]
        in_bounds &= (position >= 0) & (position < size)
        flat = flat * size + position
    values = x.reshape([n if name in present_axes else 1 for name, n in axes]).expand(shape)
    flat, values = torch.where(in_bounds, flat, 0), torch.where(in_bounds, values, 0)
    out = x.new_zeros(prod(sizes))
    return out.index_add_(0, flat.flatten(), values.flatten()).reshape(list(sizes))


def mask_like(x: torch.Tensor, queries: int, keys: int, causal: bool, window: int | None, first: int) -> torch.Tensor:
    """Return the mask for attended pairs in a tensor's dtype."""
    return mask_of(queries, keys, causal, window, first, x.device).to(x.dtype)


def _masked(
    site: LoweringContext[Einsum], operands: list[NamedAxesNode], kept_axes: Sequence[str], extents: Mapping[str, int]
) -> list[NamedAxesNode]:
    """Multiply by a domain's mask if one domain axis is summed."""
    if site.kind.domain is None:
        return operands
    domain, query, key = site.kind.domain
    if query in kept_axes and key in kept_axes and site.kind.sizes is None:
        return operands  # elements outside the domain are never read
    sizes = extents[query], extents[key]
    node = site.call(mask_like, operands[0].node, *sizes, *site.mask_arguments(domain, *sizes))
    return [*operands, NamedAxesNode(node, (query, key))]


def _contract_cheapest_pair(
    site: LoweringContext[OpKind], operands: list[NamedAxesNode], kept_axes: Sequence[str], extents: Mapping[str, int]
) -> list[NamedAxesNode]:
    """Contract the two operands that minimize the total cost."""

    def after(remaining: list[tuple[str, ...]], i: int, j: int) -> tuple[list[tuple[str, ...]], int]:
        others = [o for k, o in enumerate(remaining) if k not in (i, j)]
        axes = dict.fromkeys((*remaining[i], *remaining[j]))
        stay = tuple(n for n in axes if n in kept_axes or any(n in o for o in others))
        points = prod(extents[n] for n in axes)
        return [*others, stay], points * (2 if len(stay) < len(axes) else 1)

    def least_cost(remaining: list[tuple[str, ...]]) -> int:
        return min(
            (
                cost + least_cost(others)
                for others, cost in (after(remaining, i, j) for i, j in combinations(range(len(remaining)), 2))
            ),
            default=0,
        )

    names = [o.names for o in operands]
    costs = {(i, j): after(names, i, j) for i, j in combinations(range(len(names)), 2)}
    i, j = min(costs, key=lambda pair: costs[pair][1] + least_cost(costs[pair][0]))
    unpaired = [o for k, o in enumerate(operands) if k not in (i, j)]
    return [*unpaired, product(site, [operands[i], operands[j]], costs[i, j][0][-1], extents)]


def linear(site: LoweringContext[OpKind], einsum: Op, operands: Sequence[Any], bias: Any) -> bool:
    """Lower a matmul with a bias as one call; return whether it is one."""
    assert isinstance(einsum.kind, Einsum)
    pattern, extents = einsum.kind.pattern, site.of(einsum.kind.extents)
    dims = (*pattern.operands, pattern.result)
    if (
        len(operands) != 2
        or einsum.kind.sizes is not None
        or any(isinstance(d, Affine) for tensor_dims in dims for d in tensor_dims)
    ):
        return False
    kept_axes, dtype = pattern.result_names, site.dtype(site.op.results[0])
    left, right = (labelled(site, v, d, extents) for v, d in zip(operands, pattern.operands, strict=True))
    rows = [n for n in kept_axes if n in left.names]
    columns = [n for n in kept_axes if n in right.names]
    summed = [n for n in left.names if n in right.names]
    all_axes = {n for tensor_dims in dims for d in tensor_dims for n in d.names}
    shape = tuple(extents[n] for n in columns)
    fits = kept_axes == (*rows, *columns) and columns and {*rows, *columns, *summed} == all_axes
    if not fits or tuple(site.shadow(bias).shape) != shape or dtype.itemsize == 1 or not dtype.is_floating_point:
        return False
    left, right = (NamedAxesNode(site.cast(o.node, dtype), o.names) for o in (left, right))
    row = site.cast(site.shaped(bias, (prod(shape),)), dtype)
    _matmul(site, left, right, kept_axes, extents, into_result=True, bias=row)
    return True


# -- matmuls -----------------------------------------------------------------------------------------------------


def product(
    site: LoweringContext[OpKind],
    operands: list[NamedAxesNode],
    kept_axes: Sequence[str],
    extents: Mapping[str, int],
    *,
    into_result: bool = False,
) -> NamedAxesNode:
    """Contract one or two operands; with `into_result`, into the op's result."""
    operands = [_summed(site, o, kept_axes, [p.names for p in operands if p is not o]) for o in operands]
    names = [set(o.names) for o in operands]
    if len(operands) == 2 and (names[0] & names[1]) - set(kept_axes):
        return _matmul(site, operands[0], operands[1], tuple(kept_axes), extents, into_result=into_result)
    views = [_aligned(site, o, kept_axes) for o in operands]
    function = torch.mul if len(views) == 2 else torch.clone
    if into_result:
        site.own(function, *views, shape=tuple(extents[n] for n in kept_axes))
        return NamedAxesNode(site.results[0], tuple(kept_axes))
    return NamedAxesNode(site.call(function, *views), tuple(kept_axes))


def _summed(
    site: LoweringContext[OpKind], o: NamedAxesNode, kept_axes: Sequence[str], others: Sequence[Sequence[str]]
) -> NamedAxesNode:
    """Sum over axes that neither the result nor another operand has."""
    summed = [i for i, n in enumerate(o.names) if n not in kept_axes and not any(n in names for names in others)]
    if not summed:
        return o
    remaining = tuple(n for i, n in enumerate(o.names) if i not in summed)
    return NamedAxesNode(site.call(torch.sum, o.node, summed, dtype=site.shadow(o.node).dtype), remaining)


def _aligned(site: LoweringContext[OpKind], o: NamedAxesNode, kept_axes: Sequence[str]) -> Any:
    """Permute axes into the result's order, with size 1 for missing ones."""
    present_axes = [n for n in kept_axes if n in o.names]
    node = site.permuted(o.node, [o.names.index(n) for n in present_axes])
    for i, n in enumerate(kept_axes):
        if n not in present_axes:
            node = site.call(torch.unsqueeze, node, i)
    return node


def _matmul(
    site: LoweringContext[OpKind],
    a: NamedAxesNode,
    b: NamedAxesNode,
    kept_axes: tuple[str, ...],
    extents: Mapping[str, int],
    *,
    into_result: bool,
    bias: Any = None,
) -> NamedAxesNode:
    """Contract by a batched matmul, in the result's axis order if possible."""
    batch = [n for n in kept_axes if n in a.names and n in b.names]
    rows = [n for n in kept_axes if n in a.names and n not in b.names]
    columns = [n for n in kept_axes if n in b.names and n not in a.names]
    if kept_axes == (*batch, *columns, *rows) and rows:
        a, b, rows, columns = b, a, columns, rows
    summed = _summed_axis_order(site, a, b, (batch, rows, columns), extents)
    left = _matrix(site, a, (batch, rows, summed), extents)
    right = _matrix(site, b, (batch, summed, columns), extents)
    names = (*batch, *rows, *columns)
    function = torch.bmm if batch else torch.mm
    shape = (*site.shadow(left).shape[:-1], site.shadow(right).shape[-1])
    if bias is not None:
        site.own(torch.addmm, bias, left, right, shape=shape)
        return NamedAxesNode(site.results[0], kept_axes)
    if into_result and names == kept_axes:
        site.own(function, left, right, shape=shape)
        return NamedAxesNode(site.results[0], kept_axes)
    node = site.shaped(site.call(function, left, right), tuple(extents[n] for n in names))
    node = site.permuted(node, [names.index(n) for n in kept_axes])
    if into_result:
        site.settle(node, fresh=False)
        node = site.results[0]
    return NamedAxesNode(node, kept_axes)


def _groups(groups: Sequence[Sequence[str]], extents: Mapping[str, int]) -> tuple[int, ...]:
    """Return a matrix shape whose axes are groups of names; an empty batch group has no axis."""
    sizes = tuple(prod(extents[n] for n in names) for names in groups)
    return sizes if groups[0] else sizes[1:]


def _matrix(
    site: LoweringContext[OpKind], o: NamedAxesNode, groups: Sequence[Sequence[str]], extents: Mapping[str, int]
) -> Any:
    order = [o.names.index(n) for names in groups for n in names]
    node = site.permuted(o.node, order)
    return site.shaped(node, _groups(groups, extents))


def _is_matrix(
    site: LoweringContext[OpKind], o: NamedAxesNode, groups: Sequence[Sequence[str]], extents: Mapping[str, int]
) -> bool:
    """Whether an operand is a matrix without a copy."""
    shadow = site.shadow(o.node).permute([o.names.index(n) for names in groups for n in names])
    try:
        shadow.view(_groups(groups, extents))
    except RuntimeError:
        return False
    return True


def _summed_axis_order(
    site: LoweringContext[OpKind],
    a: NamedAxesNode,
    b: NamedAxesNode,
    axis_groups: tuple[list[str], list[str], list[str]],
    extents: Mapping[str, int],
) -> list[str]:
    """Order the summed axes as in one of the operands, so that fewer operands are copied."""
    batch, rows, columns = axis_groups
    shared = [n for n in a.names if n in b.names and n not in batch]
    orders = [
        sorted(shared, key=lambda n, o=o: -site.shadow(o.node).stride(o.names.index(n)))  # type: ignore[misc]
        for o in (a, b)
    ]

    def copies(order: list[str]) -> int:
        left = _is_matrix(site, a, (batch, rows, order), extents)
        return 2 - left - _is_matrix(site, b, (batch, order, columns), extents)

    return min(orders, key=copies)
