"""Lower fused kernels to torch's function if the body matches one, and external calls by replaying them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch

from ...dtypes import DType
from ...errors import UnsupportedError
from ...ir.graph import Call, Graph, Op, OpKind, Tensor
from ...ops.einsum import Einsum
from ...ops.elementwise import Dropout, Pointwise
from ...ops.loops import Kernel
from ...ops.opaque import Opaque
from ...ops.reduce import Reduce
from .context import LoweringContext, lowering, torch_dtype
from .contraction import convolution, linear
from .elementwise import item, leaf, mask_of

__all__ = [
    "Matches",
    "Rule",
    "operand_node",
    "match",
    "named_results",
    "unsupported_dtype",
    "scalar_of",
    "kind_of",
    "reduced_axis",
    "without_domain",
    "flash",
    "flash_backward",
    "LAYER_NORM_BACKWARD",
    "RMS_NORM_BACKWARD",
    "norm",
    "norm_backward",
    "NLL",
    "NLL_BACKWARD",
    "nll",
    "nll_backward",
    "replay",
    "runs_on",
]


# -- fused kernels -----------------------------------------------------------------------------------------------------


# -- pattern matching --------------------------------------------------------------------------------------------------
# Recognize fused bodies by the names of their ops and their operands.

K = TypeVar("K", bound=OpKind)

#: Tensors by name in a pattern.
Matches = dict[str, Tensor]
#: Lowers a matched kernel, or returns False if its sizes, dtypes or results do not fit.
Rule = Callable[[LoweringContext[Kernel], Matches], bool]


def label_of(op: Op) -> str:
    match op.kind:
        case Pointwise() as kind:
            return kind.function.name
        case Reduce() as kind:
            return kind.operation
        case Kernel() as kind:
            return kind.backward or kind.name
        case kind:
            return kind.name


def skip_casts(t: Tensor) -> Tensor:
    """Skip casts: torch's kernels accumulate in a wider dtype internally."""
    while t.producer is not None and label_of(t.producer) == "cast":
        t = t.producer.operands[0]
    return t


def match(body: Graph, text: str) -> Matches | None:
    """Match a body with a pattern such as `e = exp x; z = sum e`; return the named tensors, None if they differ."""
    rows = [row.split() for row in text.split("; ")]
    ops = [op for op in body.ops if label_of(op) != "cast"]
    if len(ops) != len(rows):
        return None
    matched: Matches = {}
    for op, (result_name, _, label, *names) in zip(ops, rows, strict=True):
        operands = [skip_casts(t) for t in op.operands]
        if label != label_of(op) or len(names) != len(operands):
            return None
        if any(matched.setdefault(n, t) is not t for n, t in zip(names, operands, strict=True)):
            return None
        matched[result_name] = op.results[0]
        matched |= {f"{result_name}'": t for t in op.results[1:2]}
    return matched


def named_results(site: LoweringContext[Kernel], matched: Matches, *names: str) -> dict[int, str] | None:
    """Return a name per kernel result; None if one is unnamed, or two have the same name."""
    by_tensor = {matched[n]: n for n in names}
    out = {i: by_tensor.get(skip_casts(t), "") for i, t in enumerate(site.kind.body.outputs)}
    return out if out and all(out.values()) and len(set(out.values())) == len(out) else None


def operand_node(site: LoweringContext[Kernel], t: Tensor) -> Any:
    """Return the operand node of a formal, None for other tensors."""
    formals = dict(zip(site.kind.body.formals, site.operands, strict=True))
    return formals.get(t)


def kind_of(matched: Matches, name: str, kind: type[K]) -> K:
    """Return the op kind of a named tensor's producer."""
    op = matched[name].producer
    assert op is not None
    assert isinstance(op.kind, kind)
    return op.kind


def scalar_of(site: LoweringContext[Kernel], matched: Matches, name: str) -> float:
    """Return the scalar operand of the elementwise op that produces a named tensor."""
    return next(float(n) for n in site.of(kind_of(matched, name, Pointwise).scalars) if n is not None)


