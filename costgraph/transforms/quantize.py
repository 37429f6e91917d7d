"""Quantization for inference: weights, activations and KV caches in narrow number formats.

Weights are stored with their summed axes innermost, so that scales run along them, and are dequantized inside the
matmul kernel: memory traffic is the packed weight and its scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ..algebra.polynomial import ONE, Poly, as_poly
from ..algebra.symbols import shown
from ..dtypes import DTYPES, DType
from ..dtypes import dtype as find_dtype
from ..errors import BindingError, CostGraphError, FormatError, GraphError, ShapeError, UnsupportedError
from ..ir.graph import (
    BodyKind,
    Graph,
    Loop,
    Op,
    Placement,
    Storage,
    Tensor,
    base_name,
    bindings,
    building,
    current_graph,
    need_flag,
    need_graph,
    need_list,
    tidy,
)
from ..ir.strides import windows_along
from ..notation.pattern import Affine, Axes, Pattern
from ..ops.einsum import Einsum
from ..ops.elementwise import cast, pointwise
from ..ops.experts import GroupedMatmul
from ..ops.fill import Assign
from ..ops.index import Gather, gather
from ..ops.kv_cache import Append, Cache
from ..ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice, expand, rearrange
from ..ops.loops import Kernel, kernel
from ..ops.opaque import need_declared
from ..ops.reduce import reduce
from .precision import word
from .reverse_mode import scoped
from .rewrite import Rewriter
from .selection import Names, split_at_layers
from .views import is_view_op

__all__ = [
    "sum_groups",
    "split_axes",
    "group_count",
    "packing",
    "quantize_activations",
    "row_scaled",
    "dequantize_weight",
    "dequantize",
    "ParamUse",
    "caches_of",
    "skipped_names",
    "summed_axes",
    "uses_of",
    "weights_of",
    "FALLBACKS",
    "MIXTURES",
    "ROLES",
    "Mixture",
    "Model",
    "StorageFormats",
    "activations_format",
    "cache_format",
    "mixture_of",
    "need_common",
    "weights_format",
    "apply_mixture",
    "quantize",
]


# -- scales and rounding -----------------------------------------------------------------------------------------------


def split_axes(op: Op, pattern: Pattern, operand: int) -> tuple[list[int], tuple[int, ...]]:
    """Return the axes of a matmul operand that the result has, and the summed ones."""
    names = set(pattern.operand_names(operand)) - set(pattern.result_names)
    dims = pattern.operands[operand]
    summed = tuple(i for i, d in enumerate(dims) if d.names and names >= set(d.names))
    outer = [i for i in range(len(dims)) if i not in summed]
    if any(names & set(dims[i].names) for i in outer):
        raise UnsupportedError(
            f"quantize: {op.name!r} sums over part of an axis of its activations, expected complete axes, or its "
            f"weight in skip="
        )
    return outer, summed


def packing(stored: DType, *, scaled: bool) -> tuple[bool, bool]:
    """Return whether a weight has zero points, and group scales; block formats apply theirs when converting."""
    return bool(stored.element) and len(stored.scale) > 1, scaled and bool(stored.element and stored.block)


def dequantize_weight(w: Tensor, dtype: DType, *, scaled: bool) -> Tensor:
    """Dequantize a weight inside a kernel: widen it, and apply its zero points and group scales."""
    zero, scaled = packing(w.dtype, scaled=scaled)
    w = cast(w, dtype, name="widen")
    if zero:
        w = pointwise("sub", w, 0, dtype=dtype, name="zero_point")
    return pointwise("mul", w, 1.0, dtype=dtype, name="group_scale") if scaled else w


def group_count(op: Op, operand: int, group: int) -> Poly:
    """Return the number of scale groups along the summed axes of a matmul."""
    count: Poly = op.operands[operand].sizes[1]
    if isinstance(op.kind, Einsum):
        pattern, count = op.kind.pattern, ONE
        for name in pattern.operand_names(operand):
            count = count if name in pattern.result_names else count * op.kind.extents[name]
    return windows_along(count, 0, group)


def sum_groups(y: Tensor, count: Poly, dtype: DType) -> Tensor:
    """Sum the scaled partial sums of groups, where operands are multiplied in their stored formats."""
    names = " ".join(f"a{i}" for i in range(y.ndim))
    size: Any = count
    parts = expand(y, f"{names} -> g {names}", g=size, name="groups")
    scaled = pointwise("mul", parts, 1.0, dtype=dtype, name="group_scale")
    return reduce(scaled, f"g {names} -> {names}", "sum", name="group_sum")


def dequantize(t: Tensor, dtype: DType, *, fused: bool) -> Tensor:
    """Dequantize a tensor."""
    if not t.dtype.element:
        return cast(t, dtype)
    if fused:
        dequantized = cast(t, dtype)
        if len(t.dtype.scale) > 1:
            dequantized = pointwise("sub", dequantized, 0, dtype=dtype, name="zero_point")
        return pointwise("mul", dequantized, 1.0, dtype=dtype, name="scale")
    with kernel("dequantize") as body:
        dequantized = dequantize(t, dtype, fused=True)
    return body.export(dequantized)


def row_scaled(pattern: Pattern, i: int, y: Callable[[Tensor], Tensor], other: Tensor) -> Tensor:
    """Multiply by an operand with row scales: scale the result, or the other operand if rows are not summed."""
    if set(pattern.operands[i][-1].names) & set(pattern.result_names):
        return y(pointwise("mul", other, 1.0, dtype=other.dtype, name="row_scale"))
    product = y(other)
    return pointwise("mul", product, 1.0, dtype=product.dtype, name="row_scale")


def quantize_activations(
    x: Tensor, outer: Sequence[int], summed: Sequence[int], dtype: DType, *, fused: bool
) -> Tensor:
    """Quantize activations: absolute maximum per scale, division, multiplication and rounding."""
    if not fused:
        with kernel("quantize") as body:
            narrow = quantize_activations(x, outer, summed, dtype, fused=True)
        return body.export(narrow)
    names = [f"a{i}" for i in range(x.ndim)]
    scale_names = ["1" if i in summed else n for i, n in enumerate(names)]
    # for block formats too: a maximum per block compares as many elements
    amax = reduce(pointwise("abs", x), f"{' '.join(names)} -> {' '.join(scale_names)}", "max", name="amax")
    scale = pointwise("div", float(dtype.max), cast(amax, "fp32"), name="scale")
    x = pointwise("clamp", pointwise("mul", x, scale, dtype=x.dtype, name="scaled"))
    if len(summed) != 1 or summed[0] != x.ndim - 1:
        right = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        x = rearrange(x, f"{' '.join(names)} -> {right}", name="order")
    return cast(x, dtype)


# -- uses of parameters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamUse:
    """An op's use of a parameter."""

    op: Op
    """the user"""
    operand: int
    """operand index"""
    kind: str
    """`product` with an activation, `lookup` of rows, or `other`"""
    summed: tuple[int, ...] = ()
    """axes of the parameter that the product sums over"""


