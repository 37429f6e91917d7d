"""Mixture of experts: router, dispatch to experts with grouped matmuls, and weighted combination.

The experts that a pass touches depend on its tokens: B*S in training, B times the new ones in decode. `routing` names
the assumption about their distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..algebra.polynomial import Poly
from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Tensor,
    current_graph,
    module,
    need_call,
    need_choice,
    need_flag,
    need_tensor,
    positive,
)
from ..ops.elementwise import (
    cast,
    pointwise,
)
from ..ops.experts import ROUTINGS, dispatch, grouped_matmul, top_k
from ..ops.fill import fill
from ..ops.index import gather, scatter, take_along
from ..ops.layout import rearrange, reshape, split
from ..ops.reduce import reduce
from .activations import one_kernel, sigmoid, silu, softmax
from .linear import linear

__all__ = ["experts", "moe", "router"]

#: How router scores become expert weights.
SCORES = ("softmax", "sigmoid", "chosen")
#: Where the weights are multiplied.
WEIGHED = ("results", "inside")


def router(
    x: Tensor,
    experts: object,
    chosen: object,
    *,
    score: str = "softmax",
    normalize: bool = False,
    scale: float | None = None,
    bias: bool = False,
    correction: bool = False,
    groups: object = None,
    kept_groups: object = None,
    fp32: bool = False,
    name: str = "router",
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, with their weights.

    Parameters
    ----------
    x : Tensor
        Shape (..., d).
    experts, chosen : sympy.Expr or int
        Number of experts, and experts per token.
    score : str
        softmax: over all experts, with the chosen ones as weights (Mixtral, Qwen). sigmoid: per expert (DeepSeek-V3).
        chosen: top-k of the logits first, then softmax over these (GPT-OSS).
    normalize : bool
        Whether to divide a token's weights by their sum.
    scale : float, optional
        Factor on the weights.
    bias : bool
        Whether the logits have a bias.
    correction : bool
        Whether a buffer is added to the scores for the choice only, not to the weights (loss-free balancing of
        DeepSeek-V3).
    groups, kept_groups : sympy.Expr or int, optional
        Number of expert groups, and how many of them a token may choose from: the best by their best expert
        (DeepSeek-V2), or with `correction` by the sum of their best two (DeepSeek-V3).
    fp32 : bool
        Whether to compute the logits in fp32, whatever the model's dtype.
    name : str
        Scope.

    Returns
    -------
    tuple of Tensor
        Weights and expert indices, (..., chosen) each. FLOPs of kind matmul: 2*d*experts per token.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, E, k = cg.dims("B S D E k")
    >>> with cg.Graph("g") as g:
    ...     weights, ids = cg.nn.router(g.input("x", (B, S, D)), E, k, normalize=True)
    >>> weights.shape, cg.param_count(g), cg.matmul_flops(g)
    ((B, S, k), D*E, 2*B*D*E*S)
    """
    place = f"router {name!r}"
    need_tensor(place, x)
    need_choice(f"{place}: score", score, SCORES)
    need_flag(place, normalize=normalize, bias=bias, correction=correction, fp32=fp32)
    if (groups is None) != (kept_groups is None):
        raise GraphError(
            f"{place}: groups={shown(groups)} and kept_groups={shown(kept_groups)}, expected both or neither"
        )
    if score == "chosen" and (correction or groups is not None or normalize):
        raise GraphError(f"{place}: score='chosen' with groups, correction or normalize, expected none of them")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise GraphError(f"{place}: scale {shown(scale)}, expected a number")
    graph = current_graph(x.graph)
    with module(graph, name):
        logits = _router_logits(x, positive(f"{place}: experts", experts), bias=bias, fp32=fp32)
        if score == "chosen":
            top_logits, ids = top_k(logits, chosen)
            weights = softmax(top_logits)
        else:
            scores = softmax(cast(logits, "fp32")) if score == "softmax" else sigmoid(logits)
            weights, ids = _choose(place, scores, chosen, correction=correction, groups=groups, kept_groups=kept_groups)
        if normalize:
            weights = _normalized(weights)
        return (weights if scale is None else weights * scale), ids


def _router_logits(x: Tensor, experts: Poly, *, bias: bool, fp32: bool) -> Tensor:
    if not fp32:
        return linear(x, "... d -> ... e", e=experts, bias=bias, name="gate")
    graph = current_graph(x.graph)
    weight = graph.param("weight", (x.sizes[-1], experts))
    y = linear(cast(x, "fp32"), "... d -> ... e", e=experts, weight=cast(weight, "fp32"), name="gate")
    return y + cast(graph.param("bias", (experts,)), "fp32") if bias else y


def _choose(
    place: str, scores: Tensor, chosen: object, *, correction: bool, groups: object, kept_groups: object
) -> tuple[Tensor, Tensor]:
    """Choose by the scores, corrected and limited to groups, and return the raw scores of the chosen experts."""
    graph = current_graph(scores.graph)
    ranking = scores
    if correction:
        ranking = ranking + graph.buffer("correction", scores.sizes[-1:], dtype="fp32")
    if groups is not None:
        ranking = _limit_to_groups(
            place, ranking, positive(f"{place}: groups", groups), kept_groups, best=2 if correction else 1
        )
    values, ids = top_k(ranking, chosen)
    return (values if ranking is scores else take_along(scores, ids)), ids


