"""Compare two graphs by class of op, and a graph's parameters with the tensors in a checkpoint file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from ..algebra.polynomial import ZERO, Poly, as_poly
from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, answer, bound_answer
from ..errors import BindingError, FormatError
from ..files.checkpoints import Weights, read_weights
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import Graph, Op, bindings, known_names, need_graph
from ..notation.validation import guarded
from ..transforms.precision import word
from .costs import executions, repeated_bodies, traffic_of

__all__ = [
    "Comparison",
    "Compared",
    "compare",
    "WeightComparison",
    "WeightDifference",
    "compare_weights",
]


# -- graphs ------------------------------------------------------------------------------------------------------------


_AMOUNTS = ("matmul", "pointwise", "transcendental", "read", "written")
#: Op names of each class, from declared ops and from torch.
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul", "addmm", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "grouped_mm",
               "scaled_mm", "int_mm", "linear", "scaled"),
    "convolution": ("conv", "convolution", "mkldnn_convolution", "thnn_conv2d", "slow_conv_transpose2d"),
    "attention": ("flash_attention", "attention", "scaled_dot_product_flash_attention",
                  "scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_efficient_attention",
                  "scaled_dot_product_cudnn_attention", "scaled_dot_product_fused_attention_overrideable"),
    "softmax": ("softmax", "log_softmax", "safe_softmax"),
    "norm": ("norm", "layer_norm", "rms_norm", "native_layer_norm", "fused_rms_norm", "native_group_norm",
             "native_batch_norm", "batch_norm", "native_batch_norm_legit", "cudnn_batch_norm"),
    "loss": ("cross_entropy", "nll", "nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward"),
    "lookup": ("embedding", "embedding_dense", "gather", "scatter", "scatter_add", "index", "index_put", "index_add",
               "index_select", "take_along"),
    "reduction": ("sum", "mean", "max", "min", "prod", "amax", "amin", "argmax", "argmin", "cumsum", "cumprod", "any",
                  "all", "var", "std", "topk", "sort", "linalg_vector_norm", "norm_sum"),
    "pooling": ("max_pool2d", "mean_pool2d", "max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d", "pool"),
    "dropout": ("dropout", "native_dropout", "bernoulli"),
}  # fmt: skip
_CLASS_OF = {name: of for of, names in _CLASSES.items() for name in names}


@guarded()
@dataclass(frozen=True)
class Compared:
    """One class of ops in one phase, or the total."""

    phase: str
    """forward, recompute, backward or optimizer"""
    ops: str
    """class of ops, such as matmul, softmax or pointwise; copy where nothing is computed"""
    kind: str
    """matmul, pointwise or transcendental FLOPs, or bytes read or written"""
    first: Formula
    """amount in the first graph"""
    second: Formula
    """amount in the second graph"""
    difference: Formula
    """second minus first"""


@guarded()
@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """Differences between two graphs."""

    rows: tuple[Compared, ...]
    """one row per phase, class of ops and kind of cost that either graph has"""
    graphs: tuple[str, str] = ("", "")
    """names of both graphs"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions in either graph"""

    def differing(self) -> tuple[Compared, ...]:
        """Return the rows with a nonzero difference."""
        return tuple(r for r in self.rows if r.difference != 0)

    def total(self, kind: str) -> Formula:
        """Return the total difference in one kind of cost."""
        return sum((r.difference for r in self.rows if r.kind == kind), start=0)

    def _description(self) -> str:
        return f"graphs {' and '.join(map(shorten, self.graphs))}: {len(self.rows)} rows"

    def _columns(self) -> Sequence[Column]:
        return (
            *map(Column, ("phase", "ops", "kind")), *(Column(n, _unit) for n in ("first", "second", "difference"))
        )  # fmt: skip


def _unit(row: Compared) -> str:
    return "B" if row.kind in ("read", "written") else "FLOP"