#: For each axis of a tensor, the axes of its source that it contains.
_Axes = tuple[frozenset[int], ...]


class Sources:
    """Follows tensors through views and bodies back to their source."""

    def __init__(self, graph: Graph) -> None:
        self.outer: dict[Tensor, Tensor] = {}
        for op in graph.walk():
            if op.loop is not None:
                self.outer |= dict(zip(op.loop.captured, op.loop.shared, strict=True))
            elif op.body is not None:
                self.outer |= dict(zip(op.body.formals, op.operands, strict=True))

    def of(self, t: Tensor) -> tuple[Tensor, _Axes | None]:
        """Return a tensor's source, and its axes in terms of the source's, None if a view obscures them."""
        axes: _Axes | None = tuple(frozenset((i,)) for i in range(t.ndim))
        while True:
            if t in self.outer:
                t = self.outer[t]
            elif t.producer is not None and is_view_op(t.producer):
                axes = _axes_before_view(t.producer, axes)
                t = t.producer.operands[0]
            else:
                return t, axes


def _axes_before_view(op: Op, axes: _Axes | None) -> _Axes | None:
    """Express a view's axes in terms of its operand's."""
    if axes is None or isinstance(op.kind, Slice):
        return axes
    if isinstance(op.kind, Expand):
        operand_axes = [frozenset[int]() if axis is None else frozenset((axis,)) for axis in op.kind.kept]
    elif isinstance(op.kind, Rearrange) and op.kind.pattern is not None:
        pattern = op.kind.pattern
        operand_axes = [
            frozenset(i for i, d in enumerate(pattern.operands[0]) if set(d.names) & set(dim.names))
            for dim in pattern.result
        ]
    elif isinstance(op.kind, Rearrange) and op.kind.merged == tuple(op.kind.split[i] for i in op.kind.order):
        if len(op.kind.order) != op.operands[0].ndim:
            return None
        operand_axes = [frozenset((i,)) for i in op.kind.order]  # a pure permutation
    else:
        return None
    return tuple(frozenset[int]().union(*(operand_axes[i] for i in inner)) for inner in axes)


def uses_of(graph: Graph) -> dict[Tensor, list[ParamUse]]:
    """Return each parameter's uses, seen through views and into bodies."""
    need_graph("uses", graph)
    sources = Sources(graph)
    uses_by_param: dict[Tensor, list[ParamUse]] = {t: [] for t in graph.params}
    for op in graph.walk():
        if is_view_op(op):
            continue
        operands = () if isinstance(op.kind, Kernel) else op.operands
        for i, t in enumerate(operands if op.loop is None else (*op.loop.starts, *op.loop.xs)):
            leaf, axes = sources.of(t)
            if leaf in uses_by_param:
                uses_by_param[leaf].append(_classify_use(op, i, axes, sources))
    for body in graph.bodies():
        for t in body.outputs:
            leaf, _ = sources.of(t)
            if leaf in uses_by_param and body.owner is not None:
                uses_by_param[leaf].append(ParamUse(body.owner, 0, "other"))
    for t in graph.outputs:
        leaf, _ = sources.of(t)
        if leaf in uses_by_param:
            uses_by_param[leaf].append(ParamUse(t.producer or next(iter(graph.walk())), 0, "other"))
    return {t: uses for t, uses in uses_by_param.items() if uses}


def is_in(name: str, scope: str) -> bool:
    """Whether a name contains a scope or parameter name at whole levels."""
    return f"/{scope}/" in f"/{name}/"


def weights_of(graph: Graph, skipped: Sequence[str], *, embeddings: bool) -> dict[Tensor, list[ParamUse]]:
    """Return the parameters that can be quantized, with their uses; raise GraphError if there are none.

    `skipped` are scopes and names to leave out; `embeddings` includes lookup tables.
    """
    weights = {}
    for t, uses in uses_of(graph).items():
        products = sum(u.kind == "product" for u in uses)
        quantizable = all(u.kind in ("product", "lookup") for u in uses)
        if not quantizable or t.ndim < 2 or t.dtype != graph.dtype or (products < len(uses) and not embeddings):
            continue
        if not any(is_in(t.name, name) for name in skipped):
            weights[t] = uses
    if not weights:
        raise GraphError(
            f"quantize: graph {graph.name!r} has no weight outside {', '.join(skipped) or 'nothing'} that only "
            f"matmuls with activations read, expected linear layers in its default format {graph.dtype.name!r}"
        )
    return weights


def summed_axes(t: Tensor, uses: Sequence[ParamUse]) -> tuple[int, ...]:
    """Return a parameter's axes that products sum over; for a table, the row axes."""
    return next((u.summed for u in uses if u.kind == "product"), tuple(range(1, t.ndim)))


def _classify_use(op: Op, i: int, axes: _Axes | None, sources: Sources) -> ParamUse:
    if isinstance(op.kind, Gather) and not op.kind.batch and i == 0 and len(op.operands) == 2:
        return ParamUse(op, i, "lookup")
    if (
        isinstance(op.kind, GroupedMatmul)
        and i == 1
        and axes is not None
        and sources.of(op.operands[0])[0].role != "param"
    ):
        return ParamUse(op, i, "product", tuple(sorted(axes[1])))
    if not isinstance(op.kind, Einsum) or word(op) != "matmul" or len(op.operands) != 2 or axes is None:
        return ParamUse(op, i, "other")
    other, _ = sources.of(op.operands[1 - i])
    pattern = op.kind.pattern
    result_names = set(pattern.result_names)
    summed: set[int] = set()
    for dim, inner in zip(pattern.operands[i], axes, strict=True):
        if set(dim.names) & result_names and set(dim.names) - result_names:
            return ParamUse(op, i, "other")
        if dim.names and not set(dim.names) & result_names:
            summed |= inner
    if other.role == "param" or not summed:
        return ParamUse(op, i, "other")
    return ParamUse(op, i, "product", tuple(sorted(summed)))


# -- caches ------------------------------------------------------------------------------------------------------------


def caches_of(graph: Graph) -> set[Tensor]:
    """Return the caches that can be quantized: keys, values, latent vectors, and tensors cached once.

    They have role `cache` and a floating dtype; states of recurrences and convolutions are excluded.
    """
    sources = Sources(graph)
    caches = {t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role == "cache"}
    quantizable = {t for t in caches if t.dtype.kind == "float"}
    for op in graph.walk():
        if op.body is None:
            quantizable -= _state_caches(op, sources)
        elif op.loop is not None:
            quantizable -= {_cache_of(t, sources) for t in (*op.loop.starts, *op.loop.xs)}
    return quantizable


