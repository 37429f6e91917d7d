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
from ..ops.fill import Assign
from ..ops.grouped import GroupedMatmul
from ..ops.index import Gather, gather
from ..ops.keep_alive import KeepAlive
from ..ops.kv_cache import Append, Cache
from ..ops.layout import Concat, Expand, Rearrange, Slice, expand, rearrange
from ..ops.loops import Kernel, kernel
from ..ops.opaque import need_declared
from ..ops.reduce import reduce
from .precision import word
from .reverse_mode import is_view_op, scoped
from .rewrite import Rewriter
from .selection import Names, split_at_layers

__all__ = [
    "added_up",
    "divided",
    "groups",
    "packing",
    "rounded",
    "row_scaled",
    "unpacked",
    "widened",
    "ParamUse",
    "caches_of",
    "left_out",
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
    "mixed",
    "quantize",
]


# -- scales and rounding -----------------------------------------------------------------------------------------------


def divided(op: Op, pattern: Pattern, place: int) -> tuple[list[int], tuple[int, ...]]:
    """Return the axes of a matmul operand that the result has, and the summed ones."""
    names = set(pattern.operand_names(place)) - set(pattern.result_names)
    dims = pattern.operands[place]
    summed = tuple(i for i, d in enumerate(dims) if d.names and names >= set(d.names))
    outer = [i for i in range(len(dims)) if i not in summed]
    if any(names & set(dims[i].names) for i in outer):
        raise UnsupportedError(
            f"quantize: {op.name!r} sums a part of an axis of its activations, expected whole axes, or its weight in "
            f"skip="
        )
    return outer, summed


def packing(stored: DType, *, scaled: bool) -> tuple[bool, bool]:
    """Return whether a weight has zero points, and group scales; block formats apply theirs when converting."""
    return bool(stored.element) and len(stored.scale) > 1, scaled and bool(stored.element and stored.block)


def unpacked(w: Tensor, wanted: DType, *, scaled: bool) -> Tensor:
    """Dequantize a weight inside a kernel: widen it, and apply its zero points and group scales."""
    zero, scaled = packing(w.dtype, scaled=scaled)
    w = cast(w, wanted, name="widen")
    if zero:
        w = pointwise("sub", w, 0, dtype=wanted, name="zero_point")
    return pointwise("mul", w, 1.0, dtype=wanted, name="group_scale") if scaled else w


def groups(op: Op, place: int, group: int) -> Poly:
    """Return the number of scale groups along the summed axes of a matmul."""
    count: Poly = op.operands[place].sizes[1]
    if isinstance(op.kind, Einsum):
        pattern, count = op.kind.pattern, ONE
        for name in pattern.operand_names(place):
            count = count if name in pattern.result_names else count * op.kind.extents[name]
    return windows_along(count, 0, group)


def added_up(y: Tensor, count: Poly, wanted: DType) -> Tensor:
    """Sum the scaled partial sums of groups, where operands are multiplied in their stored formats."""
    names = " ".join(f"a{i}" for i in range(y.ndim))
    size: Any = count
    parts = expand(y, f"{names} -> g {names}", g=size, name="groups")
    scaled = pointwise("mul", parts, 1.0, dtype=wanted, name="group_scale")
    return reduce(scaled, f"g {names} -> {names}", "sum", name="group_sum")


def widened(t: Tensor, wanted: DType, *, fused: bool) -> Tensor:
    """Dequantize a tensor."""
    if not t.dtype.element:
        return cast(t, wanted)
    if fused:
        made = cast(t, wanted)
        if len(t.dtype.scale) > 1:
            made = pointwise("sub", made, 0, dtype=wanted, name="zero_point")
        return pointwise("mul", made, 1.0, dtype=wanted, name="scale")
    with kernel("dequantize") as body:
        made = widened(t, wanted, fused=True)
    return body.export(made)


def row_scaled(pattern: Pattern, i: int, y: Callable[[Tensor], Tensor], other: Tensor) -> Tensor:
    """Multiply by an operand with row scales: scale the result, or the other operand if rows are not summed."""
    if set(pattern.operands[i][-1].names) & set(pattern.result_names):
        return y(pointwise("mul", other, 1.0, dtype=other.dtype, name="row_scale"))
    made = y(other)
    return pointwise("mul", made, 1.0, dtype=made.dtype, name="row_scale")