def compare(first: Graph, second: Graph, /, *, count: str = "executed", **dims: int) -> Comparison:
    """Compare two graphs by class of op, with differences as formulas.

    Parameters
    ----------
    first, second : Graph
        Graphs to compare, such as a declared one and one from `costgraph.torch.trace`. Equal names are equal sizes.
    count : str
        "executed", or "full" to ignore iteration domains such as causal masks, as FlopCounterMode does.
    **dims : int
        Sizes to bind, each in the graphs that have it; otherwise preset sizes apply.

    Returns
    -------
    Comparison
        `.rows`, `.differing()`, `.total(kind)`; `print` it.

    Raises
    ------
    GraphError, BindingError
        If an argument is not a graph, or a size is invalid or in neither graph.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> def net(scaled):
    ...     with cg.Graph("net") as g:
    ...         y = cg.linear(g.input("x", (B, D)), "b d -> b f", f=F)
    ...         g.output(cg.relu(y * 2 if scaled else y))
    ...     return g
    >>> for row in cg.compare(net(False), net(True)).differing():
    ...     print(row.ops, row.kind, row.difference)
    pointwise pointwise B*F
    pointwise read 4*B*F
    pointwise written 4*B*F
    """
    need_graph("compare: first", first)
    need_graph("compare: second", second)
    shared_names = known_names(first) | known_names(second)
    amounts = [_amounts(g, count, {k: v for k, v in dims.items() if k in known_names(g) or k not in shared_names})
               for g in (first, second)]  # fmt: skip
    rows = []
    for key in dict.fromkeys([*amounts[0], *amounts[1]]):
        a, b = (by_class.get(key, ZERO) for by_class in amounts)
        if a or b:
            rows.append(Compared(*key, answer(a), answer(b), answer(b - a)))
    order = ("forward", "recompute", "backward", "optimizer")
    rows.sort(key=lambda r: (order.index(r.phase), r.ops, _AMOUNTS.index(r.kind)))
    legends = [g.root.legend for g in (first, second)]
    legend = {n: " or ".join(dict.fromkeys(of[n] for of in legends if n in of)) for of in legends for n in of}
    return Comparison(tuple(rows), (first.name, second.name), legend)


def _amounts(graph: Graph, count: str, dims: Mapping[str, int]) -> dict[tuple[str, str, str], Poly]:
    values = bindings(graph, dims)
    amounts: dict[tuple[str, str, str], Poly] = {}
    around = ""
    for op, times, moves in executions(graph):
        around = _class_of(op) if moves else around  # ops fused into a kernel belong to it
        amounts_of_op = op.kind.flops(op).by_kind(count)
        if moves:
            amounts_of_op |= traffic_of(op)
        for kind, amount in amounts_of_op.items():
            if amount:
                key = op.phase, around, kind
                amounts[key] = amounts.get(key, ZERO) + (as_poly(amount) * times).bind(values)
    return amounts


def _class_of(op: Op) -> str:
    if op.phase == "optimizer":
        return "update"
    name = word(op) if op.call is None else op.call.name
    name = name.strip("_").removesuffix("_data").removesuffix("_backward")
    if name in _CLASS_OF:
        return _CLASS_OF[name]
    return "copy" if not any(_computed(op)) else "pointwise"


def _computed(op: Op) -> Iterator[Poly]:
    for inner in [op] if op.body is None else [i for i, _, _ in executions(op.body)]:
        yield from inner.kind.flops(inner).by_kind().values()


# -- checkpoint files --------------------------------------------------------------------------------------------------


#: Maximum number of parts in a fused tensor, and of candidates considered for them.
_MOST_PARTS, _MOST_NEAR = 6, 12
#: Maximum number of axes considered for merging, and of distinct names after numbers are ignored.
_MOST_AXES, _MOST_GROUPS = 8, 2**12
#: Share of common words from which two names denote one tensor, whatever their shapes.
_LIKE = 0.35


@guarded()
@dataclass(frozen=True)
class WeightDifference:
    """A difference between a checkpoint and a graph, for one or more tensors."""

    kind: str
    """missing from the checkpoint, unexpected in it, or different in shape or format"""
    declared: str
    """path of the parameter, empty without a counterpart"""
    stored: str
    """name in the checkpoint with numbers as #, empty without a counterpart"""
    tensors: int
    """number of tensors that differ, counted in the checkpoint if it has any"""
    expected: str
    """declared shape and format"""
    found: str
    """shape and format in the checkpoint"""


@guarded()
@dataclass(frozen=True, repr=False)
class WeightComparison(Table):
    """Comparison of a checkpoint with a graph: parameters, bytes, and one row per difference."""

    rows: tuple[WeightDifference, ...]
    """differences, empty if everything agrees"""
    parameters: tuple[int, int]
    """elements in the declared parameters, and in all checkpoint tensors"""
    bytes: tuple[int, int]
    """bytes of the same"""
    names: tuple[str, str] = ("", "")
    """graph name and checkpoint path"""

    @property
    def agree(self) -> bool:
        """Whether every parameter is present with its shape and format, and nothing else is."""
        return not self.rows

    def _description(self) -> str:
        return f"{self.names[0]} and {self.names[1]}: {len(self.rows)} differences"

    def _columns(self) -> Sequence[Column]:
        return (
            *map(Column, ("kind", "declared", "stored")),
            Column("tensors", "1"),
            Column("expected"),
            Column("found"),
        )

    def _facts(self) -> Iterator[Fact]:
        for quantity, unit, pair in (("parameters", "1", self.parameters), ("bytes", "B", self.bytes)):
            yield from (Fact(f"{quantity}, {of}", n, unit) for of, n in zip(("declared", "stored"), pair, strict=True))
        yield Fact("differences", len(self.rows), "1")