def _cache_of(t: Tensor, sources: Sources) -> Tensor:
    """Return the cache that a tensor views or was appended to."""
    while True:
        t, _ = sources.of(t)
        if t.producer is None or not isinstance(t.producer.kind, Append | Assign):
            return t
        t = t.producer.operands[0]


def _state_caches(op: Op, sources: Sources) -> set[Tensor]:
    """Return the caches that an op uses as state of a recurrence or as a convolution's window of earlier inputs."""
    if isinstance(op.kind, Assign):
        cache = _cache_of(op.operands[0], sources)
        producer = sources.of(op.operands[1])[0].producer
        if producer is None:
            return set()
        # a concat of cached and new inputs, the last of which are kept
        shifted = isinstance(producer.kind, Concat) and any(_cache_of(t, sources) is cache for t in producer.operands)
        return {cache} if shifted or producer.loop is not None else set()
    if isinstance(op.kind, Append):  # a fixed window of earlier positions, for any number of new ones
        cache, new = op.operands
        capacity, added = (t.sizes[op.kind.axis] for t in (cache, new))
        is_window = capacity.constant is not None and added.constant is None
        return {_cache_of(cache, sources)} if is_window else set()
    slides = isinstance(op.kind, Einsum) and any(isinstance(d, Affine) for o in op.kind.pattern.operands for d in o)
    return {_cache_of(t, sources) for t in op.operands} if slides else set()


def skipped_names(graph: Graph, skip: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameter names or scopes to leave unquantized."""
    if skip is None:
        return default
    names, skipped = Names(graph), list[str]()
    for name in need_list("quantize: skip", skip):
        text = name if isinstance(name, str) else ""
        # the name may be a pattern, or lack the suffixes of an unrolled loop
        matches = [t.name for t in graph.params if is_in(base_name(t.name), text) or names.matches(t, [text])]
        if not matches:
            examples = ", ".join(sorted({t.name for t in graph.params})[:8])
            raise GraphError(f"quantize: skip {shown(name)} matches no parameter or scope, expected some of {examples}")
        skipped += dict.fromkeys(text if is_in(n, text) else n for n in matches)
    return tuple(skipped)


# -- mixtures ----------------------------------------------------------------------------------------------------------
# GGUF mixtures choose each matrix's format by its role and its layer.
#
# Source: llama.cpp, src/llama-quant.cpp (`llama_tensor_get_type_impl` and `tensor_type_fallback`, commit 007dbbf3),
# without an importance matrix. Rules for single architectures are left out. Packed QKV projections follow their own
# branch, as in published files; that commit treats them as values.

#: Role of a matrix by the trailing levels of its name, as given by the layers of `costgraph.nn` and the zoo.
ROLES: Mapping[tuple[str, ...], str] = MappingProxyType({
    ("attention", "q", "weight"): "query", ("attention", "k", "weight"): "key",
    **{("attention", name, "weight"): "value" for name in ("v", "kv_b")},
    **{("attention", name, "weight"): "packed" for name in ("qkv", "kqv")},
    ("attention", "proj", "weight"): "output",
    **{("mlp", name, "weight"): "down" for name in ("down", "ffw2")},
    ("moe", "experts", "down"): "down", ("shared", "down", "weight"): "down",
})  # fmt: skip

#: Replacement if a format's block size does not divide the row size.
FALLBACKS: Mapping[str, str] = MappingProxyType(
    {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
)

#: Whether a rule applies to layer i of n.
Layers = Callable[[int, int], bool]


def _gets_more_bits(i: int, n: int) -> bool:
    """Whether a layer gets more bits: the first and last eighth, and every third layer between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True)
class Model:
    """Properties of a model that rules depend on."""

    layers: int
    """number of layers"""
    experts: int
    """experts per layer, 1 for a dense model"""
    shared: int
    """query heads per value head; 1 for packed projections"""


@dataclass(frozen=True)
class Mixture:
    """Formats of a model's matrices; norms, biases, routers and position tables are not quantized."""

    base: str
    """format of matrices without a rule"""
    rules: Mapping[str, tuple[tuple[str, Layers], ...]] = field(default_factory=dict)
    """formats by role, each with its layers; the first match applies"""
    grouped: str = ""
    """format of values if at least four query heads share a value head"""
    eight: str = ""
    """format of the attention output in a model with eight experts"""

    @property
    def layered(self) -> bool:
        """Whether formats depend on the number of layers."""
        return bool(self.rules) or self.base in _WIDENED

    def format(self, role: str, i: int, model: Model) -> str:
        """Return the format of a matrix in the i-th layer that has its role."""
        if role == "head":
            return self.base if self.base == "q8_0" else "q6_k"
        if model.experts == 8 and role in ("key", "value"):
            return "q8_0"
        if role == "output" and model.experts == 8:
            return self.eight or self.base
        candidates = (name for name, layers in self.rules.get(role, ()) if layers(i, model.layers))
        choice = next(candidates, self.base)
        if role != "value":
            return choice
        choice = self.grouped if self.grouped and model.shared >= 4 else choice
        return "q5_k" if choice in _WIDENED and model.layers == 80 and model.shared > 1 else choice


#: Value formats that a grouped-query model of 80 layers replaces by a wider one.
_WIDENED = ("q3_k", "q4_k")


def _always(name: str) -> tuple[tuple[str, Layers], ...]:
    return ((name, lambda i, n: True),)


def _for_layers(name: str, layers: Layers) -> tuple[tuple[str, Layers], ...]:
    return ((name, layers),)