def rounded(x: Tensor, outer: Sequence[int], summed: Sequence[int], wanted: DType, *, fused: bool) -> Tensor:
    """Quantize activations: absolute maximum per scale, division, multiplication and rounding."""
    if not fused:
        with kernel("quantize") as body:
            made = rounded(x, outer, summed, wanted, fused=True)
        return body.export(made)
    names = [f"a{i}" for i in range(x.ndim)]
    kept = ["1" if i in summed else n for i, n in enumerate(names)]
    # for block formats too: a maximum per block compares as many elements
    largest = reduce(pointwise("abs", x), f"{' '.join(names)} -> {' '.join(kept)}", "max", name="amax")
    scale = pointwise("div", float(wanted.max), cast(largest, "fp32"), name="scale")
    x = pointwise("clamp", pointwise("mul", x, scale, dtype=x.dtype, name="scaled"))
    if len(summed) != 1 or summed[0] != x.ndim - 1:
        right = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        x = rearrange(x, f"{' '.join(names)} -> {right}", name="order")
    return cast(x, wanted)


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
                axes = _before(t.producer, axes)
                t = t.producer.operands[0]
            else:
                return t, axes


def _before(op: Op, axes: _Axes | None) -> _Axes | None:
    """Express a view's axes in terms of its operand's."""
    if axes is None or isinstance(op.kind, Slice):
        return axes
    if isinstance(op.kind, Expand):
        places = [frozenset[int]() if at is None else frozenset((at,)) for at in op.kind.kept]
    elif isinstance(op.kind, Rearrange) and op.kind.pattern is not None:
        pattern = op.kind.pattern
        places = [
            frozenset(i for i, d in enumerate(pattern.operands[0]) if set(d.names) & set(dim.names))
            for dim in pattern.result
        ]
    elif isinstance(op.kind, Rearrange) and op.kind.merged == tuple(op.kind.split[i] for i in op.kind.order):
        if len(op.kind.order) != op.operands[0].ndim:
            return None
        places = [frozenset((i,)) for i in op.kind.order]  # a pure permutation
    else:
        return None
    return tuple(frozenset[int]().union(*(places[i] for i in inner)) for inner in axes)


def uses_of(graph: Graph) -> dict[Tensor, list[ParamUse]]:
    """Return each parameter's uses, seen through views and into bodies."""
    need_graph("uses", graph)
    sources = Sources(graph)
    found: dict[Tensor, list[ParamUse]] = {t: [] for t in graph.params}
    for op in graph.walk():
        if is_view_op(op):
            continue
        own = () if isinstance(op.kind, Kernel) else op.operands
        for i, t in enumerate(own if op.loop is None else (*op.loop.starts, *op.loop.xs)):
            leaf, axes = sources.of(t)
            if leaf in found:
                found[leaf].append(_use(op, i, axes, sources))
    for body in graph.bodies():
        for t in body.outputs:
            leaf, _ = sources.of(t)
            if leaf in found and body.owner is not None:
                found[leaf].append(ParamUse(body.owner, 0, "other"))
    for t in graph.outputs:
        leaf, _ = sources.of(t)
        if leaf in found:
            found[leaf].append(ParamUse(t.producer or next(iter(graph.walk())), 0, "other"))
    return {t: uses for t, uses in found.items() if uses}


def is_in(name: str, scope: str) -> bool:
    """Whether a name contains a scope or parameter name at whole levels."""
    return f"/{scope}/" in f"/{name}/"


def weights_of(graph: Graph, kept: Sequence[str], *, embeddings: bool) -> dict[Tensor, list[ParamUse]]:
    """Return the parameters that can be quantized, with their uses; raise GraphError if there are none.

    `kept` are scopes and names to leave out; `embeddings` includes lookup tables.
    """
    found = {}
    for t, uses in uses_of(graph).items():
        products = sum(u.kind == "product" for u in uses)
        whole = all(u.kind in ("product", "lookup") for u in uses)
        if not whole or t.ndim < 2 or t.dtype != graph.dtype or (products < len(uses) and not embeddings):
            continue
        if not any(is_in(t.name, name) for name in kept):
            found[t] = uses
    if not found:
        raise GraphError(
            f"quantize: graph {graph.name!r} has no weight that products with activations alone read outside "
            f"{', '.join(kept) or 'nothing'}, expected linear layers in its default format {graph.dtype.name!r}"
        )
    return found


def summed_axes(t: Tensor, uses: Sequence[ParamUse]) -> tuple[int, ...]:
    """Return a parameter's axes that products sum over; for a table, the row axes."""
    return next((u.summed for u in uses if u.kind == "product"), tuple(range(1, t.ndim)))


def _use(op: Op, i: int, axes: _Axes | None, sources: Sources) -> ParamUse:
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
    kept = set(pattern.result_names)
    summed: set[int] = set()
    for dim, inner in zip(pattern.operands[i], axes, strict=True):
        if set(dim.names) & kept and set(dim.names) - kept:
            return ParamUse(op, i, "other")
        if dim.names and not set(dim.names) & kept:
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
    found = {t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role == "cache"}
    left = {t for t in found if t.dtype.kind == "float"}
    for op in graph.walk():
        if op.body is None:
            left -= _states(op, sources)
        elif op.loop is not None:
            left -= {_held(t, sources) for t in (*op.loop.starts, *op.loop.xs)}
    return left