def reduced_axis(matched: Matches, name: str) -> int | None:
    """Return the only axis that a reduction drops, None if there are several."""
    pattern = kind_of(matched, name, Reduce).pattern
    dropped_axes = [
        i for i, a in enumerate(pattern.operands[0]) if not a.names or a.names[0] not in pattern.result_names
    ]
    return dropped_axes[0] if len(dropped_axes) == 1 and len(pattern.operands[0]) == len(pattern.result) else None


def without_domain(matched: Mapping[str, Tensor]) -> bool:
    """Whether no tensor is restricted to a domain."""
    return all(t.domain is None for t in matched.values())


def unsupported_dtype(site: LoweringContext[Kernel], node: Any) -> bool:
    """Whether torch's kernels lack a node's dtype."""
    dtype = site.shadow(node).dtype
    return dtype.itemsize == 1 or not dtype.is_floating_point


# -- attention ---------------------------------------------------------------------------------------------------------

_SCORES = "b g r s k, b g t k -> b g r s t"
_REDUCE = "b g r s t, b g t v -> b s g r v"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, first: int, scale: float,
    p: float,
) -> torch.Tensor:  # fmt: skip
    """Call fused attention: q (b, g, r, s, k), k (b, g, t, k), v (b, g, t, v) to (b, s, g, r, v)."""
    b, g, r, s, _ = q.shape
    t = k.shape[2]
    # a single last query sees all keys; torch's causal flag aligns first positions, so it needs equal lengths
    plain = window is None and (not causal or (s == 1 and first == t - 1))
    flag = window is None and causal and s == t and s > 1
    mask = None if plain or flag else mask_of(s, t, causal, window, first, q.device)
    output = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(b, g * r, s, -1), k, v, mask, dropout_p=p, is_causal=flag, scale=scale, enable_gqa=r > 1
    )
    return output.transpose(1, 2).reshape(b, s, g, r, -1).contiguous()


#: Attended pairs beyond torch's `is_causal`: arguments of `mask_of` without the device.
Pairs = tuple[int, int, bool, int | None, int]


def _bias(x: torch.Tensor, pairs: Pairs | None) -> torch.Tensor | None:
    """Return the additive mask for torch's CPU kernel."""
    if pairs is None:
        return None
    attended = mask_of(*pairs, x.device)
    return x.new_zeros(attended.shape).masked_fill_(attended.logical_not_(), float("-inf"))


def attend_with_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, pairs: Pairs | None = None
) -> list[torch.Tensor]:
    """Call fused attention, also returning the logsumexp of each row, (b, g, r, s, 1), for the backward pass."""
    b, g, r, s, _ = q.shape
    heads, aten = q.reshape(b, g * r, s, -1), torch.ops.aten
    if q.is_cuda and q.dtype.itemsize == 2:
        output, sums = aten._scaled_dot_product_flash_attention(heads, k, v, 0.0, causal, False, scale=scale)[:2]
    elif q.is_cuda:
        options = (None, True, 0.0, causal)
        output, sums = aten._scaled_dot_product_efficient_attention(
            heads, _repeat_heads(k, r), _repeat_heads(v, r), *options, scale=scale
        )[:2]
    else:
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            heads, k, v, 0.0, causal, attn_mask=_bias(q, pairs), scale=scale
        )
    output = output.transpose(1, 2).reshape(b, s, g, r, -1).contiguous()
    return [output, sums[..., :s].reshape(b, g, r, s, 1).contiguous()]