@dataclass
class _Group:
    """Equal tensors: a parameter in all iterations, or checkpoint tensors whose names differ only in numbers."""

    name: str
    shape: tuple[int, ...]
    format: str
    left: int
    """number not matched yet"""
    bytes: int
    """bytes per tensor"""
    packed: bool = False
    """whether scales or packed elements give the checkpoint other shapes"""
    optional: bool = False
    """whether it is a buffer, which a checkpoint may omit"""
    words: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.words = frozenset(re.findall(r"[a-z]+", self.name.lower()))

    def amount(self, of_bytes: bool) -> int:
        """Return the unmatched elements or bytes."""
        return self.left * (self.bytes if of_bytes else prod(self.shape))

    def __str__(self) -> str:
        return f"{self.shape} {self.format}"


def compare_weights(graph: Graph, weights: Weights | str | os.PathLike[str], /, **dims: int) -> WeightComparison:
    """Compare the tensors in a checkpoint with the parameters of a graph, and list the differences.

    A checkpoint tensor matches a parameter if its axes are products of declared axes, in any order. Names only decide
    between equal shapes. Fused or split tensors match if they have the same number of elements, or the same bytes for
    packed formats and formats with scales.

    Parameters
    ----------
    graph : Graph
        Graph that declares the parameters.
    weights : Weights, str or path-like
        Result of `read_weights`, or its argument.
    **dims : int
        Sizes to bind.

    Returns
    -------
    WeightComparison
        `.agree`, `.rows`, `.parameters`, `.bytes`; `print` it. Buffers, such as running statistics, are optional.

    Raises
    ------
    BindingError
        If the size of a parameter is unbound.
    FormatError
        If the checkpoint cannot be read, or has more than 4096 tensors after numbers in names are ignored.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.files.checkpoints import Weight, Weights
    >>> with cg.Graph("net", dtype="bf16") as g:
    ...     x = g.input("x", (3, 5))
    ...     g.output(cg.linear(cg.linear(x, "b d -> b f", f=7, name="up"), "b f -> b d", d=5, name="down"))
    >>> file = Weights((Weight("up.weight", (7, 5), "bf16", 70), Weight("down.weight", (5, 7), "fp32", 140)))
    >>> for row in cg.compare_weights(g, file).rows:
    ...     print(row.kind, row.declared, row.stored, row.expected, "->", row.found)
    format down/weight down.weight (7, 5) bf16 -> (5, 7) fp32
    """
    need_graph("compare_weights", graph)
    file_weights = weights if isinstance(weights, Weights) else read_weights(weights)
    declared, stored = _declared(graph, dims), _stored(file_weights)
    elements, size = (sum(d.amount(of_bytes) for d in declared if not d.optional) for of_bytes in (False, True))
    needed, buffers = ([d for d in declared if d.optional is so] for so in (False, True))
    rows = [row for match in (_alike, _regrouped) for row in match(needed, stored)]
    rows += _alike(buffers, stored)  # using tensors left over by parameters
    rows += _others(needed, [s for s in stored if s.left])
    return WeightComparison(
        tuple(rows), (elements, file_weights.elements), (size, file_weights.bytes), (graph.name, file_weights.place)
    )


def _number(value: Any) -> int:
    if not isinstance(value, int):
        names = ", ".join(sorted(map(str, value.free_symbols)))
        raise BindingError(f"compare_weights: no size for {names}; expected one for each dimension of a parameter")
    return value


def _declared(graph: Graph, dims: dict[str, int]) -> list[_Group]:
    """Return parameters and buffers; packed ones are merged across bodies, as are their parts."""
    values, groups = bindings(graph, dims), dict[tuple[object, ...], _Group]()
    for body, times in repeated_bodies(graph):
        for t in body.tensors:
            if t.role not in ("param", "buffer") or t.producer is not None:
                continue
            shape = tuple(_number(bound_answer(n, values)) for n in t.sizes)
            count, size = (_number(bound_answer(n, values)) for n in (times, t.storage.bytes))
            packed = bool(t.dtype.scale) or t.dtype.bits % 8 != 0
            name = t.name.split("/")[-2:] if packed else [t.name]
            first = groups.setdefault(
                (*name, shape, t.dtype.name), _Group(t.name, shape, t.dtype.name, 0, size, packed, t.role == "buffer")
            )
            first.left += count
    return list(groups.values())


