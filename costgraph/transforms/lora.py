"""LoRA: low-rank adapters for a graph's linear layers, with all other parameters frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

from ..algebra.polynomial import ONE, Poly
from ..errors import GraphError, UnsupportedError
from ..ir.graph import (
    Graph,
    Op,
    Tensor,
    building,
    current_graph,
    need_graph,
    opened,
    positive,
)
from ..notation.pattern import Affine, Axes, Pattern
from ..notation.validation import Rule
from ..ops import elementwise
from ..ops.einsum import Einsum, einsum
from ..ops.elementwise import (
    Pointwise,
    cast,
    pointwise,
)
from ..ops.loops import Kernel
from ..ops.opaque import need_declared
from .quantize import (
    Sources,
    is_in,
    uses_of,
)
from .rewrite import Rewriter
from .selection import (
    Names,
    patterns_of,
    split_at_layers,
)

__all__ = ["lora"]

#: Functions allowed next to a matmul in a kernel: with them it stays affine in the layer's input.
_LINEAR = ("add", "sub", "mul", "cast")


def lora(
    graph: Graph,
    rank: object = 8,
    on: str | Sequence[str] = "*",
    *,
    alpha: Annotated[float, Rule("a number above 0", lambda a: isinstance(a, int | float) and a > 0)] = 16,
    dropout: Annotated[
        float, Rule("a number of at least 0 and below 1", lambda p: isinstance(p, int | float) and 0 <= p < 1)
    ] = 0.0,
    trainable: str | Sequence[str] = (),
) -> Graph:
    """Add low-rank adapters to the linear layers of a graph and freeze all other parameters.

    A layer `x W` becomes `x W + alpha/rank * dropout(x) A B`: A maps the input axes of W to `rank`, and B maps these to
    its output axes (Hu et al. 2021, arXiv 2106.09685, section 4.1). Four ops are added, as PEFT runs them.

    Parameters
    ----------
    graph : Graph
        A forward pass; it is not modified. For QLoRA (Dettmers et al. 2023, arXiv 2305.14314), quantize the weights
        afterwards: `quantize(..., skip=["head", "lora_a", "lora_b"])`.
    rank : sympy.Expr or int
        Rank of the adapters.
    on : str or sequence of str
        Weights to adapt, by names or scopes in which `*` matches anything: `["*/attention/[qv]"]`. Default: all linear
        layers except a `head`, experts and tables. Select layers of a stack as `layers[16:]` or
        `layers/31/attention/*`; a loop is split there.
    alpha : float
        Scale of the adapters, times `rank`.
    dropout : float
        Dropout probability of the adapter input; 0 adds no op.
    trainable : str or sequence of str
        Parameters to train besides the adapters, such as a new head.

    Returns
    -------
    Graph
        With parameters `lora_a` and `lora_b` in each layer's scope, in the dtype of its input.

    Raises
    ------
    GraphError
        If a pattern is invalid, or matches no linear layer or parameter.
    UnsupportedError
        If an op is an external call recorded by a trace, or a layer is in a kernel that is not affine in its input.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.lora(cg.models.load("llama-3-8b"), 8, ["*/attention/[qv]"])
    >>> cg.param_count(g) - cg.param_count(cg.models.load("llama-3-8b"))  # 32 * 8 * (2*4096 + 4096 + 1024)
    3407872
    >>> step = cg.training_step(g, optimizer=cg.AdamW(), checkpoint=cg.every_block())
    >>> round(cg.peak_memory(step, B=1, S=1024) / 1e9, 1)
    17.1
    """
    need_graph("lora", graph)
    need_declared("lora", graph, "trace the module with its adapters", floats=True)
    size = positive("lora: rank", rank)
    graph = split_at_layers("lora", graph, on, trainable)
    names, layers = Names(graph), _linear_layers(graph)
    patterns = patterns_of("lora: trainable", trainable, names, graph.params) if trainable else []
    trained = {t for t in graph.params if names.matches(t, patterns)}
    weight_patterns = patterns_of("lora: on", on, names, [*layers])
    chosen = {op: (i, t) for t, ops in layers.items() if names.matches(t, weight_patterns) for op, i in ops.items()}
    return _Adapter(graph, chosen, trained, size, float(alpha), dropout).run(graph)


def _linear_layers(graph: Graph) -> dict[Tensor, dict[Op, int]]:
    """Return the weights read only by matmuls with activations, with these ops and the operand index of the weight."""
    layers = {}
    for t, uses in uses_of(graph).items():
        ops = {u.op: u.operand for u in uses if u.kind == "product" and isinstance(u.op.kind, Einsum)}
        if len(ops) == len(uses) and not is_in(t.name, "head"):
            layers[t] = ops
    if not layers:
        raise GraphError(f"lora: graph {graph.name!r} has no linear layer, expected matmuls of activations by weights")
    return layers


class _Adapter(Rewriter):
    """Copies a graph, adding adapters to the chosen layers."""

    def __init__(
        self,
        graph: Graph,
        chosen: dict[Op, tuple[int, Tensor]],
        trained: set[Tensor],
        rank: Poly,
        alpha: float,
        p: float,
    ) -> None:
        super().__init__()
        self.outer = Sources(graph).outer
        self.chosen = {self.layer(op): (op, *weight) for op, weight in chosen.items()}
        self.trained, self.rank, self.alpha, self.p = trained, rank, alpha, p

    def layer(self, op: Op) -> Op:
        """Return the op that an adapter parallels: the matmul, or the kernel that contains it."""
        graph = op.graph
        if not graph.fused:
            return op
        owner = graph.owner
        kinds = [inner.kind for inner in graph.walk() if inner is not op]
        is_affine = all(isinstance(k, Pointwise) and k.function.name in _LINEAR for k in kinds)
        if owner is None or not isinstance(owner.kind, Kernel) or not is_affine or len(owner.results) != 1:
            raise UnsupportedError(
                f"lora: {op.name!r} is in a kernel that does more than add to its result, expected a separate layer"
            )
        return owner

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        copied: Tensor = super().source(old, new, suffix)
        if old.role == "param" and old not in self.trained:
            copied.requires_grad = False
        return copied

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        super().emit(op, new, suffix)
        if op in self.chosen:
            matmul, weight_index, weight = self.chosen[op]
            with opened(levels=tuple(weight.name.split("/")[:-1])), building(new):
                self.tensors[op.results[0]] = self.add_adapter(op, matmul, weight_index)

    def add_adapter(self, layer: Op, op: Op, weight_index: int) -> Tensor:
        """Return the sum of a layer's result and that of its adapter."""
        old, y = op.operands[1 - weight_index], self.tensors[layer.results[0]]
        while old.graph is not layer.graph:
            old = self.outer[old]
        x: Tensor = self.tensors[old]
        down, up, sizes = _adapter_patterns(op, weight_index, self.rank)
        dropped = elementwise.dropout(x, self.p) if self.p else x
        product = _matmul_with_param(_matmul_with_param(dropped, down, sizes, "lora_a"), up, sizes, "lora_b")
        scaled = pointwise("mul", product, self.alpha, name="lora_scale")
        return pointwise("add", y, cast(scaled, y.dtype), name="lora_add")


