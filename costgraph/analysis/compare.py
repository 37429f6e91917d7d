"""Compare two graphs by class of op, for example a declared and a traced version of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..algebra.polynomial import ZERO, Poly, as_poly
from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, answer
from ..hardware.tables import Column, Table
from ..ir.graph import (
    Graph,
    Op,
    bindings,
    known_names,
    need_graph,
)
from ..notation.validation import guarded
from ..transforms.precision import word
from .costs import executions, traffic_of

__all__ = ["Comparison", "Compared", "compare"]

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
    return Comparison(tuple(rows), (first.name, second.name))


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