def _stored(weights: Weights) -> list[_Group]:
    """Group the tensors in a checkpoint by name without numbers, shape and format."""
    counts = Counter((re.sub(r"\d+", "#", w.name), w.shape, w.format, w.bytes) for w in weights.rows)
    if len(counts) > _MOST_GROUPS:
        raise FormatError(
            f"{weights.place}: {len(counts)} tensors whose names differ in more than numbers, expected at most "
            f"{_MOST_GROUPS}"
        )
    return [_Group(name, shape, format_, n, size) for (name, shape, format_, size), n in counts.items()]


# -- matching ----------------------------------------------------------------------------------------------------------


def _made_of(axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each axis is a product of sizes, each size used at most once."""
    if not axes:
        return True
    return any(
        prod(sizes[i] for i in chosen) == axes[0]
        and _made_of(axes[1:], [n for i, n in enumerate(sizes) if i not in chosen])
        for count in range(1, len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
    )


@lru_cache(maxsize=1 << 14)
def _reshaped(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether one shape is a permutation of the other with axes merged."""
    shorter, longer = sorted(([n for n in shape if n != 1] for shape in (a, b)), key=len)
    return prod(a) == prod(b) and len(longer) <= _MOST_AXES and _made_of(shorter, longer)


@lru_cache(maxsize=1 << 14)
def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be a slice of the other: all axes but one are products of its axes."""
    shorter, longer = sorted(([n for n in shape if n != 1] for shape in (a, b)), key=len)
    within = len(longer) <= _MOST_AXES
    return within and (
        not shorter or any(_made_of(shorter[:i] + shorter[i + 1 :], longer) for i in range(len(shorter)))
    )


def _likeness(a: _Group, b: _Group) -> float:
    """Return the Jaccard similarity of the words in both names."""
    return len(a.words & b.words) / max(1, len(a.words | b.words))


def _differs(d: _Group, s: _Group, kind: str, count: int) -> WeightDifference:
    return WeightDifference(kind, d.name, s.name, count, str(d), str(s))


def _alike(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Match tensors of equal shape, equal formats and similar names first; yield different formats."""
    pairs = [(d, s) for d in declared for s in stored if not d.packed and _reshaped(d.shape, s.shape)]
    pairs.sort(key=lambda pair: (pair[0].format != pair[1].format, -_likeness(*pair)))
    for d, s in pairs:
        matched = min(d.left, s.left)
        d.left, s.left = d.left - matched, s.left - matched
        if matched and d.format != s.format:
            yield _differs(d, s, "format", matched)


def _regrouped(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Match fused tensors to their parts by elements or bytes; yield different formats."""
    for fused_groups, part_groups in ((declared, stored), (stored, declared)):
        for fused in fused_groups:
            parts = _parts(fused, [g for g in part_groups if g.left]) if fused.left else ()
            for part in parts:
                d, s = (fused, part) if fused_groups is declared else (part, fused)
                if not d.packed and d.format != s.format:
                    yield _differs(d, s, "format", s.left)
            for part in parts:
                part.left = fused.left = 0


def _parts(fused: _Group, candidates: list[_Group]) -> Sequence[_Group]:
    """Return the fewest parts that add up to a tensor, trying similar names first."""
    near = [g for g in candidates if fused.packed or g.packed or _shared(fused.shape, g.shape)]
    near = sorted(near, key=lambda g: -_likeness(fused, g))[:_MOST_NEAR]
    for count in range(1, min(_MOST_PARTS, len(near)) + 1):
        for chosen in combinations(near, count):
            packed = fused.packed or any(g.packed for g in chosen)
            if fused.amount(packed) == sum(g.amount(packed) for g in chosen):
                return chosen
    return ()


def _others(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Yield the remaining tensors: different shapes where names and counts agree, else missing or unexpected."""
    pairs = [(d, s) for d in declared for s in stored if d.left and d.left == s.left and _likeness(d, s) >= _LIKE]
    for d, s in sorted(pairs, key=lambda pair: -_likeness(*pair)):
        if d.left and s.left:
            yield _differs(d, s, "shape", s.left)
            d.left = s.left = 0
    for d in declared:
        if d.left:
            yield WeightDifference("missing", d.name, "", d.left, str(d), "")
    for s in stored:
        if s.left:
            yield WeightDifference("unexpected", "", s.name, s.left, "", str(s))