def _adapter_patterns(op: Op, weight_index: int, rank: Poly) -> tuple[Pattern, Pattern, dict[str, Poly]]:
    """Return the patterns of A and B with their axis sizes; both have axes that index separate weights (experts)."""
    assert isinstance(op.kind, Einsum)
    pattern = op.kind.pattern
    weight, x = pattern.operands[weight_index], pattern.operands[1 - weight_index]
    if any(isinstance(dim, Affine) for dim in (*weight, *x, *pattern.result)):
        raise UnsupportedError(f"lora: {op.name!r} is a convolution, expected a linear layer")
    input_names, result_names, weight_names = (
        set(names)
        for names in (
            pattern.operand_names(1 - weight_index),
            pattern.result_names,
            pattern.operand_names(weight_index),
        )
    )
    name = next(n for n in (f"r{i}" for i in range(len(op.kind.extents) + 1)) if n not in op.kind.extents)
    rank_axis = Axes((name,))
    kept_dims = tuple(dim for dim in x if set(dim.names) & result_names or not set(dim.names) & weight_names)
    input_dims = tuple(dim for dim in weight if set(dim.names) <= input_names)
    output_dims = tuple(dim for dim in weight if set(dim.names) <= result_names)
    shared = tuple(dim for dim in output_dims if dim in input_dims)
    down = Pattern((x, (*input_dims, rank_axis)), (*kept_dims, rank_axis))
    up = Pattern(
        ((*kept_dims, rank_axis), (*shared, rank_axis, *(dim for dim in output_dims if dim not in shared))),
        pattern.result,
    )
    return down, up, {**op.kind.extents, name: rank}


def _matmul_with_param(x: Tensor, pattern: Pattern, sizes: Mapping[str, Poly], name: str) -> Tensor:
    """Multiply by a new parameter."""
    dims = pattern.operands[1]
    shape = [prod((sizes[n] for n in dim.names), start=ONE).expr for dim in dims]
    merged = {n: sizes[n].expr for dim in (*dims, *pattern.operands[0]) if len(dim.names) > 1 for n in dim.names}
    return einsum(x, current_graph().param(name, shape, x.dtype), str(pattern), name=name, **merged)