def _repeat_heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat each head."""
    return x if count == 1 else x.repeat_interleave(count, 1)


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, sums: torch.Tensor,
    causal: bool, scale: float, pairs: Pairs | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    b, g, r, s, _ = q.shape
    heads, sums, aten = q.reshape(b, g * r, s, -1), sums.reshape(b, g * r, s), torch.ops.aten
    dy, y = (t.reshape(b, s, g * r, -1).transpose(1, 2) for t in (grad, output))
    if q.is_cuda and q.dtype.itemsize == 2:
        state = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty((), dtype=torch.uint64, device=q.device),
        )
        grads = aten._scaled_dot_product_flash_attention_backward(
            dy, heads, k, v, y, sums, None, None, s, k.shape[2], 0.0, causal, *state, scale=scale
        )
    elif q.is_cuda:
        grads = _efficient_backward(dy, heads, k, v, y, sums, causal, scale, r)
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, heads, k, v, y, sums, 0.0, causal, attn_mask=_bias(q, pairs), scale=scale
        )
    return [grads[0].reshape(q.shape).contiguous(), grads[1].contiguous(), grads[2].contiguous()]


def _efficient_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, sums: torch.Tensor,
    causal: bool, scale: float, share: int,
) -> list[torch.Tensor]:  # fmt: skip
    """Call CUDA's backward kernel for fp32, which pads row sums to 32 rows and does not share key heads."""
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))
    state = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
    keys, values = _repeat_heads(k, share), _repeat_heads(v, share)
    options = (padded, *state, 0.0, [True, True, True, False], causal)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dy, q, keys, values, None, y, *options, scale=scale
    )
    return [grads[0], *(t.unflatten(1, (-1, share)).sum(2) if share > 1 else t for t in grads[1:3])]


#: Softmax body of a flash kernel, without and with the logsumexp for its backward pass.
_SOFTMAX = "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z"
_SOFTMAX_WITH_LOGSUMEXP = f"{_SOFTMAX}; l = log z; t = add m l"


def flash(site: LoweringContext[Kernel], matched: Matches) -> bool:
    """Lower flash attention."""
    scores, weighted = (kind_of(matched, n, Einsum) for n in "sy")
    inner = kind_of(matched, "p", Kernel).body
    with_logsumexp = "p'" in matched
    q, k, v = (operand_node(site, matched[n]) for n in "qkv")
    patterns = str(scores.pattern), str(weighted.pattern)
    if patterns != (_SCORES, _REDUCE) or any(n is None or unsupported_dtype(site, n) for n in (q, k, v)):
        return False
    names = named_results(site, matched, "y", *(n for n in ("p'", "n") if n in matched))
    if names is None or match(inner, _SOFTMAX_WITH_LOGSUMEXP if with_logsumexp else _SOFTMAX) is None:
        return False
    if len({site.shadow(n).dtype for n in (q, k, v)}) > 1:
        return False
    factor, p = scalar_of(site, matched, "c"), kind_of(matched, "d", Dropout).p if "d" in matched else 0.0
    shape, rows = site.shadow(q).shape, site.shadow(q).shape[:-1]
    b, g, r, s, _ = shape
    like = torch.empty((b, s, g, r, site.shadow(v).shape[-1]), dtype=site.shadow(q).dtype, device="meta")
    if not with_logsumexp:
        site.settle(
            site.call(attend, q, k, v, *_mask_arguments(site, scores, s, site.shadow(k).shape[2]), factor, p, like=like)
        )
        return True
    pairs = _pairs(site, q, k, v, scores)
    if pairs is None or p:
        return False
    sums = torch.empty((*rows, 1), dtype=_logsumexp_dtype(like.dtype), device="meta")
    results = site.call(attend_with_logsumexp, q, k, v, pairs[0], factor, *pairs[1:], like=[like, sums])
    for i, name in names.items():
        node = site.call(item, results, int(name != "y"))
        if name == "n":  # positions first
            node = site.permuted(site.viewed(node, (b, g * r, s)), (0, 2, 1))
        site.settle(node, i)
    return True


def _logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mask_arguments(
    site: LoweringContext[Kernel], scores: Einsum, queries: int, keys: int
) -> tuple[bool, int | None, int]:
    """Return whether later keys are masked, the window, and the position of the first query."""
    return (False, None, 0) if scores.domain is None else site.mask_arguments(scores.domain[0], queries, keys)