def _held(t: Tensor, sources: Sources) -> Tensor:
    """Return the cache that a tensor views or was appended to."""
    while True:
        t, _ = sources.of(t)
        if t.producer is None or not isinstance(t.producer.kind, Append | Assign):
            return t
        t = t.producer.operands[0]


def _states(op: Op, sources: Sources) -> set[Tensor]:
    """Return the caches that an op uses as state of a recurrence or as a convolution's window of earlier inputs."""
    if isinstance(op.kind, Assign):
        held = _held(op.operands[0], sources)
        made = sources.of(op.operands[1])[0].producer
        if made is None:
            return set()
        # earlier inputs followed by new ones; the last are kept
        shifted = isinstance(made.kind, Concat) and any(_held(t, sources) is held for t in made.operands)
        return {held} if shifted or made.loop is not None else set()
    if isinstance(op.kind, Append):  # a fixed window of earlier positions, for any number of new ones
        held, new = op.operands
        room, more = (t.sizes[op.kind.axis] for t in (held, new))
        short = room.constant is not None and more.constant is None
        return {_held(held, sources)} if short else set()
    slides = isinstance(op.kind, Einsum) and any(isinstance(d, Affine) for o in op.kind.pattern.operands for d in o)
    return {_held(t, sources) for t in op.operands} if slides else set()