_MIXTURES = {
    **{name.upper(): Mixture(name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k")},
    "Q2_K": Mixture("q2_k", {
        "value": _always("q3_k"), "down": _always("q3_k"), "output": _always("q3_k"),
    }, "q4_k", "q5_k"),
    "Q3_K_S": Mixture("q3_k", eight="q5_k"),
    "Q3_K_M": Mixture("q3_k", {
        "value": (*_for_layers("q5_k", lambda i, n: i < 2), *_always("q4_k")),
        "down": (*_for_layers("q5_k", lambda i, n: i < n // 16), *_always("q4_k")),
        "output": _always("q4_k"), "packed": _always("q4_k"),
    }, eight="q5_k"),
    "Q3_K_L": Mixture("q3_k", {
        **{role: _always("q5_k") for role in ("value", "down", "output")}, "packed": _always("q4_k"),
    }),
    "Q4_K_S": Mixture("q4_k", {
        "value": _for_layers("q5_k", lambda i, n: i < 4), "down": _for_layers("q5_k", lambda i, n: i < n // 8),
    }, eight="q5_k"),
    "Q4_K_M": Mixture("q4_k", {
        **{role: _for_layers("q6_k", _gets_more_bits) for role in ("value", "down")}, "packed": _always("q5_k"),
    }, eight="q5_k"),
    "Q5_K_S": Mixture("q5_k"),
    "Q5_K_M": Mixture("q5_k", {
        **{role: _for_layers("q6_k", _gets_more_bits) for role in ("value", "down")}, "packed": _always("q6_k"),
    }),
}  # fmt: skip

MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    _MIXTURES | {name: _MIXTURES[f"{name}_M"] for name in ("Q3_K", "Q4_K", "Q5_K")}  # as llama-quantize reads them
)
"""Mixtures by the names that their files carry."""


# -- formats -----------------------------------------------------------------------------------------------------------
# Validates the requested formats of weights, activations and caches, and their combinations.


class _LibraryDefaults(NamedTuple):
    """Default group size and scale format in the library that coined a weight format."""

    group: int
    """elements that share a scale"""
    scale: str
    """scale format"""
    flat: bool
    """whether groups run over the flattened weight and continue across row ends"""


#: bitsandbytes 0.50 (`Params4bit` in nn/modules.py, `quantize_4bit` in functional.py) flattens a weight into 64-element
#: blocks, each with an fp32 `absmax`; its fp4 codebook is E2M1 except for the smallest value. GPTQ, AWQ, torchao
#: (`Int4WeightOnlyConfig`) and compressed-tensors (W4A16) use a group size of 128 for int4 by default.
_LIBRARY_DEFAULTS = {
    "nf4": _LibraryDefaults(64, "fp32", True),
    "fp4": _LibraryDefaults(64, "fp32", True),
    "int4": _LibraryDefaults(128, "fp16", False),
}
#: Kernels and caches use FP4 only with block scales, so `fp4` names a weight format alone.
_NO_FP4 = "nvfp4 or mxfp4, whose blocks have scales, or fp4_e2m1 for elements in one block"


@dataclass(frozen=True)
class StorageFormats:
    """Storage formats of a quantized graph; None for unchanged."""

    weights: DType | None
    activations: DType | None
    cache: DType | None

    @property
    def product(self) -> DType | None:
        """Compute format of quantized matmuls; None for the activations' own."""
        if self.weights is None or self.activations is None:
            return None
        pair = (_element_dtype(self.weights), _element_dtype(self.activations))
        return next(a for a, b in (pair, pair[::-1]) if _represents(a, b))

    def operand(self, stored: DType) -> DType:
        """Format in which a quantized operand enters the matmul: its own if as wide as the compute format."""
        compute, element = self.product, _element_dtype(stored)
        return element if compute is None or element.bits == compute.bits else compute


def _narrow_dtype(place: str, value: object) -> DType:
    try:
        dtype = find_dtype(value)
    except CostGraphError as error:
        raise FormatError(f"{place}: {error}") from None
    if dtype.bits > 8 or dtype.kind == "bool" or dtype.name == "fp8_e8m0":
        raise FormatError(f"{place}: {dtype.name!r}, expected an integer or float of 8 bits or fewer")
    return dtype


def _element_dtype(dtype: DType) -> DType:
    """Return the element format without scales."""
    return DTYPES[dtype.element] if dtype.element else dtype


def weights_format(value: object, group: object, scale: object, *, zero: bool) -> DType | None:
    """Return the format of weights with their scales, None if unchanged."""
    place = "quantize: weights"
    if value is None:
        for name, option in (("group", group), ("scale", scale), ("zero", zero or None)):
            if option is not None:
                raise FormatError(f"quantize: {name}={shown(option)} without weights=, expected a format for them")
        return None
    mixture = mixture_of(value)
    dtype = _narrow_dtype(place, value) if mixture is None else _narrow_dtype(place, mixture.base)
    if dtype.scale:
        for name, option in (("group", group), ("scale", scale), ("zero", zero or None)):
            if option is not None:
                raise FormatError(f"{place} {shown(value)} have their own scales, expected no {name}=")
        return dtype if mixture is None else None
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise FormatError(f"quantize: group={shown(group)}, expected a positive integer")
    defaults = _LIBRARY_DEFAULTS.get(value) if isinstance(value, str) else None
    if defaults is not None:
        group, scale = defaults.group if group is None else group, defaults.scale if scale is None else scale
    scale_format = ("fp32" if group is None else "fp16") if scale is None else scale
    granularity = "row" if group is None else f"g{group}"
    try:
        suffix = ("_zero" if zero else "") + ("_flat" if defaults is not None and defaults.flat else "")
        return find_dtype(f"{dtype.name}_{granularity}_{find_dtype(scale_format).name}{suffix}")
    except CostGraphError:
        expected = "a scale in fp32, fp16, bf16 or fp8" + (", and a zero point only for integers" if zero else "")
        raise FormatError(
            f"{place} {dtype.name!r} with scale={shown(scale_format)}, zero={zero}, expected {expected}"
        ) from None


def mixture_of(value: object) -> Mixture | None:
    """Return the mixture with this case-insensitive name, None if there is none; number formats take precedence."""
    if not isinstance(value, str) or value in DTYPES:
        return None
    return MIXTURES.get(value) or MIXTURES.get(value.upper())


def activations_format(weights: object, value: object) -> DType | None:
    """Return the format of activations with one scale per token, None if unchanged."""
    if value is None:
        return None
    if weights is None:
        raise FormatError(f"quantize: activations={shown(value)} without weights=, expected a format for both")
    if mixture_of(weights) is not None:
        raise FormatError(f"quantize: activations={shown(value)} with the mixture {weights!r}, expected only weights")
    if "fp4" in (weights, value):
        raise FormatError(f"quantize: activations={shown(value)} with weights {shown(weights)}, expected {_NO_FP4}")
    dtype = _narrow_dtype("quantize: activations", value)
    return dtype if dtype.scale else find_dtype(f"{dtype.name}_row_fp32")


def cache_format(value: object) -> DType | None:
    """Return the format of caches, None if unchanged; integers get one scale per row."""
    if value is None:
        return None
    if value == "fp4":
        raise FormatError(f"quantize: cache='fp4', expected {_NO_FP4}")
    dtype = _narrow_dtype("quantize: cache", value)
    return find_dtype(f"{dtype.name}_row_fp16") if dtype.kind == "int" and not dtype.scale else dtype


def _represents(wide: DType, narrow: DType) -> bool:
    """Whether a format represents every value of another, scales aside; no matrix unit multiplies codebook values."""
    if wide.codes or narrow.codes:
        return False
    if wide.kind == narrow.kind == "int":
        return wide.bits > narrow.bits or (wide.bits == narrow.bits and wide.signed == narrow.signed)
    if wide.kind == "int" or wide.bits < narrow.bits:
        return False
    if narrow.kind == "int":
        return wide.mantissa + 1 >= narrow.bits - narrow.signed and wide.max >= -narrow.min
    # matrix units multiply the two 8-bit float formats with each other
    return wide.bits == narrow.bits or (wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa)


def need_common(formats: StorageFormats) -> None:
    """Raise FormatError if weights and activations have no common compute format."""
    assert formats.weights is not None
    assert formats.activations is not None
    weights, activations = _element_dtype(formats.weights), _element_dtype(formats.activations)
    if not _represents(weights, activations) and not _represents(activations, weights):
        raise FormatError(
            f"quantize: weights in {weights.name!r} and activations in {activations.name!r}: neither holds the "
            f"values of the other, expected the same format, or one that holds the other's values"
        )
    if weights.block != activations.block:
        raise FormatError(
            f"quantize: weights in {weights.name!r} and activations in {activations.name!r}: the matrix unit applies "
            f"block scales, expected the same block size on both sides, or no blocks"
        )


# -- applying a mixture ------------------------------------------------------------------------------------------------
# Assigns a format to each parameter in each iteration, and splits loops into parts with equal formats.

#: Suffixes that make names unique: of modules, and of unrolled iterations.
_NUMBER = re.compile(r"_\d+(?=/|$)|\..*", re.ASCII)
_MAX_ITERATIONS = 1 << 12  # more layers than any model has
#: Iteration indices of the loops around a parameter, outermost first.
_Path = tuple[int, ...]


def apply_mixture(graph: Graph, name: str, mixture: Mixture, skipped: Sequence[str]) -> tuple[Graph, dict[str, DType]]:
    """Assign a mixture's formats to the matrices of a forward pass; return the graph and formats by parameter.

    Iterations of a loop with equal formats form one loop. Raises BindingError if formats depend on symbolic sizes,
    GraphError if there is nothing to quantize or no matrix that the rules name, and UnsupportedError if a loop to split
    reads or writes slices, or a matrix does not belong to a decoder.
    """
    rewriter = _LoopSplitter(_FormatPlan(graph, name, mixture, skipped))
    return rewriter.run(graph), rewriter.formats


# -- assigning formats -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ParamInstance:
    """A parameter in one iteration."""

    param: Tensor
    path: _Path
    role: str
    layer: tuple[object, ...]
    """key shared by one layer's matrices"""


class _FormatPlan:
    """Formats of all parameters in all iterations, and the iteration counts of loops."""

    def __init__(self, graph: Graph, name: str, mixture: Mixture, skipped: Sequence[str]) -> None:
        self.place, self.mixture = f"quantize: weights {name!r}", mixture
        self.chosen: dict[Tensor, tuple[int, ...]] = {}
        """Quantized parameters, with their summed axes."""
        self.heads: set[Tensor] = set()
        """Matrices that compute logits, including tied embeddings."""
        for t, uses in weights_of(graph, skipped, embeddings=True).items():
            kinds = {u.kind for u in uses}
            if kinds == {"lookup"} and not is_in(t.name, "tokens"):
                continue  # a position table or similar
            self.chosen[t] = summed_axes(t, uses)
            if is_in(t.name, "head") or len(kinds) > 1:
                self.heads.add(t)
        self.sizes = bindings(graph, {})
        self.iteration_counts: dict[Op, int] = {}
        self.formats: dict[tuple[Tensor, _Path], DType] = {}
        occurrences: dict[tuple[str, _Path], int] = {}
        instances = list(self.walk(graph, (), occurrences))
        self.need_roles({p.role for p in instances})
        model = self.model(instances)
        orders: dict[str, dict[tuple[object, ...], int]] = {}
        for p in instances:
            order = orders.setdefault(p.role, {})
            format_name = mixture.format(p.role, order.setdefault(p.layer, len(order)), model)
            self.formats[p.param, p.path] = find_dtype(self.fitting_format(p.param, format_name))

    def walk(self, graph: Graph, path: _Path, occurrences: dict[tuple[str, _Path], int]) -> Iterator[_ParamInstance]:
        """Yield the parameters from all iterations in execution order."""
        for node in list(graph.nodes):
            if isinstance(node, Tensor):
                if node in self.chosen:
                    yield self.classify(node, path, occurrences)
            elif node.body is not None:
                has_chosen = any(t in self.chosen for t in node.body.params)
                count = self.count(node) if has_chosen and node.loop is not None else 1
                for i in range(count if has_chosen else 0):
                    yield from self.walk(node.body, path if node.loop is None else (*path, i), occurrences)

    def classify(self, t: Tensor, path: _Path, occurrences: dict[tuple[str, _Path], int]) -> _ParamInstance:
        """Classify a parameter; equal names in consecutive layers are numbered."""
        stem = _NUMBER.sub("", t.name)
        levels = tuple(stem.split("/"))
        repetition = occurrences[stem, path] = occurrences.get((stem, path), -1) + 1
        if t in self.heads:
            return _ParamInstance(t, path, "head", ())
        for last, role in ROLES.items():
            if levels[-len(last) :] == last:
                return _ParamInstance(t, path, role, (path, repetition, levels[: -len(last)]))
        if "cross" in levels:
            raise UnsupportedError(f"{self.place}: {t.name!r} does not belong to a decoder, expected a decoder")
        return _ParamInstance(t, path, "", ())

    def count(self, op: Op) -> int:
        """Return a loop's iteration count, 1 if no format depends on it."""
        assert op.loop is not None
        if not self.mixture.layered:
            return 1
        if op not in self.iteration_counts:
            iterations = self.number(op.loop.count, f"iterations of {op.name!r}")
            if iterations > _MAX_ITERATIONS:
                raise BindingError(
                    f"{self.place}: {iterations} iterations of {op.name!r}, expected at most {_MAX_ITERATIONS}"
                )
            self.iteration_counts[op] = int(iterations)
        return self.iteration_counts[op]

    def number(self, size: Poly, quantity: str) -> Fraction:
        value = size.bind(self.sizes).constant
        if value is None:
            raise BindingError(f"{self.place}: {quantity} are {size}, expected a number: formats depend on it")
        return Fraction(value)

    def need_roles(self, roles: set[str]) -> None:
        present = roles | {"value", "packed"} if roles & {"value", "packed"} else roles
        missing = sorted(set(self.mixture.rules) - present)
        if missing:
            raise GraphError(
                f"{self.place} has rules for {', '.join(missing)}, which the graph lacks; expected layers of "
                f"costgraph.nn"
            )

    def model(self, instances: Sequence[_ParamInstance]) -> Model:
        """Return the numbers of layers, experts and query heads per value head."""
        first = {p.role: p.param for p in reversed(instances)}
        layers = len({p.layer for p in instances if p.role in ("value", "packed")})
        experts = [p.param.sizes[0] for p in instances if p.param.ndim == 3 and p.role == "down"]
        shared = 1
        if {"query", "key"} <= first.keys() and self.mixture.layered:
            query, key = (prod(first[role].sizes, start=ONE) for role in ("query", "key"))
            shared = int(self.number(query / key, "heads that share a value"))
        return Model(layers, int(self.number(experts[0], "experts")) if experts else 1, shared)

    def fitting_format(self, t: Tensor, name: str) -> str:
        """Return the format, or its fallback, whose block size divides a parameter's row size."""
        row = prod((t.sizes[i] for i in self.chosen[t]), start=ONE).bind(self.sizes).constant
        for candidate in (name, FALLBACKS.get(name, name)):
            block = max(s.per or 1 for s in find_dtype(candidate).scale)
            if row is None or row % block == 0:
                return candidate
        return "fp16"


# -- splitting loops ---------------------------------------------------------------------------------------------------


class _LoopSplitter(Rewriter):
    """Copies a graph, splitting loops into one per combination of formats.

    No cost depends on the order of iterations, so those of one part need not be consecutive.
    """

    lies = True

    def __init__(self, plan: _FormatPlan) -> None:
        self.plan = plan
        self.formats: dict[str, DType] = {}
        """Formats by parameter name in the new graph."""
        self.path: _Path = ()
        """First iterations of the parts being copied."""
        formats_of: dict[Tensor, set[DType]] = {}
        for (t, _), dtype in plan.formats.items():
            formats_of.setdefault(t, set()).add(dtype)
        self.splits_loops = any(len(dtype) > 1 for dtype in formats_of.values())
        counts = [op.loop.count for op in plan.iteration_counts if op.loop is not None and self.splits_loops]
        names = set[str]().union(*(count.names() for count in counts))
        super().__init__({name: size for name, size in plan.sizes.items() if name in names})

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        copied = super().source(old, new, suffix)
        if old in self.plan.chosen:
            self.formats[copied.name] = self.plan.formats[old, self.path]
        return copied

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, or a loop in parts."""
        if op.loop is None or not any(t in self.plan.chosen for t in op.loop.body.params):
            return super().copy(op, new, suffix)
        outer, groups = self.path, self.iteration_groups(op.loop)
        starts = {t: self.tensors[t] for t in op.loop.starts}
        for n, group in enumerate(groups):
            self.path = (*outer, group[0])
            copied = self.copy_part(
                op, op.loop, new, f"{suffix}.part{n}" if n else suffix, len(group) if len(groups) > 1 else 0
            )
            self.tensors |= zip(op.loop.starts, copied.results, strict=False)  # carried into the next part
        self.tensors |= starts
        self.path = outer
        return copied

    def copy_part(self, op: Op, loop: Loop, new: Graph, suffix: str, count: int) -> Op:
        """Copy a loop with `count` iterations; with all of them if that is 0."""
        if not count:
            return super().copy(op, new, suffix)
        if loop.xs or len(op.results) > len(loop.starts):
            raise UnsupportedError(
                f"{self.plan.place}: {op.name!r} reads or writes a slice in each iteration, expected a loop that only "
                f"forwards carries"
            )
        kind = replace(loop.kind, body=self.body(loop.body, new, suffix), count=as_poly(count))
        return self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix)

    def iteration_groups(self, loop: Loop) -> list[list[int]]:
        """Return a loop's iterations, grouped by formats."""
        if not self.splits_loops:
            return [[0]]
        params, depth = set(loop.body.params), len(self.path) + 1
        formats: dict[int, list[DType]] = {}
        for (t, path), dtype in self.plan.formats.items():
            if t in params and path[: depth - 1] == self.path:
                formats.setdefault(path[depth - 1], []).append(dtype)
        parts: dict[tuple[DType, ...], list[int]] = {}
        for i, combination in formats.items():
            parts.setdefault(tuple(combination), []).append(i)
        return list(parts.values())


# -- quantize ----------------------------------------------------------------------------------------------------------

#: Scopes that are not quantized by default: logits and routing are sensitive to rounding.
SKIPPED = ("head", "router")
#: Outer and summed axes of the rows of a grouped matmul.
_ROWS: tuple[list[int], tuple[int, ...]] = ([0], (1,))


def quantize(
    graph: Graph, weights: object = None, activations: object = None, cache: object = None, *,
    group: int | None = None, scale: str | None = None, zero: bool = False, skip: Sequence[str] | None = None,
    embeddings: bool = False,
) -> Graph:  # fmt: skip
    """Store weights, activations and caches of inference in narrower number formats.

    Parameters
    ----------
    graph : Graph
        A forward pass, or the result of `prefill` or `decode`; it is not modified.
    weights : str or DType, optional
        Format of parameters that are read only by matmuls with activations: linear layers and experts. Integers and
        floats of 8 bits or fewer get scales (see `group`); block formats such as mxfp4 have their own. Vectors,
        parameters with an explicit dtype and convolution weights stay. The name of a GGUF mixture, such as Q4_K_M
        (case-insensitive), quantizes each matrix of a decoder, embeddings and head included, by its name and layer.
        A loop is then split into one loop per combination of formats.
    activations : str or DType, optional
        Format that the other operand of these matmuls is quantized to, by a separate op, with an fp32 scale per token.
        By default matmuls run in the activations' dtype, and weights are dequantized inside the kernel.
    cache : str or DType, optional
        Format of cached keys, values and latent vectors. Integers have an fp16 scale per row of the innermost axis (one
        head of one position); floats have none, as a scale per layer is a constant. States of recurrences and
        convolutions stay. Fused attention dequantizes inside; for eager attention a kernel writes a wide copy.
    group : int, optional
        Group size: elements along the summed axes that share a weight scale. Default: one scale per output channel,
        except where the format's library has its own default: 128 for `int4` (GPTQ, AWQ, torchao), and 64 elements of
        the flattened weight for `nf4` and `fp4` (bitsandbytes). `int4_row_fp32` is int4 with one scale per output
        channel.
    scale : str, optional
        Format of the weight scales. Default: fp16 with `group` and for `int4`; fp32 without, and for `nf4` and `fp4`.
    zero : bool
        Whether each weight scale has a zero point, stored in the weights' format.
    skip : sequence of str, optional
        Scopes or names of parameters that are not quantized, matched at any level. Default: `head` and `router`; with a
        mixture only `router`. Layers of a stack are selected as `layers[16:]` or `layers/31/mlp`.
    embeddings : bool
        Whether embedding tables are quantized too, including those tied to a head that is not skipped.

    Returns
    -------
    Graph
        With the same number of parameters; `param_bytes` includes their scales. Quantization and scaling FLOPs are
        counted: one per weight element for group scales and one more for zero points, one per output element for
        channel or token scales, and one per attention score for cache row scales. Conversions are free, including the
        scaling of block formats.

    Raises
    ------
    BindingError
        If a mixture depends on a size without a value.
    FormatError
        If a format is unknown, wider than 8 bits, or already has scales, or if weights and activations have no common
        compute format.
    GraphError
        If no format is given, or the graph has nothing to quantize.
    UnsupportedError
        If a matmul reads a quantized weight in an axis order that does not fit its scales, or an op is an external call
        recorded by a trace.

    Notes
    -----
    `weights="int4", group=128` matches GPTQ (Frantar et al. 2022, arXiv 2210.17323) and AWQ (Lin et al. 2023, arXiv
    2306.00978); int8 weights and activations match SmoothQuant (Xiao et al. 2022, arXiv 2211.10438). Block formats
    follow OCP Microscaling (MX) 1.0; mixtures follow llama.cpp (src/llama-quant.cpp). For fp8 matmuls in a training
    step, see `costgraph.Policy`.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    >>> cg.param_bytes(cg.quantize(g, "int4", group=128))  # half a byte each, and 2 B for 128 of a column
    D*F/2 + 2*F*ceiling(D/128)
    >>> w8a8 = cg.quantize(g, "int8", "int8")
    >>> [(op.name, cg.costs(w8a8).filter(op=op.name, kind="matmul").total().flops) for op in w8a8.ops if op.body]
    [('linear/quantize', 0), ('linear/matmul', 2*B*D*F)]
    """
    need_graph("quantize", graph)
    need_declared("quantize", graph, "trace the quantized module", floats=True)
    need_flag("quantize", zero=zero, embeddings=embeddings)
    formats = StorageFormats(
        weights_format(weights, group, scale, zero=zero), activations_format(weights, activations), cache_format(cache)
    )
    mixture = mixture_of(weights)
    if formats.weights is None and formats.cache is None and mixture is None:
        raise GraphError("quantize: no format, expected one for the weights or the cache")
    if formats.activations is not None:
        need_common(formats)
    stored: Mapping[str, DType] = {}
    graph = split_at_layers("quantize: skip", graph, skip)
    skipped = skipped_names(graph, skip, SKIPPED if mixture is None else SKIPPED[1:])
    if mixture is not None:
        graph, stored = apply_mixture(graph, str(weights), mixture, skipped)
    rewriter = _Quantizer(formats, stored)
    if formats.weights is not None or mixture is not None:
        rewriter.choose(graph, skipped, embeddings=embeddings or mixture is not None)
    if formats.cache is not None:
        rewriter.caches = caches_of(graph)
        if not rewriter.caches:
            raise GraphError(
                f"quantize: graph {graph.name!r} has no cache of keys and values, expected the result of prefill or "
                f"decode"
            )
    return rewriter.run(graph)


# -- rewriter ----------------------------------------------------------------------------------------------------------


class _Quantizer(Rewriter):
    """Copies a graph, storing tensors in narrow formats and dequantizing them where ops read them."""

    lies = True

    def __init__(self, formats: StorageFormats, stored: Mapping[str, DType]) -> None:
        super().__init__()
        self.formats = formats
        self.stored = stored
        """Formats by parameter name, from a mixture."""
        self.weights: dict[Tensor, tuple[int, ...]] = {}
        """Quantized parameters, with their summed axes."""
        self.uses: dict[Op, ParamUse] = {}
        """Uses of quantized parameters."""
        self.caches: set[Tensor] = set()
        self.wide: dict[tuple[Tensor, Graph], Tensor] = {}
        """Dequantized copies, by the graph they are in."""
        self.narrow: dict[tuple[Tensor, Graph, tuple[int, ...]], Tensor] = {}
        """Quantized activations, by the axes that share a scale."""

    def choose(self, graph: Graph, skipped: Sequence[str], *, embeddings: bool) -> None:
        """Select the parameters to quantize."""
        for t, uses in weights_of(graph, skipped, embeddings=embeddings).items():
            if self.formats.weights is not None or t.name in self.stored:
                self.weights[t] = summed_axes(t, uses)
                self.uses |= {u.op: u for u in uses}

    @contextmanager
    def in_scope_of(self, op: Op, graph: Graph) -> Iterator[None]:
        """Add new ops in an existing op's scope."""
        with scoped(op), building(graph):
            yield

    # -- sources ---------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; weights are stored with summed axes innermost, behind a view in the old order."""
        copied: Tensor = super().source(old, new, suffix)
        if old in self.caches:
            assert self.formats.cache is not None
            copied.dtype = self.formats.cache
            copied.storage = Storage(copied.name, copied.sizes, copied.dtype, copied.role, copied.storage.pieces)
        if old not in self.weights:
            return copied
        dtype = self.stored.get(old.name, self.formats.weights)
        assert dtype is not None
        summed = self.weights[old]
        outer = [i for i in range(old.ndim) if i not in summed]
        names = [f"a{i}" for i in range(old.ndim)]
        sizes = (*(old.sizes[i] for i in outer), prod((old.sizes[i] for i in summed), start=ONE))
        copied.sizes, copied.dtype, copied.requires_grad = sizes, dtype, False
        stored = Tensor(new, copied.name, sizes, copied.dtype, role="param")
        copied.strides, copied.storage = stored.strides, stored.storage
        if len(summed) == 1 and (*outer, *summed) == tuple(range(old.ndim)):
            return copied
        stored_order = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        sizes_of: dict[str, Any] = {names[i]: old.sizes[i] for i in summed}
        with building(new):
            return rearrange(copied, f"{stored_order} -> {' '.join(names)}", name=f"{copied.name}.order", **sizes_of)

    def placed(self, old: Tensor, placement: Placement) -> Placement:
        """Return the placement of a sharded weight, with its summed axes merged."""
        if old not in self.weights:
            return placement
        summed = self.weights[old]
        inner = (f for i in summed for f in placement.dims[i] or (old.sizes[i],))
        return placement.with_dims([*(dim for i, dim in enumerate(placement.dims) if i not in summed), tidy(inner)])

    # -- ops -------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or replace a use of a quantized parameter."""
        use = self.uses.get(op)
        if use is None:
            super().emit(op, new, suffix)
            return
        try:
            if use.kind == "lookup":
                self.gather_rows(op, new)
            else:
                self.multiply_weight(op, new)
        except ShapeError as error:
            raise UnsupportedError(
                f"quantize: {op.name!r}: {error}; pass its weight in skip= to leave it unquantized"
            ) from None

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, dequantizing its operands first where it needs them wide."""
        if op.body is not None:
            return self.copy_with_body(op, new)
        narrow = [i for i, t in enumerate(op.operands) if self.tensors[t].dtype != t.dtype]
        if new.fused and isinstance(op.kind, Einsum) and len(narrow) == 1 and len(op.operands) == 2:
            return self.contract_cached(op, op.kind, narrow[0], new)
        first = 1 if isinstance(op.kind, Append | Assign) else 0
        passive = is_view_op(op) or isinstance(op.kind, KeepAlive | Cache)
        previous = {t: self.tensors[t] for t in op.operands}
        if not passive:
            self.tensors |= {t: self.dequantized(t, op, new) for t in op.operands[first:]}
        copied = super().copy(op, new, suffix)
        self.tensors |= previous
        return copied

    def contract_cached(self, op: Op, kind: Einsum, i: int, new: Graph) -> Op:
        """Multiply by a cached operand in its narrow format; the kernel widens it while reading."""
        operands: list[Tensor] = [new.adopt(self.tensors[t]) for t in op.operands]
        products: list[Op] = []

        def product(other: Tensor) -> Tensor:
            operands[1 - i] = other
            products.append(new.add_op(kind, operands, op.name.rpartition("/")[2], op.phase))
            return products[0].results[0]

        with self.in_scope_of(op, new):
            scaled = operands[i].dtype.element and not operands[i].dtype.block
            y = row_scaled(kind.pattern, i, product, operands[1 - i]) if scaled else product(operands[1 - i])
        self.tensors[op.results[0]] = y
        return products[0]

    def dequantized(self, old: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a tensor in its original format: for free inside a kernel, else as a copy."""
        t: Tensor = self.tensors[old]
        if t.dtype == old.dtype:
            return t
        if (t, new) not in self.wide:
            with self.in_scope_of(op, new):
                self.wide[t, new] = dequantize(t, old.dtype, fused=new.fused)
        return self.wide[t, new]

    def copy_with_body(self, op: Op, new: Graph) -> Op:
        """Copy an op with a body, whose formals take the operands' formats."""
        kind, loop = op.kind, op.loop
        assert isinstance(kind, BodyKind)
        old_body = kind.body
        body = new.start_body(old_body.name, fused=old_body.fused)
        rewritten = loop is None and any(inner in self.uses for inner in old_body.walk())
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        operands = []
        for f, operand in zip(old_body.formals, op.operands, strict=True):
            t = self.dequantized(operand, op, new) if f in carries else self.tensors[operand]
            operands.append(t)
            if rewritten:
                self.tensors[f] = t  # captured on first use: activations are quantized outside
                continue
            formal = self.formal(f, body)
            formal.dtype = t.dtype
            formal.storage = Storage(formal.name, formal.sizes, t.dtype, formal.role, formal.storage.pieces)
            if f not in carries and f not in slices:
                formal.strides, formal.offset = t.strides, t.offset
            self.tensors[f] = formal
        self.fill(old_body, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old_body.outputs]
        kind = replace(kind, body=body)
        if rewritten and isinstance(kind, Kernel):  # operands are now in the order of their first use
            changed = tuple(body.captured.index(operands[i]) for i in kind.changed)
            kind = replace(kind, backward="", changed=changed)
        return self.add(op, kind, body.captured if rewritten else operands, new)

    def gather_rows(self, op: Op, new: Graph) -> None:
        """Gather rows of a quantized table and dequantize them, in one kernel."""
        table, ids = (self.tensors[t] for t in op.operands)
        dtype = op.results[0].dtype
        with self.in_scope_of(op, new):
            if new.fused:
                result = dequantize(gather(table, ids), dtype, fused=True)
            else:
                with kernel(_kernel_name(op)) as body:
                    rows = dequantize(gather(table, ids), dtype, fused=True)
                result = body.export(rows)
        self.tensors[op.results[0]] = result

    def multiply_weight(self, op: Op, new: Graph) -> None:
        """Multiply by a quantized weight, in one kernel that dequantizes it."""
        x_index, kind = 1 - self.uses[op].operand, op.kind
        assert isinstance(kind, Einsum | GroupedMatmul)
        x = self.dequantized(op.operands[x_index], op, new)
        if self.formats.activations is not None:
            x, kind = self.quantize_input(op, kind, x, x_index, new)
        with self.in_scope_of(op, new):
            if new.fused:
                result = self.product(op, kind, x)
            else:
                with kernel(_kernel_name(op)) as body:
                    y = self.product(op, kind, x)
                result = body.export(y)
        self.tensors[op.results[0]] = result

    def quantize_input(
        self, op: Op, kind: Einsum | GroupedMatmul, x: Tensor, index: int, new: Graph
    ) -> tuple[Tensor, Einsum | GroupedMatmul]:
        """Return the quantized activations, summed axes merged and last, and the matching matmul record; cached."""
        outer, summed = _ROWS
        if isinstance(kind, Einsum):
            pattern = kind.pattern
            outer, summed = split_axes(op, pattern, index)
            dims = pattern.operands[index]
            operands = list(pattern.operands)
            operands[index] = (*(dims[i] for i in outer), Axes(tuple(n for i in summed for n in dims[i].names)))
            kind = replace(kind, pattern=Pattern(tuple(operands), pattern.result))
        target = new
        while target.fused and x.graph is not target and target.parent is not None:
            target = target.parent
        key = (x, target, summed)
        if key not in self.narrow:
            assert self.formats.activations is not None
            with self.in_scope_of(op, target):
                self.narrow[key] = quantize_activations(x, outer, summed, self.formats.activations, fused=target.fused)
        return self.narrow[key], kind

    def product(self, op: Op, kind: Einsum | GroupedMatmul, x: Tensor) -> Tensor:
        """Add a matmul and its scaling to the open kernel."""
        index, wide, compute = self.uses[op].operand, op.results[0].dtype, self.formats.product
        packed: Tensor = self.tensors[op.operands[index]]
        weights, activations = packed.dtype, self.formats.activations
        if isinstance(kind, GroupedMatmul):  # unpacks only the weights of experts that receive rows
            kind, w = replace(kind, unpack_flops=sum(packing(weights, scaled=compute is None))), packed
        else:
            w = dequantize_weight(
                packed, wide if compute is None else self.formats.operand(weights), scaled=compute is None
            )
        x = x if compute is None else cast(x, self.formats.operand(x.dtype))
        operands = [self.tensors[t] for t in op.operands]
        operands[index], operands[1 - index] = w, x
        sums = wide if compute is None else DTYPES["int32" if compute.kind == "int" else "fp32"]
        graph = current_graph()
        y: Tensor = graph.add_op(replace(kind, dtype=sums), operands, "product", op.phase).results[0]
        scaled_dtype = y.dtype if y.dtype.kind == "float" else DTYPES["fp32"]
        if compute is not None and weights.element and weights.block:
            y = sum_groups(y, group_count(op, index, weights.block), scaled_dtype)
        if activations is not None and activations.element:
            y = pointwise("mul", y, 1.0, dtype=scaled_dtype, name="token_scale")
        if weights.element and not weights.block:
            y = pointwise("mul", y, 1.0, dtype=scaled_dtype, name="channel_scale")
        return cast(y, wide)


def _kernel_name(op: Op) -> str:
    """Return an op's kernel name: its last level, without the suffixes of an unrolled loop."""
    return op.name.rpartition("/")[2].partition(".")[0]