def _limit_to_groups(place: str, scores: Tensor, groups: Poly, kept_groups: object, *, best: int) -> Tensor:
    """Set scores outside the best groups to 0; no remaining score is lower."""
    size = (scores.sizes[-1] / groups).constant
    if size is not None and (not isinstance(size, int) or size < best):
        raise ShapeError(
            f"{place}: {scores.sizes[-1]} experts in {groups} groups, expected equal groups of at least {best}"
        )
    grouped_scores = rearrange(scores, "... (g e) -> ... g e", g=groups.expr)
    if best > 1:
        group_scores = reduce(top_k(grouped_scores, best)[0], "... e -> ...", "sum")
    else:
        group_scores = reduce(grouped_scores, "... e -> ...", "max")
    values, _ = top_k(group_scores, kept_groups)

    def body(scores: Tensor, group_scores: Tensor, values: Tensor) -> Tensor:
        threshold = reduce(values, "... k -> ... 1", "min")
        hidden = pointwise("less", group_scores, threshold)
        return pointwise("masked_fill", scores, rearrange(hidden, "... g -> ... g 1"))

    limited = one_kernel("limit_groups", body, grouped_scores, group_scores, values)
    return rearrange(limited, "... g e -> ... (g e)")


def _normalized(weights: Tensor) -> Tensor:
    def body(weights: Tensor) -> Tensor:
        return weights / (reduce(weights, "... k -> ... 1", "sum") + 1e-20)

    return one_kernel("normalize", body, weights)


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    count: object,
    f: object,
    *,
    routing: str = "balanced",
    capacity: object = None,
    activation: Callable[[Tensor], Tensor] = silu,
    gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    gated: bool = True,
    bias: bool = False,
    weigh: str = "results",
    name: str = "experts",
) -> Tensor:
    """Send each token to its chosen experts, and sum their results.

    Rows are gathered in expert order, each projection is one kernel for all experts, and each token gathers its rows
    back: no one-hot matmuls.

    Parameters
    ----------
    x : Tensor
        Shape (..., d).
    weights, ids : Tensor
        From `router`, (..., k) each: T tokens choose k experts.
    count : sympy.Expr or int
        Number of experts, E.
    f : sympy.Expr or int
        Expert width.
    routing : str
        Token distribution, which sets how many experts' weights are read. balanced: the T*k rows are spread evenly over
        Min(E, T*k) experts. expected: independent uniform choices, E*(1 - (1 - k/E)**T) experts on average. capacity:
        each expert computes ceiling(capacity*T*k/E) rows, padded or dropped; all experts are read.
    capacity : number or sympy.Expr, optional
        Capacity factor, required by `routing="capacity"`.
    activation : callable
        Activation for the gate, or for the only up-projection.
    gate : callable, optional
        `gate(gate, up)`, to replace activation(gate) * up.
    gated : bool
        Whether there is a gate; gate and up-projection are one parameter (E, d, 2*f), "gate_up".
    bias : bool
        Whether the projections have biases, (E, 2*f) and (E, d).
    weigh : str
        Where weights are multiplied. results: expert outputs, which are saved for the weight gradient. inside: the
        input of the down-projection, in one kernel with the activation that recomputes its intermediates in the
        backward pass, as `weighted_bias_swiglu_impl` in Megatron-LM (megatron/core/fusions/fused_bias_swiglu.py).
    name : str
        Scope.

    Returns
    -------
    Tensor
        Shape of `x`. FLOPs of kind matmul: 2*d*f per expert matrix (three with a gate) and row; there are T*k rows, or
        as many as all capacities.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.
    """
    place = f"experts {name!r}"
    _check(place, x, weights, ids, routing, capacity)
    need_call(f"{place}: activation", activation)
    need_flag(place, gated=gated, bias=bias)
    need_choice(f"{place}: weigh", weigh, WEIGHED)
    if bias and weigh == "inside":
        raise GraphError(
            f"{place}: weigh='inside' with bias=True, expected only one of them: the bias would be weighted as well"
        )
    graph = current_graph(x.graph)
    d, width, chosen = x.sizes[-1], positive(f"{place}: f", f), ids.sizes[-1]
    with module(graph, name):
        sent = dispatch(ids, count, capacity=capacity, owners=bias)
        rows = gather(_token_rows(x), sent.tokens, name="permute")

        def project(rows: Tensor, out_width: Poly, param_name: str) -> Tensor:
            expert_count = sent.ends.sizes[0]
            weight = graph.param(param_name, (expert_count, rows.sizes[-1], out_width))
            result = grouped_matmul(rows, weight, sent.ends, chosen, routing=routing, name=f"{param_name}_matmul")
            if sent.owners is None:
                return result
            return result + gather(
                graph.param(f"{param_name}_bias", (expert_count, out_width)),
                sent.owners,
                name=f"{param_name}_bias_rows",
            )

        h = project(rows, 2 * width, "gate_up") if gated else project(rows, width, "up")
        if sent.dropped is not None:
            weights = pointwise("masked_fill", weights, sent.dropped)
        parts = split(h, (width, width), -1) if gated else (h,)
        join = (gate or (lambda first, up: activation(first) * up)) if gated else activation
        if weigh == "results":
            return _combine(project(join(*parts), d, "down"), sent.places, weights, x)
        row_weights = scatter(fill(sent.tokens.sizes, 0, weights.dtype), sent.places, weights, name="weights")
        y = project(_weighted_activation(join, parts, row_weights, x), d, "down")
        return _combine(y, sent.places, None, x, sent.dropped)