def _pairs(
    site: LoweringContext[Kernel], q: Any, k: Any, v: Any, scores: Einsum
) -> tuple[bool] | tuple[bool, Pairs] | None:
    """Return torch's `is_causal`, with a mask for a rank's split queries; None if torch's kernels support neither."""
    queries, keys = site.shadow(q).shape[3], site.shadow(k).shape[2]
    size, other = site.shadow(q).shape[-1], site.shadow(v).shape[-1]
    causal, window, first = _mask_arguments(site, scores, queries, keys)
    device = site.emitter.device.type
    if size != other or (device == "cuda" and size % 8):
        return None
    if scores.domain is not None and scores.domain[0].ranks:  # CUDA's flash kernels take no mask
        return None if device == "cuda" else (False, (queries, keys, causal, window, first))
    if window is not None or (causal and queries not in (1, keys)):
        return None
    return (causal and queries > 1,)


def flash_backward(site: LoweringContext[Kernel], matched: Matches) -> bool:
    """Lower the gradient of flash attention, which recomputes scores."""
    scores, grads = (kind_of(matched, n, Einsum) for n in "sa")
    patterns = str(scores.pattern), str(grads.pattern)
    names = named_results(site, matched, "dq", "dk", "dv")
    nodes = [operand_node(site, matched[n]) for n in ("g", "q", "k", "v", "y", "l")]
    if patterns != (_SCORES, "b s g r v, b g t v -> b g r s t") or names is None or any(n is None for n in nodes):
        return False
    q, k, v = nodes[1:4]
    pairs = _pairs(site, q, k, v, scores)
    if pairs is None or unsupported_dtype(site, q) or len({site.shadow(n).dtype for n in nodes[:5]}) > 1:
        return False
    like = [torch.empty(site.shadow(n).shape, dtype=site.shadow(q).dtype, device="meta") for n in (q, k, v)]
    gradients = site.call(attend_backward, *nodes, pairs[0], scalar_of(site, matched, "c"), *pairs[1:], like=like)
    for i, name in names.items():
        site.settle(site.call(item, gradients, ("dq", "dk", "dv").index(name)), i)
    return True


# -- norms -------------------------------------------------------------------------------------------------------------


def norm(statistics: str) -> Rule:
    """Return the rule of a norm with these optional results: reciprocal deviation r and, for a layer norm, mean m."""

    def rule(site: LoweringContext[Kernel], matched: Matches) -> bool:
        names, x = named_results(site, matched, "y", *statistics), operand_node(site, matched["x"])
        last = reduced_axis(matched, "v") == matched["x"].ndim - 1
        if names is None or x is None or not last or not without_domain(matched) or unsupported_dtype(site, x):
            return False
        parameters = [None if n not in matched else operand_node(site, matched[n]) for n in ("w", "b")]
        if any(v is None and n in matched for v, n in zip(parameters, "wb", strict=True)):
            return False
        shadow = site.shadow(x)
        size = [shadow.shape[-1]]
        if any(v is not None and list(site.shadow(v).shape) != size for v in parameters):
            return False
        weight, shift = (None if v is None else site.cast(v, shadow.dtype) for v in parameters)
        eps = scalar_of(site, matched, "a")
        if "m" in statistics:
            outputs = site.call(torch.native_layer_norm, x, size, weight, shift, eps)
        else:
            outputs = site.call(torch.ops.aten._fused_rms_norm, x, size, weight, eps)
        for i, name in names.items():
            site.settle(site.call(item, outputs, ("y", *statistics).index(name)), i)
        return True

    return rule


def layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, shift: bool
) -> list[Any]:
    """Return the gradients of the input, the weight and, if present, the bias."""
    size, mask = [x.shape[-1]], [True, True, shift]
    weight, mean, scale = weight.to(x.dtype), mean.to(_statistics_dtype(x)), scale.to(_statistics_dtype(x))
    return list(
        torch.ops.aten.native_layer_norm_backward(grad, x, size, mean, scale, weight, weight if shift else None, mask)
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of mean and deviation: fp32 for 16-bit inputs on a GPU."""
    return torch.float32 if x.is_cuda and x.dtype.itemsize == 2 else x.dtype


def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    """Return the gradients of the input and the weight."""
    if x.is_cuda:
        size, aten = [x.shape[-1]], torch.ops.aten
        return list(aten._fused_rms_norm_backward(grad, x, size, scale, weight.to(x.dtype), [True, True]))
    # torch has no CPU kernel
    wide, g = x.to(scale.dtype), grad.to(scale.dtype)
    normal = wide * scale
    weight_grad = (g * normal).flatten(0, -2).sum(0)
    g = g * weight
    projection = (g * normal).mean(-1, keepdim=True)
    return [normal.mul_(projection).neg_().add_(g).mul_(scale).to(x.dtype), weight_grad.to(weight.dtype)]


_NORM_GRADIENT_TAIL = (
    "t = sum j; u = mul t; v = cubed r; z = mul u v; e = expand z; d = div e; o = copy {c}; i = mul o; q = mul d i; "
)
_LAYER_NORM_BACKWARD = (
    "gw = mul g w; c = sub x m; n = mul c r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw c; "
    + _NORM_GRADIENT_TAIL.format(c="c")
    + "a = add k q; b = neg a; f = sum b; h = expand f; l = div h; y = add a l"
)
#: Gradient bodies as reverse mode produces them.
LAYER_NORM_BACKWARD = (f"sb = sum g; {_LAYER_NORM_BACKWARD}", _LAYER_NORM_BACKWARD)
RMS_NORM_BACKWARD = (
    "gw = mul g w; n = mul x r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw x; "
    + _NORM_GRADIENT_TAIL.format(c="x")
    + "y = add k q"
)


def norm_backward(site: LoweringContext[Kernel], matched: Matches) -> bool:
    """Lower the gradient of a norm with a weight along the last axis."""
    names: list[str] = [n for n in ("y", "sw", "sb") if n in matched]
    result_names = named_results(site, matched, *names)
    nodes = {n: operand_node(site, matched[n]) for n in ("g", "x", "r", "w", "m") if n in matched}
    if result_names is None or any(v is None for v in nodes.values()) or not without_domain(matched):
        return False
    shadows = {n: site.shadow(v) for n, v in nodes.items()}
    x, statistics_shape = shadows["x"], (*shadows["x"].shape[:-1], 1)
    compatible = (
        shadows["g"].shape == x.shape and shadows["g"].dtype == x.dtype and not unsupported_dtype(site, nodes["x"])
    )
    if (
        not compatible
        or x.ndim < 2
        or tuple(shadows["w"].shape) != tuple(x.shape[-1:])
        or tuple(shadows["r"].shape) != statistics_shape
    ):
        return False
    vector, like = torch.empty(x.shape[-1:], dtype=x.dtype, device="meta"), torch.empty_like(x)

    if "m" in matched:
        arguments = [nodes[n] for n in ("g", "x", "m", "r", "w")]
        gradients = site.call(layer_norm_backward, *arguments, "sb" in matched, like=[like, vector, vector])
    else:
        arguments = [nodes[n] for n in ("g", "x", "r", "w")]
        gradients = site.call(rms_norm_backward, *arguments, like=[like, vector.to(shadows["w"].dtype)])
    for i, name in result_names.items():
        site.settle(site.call(item, gradients, names.index(name)), i)
    return True


# -- losses ------------------------------------------------------------------------------------------------------------
# Negative log-likelihood; negative targets are ignored, as with `ignore_index` of torch's `nll_loss`.

#: Bodies without a reduction, with a mean and with a sum, in the order of torch's codes.
NLL = tuple(
    f"r = rearrange t; p = gather x r; q = rearrange p; {end}; w = fill"
    for end in ("y = neg q", "m = mean q; y = neg m", "u = sum q; y = neg u")
)
#: Bodies of their gradients.
NLL_BACKWARD = tuple(
    f"n = neg g; {middle}; z = fill; i = rearrange t; s = scatter z i r"
    for middle in ("r = rearrange n", "e = expand n; d = div e; r = rearrange d", "e = expand n; r = rearrange e")
)


def _reduction(matched: Matches) -> int:
    return 1 if "m" in matched or "d" in matched else 2 if "u" in matched or "e" in matched else 0


def _clamped_targets(site: LoweringContext[Kernel], node: Any) -> Any:
    """Return targets with all negative values set to -1."""
    return site.call(torch.clamp, node, min=-1)


def _target_count(targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of targets that are not ignored."""
    return (targets >= 0).sum().to(dtype)


def nll(site: LoweringContext[Kernel], matched: Matches) -> bool:
    """Lower the loss; a mean is over targets that are not ignored."""
    x, targets, names = (
        operand_node(site, matched["x"]),
        operand_node(site, matched["t"]),
        named_results(site, matched, *"yw"),
    )
    if (
        x is None
        or targets is None
        or names is None
        or not without_domain(matched)
        or unsupported_dtype(site, x)
        or matched["x"].ndim != 2
    ):
        return False
    outputs = site.call(
        torch.ops.aten.nll_loss_forward, x, _clamped_targets(site, targets), None, _reduction(matched), -1
    )
    for i, name in names.items():
        site.settle(site.call(item, outputs, "yw".index(name)), i)
    return True


def nll_backward(site: LoweringContext[Kernel], matched: Matches) -> bool:
    """Lower the gradient of the loss, zero for ignored targets."""
    grad, targets, shape = operand_node(site, matched["g"]), operand_node(site, matched["t"]), site.sizes(matched["s"])
    if grad is None or targets is None or not without_domain(matched) or named_results(site, matched, "s") is None:
        return False
    reduction = _reduction(matched)
    if (
        unsupported_dtype(site, grad)
        or len(shape) != 2
        or (reduction == 1 and scalar_of(site, matched, "d") != shape[0])
    ):
        return False
    like = site.call(torch.Tensor.expand, grad if reduction else site.viewed(grad, (shape[0], 1)), shape)
    count = site.call(_target_count, targets, site.shadow(grad).dtype)
    ids = _clamped_targets(site, targets)
    site.own(torch.ops.aten.nll_loss_backward, grad, like, ids, None, reduction, -1, count)
    return True


# -- rules -------------------------------------------------------------------------------------------------------------


@lowering(Kernel)
def _kernel(site: LoweringContext[Kernel]) -> None:
    body = site.kind.body
    for text, rule in _RULES.items():
        matched = match(body, text)
        if matched is not None and rule(site, matched):
            return
    nodes = site.shared.lower_body(body, site.operands)
    used = {_storage(site, v) for v in site.operands}
    changed = {site.op.operands[i].storage for i in site.kind.changed}
    for i, v in enumerate(nodes):
        if site.op.results[i].storage in changed:  # written in place
            site.alias(v, i)
            continue
        shadow, storage = site.shadow(v), _storage(site, v)
        fresh = storage not in used and shadow.untyped_storage().nbytes() == shadow.numel() * shadow.itemsize
        used.add(storage)
        site.settle(v, i, fresh=fresh)


def _storage(site: LoweringContext[Kernel], node: Any) -> int:
    address: int = site.shadow(node).untyped_storage()._cdata
    return address


def _softmax(function: Callable[..., Any]) -> Rule:
    def rule(site: LoweringContext[Kernel], matched: Matches) -> bool:
        axis, x = reduced_axis(matched, "m"), operand_node(site, matched["x"])
        if (
            axis is None
            or x is None
            or not without_domain(matched)
            or named_results(site, matched, "y") is None
            or unsupported_dtype(site, x)
        ):
            return False
        site.own(function, x, axis, False)
        return True

    return rule


def _softmax_backward(function: Callable[..., Any]) -> Rule:
    def rule(site: LoweringContext[Kernel], matched: Matches) -> bool:
        axis, g, y = reduced_axis(matched, "a"), operand_node(site, matched["g"]), operand_node(site, matched["y"])
        if (
            axis is None
            or g is None
            or y is None
            or not without_domain(matched)
            or named_results(site, matched, "z") is None
        ):
            return False
        shadows = [site.shadow(g), site.shadow(y)]
        if shadows[0].dtype != shadows[1].dtype or shadows[0].shape != shadows[1].shape or unsupported_dtype(site, g):
            return False
        site.own(function, g, y, axis, shadows[0].dtype)
        return True

    return rule


def _biased(lowered: Callable[..., bool]) -> Rule:
    """Return the rule of a contraction with a bias."""

    def rule(site: LoweringContext[Kernel], matched: Matches) -> bool:
        einsum, nodes = matched["p"].producer, [operand_node(site, matched[n]) for n in "xwb"]
        if any(v is None for v in nodes) or not without_domain(matched) or named_results(site, matched, "y") is None:
            return False
        return lowered(site, einsum, nodes[:2], nodes[2])

    return rule


_LAYER_NORM = "m = mean x; c = sub x m; q = square c; v = mean q; a = add v; r = rsqrt a; "
_RMS_NORM = "q = square x; v = mean q; a = add v; r = rsqrt a; "
#: Patterns with a torch function, and their rules.
_RULES: dict[str, Rule] = {
    "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z": _softmax(torch.ops.aten._softmax),
    "m = max x; s = sub x m; e = exp s; z = sum e; l = log z; y = sub s l": _softmax(torch.ops.aten._log_softmax),
    "q = mul g y; a = sum q; d = sub g a; z = mul y d": _softmax_backward(torch.ops.aten._softmax_backward_data),
    "e = exp y; a = sum g; q = mul e a; z = sub g q": _softmax_backward(torch.ops.aten._log_softmax_backward_data),
    _LAYER_NORM + "y = mul c r": norm("mr"),
    _LAYER_NORM + "n = mul c r; y = mul n w": norm("mr"),
    _LAYER_NORM + "n = mul c r; o = mul n w; y = add o b": norm("mr"),
    _RMS_NORM + "y = mul x r": norm("r"),
    _RMS_NORM + "n = mul x r; y = mul n w": norm("r"),
    "p = einsum x w; y = add p b": _biased(linear),
    "p = einsum x w; o = rearrange b; y = add p o": _biased(convolution),
    **dict.fromkeys((*LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD), norm_backward),
    **dict.fromkeys(NLL, nll) | dict.fromkeys(NLL_BACKWARD, nll_backward),
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v": flash,
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v; n = rearrange p'": flash,
    "s = einsum q k; c = mul s; p = softmax c; d = dropout p; y = einsum d v": flash,
    "a = einsum g v; s = einsum q k; c = mul s; o = sub c l; p = exp o; dv = einsum g p; i = mul g y; t = sum i; "
    "u = rearrange t; e = sub a u; f = mul p e; h = mul f; dq = einsum h k; dk = einsum h q": flash_backward,
}


# -- external calls ----------------------------------------------------------------------------------------------------


# -- replay ------------------------------------------------------------------------------------------------------------

_CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")

#: Ops that a loaded graph must not call: they read other files.
_REFUSED = ("from_file",)


def replay(site: LoweringContext[OpKind], call: Call) -> None:
    """Append the traced call of an op."""
    arguments = [_argument(site, v) for v in call.arguments]
    keywords = {k: _argument(site, v) for k, v in call.keywords.items()}
    function = _overload(site, call.target)
    if function is torch.ops.aten.lift_fresh.default:  # the trace holds the numbers themselves
        function, keywords["device"] = torch.tensor, site.emitter.device
    outputs = site.call(function, *arguments, **keywords)
    single = isinstance(site.shadow(outputs), torch.Tensor)
    stored = [t.storage for t in site.op.operands]
    for i, (output_index, t) in enumerate(zip(call.places, site.op.results, strict=True)):
        operand_index = stored.index(t.storage) if t.storage in stored else None
        if output_index < 0:  # an operand written in place
            assert operand_index is not None
            site.alias(site.operands[operand_index], i)
            continue
        node = outputs if single else site.call(leaf, outputs, output_index)
        if operand_index is None:
            site.settle(_stored(site, node, i), i)
        else:
            site.alias(node, i)


def runs_on(call: Call, device: torch.device) -> bool:
    """Whether a call is available on a device: traces for CUDA may call kernels that a CPU lacks."""
    if not call.rule or device.type != "cpu":
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    *_, name, overload = call.target.split(".")
    full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
    return any(has_kernel(full, key) for key in _CPU_KEYS)


def _stored(site: LoweringContext[OpKind], node: Any, i: int) -> Any:
    """Return the whole storage of a result that is larger than its tensor, as a row of elements."""
    sizes = site.sizes(site.op.results[i])
    return node if site.shadow(node).numel() == prod(sizes) else site.call(torch.as_strided, node, sizes, (1,), 0)


def _overload(site: LoweringContext[OpKind], target: str) -> Callable[..., Any]:
    """Return a torch op by name, with its namespace unless it is aten."""
    *space, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, space[0] if space else "aten"), name, None)
    function: Callable[..., Any] | None = getattr(packet, overload or "default", None)
    if function is None or len(space) > 1 or name in _REFUSED:
        raise UnsupportedError(
            f"lower {site.op.name!r}: unknown torch op {target!r}, expected an op that torch has and that reads no file"
        )
    return function