def left_out(graph: Graph, skip: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameter names or scopes to leave unquantized."""
    if skip is None:
        return default
    names, kept = Names(graph), list[str]()
    for name in need_list("quantize: skip", skip):
        text = name if isinstance(name, str) else ""
        # the name may be a pattern, or lack the suffixes of an unrolled loop
        found = [t.name for t in graph.params if is_in(base_name(t.name), text) or names.answers(t, [text])]
        if not found:
            known = ", ".join(sorted({t.name for t in graph.params})[:8])
            raise GraphError(f"quantize: skip {shown(name)} is no parameter or scope of one, expected some of {known}")
        kept += dict.fromkeys(text if is_in(n, text) else n for n in found)
    return tuple(kept)


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


def _more(i: int, n: int) -> bool:
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
        fits = (name for name, layers in self.rules.get(role, ()) if layers(i, model.layers))
        found = next(fits, self.base)
        if role != "value":
            return found
        found = self.grouped if self.grouped and model.shared >= 4 else found
        return "q5_k" if found in _WIDENED and model.layers == 80 and model.shared > 1 else found


#: Value formats that a grouped-query model of 80 layers replaces by a wider one.
_WIDENED = ("q3_k", "q4_k")


def _all(name: str) -> tuple[tuple[str, Layers], ...]:
    return ((name, lambda i, n: True),)


def _first(name: str, layers: Layers) -> tuple[tuple[str, Layers], ...]:
    return ((name, layers),)


_MIXTURES = {
    **{name.upper(): Mixture(name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k")},
    "Q2_K": Mixture("q2_k", {"value": _all("q3_k"), "down": _all("q3_k"), "output": _all("q3_k")}, "q4_k", "q5_k"),
    "Q3_K_S": Mixture("q3_k", eight="q5_k"),
    "Q3_K_M": Mixture("q3_k", {
        "value": (*_first("q5_k", lambda i, n: i < 2), *_all("q4_k")),
        "down": (*_first("q5_k", lambda i, n: i < n // 16), *_all("q4_k")),
        "output": _all("q4_k"), "packed": _all("q4_k"),
    }, eight="q5_k"),
    "Q3_K_L": Mixture("q3_k", {
        **{role: _all("q5_k") for role in ("value", "down", "output")}, "packed": _all("q4_k"),
    }),
    "Q4_K_S": Mixture("q4_k", {
        "value": _first("q5_k", lambda i, n: i < 4), "down": _first("q5_k", lambda i, n: i < n // 8),
    }, eight="q5_k"),
    "Q4_K_M": Mixture("q4_k", {
        **{role: _first("q6_k", _more) for role in ("value", "down")}, "packed": _all("q5_k"),
    }, eight="q5_k"),
    "Q5_K_S": Mixture("q5_k"),
    "Q5_K_M": Mixture("q5_k", {
        **{role: _first("q6_k", _more) for role in ("value", "down")}, "packed": _all("q6_k"),
    }),
}  # fmt: skip

MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    _MIXTURES | {name: _MIXTURES[f"{name}_M"] for name in ("Q3_K", "Q4_K", "Q5_K")}  # as llama-quantize reads them
)
"""Mixtures by the names that their files carry."""


# -- formats -----------------------------------------------------------------------------------------------------------
# Validates the requested formats of weights, activations and caches, and their combinations.


class _Coined(NamedTuple):
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
_COINED = {"nf4": _Coined(64, "fp32", True), "fp4": _Coined(64, "fp32", True), "int4": _Coined(128, "fp16", False)}
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
        pair = (_bare(self.weights), _bare(self.activations))
        return next(a for a, b in (pair, pair[::-1]) if _holds(a, b))

    def operand(self, stored: DType) -> DType:
        """Format in which a quantized operand enters the matmul: its own if as wide as the compute format."""
        own, found = self.product, _bare(stored)
        return found if own is None or found.bits == own.bits else own


def _narrow(place: str, value: object) -> DType:
    try:
        found = find_dtype(value)
    except CostGraphError as error:
        raise FormatError(f"{place}: {error}") from None
    if found.bits > 8 or found.kind == "bool" or found.name == "fp8_e8m0":
        raise FormatError(f"{place}: {found.name!r}, expected an integer or float of 8 bits or fewer")
    return found


def _bare(found: DType) -> DType:
    """Return the element format without scales."""
    return DTYPES[found.element] if found.element else found


def weights_format(value: object, group: object, scale: object, *, zero: bool) -> DType | None:
    """Return the format of weights with their scales, None if unchanged."""
    place = "quantize: weights"
    if value is None:
        for name, given in (("group", group), ("scale", scale), ("zero", zero or None)):
            if given is not None:
                raise FormatError(f"quantize: {name}={shown(given)} without weights=, expected a format for them")
        return None
    mixture = mixture_of(value)
    found = _narrow(place, value) if mixture is None else _narrow(place, mixture.base)
    if found.scale:
        for name, given in (("group", group), ("scale", scale), ("zero", zero or None)):
            if given is not None:
                raise FormatError(f"{place} {shown(value)} have scales of their own, expected no {name}=")
        return found if mixture is None else None
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise FormatError(f"quantize: group={shown(group)}, expected a positive integer")
    coined = _COINED.get(value) if isinstance(value, str) else None
    if coined is not None:
        group, scale = coined.group if group is None else group, coined.scale if scale is None else scale
    wanted = ("fp32" if group is None else "fp16") if scale is None else scale
    shared = "row" if group is None else f"g{group}"
    try:
        more = ("_zero" if zero else "") + ("_flat" if coined is not None and coined.flat else "")
        return find_dtype(f"{found.name}_{shared}_{find_dtype(wanted).name}{more}")
    except CostGraphError:
        expected = "a scale in fp32, fp16, bf16 or fp8" + (", and a zero point of integers alone" if zero else "")
        raise FormatError(
            f"{place} {found.name!r} with scale={shown(wanted)}, zero={zero}, expected {expected}"
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
        raise FormatError(f"quantize: activations={shown(value)} with the mixture {weights!r}, expected weights alone")
    if "fp4" in (weights, value):
        raise FormatError(f"quantize: activations={shown(value)} with weights {shown(weights)}, expected {_NO_FP4}")
    found = _narrow("quantize: activations", value)
    return found if found.scale else find_dtype(f"{found.name}_row_fp32")


def cache_format(value: object) -> DType | None:
    """Return the format of caches, None if unchanged; integers get one scale per row."""
    if value is None:
        return None
    if value == "fp4":
        raise FormatError(f"quantize: cache='fp4', expected {_NO_FP4}")
    found = _narrow("quantize: cache", value)
    return find_dtype(f"{found.name}_row_fp16") if found.kind == "int" and not found.scale else found


def _holds(wide: DType, narrow: DType) -> bool:
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
    one, other = _bare(formats.weights), _bare(formats.activations)
    if not _holds(one, other) and not _holds(other, one):
        raise FormatError(
            f"quantize: weights in {one.name!r} and activations in {other.name!r}: neither holds the values of the "
            f"other, expected one format, or a narrower one that the other holds"
        )
    if one.block != other.block:
        raise FormatError(
            f"quantize: weights in {one.name!r} and activations in {other.name!r}: the matrix unit applies scales of "
            f"blocks, expected blocks of one length on both sides, or on neither"
        )


# -- applying a mixture ------------------------------------------------------------------------------------------------
# Assigns a format to each parameter in each iteration, and splits loops into parts with equal formats.

#: Suffixes that make names unique: of modules, and of unrolled iterations.
_NUMBER = re.compile(r"_\d+(?=/|$)|\..*", re.ASCII)
_MOST_TURNS = 1 << 12  # more layers than any model has
#: Iteration indices of the loops around a parameter, outermost first.
_Path = tuple[int, ...]


def mixed(graph: Graph, name: str, mixture: Mixture, kept: Sequence[str]) -> tuple[Graph, dict[str, DType]]:
    """Assign a mixture's formats to the matrices of a forward pass; return the graph and formats by parameter.

    Iterations of a loop with equal formats form one loop. Raises BindingError if formats depend on symbolic sizes,
    GraphError if there is nothing to quantize or no matrix that the rules name, and UnsupportedError if a loop to split
    reads or writes slices, or a matrix does not belong to a decoder.
    """
    parter = _Parter(_Plan(graph, name, mixture, kept))
    return parter.run(graph), parter.formats


# -- assigning formats -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A parameter in one iteration."""

    param: Tensor
    path: _Path
    role: str
    layer: tuple[object, ...]
    """key shared by one layer's matrices"""


class _Plan:
    """Formats of all parameters in all iterations, and the iteration counts of loops."""

    def __init__(self, graph: Graph, name: str, mixture: Mixture, kept: Sequence[str]) -> None:
        self.place, self.mixture = f"quantize: weights {name!r}", mixture
        self.chosen: dict[Tensor, tuple[int, ...]] = {}
        """Quantized parameters, with their summed axes."""
        self.heads: set[Tensor] = set()
        """Matrices that compute logits, including tied embeddings."""
        for t, uses in weights_of(graph, kept, embeddings=True).items():
            kinds = {u.kind for u in uses}
            if kinds == {"lookup"} and not is_in(t.name, "tokens"):
                continue  # a position table or similar
            self.chosen[t] = summed_axes(t, uses)
            if is_in(t.name, "head") or len(kinds) > 1:
                self.heads.add(t)
        self.sizes = bindings(graph, {})
        self.turns: dict[Op, int] = {}
        self.formats: dict[tuple[Tensor, _Path], DType] = {}
        seen: dict[tuple[str, _Path], int] = {}
        places = list(self.walk(graph, (), seen))
        self.need_roles({p.role for p in places})
        model = self.model(places)
        orders: dict[str, dict[tuple[object, ...], int]] = {}
        for p in places:
            order = orders.setdefault(p.role, {})
            found = mixture.format(p.role, order.setdefault(p.layer, len(order)), model)
            self.formats[p.param, p.path] = find_dtype(self.fitting(p.param, found))

    def walk(self, graph: Graph, path: _Path, seen: dict[tuple[str, _Path], int]) -> Iterator[_Place]:
        """Yield the parameters from all iterations in execution order."""
        for node in list(graph.nodes):
            if isinstance(node, Tensor):
                if node in self.chosen:
                    yield self.placed(node, path, seen)
            elif node.body is not None:
                inside = any(t in self.chosen for t in node.body.params)
                turns = self.count(node) if inside and node.loop is not None else 1
                for i in range(turns if inside else 0):
                    yield from self.walk(node.body, path if node.loop is None else (*path, i), seen)

    def placed(self, t: Tensor, path: _Path, seen: dict[tuple[str, _Path], int]) -> _Place:
        """Classify a parameter; equal names in consecutive layers are numbered."""
        stem = _NUMBER.sub("", t.name)
        levels = tuple(stem.split("/"))
        again = seen[stem, path] = seen.get((stem, path), -1) + 1
        if t in self.heads:
            return _Place(t, path, "head", ())
        for last, role in ROLES.items():
            if levels[-len(last) :] == last:
                return _Place(t, path, role, (path, again, levels[: -len(last)]))
        if "cross" in levels:
            raise UnsupportedError(f"{self.place}: {t.name!r} is of no decoder, which alone is known")
        return _Place(t, path, "", ())

    def count(self, op: Op) -> int:
        """Return a loop's iteration count, 1 if no format depends on it."""
        assert op.loop is not None
        if not self.mixture.layered:
            return 1
        if op not in self.turns:
            turns = self.number(op.loop.count, f"iterations of {op.name!r}")
            if turns > _MOST_TURNS:
                raise BindingError(f"{self.place}: {turns} iterations of {op.name!r}, expected at most {_MOST_TURNS}")
            self.turns[op] = int(turns)
        return self.turns[op]

    def number(self, size: Poly, what: str) -> Fraction:
        found = size.bind(self.sizes).constant
        if found is None:
            raise BindingError(f"{self.place}: {what} are {size}, expected a number: formats depend on it")
        return Fraction(found)

    def need_roles(self, roles: set[str]) -> None:
        known = roles | {"value", "packed"} if roles & {"value", "packed"} else roles
        missing = sorted(set(self.mixture.rules) - known)
        if missing:
            raise GraphError(
                f"{self.place} names {', '.join(missing)}, none of which the graph has; expected layers of costgraph.nn"
            )

    def model(self, places: Sequence[_Place]) -> Model:
        """Return the numbers of layers, experts and query heads per value head."""
        first = {p.role: p.param for p in reversed(places)}
        layers = len({p.layer for p in places if p.role in ("value", "packed")})
        experts = [p.param.sizes[0] for p in places if p.param.ndim == 3 and p.role == "down"]
        shared = 1
        if {"query", "key"} <= first.keys() and self.mixture.layered:
            query, key = (prod(first[role].sizes, start=ONE) for role in ("query", "key"))
            shared = int(self.number(query / key, "heads that share a value"))
        return Model(layers, int(self.number(experts[0], "experts")) if experts else 1, shared)

    def fitting(self, t: Tensor, name: str) -> str:
        """Return the format, or its fallback, whose block size divides a parameter's row size."""
        row = prod((t.sizes[i] for i in self.chosen[t]), start=ONE).bind(self.sizes).constant
        for found in (name, FALLBACKS.get(name, name)):
            block = max(s.per or 1 for s in find_dtype(found).scale)
            if row is None or row % block == 0:
                return found
        return "fp16"


# -- splitting loops ---------------------------------------------------------------------------------------------------


class _Parter(Rewriter):
    """Copies a graph, splitting loops into one per combination of formats.

    No cost depends on the order of iterations, so those of one part need not be consecutive.
    """

    lies = True

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.formats: dict[str, DType] = {}
        """Formats by parameter name in the new graph."""
        self.path: _Path = ()
        """First iterations of the parts being copied."""
        different: dict[Tensor, set[DType]] = {}
        for (t, _), found in plan.formats.items():
            different.setdefault(t, set()).add(found)
        self.cut = any(len(found) > 1 for found in different.values())
        counts = [op.loop.count for op in plan.turns if op.loop is not None and self.cut]
        names = set[str]().union(*(count.names() for count in counts))
        super().__init__({name: size for name, size in plan.sizes.items() if name in names})

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        made = super().source(old, new, suffix)
        if old in self.plan.chosen:
            self.formats[made.name] = self.plan.formats[old, self.path]
        return made

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, or a loop in parts."""
        if op.loop is None or not any(t in self.plan.chosen for t in op.loop.body.params):
            return super().copy(op, new, suffix)
        outer, parts = self.path, self.parts(op.loop)
        before = {t: self.tensors[t] for t in op.loop.starts}
        for n, part in enumerate(parts):
            self.path = (*outer, part[0])
            made = self.part(op, op.loop, new, f"{suffix}.part{n}" if n else suffix, len(part) if len(parts) > 1 else 0)
            self.tensors |= zip(op.loop.starts, made.results, strict=False)  # carried into the next part
        self.tensors |= before
        self.path = outer
        return made

    def part(self, op: Op, loop: Loop, new: Graph, suffix: str, count: int) -> Op:
        """Copy a loop with `count` iterations; with all of them if that is 0."""
        if not count:
            return super().copy(op, new, suffix)
        if loop.xs or len(op.results) > len(loop.starts):
            raise UnsupportedError(
                f"{self.plan.place}: {op.name!r} reads or writes a slice in each iteration, expected one that hands on "
                f"alone"
            )
        kind = replace(loop.kind, body=self.body(loop.body, new, suffix), count=as_poly(count))
        return self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix)

    def parts(self, loop: Loop) -> list[list[int]]:
        """Return a loop's iterations, grouped by formats."""
        if not self.cut:
            return [[0]]
        own, depth = set(loop.body.params), len(self.path) + 1
        formats: dict[int, list[DType]] = {}
        for (t, path), found in self.plan.formats.items():
            if t in own and path[: depth - 1] == self.path:
                formats.setdefault(path[depth - 1], []).append(found)
        parts: dict[tuple[DType, ...], list[int]] = {}
        for i, found_there in formats.items():
            parts.setdefault(tuple(found_there), []).append(i)
        return list(parts.values())


# -- quantize ----------------------------------------------------------------------------------------------------------

#: Scopes that are not quantized by default: logits and routing are sensitive to rounding.
KEPT = ("head", "router")
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
        raise GraphError("quantize: no format, expected one of weights or of the cache")
    if formats.activations is not None:
        need_common(formats)
    stored: Mapping[str, DType] = {}
    graph = split_at_layers("quantize: skip", graph, skip)
    kept = left_out(graph, skip, KEPT if mixture is None else KEPT[1:])
    if mixture is not None:
        graph, stored = mixed(graph, str(weights), mixture, kept)
    rewriter = _Quantizer(formats, stored)
    if formats.weights is not None or mixture is not None:
        rewriter.choose(graph, kept, embeddings=embeddings or mixture is not None)
    if formats.cache is not None:
        rewriter.caches = caches_of(graph)
        if not rewriter.caches:
            raise GraphError(
                f"quantize: graph {graph.name!r} has no cache of keys and values, expected what prefill or decode "
                f"returns"
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

    def choose(self, graph: Graph, kept: Sequence[str], *, embeddings: bool) -> None:
        """Select the parameters to quantize."""
        for t, uses in weights_of(graph, kept, embeddings=embeddings).items():
            if self.formats.weights is not None or t.name in self.stored:
                self.weights[t] = summed_axes(t, uses)
                self.uses |= {u.op: u for u in uses}

    @contextmanager
    def at(self, op: Op, graph: Graph) -> Iterator[None]:
        """Add new ops in an existing op's scope."""
        with scoped(op), building(graph):
            yield

    # -- sources ---------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; weights are stored with summed axes innermost, behind a view in the old order."""
        made: Tensor = super().source(old, new, suffix)
        if old in self.caches:
            assert self.formats.cache is not None
            made.dtype = self.formats.cache
            made.storage = Storage(made.name, made.sizes, made.dtype, made.role, made.storage.pieces)
        if old not in self.weights:
            return made
        found = self.stored.get(old.name, self.formats.weights)
        assert found is not None
        summed = self.weights[old]
        outer = [i for i in range(old.ndim) if i not in summed]
        names = [f"a{i}" for i in range(old.ndim)]
        sizes = (*(old.sizes[i] for i in outer), prod((old.sizes[i] for i in summed), start=ONE))
        made.sizes, made.dtype, made.requires_grad = sizes, found, False
        stored = Tensor(new, made.name, sizes, made.dtype, role="param")
        made.strides, made.storage = stored.strides, stored.storage
        if len(summed) == 1 and (*outer, *summed) == tuple(range(old.ndim)):
            return made
        left = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        sizes_of: dict[str, Any] = {names[i]: old.sizes[i] for i in summed}
        with building(new):
            return rearrange(made, f"{left} -> {' '.join(names)}", name=f"{made.name}.order", **sizes_of)

    def placed(self, old: Tensor, at: Placement) -> Placement:
        """Return the placement of a sharded weight, with its summed axes merged."""
        if old not in self.weights:
            return at
        summed = self.weights[old]
        inner = (f for i in summed for f in at.dims[i] or (old.sizes[i],))
        return at.with_dims([*(dim for i, dim in enumerate(at.dims) if i not in summed), tidy(inner)])

    # -- ops -------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or replace a use of a quantized parameter."""
        use = self.uses.get(op)
        if use is None:
            super().emit(op, new, suffix)
            return
        try:
            if use.kind == "lookup":
                self.looked_up(op, new)
            else:
                self.multiplied(op, new)
        except ShapeError as error:
            raise UnsupportedError(
                f"quantize: {op.name!r}: {error}; its weight may be left as it is by skip="
            ) from None

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, dequantizing its operands first where it needs them wide."""
        if op.body is not None:
            return self.block(op, new)
        narrow = [i for i, t in enumerate(op.operands) if self.tensors[t].dtype != t.dtype]
        if new.fused and isinstance(op.kind, Einsum) and len(narrow) == 1 and len(op.operands) == 2:
            return self.contracted(op, op.kind, narrow[0], new)
        held = 1 if isinstance(op.kind, Append | Assign) else 0
        passive = is_view_op(op) or isinstance(op.kind, KeepAlive | Cache)
        before = {t: self.tensors[t] for t in op.operands}
        if not passive:
            self.tensors |= {t: self.widened(t, op, new) for t in op.operands[held:]}
        made = super().copy(op, new, suffix)
        self.tensors |= before
        return made

    def contracted(self, op: Op, kind: Einsum, i: int, new: Graph) -> Op:
        """Multiply by a cached operand in its narrow format; the kernel widens it while reading."""
        operands: list[Tensor] = [new.adopt(self.tensors[t]) for t in op.operands]
        made: list[Op] = []

        def product(other: Tensor) -> Tensor:
            operands[1 - i] = other
            made.append(new.add_op(kind, operands, op.name.rpartition("/")[2], op.phase))
            return made[0].results[0]

        with self.at(op, new):
            scaled = operands[i].dtype.element and not operands[i].dtype.block
            y = row_scaled(kind.pattern, i, product, operands[1 - i]) if scaled else product(operands[1 - i])
        self.tensors[op.results[0]] = y
        return made[0]

    def widened(self, old: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a tensor in its original format: for free inside a kernel, else as a copy."""
        t: Tensor = self.tensors[old]
        if t.dtype == old.dtype:
            return t
        if (t, new) not in self.wide:
            with self.at(op, new):
                self.wide[t, new] = widened(t, old.dtype, fused=new.fused)
        return self.wide[t, new]

    def block(self, op: Op, new: Graph) -> Op:
        """Copy an op with a body, whose formals take the operands' formats."""
        kind, loop = op.kind, op.loop
        assert isinstance(kind, BodyKind)
        old = kind.body
        body = new.start_body(old.name, fused=old.fused)
        rewritten = loop is None and any(inner in self.uses for inner in old.walk())
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        operands = []
        for f, before in zip(old.formals, op.operands, strict=True):
            t = self.widened(before, op, new) if f in carries else self.tensors[before]
            operands.append(t)
            if rewritten:
                self.tensors[f] = t  # captured on first use: activations are quantized outside
                continue
            made = self.formal(f, body)
            made.dtype = t.dtype
            made.storage = Storage(made.name, made.sizes, t.dtype, made.role, made.storage.pieces)
            if f not in carries and f not in slices:
                made.strides, made.offset = t.strides, t.offset
            self.tensors[f] = made
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        kind = replace(kind, body=body)
        if rewritten and isinstance(kind, Kernel):  # operands are now in the order of their first use
            changed = tuple(body.captured.index(operands[i]) for i in kind.changed)
            kind = replace(kind, backward="", changed=changed)
        return self.add(op, kind, body.captured if rewritten else operands, new)

    def looked_up(self, op: Op, new: Graph) -> None:
        """Gather rows of a quantized table and dequantize them, in one kernel."""
        table, ids = (self.tensors[t] for t in op.operands)
        wide = op.results[0].dtype
        with self.at(op, new):
            if new.fused:
                made = widened(gather(table, ids), wide, fused=True)
            else:
                with kernel(_level(op)) as body:
                    rows = widened(gather(table, ids), wide, fused=True)
                made = body.export(rows)
        self.tensors[op.results[0]] = made

    def multiplied(self, op: Op, new: Graph) -> None:
        """Multiply by a quantized weight, in one kernel that dequantizes it."""
        place, kind = 1 - self.uses[op].operand, op.kind
        assert isinstance(kind, Einsum | GroupedMatmul)
        x = self.widened(op.operands[place], op, new)
        if self.formats.activations is not None:
            x, kind = self.quantized(op, kind, x, place, new)
        with self.at(op, new):
            if new.fused:
                made = self.product(op, kind, x)
            else:
                with kernel(_level(op)) as body:
                    y = self.product(op, kind, x)
                made = body.export(y)
        self.tensors[op.results[0]] = made

    def quantized(
        self, op: Op, kind: Einsum | GroupedMatmul, x: Tensor, place: int, new: Graph
    ) -> tuple[Tensor, Einsum | GroupedMatmul]:
        """Return the quantized activations, summed axes merged and last, and the matching matmul record; cached."""
        outer, summed = _ROWS
        if isinstance(kind, Einsum):
            pattern = kind.pattern
            outer, summed = divided(op, pattern, place)
            dims = pattern.operands[place]
            operands = list(pattern.operands)
            operands[place] = (*(dims[i] for i in outer), Axes(tuple(n for i in summed for n in dims[i].names)))
            kind = replace(kind, pattern=Pattern(tuple(operands), pattern.result))
        home = new
        while home.fused and x.graph is not home and home.parent is not None:
            home = home.parent
        key = (x, home, summed)
        if key not in self.narrow:
            assert self.formats.activations is not None
            with self.at(op, home):
                self.narrow[key] = rounded(x, outer, summed, self.formats.activations, fused=home.fused)
        return self.narrow[key], kind

    def product(self, op: Op, kind: Einsum | GroupedMatmul, x: Tensor) -> Tensor:
        """Add a matmul and its scaling to the open kernel."""
        place, wide, own = self.uses[op].operand, op.results[0].dtype, self.formats.product
        packed: Tensor = self.tensors[op.operands[place]]
        weights, activations = packed.dtype, self.formats.activations
        if isinstance(kind, GroupedMatmul):  # unpacks only the weights of experts that receive rows
            kind, w = replace(kind, unpacked=sum(packing(weights, scaled=own is None))), packed
        else:
            w = unpacked(packed, wide if own is None else self.formats.operand(weights), scaled=own is None)
        x = x if own is None else cast(x, self.formats.operand(x.dtype))
        operands = [self.tensors[t] for t in op.operands]
        operands[place], operands[1 - place] = w, x
        sums = wide if own is None else DTYPES["int32" if own.kind == "int" else "fp32"]
        graph = current_graph()
        y: Tensor = graph.add_op(replace(kind, dtype=sums), operands, "product", op.phase).results[0]
        calculated = y.dtype if y.dtype.kind == "float" else DTYPES["fp32"]
        if own is not None and weights.element and weights.block:
            y = added_up(y, groups(op, place, weights.block), calculated)
        if activations is not None and activations.element:
            y = pointwise("mul", y, 1.0, dtype=calculated, name="token_scale")
        if weights.element and not weights.block:
            y = pointwise("mul", y, 1.0, dtype=calculated, name="channel_scale")
        return cast(y, wide)


def _level(op: Op) -> str:
    """Return an op's kernel name: its last level, without the suffixes of an unrolled loop."""
    return op.name.rpartition("/")[2].partition(".")[0]