def _check(place: str, x: Tensor, weights: Tensor, ids: Tensor, routing: str, capacity: object) -> None:
    need_tensor(place, x, weights, ids)
    need_choice(f"{place}: routing", routing, ROUTINGS)
    if (capacity is not None) != (routing == "capacity"):
        raise GraphError(
            f"{place}: routing={routing!r}, capacity={shown(capacity)}: expected a capacity factor with "
            "routing='capacity' only"
        )
    if ids.ndim == 0 or weights.ndim != ids.ndim or not all(map(x.graph.same, ids.sizes[:-1], x.sizes[:-1])):
        raise ShapeError(f"{place}: {ids!r} and {weights!r} of {x!r}, expected experts (..., k) for each token")


def _token_rows(x: Tensor) -> Tensor:
    """Flatten tokens into rows."""
    if x.ndim == 2:
        return x
    names = " ".join(f"a{i}" for i in range(x.ndim - 1))
    return rearrange(x, f"{names} d -> ({names}) d", name="tokens") if names else reshape(x, (1, x.sizes[-1]))


def _weighted_activation(
    join: Callable[..., Tensor], parts: Sequence[Tensor], row_weights: Tensor, x: Tensor
) -> Tensor:
    """Combine the up-projections and multiply rows by their weights, in one kernel."""

    def body(row_weights: Tensor, *parts: Tensor) -> Tensor:
        return cast(join(*parts) * rearrange(row_weights, "r -> r 1"), x.dtype)

    return one_kernel("weighed", body, row_weights, *parts)


def _combine(rows: Tensor, places: Tensor, weights: Tensor | None, x: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Gather and sum each token's rows, weighted or without dropped ones, in one kernel."""
    factors = dropped if weights is None else weights

    def body(rows: Tensor, places: Tensor, *factors: Tensor) -> Tensor:
        picked = gather(rows, places)
        for factor in (rearrange(t, "... k -> ... k 1") for t in factors):
            picked = pointwise("masked_fill", picked, factor) if weights is None else picked * factor
        return cast(reduce(picked, "... k d -> ... d", "sum"), x.dtype)

    return one_kernel("combine", body, rows, places, *(() if factors is None else (factors,)))


def moe(
    x: Tensor,
    experts: object,
    chosen: object,
    f: object,
    *,
    routing: str = "balanced",
    capacity: object = None,
    activation: Callable[[Tensor], Tensor] = silu,
    gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    gated: bool = True,
    bias: bool = False,
    weigh: str = "results",
    name: str = "moe",
    **options: Any,
) -> Tensor:
    """Mixture of experts: `router`, then `experts`.

    Parameters
    ----------
    x : Tensor
        Shape (..., d).
    experts, chosen, f : sympy.Expr or int
        Number of experts, experts per token, and expert width.
    routing, capacity, activation, gate, gated, bias, weigh : object
        As in `experts`; `bias` belongs to the experts.
    name : str
        Scope.
    **options
        Other arguments for `router`; its bias is `router_bias`.

    Returns
    -------
    Tensor
        Shape of `x`.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    With 2 of 8 experts per token, a batch of one token reads two experts, a large batch all of them.

    >>> import costgraph as cg
    >>> T, D, F = cg.dims("T D F")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(cg.nn.moe(g.input("x", (T, D)), 8, 2, F))
    >>> cg.param_count(g), cg.param_count(g, active=True)
    (24*D*F + 8*D, 6*D*F + 8*D)
    >>> cg.matmul_flops(g)  # three matrices, two rows a token; and the router
    12*D*F*T + 16*D*T
    >>> [cg.bytes_moved(g, fused=True, T=t, D=4096, F=14336) for t in (1, 2, 64)]
    [704724992, 1409384448, 2819686400]
    """
    graph = current_graph(x.graph if isinstance(x, Tensor) else None)
    if "router_bias" in options:
        options["bias"] = options.pop("router_bias")
    with module(graph, name):
        weights, ids = router(x, experts, chosen, **options)
        return _experts(
            x, weights, ids, experts, f, routing=routing, capacity=capacity, activation=activation, gate=gate,
            gated=gated, bias=bias, weigh=weigh,
        )  # fmt: skip


_experts = experts  # `moe` has an argument of that name