def _argument(site: LoweringContext[OpKind], value: Any) -> Any:
    """Convert an argument to torch."""
    if isinstance(value, tuple):
        return [_argument(site, v) for v in value]
    if isinstance(value, DType):
        return torch_dtype(repr(site.op.name), value)
    if not isinstance(value, Mapping):
        return site.numbers.bind(value)
    if "operand" in value:
        return site.operands[value["operand"]]
    if "empty" in value:
        dtype = torch_dtype(repr(site.op.name), value["dtype"])
        return site.call(torch.empty, site.numbers.of(value["empty"]), dtype=dtype, device=site.emitter.device)
    return _named(site, value["torch"])


def _named(site: LoweringContext[OpKind], text: str) -> Any:
    """Return a device, a memory format, a layout or a complex number."""
    if text == "device":
        return site.emitter.device
    if text == "data":
        raise UnsupportedError(
            f"lower {site.op.name!r}: an argument was read from a tensor during tracing, expected a constant number"
        )
    if text.isidentifier():
        return getattr(torch, text)
    return complex(*map(float, text.split()))


# -- opaque ops --------------------------------------------------------------------------------------------------------


def _function(site: LoweringContext[Opaque]) -> Callable[..., Any]:
    """Return the caller's function for an opaque op, by name with or without scope and number."""
    last = site.op.name.rpartition("/")[2]
    names = (site.op.name, last, re.sub(r"_\d+\Z", "", last))
    for name in names:
        if name in site.shared.functions:
            return site.shared.functions[name]
    raise UnsupportedError(
        f"lower {site.op.name!r}: an opaque op has no implementation, expected a torch function in "
        f"functions={{{names[-1]!r}: ...}}"
    )


def _checked(function: Callable[..., Any], name: str, outputs: Sequence[tuple[Any, Any]]) -> Callable[..., Any]:
    """Wrap a caller's function to check its results and make them contiguous."""

    def opaque(*operands: torch.Tensor) -> list[torch.Tensor]:
        returned = function(*operands)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        shapes = [(tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y).__name__ for y in results]
        if shapes != list(outputs):
            raise UnsupportedError(f"function of opaque op {name!r} returned {shapes}, expected {list(outputs)}")
        return [y.contiguous() for y in results]

    return opaque


@lowering(Opaque)
def _opaque(site: LoweringContext[Opaque]) -> None:
    outputs = tuple((site.sizes(t), site.dtype(t)) for t in site.op.results)
    like = [torch.empty(sizes, dtype=dtype, device="meta") for sizes, dtype in outputs]
    results = site.call(_checked(_function(site), site.op.name, outputs), *site.operands, like=like)
    for i in range(len(outputs)):
        site.settle(site.call(item, results, i), i)
