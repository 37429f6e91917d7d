"""Lower fused kernels: torch's function if the body matches one, else the ops one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ...ir.graph import Graph, Op, OpKind, Tensor
from ...ops.einsum import Einsum
from ...ops.elementwise import Dropout, Pointwise
from ...ops.loops import Kernel
from ...ops.reduce import Reduce
from .context import LoweringContext, lowering
from .contraction import convolution, linear
from .elementwise import item, mask_of

__all__ = [
    "Bound",
    "Rule",
    "given_node",
    "match",
    "named_results",
    "narrow",
    "number_of",
    "record_of",
    "reduced_axis",
    "whole",
    "flash",
    "flash_backward",
    "LAYER_BACKWARD",
    "ROOT_BACKWARD",
    "norm",
    "norm_backward",
    "NLL",
    "NLL_BACKWARD",
    "nll",
    "nll_backward",
]


# -- pattern matching --------------------------------------------------------------------------------------------------
# Recognize fused bodies by the names of their ops and their operands.

K = TypeVar("K", bound=OpKind)

#: Tensors by name in a pattern.
Bound = dict[str, Tensor]
#: Lowers a matched kernel, or returns False if its sizes, dtypes or results do not fit.
Rule = Callable[[LoweringContext[Kernel], Bound], bool]


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


def through(t: Tensor) -> Tensor:
    """Skip casts: torch's kernels accumulate in a wider dtype internally."""
    while t.producer is not None and label_of(t.producer) == "cast":
        t = t.producer.operands[0]
    return t


def match(body: Graph, text: str) -> Bound | None:
    """Match a body with a pattern such as `e = exp x; z = sum e`; return the named tensors, None if they differ."""
    rows = [row.split() for row in text.split("; ")]
    ops = [op for op in body.ops if label_of(op) != "cast"]
    if len(ops) != len(rows):
        return None
    found: Bound = {}
    for op, (made, _, label, *names) in zip(ops, rows, strict=True):
        operands = [through(t) for t in op.operands]
        if label != label_of(op) or len(names) != len(operands):
            return None
        if any(found.setdefault(n, t) is not t for n, t in zip(names, operands, strict=True)):
            return None
        found[made] = op.results[0]
        found |= {f"{made}'": t for t in op.results[1:2]}
    return found


def named_results(site: LoweringContext[Kernel], found: Bound, *names: str) -> dict[int, str] | None:
    """Return a name per kernel result; None if one is unnamed, or two have the same name."""
    by_tensor = {found[n]: n for n in names}
    out = {i: by_tensor.get(through(t), "") for i, t in enumerate(site.kind.body.outputs)}
    return out if out and all(out.values()) and len(set(out.values())) == len(out) else None


def given_node(site: LoweringContext[Kernel], t: Tensor) -> Any:
    """Return the operand node of a formal, None for other tensors."""
    formals = dict(zip(site.kind.body.formals, site.operands, strict=True))
    return formals.get(t)


def record_of(found: Bound, name: str, kind: type[K]) -> K:
    """Return the op kind of a named tensor's producer."""
    op = found[name].producer
    assert op is not None
    assert isinstance(op.kind, kind)
    return op.kind


def number_of(site: LoweringContext[Kernel], found: Bound, name: str) -> float:
    """Return the scalar operand of the elementwise op that produces a named tensor."""
    return next(float(n) for n in site.of(record_of(found, name, Pointwise).scalars) if n is not None)


def reduced_axis(found: Bound, name: str) -> int | None:
    """Return the only axis that a reduction drops, None if there are several."""
    pattern = record_of(found, name, Reduce).pattern
    gone = [i for i, a in enumerate(pattern.operands[0]) if not a.names or a.names[0] not in pattern.result_names]
    return gone[0] if len(gone) == 1 and len(pattern.operands[0]) == len(pattern.result) else None


def whole(found: Mapping[str, Tensor]) -> bool:
    """Whether no tensor is restricted to a domain."""
    return all(t.domain is None for t in found.values())


def narrow(site: LoweringContext[Kernel], node: Any) -> bool:
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
    made = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(b, g * r, s, -1), k, v, mask, dropout_p=p, is_causal=flag, scale=scale, enable_gqa=r > 1
    )
    return made.transpose(1, 2).reshape(b, s, g, r, -1).contiguous()


#: Attended pairs beyond torch's `is_causal`: arguments of `mask_of` without the device.
Pairs = tuple[int, int, bool, int | None, int]


def _bias(x: torch.Tensor, pairs: Pairs | None) -> torch.Tensor | None:
    """Return the additive mask for torch's CPU kernel."""
    if pairs is None:
        return None
    seen = mask_of(*pairs, x.device)
    return x.new_zeros(seen.shape).masked_fill_(seen.logical_not_(), float("-inf"))


def attend_and_keep(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, pairs: Pairs | None = None
) -> list[torch.Tensor]:
    """Call fused attention, also returning the logsumexp of each row, (b, g, r, s, 1), for the backward pass."""
    b, g, r, s, _ = q.shape
    heads, aten = q.reshape(b, g * r, s, -1), torch.ops.aten
    if q.is_cuda and q.dtype.itemsize == 2:
        made, sums = aten._scaled_dot_product_flash_attention(heads, k, v, 0.0, causal, False, scale=scale)[:2]
    elif q.is_cuda:
        more = (None, True, 0.0, causal)
        made, sums = aten._scaled_dot_product_efficient_attention(heads, _each(k, r), _each(v, r), *more, scale=scale)[
            :2
        ]
    else:
        made, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            heads, k, v, 0.0, causal, attn_mask=_bias(q, pairs), scale=scale
        )
    made = made.transpose(1, 2).reshape(b, s, g, r, -1).contiguous()
    return [made, sums[..., :s].reshape(b, g, r, s, 1).contiguous()]


def _each(x: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat each head."""
    return x if count == 1 else x.repeat_interleave(count, 1)


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, made: torch.Tensor, sums: torch.Tensor,
    causal: bool, scale: float, pairs: Pairs | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    b, g, r, s, _ = q.shape
    heads, sums, aten = q.reshape(b, g * r, s, -1), sums.reshape(b, g * r, s), torch.ops.aten
    dy, y = (t.reshape(b, s, g * r, -1).transpose(1, 2) for t in (grad, made))
    if q.is_cuda and q.dtype.itemsize == 2:
        state = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty((), dtype=torch.uint64, device=q.device),
        )
        found = aten._scaled_dot_product_flash_attention_backward(
            dy, heads, k, v, y, sums, None, None, s, k.shape[2], 0.0, causal, *state, scale=scale
        )
    elif q.is_cuda:
        found = _efficient_backward(dy, heads, k, v, y, sums, causal, scale, r)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, heads, k, v, y, sums, 0.0, causal, attn_mask=_bias(q, pairs), scale=scale
        )
    return [found[0].reshape(q.shape).contiguous(), found[1].contiguous(), found[2].contiguous()]


def _efficient_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, sums: torch.Tensor,
    causal: bool, scale: float, share: int,
) -> list[torch.Tensor]:  # fmt: skip
    """Call CUDA's backward kernel for fp32, which pads row sums to 32 rows and does not share key heads."""
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))
    state = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
    keys, values = _each(k, share), _each(v, share)
    more = (padded, *state, 0.0, [True, True, True, False], causal)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dy, q, keys, values, None, y, *more, scale=scale
    )
    return [found[0], *(t.unflatten(1, (-1, share)).sum(2) if share > 1 else t for t in found[1:3])]


#: Softmax body of a flash kernel, without and with the logsumexp for its backward pass.
_SOFTMAX = "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z"
_KEEPING = f"{_SOFTMAX}; l = log z; t = add m l"


def flash(site: LoweringContext[Kernel], found: Bound) -> bool:
    """Lower flash attention."""
    scores, reduced = (record_of(found, n, Einsum) for n in "sy")
    inner = record_of(found, "p", Kernel).body
    keeps = "p'" in found
    q, k, v = (given_node(site, found[n]) for n in "qkv")
    patterns = str(scores.pattern), str(reduced.pattern)
    if patterns != (_SCORES, _REDUCE) or any(n is None or narrow(site, n) for n in (q, k, v)):
        return False
    made = named_results(site, found, "y", *(n for n in ("p'", "n") if n in found))
    if made is None or match(inner, _KEEPING if keeps else _SOFTMAX) is None:
        return False
    if len({site.shadow(n).dtype for n in (q, k, v)}) > 1:
        return False
    factor, p = number_of(site, found, "c"), record_of(found, "d", Dropout).p if "d" in found else 0.0
    shape, rows = site.shadow(q).shape, site.shadow(q).shape[:-1]
    b, g, r, s, _ = shape
    like = torch.empty((b, s, g, r, site.shadow(v).shape[-1]), dtype=site.shadow(q).dtype, device="meta")
    if not keeps:
        site.settle(site.call(attend, q, k, v, *_seen(site, scores, s, site.shadow(k).shape[2]), factor, p, like=like))
        return True
    pairs = _pairs(site, q, k, v, scores)
    if pairs is None or p:
        return False
    sums = torch.empty((*rows, 1), dtype=_sums(like.dtype), device="meta")
    both = site.call(attend_and_keep, q, k, v, pairs[0], factor, *pairs[1:], like=[like, sums])
    for i, name in made.items():
        node = site.call(item, both, int(name != "y"))
        if name == "n":  # positions first
            node = site.permuted(site.viewed(node, (b, g * r, s)), (0, 2, 1))
        site.settle(node, i)
    return True


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _seen(site: LoweringContext[Kernel], scores: Einsum, queries: int, keys: int) -> tuple[bool, int | None, int]:
    """Return whether later keys are masked, the window, and the position of the first query."""
    return (False, None, 0) if scores.domain is None else site.seen(scores.domain[0], queries, keys)


def _pairs(
    site: LoweringContext[Kernel], q: Any, k: Any, v: Any, scores: Einsum
) -> tuple[bool] | tuple[bool, Pairs] | None:
    """Return torch's `is_causal`, with a mask for a rank's split queries; None if torch's kernels support neither."""
    queries, keys = site.shadow(q).shape[3], site.shadow(k).shape[2]
    size, other = site.shadow(q).shape[-1], site.shadow(v).shape[-1]
    causal, window, first = _seen(site, scores, queries, keys)
    device = site.emitter.device.type
    if size != other or (device == "cuda" and size % 8):
        return None
    if scores.domain is not None and scores.domain[0].ranks:  # CUDA's flash kernels take no mask
        return None if device == "cuda" else (False, (queries, keys, causal, window, first))
    if window is not None or (causal and queries not in (1, keys)):
        return None
    return (causal and queries > 1,)


def flash_backward(site: LoweringContext[Kernel], found: Bound) -> bool:
    """Lower the gradient of flash attention, which recomputes scores."""
    scores, grads = (record_of(found, n, Einsum) for n in "sa")
    patterns = str(scores.pattern), str(grads.pattern)
    made = named_results(site, found, "dq", "dk", "dv")
    given = [given_node(site, found[n]) for n in ("g", "q", "k", "v", "y", "l")]
    if patterns != (_SCORES, "b s g r v, b g t v -> b g r s t") or made is None or any(n is None for n in given):
        return False
    q, k, v = given[1:4]
    pairs = _pairs(site, q, k, v, scores)
    if pairs is None or narrow(site, q) or len({site.shadow(n).dtype for n in given[:5]}) > 1:
        return False
    like = [torch.empty(site.shadow(n).shape, dtype=site.shadow(q).dtype, device="meta") for n in (q, k, v)]
    every = site.call(attend_backward, *given, pairs[0], number_of(site, found, "c"), *pairs[1:], like=like)
    for i, name in made.items():
        site.settle(site.call(item, every, ("dq", "dk", "dv").index(name)), i)
    return True


# -- norms -------------------------------------------------------------------------------------------------------------


def norm(statistics: str) -> Rule:
    """Return the rule of a norm with these optional results: reciprocal deviation r and, for a layer norm, mean m."""

    def rule(site: LoweringContext[Kernel], found: Bound) -> bool:
        made, x = named_results(site, found, "y", *statistics), given_node(site, found["x"])
        last = reduced_axis(found, "v") == found["x"].ndim - 1
        if made is None or x is None or not last or not whole(found) or narrow(site, x):
            return False
        given = [None if n not in found else given_node(site, found[n]) for n in ("w", "b")]
        if any(v is None and n in found for v, n in zip(given, "wb", strict=True)):
            return False
        shadow = site.shadow(x)
        size = [shadow.shape[-1]]
        if any(v is not None and list(site.shadow(v).shape) != size for v in given):
            return False
        weight, shift = (None if v is None else site.cast(v, shadow.dtype) for v in given)
        eps = number_of(site, found, "a")
        if "m" in statistics:
            every = site.call(torch.native_layer_norm, x, size, weight, shift, eps)
        else:
            every = site.call(torch.ops.aten._fused_rms_norm, x, size, weight, eps)
        for i, name in made.items():
            site.settle(site.call(item, every, ("y", *statistics).index(name)), i)
        return True

    return rule


def layer_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, shift: bool
) -> list[Any]:
    """Return the gradients of the input, the weight and, if present, the bias."""
    size, mask = [x.shape[-1]], [True, True, shift]
    weight, mean, scale = weight.to(x.dtype), mean.to(_statistics(x)), scale.to(_statistics(x))
    return list(
        torch.ops.aten.native_layer_norm_backward(grad, x, size, mean, scale, weight, weight if shift else None, mask)
    )


def _statistics(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of mean and deviation: fp32 for 16-bit inputs on a GPU."""
    return torch.float32 if x.is_cuda and x.dtype.itemsize == 2 else x.dtype


def root_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    """Return the gradients of the input and the weight."""
    if x.is_cuda:
        size, aten = [x.shape[-1]], torch.ops.aten
        return list(aten._fused_rms_norm_backward(grad, x, size, scale, weight.to(x.dtype), [True, True]))
    # torch has no CPU kernel
    wide, g = x.to(scale.dtype), grad.to(scale.dtype)
    normal = wide * scale
    of_weight = (g * normal).flatten(0, -2).sum(0)
    g = g * weight
    along = (g * normal).mean(-1, keepdim=True)
    return [normal.mul_(along).neg_().add_(g).mul_(scale).to(x.dtype), of_weight.to(weight.dtype)]


_REST = (
    "t = sum j; u = mul t; v = cubed r; z = mul u v; e = expand z; d = div e; o = copy {c}; i = mul o; q = mul d i; "
)
_LAYER_BACKWARD = (
    "gw = mul g w; c = sub x m; n = mul c r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw c; "
    + _REST.format(c="c")
    + "a = add k q; b = neg a; f = sum b; h = expand f; l = div h; y = add a l"
)
#: Gradient bodies as reverse mode produces them.
LAYER_BACKWARD = (f"sb = sum g; {_LAYER_BACKWARD}", _LAYER_BACKWARD)
ROOT_BACKWARD = (
    "gw = mul g w; n = mul x r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw x; "
    + _REST.format(c="x")
    + "y = add k q"
)


def norm_backward(site: LoweringContext[Kernel], found: Bound) -> bool:
    """Lower the gradient of a norm with a weight along the last axis."""
    names: list[str] = [n for n in ("y", "sw", "sb") if n in found]
    made = named_results(site, found, *names)
    given = {n: given_node(site, found[n]) for n in ("g", "x", "r", "w", "m") if n in found}
    if made is None or any(v is None for v in given.values()) or not whole(found):
        return False
    shadows = {n: site.shadow(v) for n, v in given.items()}
    x, kept = shadows["x"], (*shadows["x"].shape[:-1], 1)
    same = shadows["g"].shape == x.shape and shadows["g"].dtype == x.dtype and not narrow(site, given["x"])
    if not same or x.ndim < 2 or tuple(shadows["w"].shape) != tuple(x.shape[-1:]) or tuple(shadows["r"].shape) != kept:
        return False
    vector, like = torch.empty(x.shape[-1:], dtype=x.dtype, device="meta"), torch.empty_like(x)

    if "m" in found:
        arguments = [given[n] for n in ("g", "x", "m", "r", "w")]
        both = site.call(layer_backward, *arguments, "sb" in found, like=[like, vector, vector])
    else:
        arguments = [given[n] for n in ("g", "x", "r", "w")]
        both = site.call(root_backward, *arguments, like=[like, vector.to(shadows["w"].dtype)])
    for i, name in made.items():
        site.settle(site.call(item, both, names.index(name)), i)
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


def _reduction(found: Bound) -> int:
    return 1 if "m" in found or "d" in found else 2 if "u" in found or "e" in found else 0


def _classes(site: LoweringContext[Kernel], node: Any) -> Any:
    """Return targets with all negative values set to -1."""
    return site.call(torch.clamp, node, min=-1)


def _counted(targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of targets that are not ignored."""
    return (targets >= 0).sum().to(dtype)


def nll(site: LoweringContext[Kernel], found: Bound) -> bool:
    """Lower the loss; a mean is over targets that are not ignored."""
    x, targets, made = given_node(site, found["x"]), given_node(site, found["t"]), named_results(site, found, *"yw")
    if x is None or targets is None or made is None or not whole(found) or narrow(site, x) or found["x"].ndim != 2:
        return False
    both = site.call(torch.ops.aten.nll_loss_forward, x, _classes(site, targets), None, _reduction(found), -1)
    for i, name in made.items():
        site.settle(site.call(item, both, "yw".index(name)), i)
    return True


def nll_backward(site: LoweringContext[Kernel], found: Bound) -> bool:
    """Lower the gradient of the loss, zero for ignored targets."""
    grad, targets, shape = given_node(site, found["g"]), given_node(site, found["t"]), site.sizes(found["s"])
    if grad is None or targets is None or not whole(found) or named_results(site, found, "s") is None:
        return False
    how = _reduction(found)
    if narrow(site, grad) or len(shape) != 2 or (how == 1 and number_of(site, found, "d") != shape[0]):
        return False
    like = site.call(torch.Tensor.expand, grad if how else site.viewed(grad, (shape[0], 1)), shape)
    count = site.call(_counted, targets, site.shadow(grad).dtype)
    ids = _classes(site, targets)
    site.own(torch.ops.aten.nll_loss_backward, grad, like, ids, None, how, -1, count)
    return True


# -- rules -------------------------------------------------------------------------------------------------------------


@lowering(Kernel)
def _kernel(site: LoweringContext[Kernel]) -> None:
    body = site.kind.body
    for text, rule in _RULES.items():
        found = match(body, text)
        if found is not None and rule(site, found):
            return
    nodes = site.shared.inside(body, site.operands)
    used = {_storage(site, v) for v in site.operands}
    changed = {site.op.operands[i].storage for i in site.kind.changed}
    for i, v in enumerate(nodes):
        if site.op.results[i].storage in changed:  # written in place
            site.alias(v, i)
            continue
        shadow, storage = site.shadow(v), _storage(site, v)
        own = storage not in used and shadow.untyped_storage().nbytes() == shadow.numel() * shadow.itemsize
        used.add(storage)
        site.settle(v, i, fresh=own)


def _storage(site: LoweringContext[Kernel], node: Any) -> int:
    found: int = site.shadow(node).untyped_storage()._cdata
    return found


def _softmax(function: Callable[..., Any]) -> Rule:
    def rule(site: LoweringContext[Kernel], found: Bound) -> bool:
        axis, x = reduced_axis(found, "m"), given_node(site, found["x"])
        if axis is None or x is None or not whole(found) or named_results(site, found, "y") is None or narrow(site, x):
            return False
        site.own(function, x, axis, False)
        return True

    return rule


def _softmax_backward(function: Callable[..., Any]) -> Rule:
    def rule(site: LoweringContext[Kernel], found: Bound) -> bool:
        axis, g, y = reduced_axis(found, "a"), given_node(site, found["g"]), given_node(site, found["y"])
        if axis is None or g is None or y is None or not whole(found) or named_results(site, found, "z") is None:
            return False
        shadows = [site.shadow(g), site.shadow(y)]
        if shadows[0].dtype != shadows[1].dtype or shadows[0].shape != shadows[1].shape or narrow(site, g):
            return False
        site.own(function, g, y, axis, shadows[0].dtype)
        return True

    return rule


def _biased(lowered: Callable[..., bool]) -> Rule:
    """Return the rule of a contraction with a bias."""

    def rule(site: LoweringContext[Kernel], found: Bound) -> bool:
        einsum, nodes = found["p"].producer, [given_node(site, found[n]) for n in "xwb"]
        if any(v is None for v in nodes) or not whole(found) or named_results(site, found, "y") is None:
            return False
        return lowered(site, einsum, nodes[:2], nodes[2])

    return rule


_LAYER = "m = mean x; c = sub x m; q = square c; v = mean q; a = add v; r = rsqrt a; "
_ROOT = "q = square x; v = mean q; a = add v; r = rsqrt a; "
#: Patterns with a torch function, and their rules.
_RULES: dict[str, Rule] = {
    "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z": _softmax(torch.ops.aten._softmax),
    "m = max x; s = sub x m; e = exp s; z = sum e; l = log z; y = sub s l": _softmax(torch.ops.aten._log_softmax),
    "q = mul g y; a = sum q; d = sub g a; z = mul y d": _softmax_backward(torch.ops.aten._softmax_backward_data),
    "e = exp y; a = sum g; q = mul e a; z = sub g q": _softmax_backward(torch.ops.aten._log_softmax_backward_data),
    _LAYER + "y = mul c r": norm("mr"),
    _LAYER + "n = mul c r; y = mul n w": norm("mr"),
    _LAYER + "n = mul c r; o = mul n w; y = add o b": norm("mr"),
    _ROOT + "y = mul x r": norm("r"),
    _ROOT + "n = mul x r; y = mul n w": norm("r"),
    "p = einsum x w; y = add p b": _biased(linear),
    "p = einsum x w; o = rearrange b; y = add p o": _biased(convolution),
    **dict.fromkeys((*LAYER_BACKWARD, ROOT_BACKWARD), norm_backward),
    **dict.fromkeys(NLL, nll) | dict.fromkeys(NLL_BACKWARD, nll_backward),
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v": flash,
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v; n = rearrange p'": flash,
    "s = einsum q k; c = mul s; p = softmax c; d = dropout p; y = einsum d v": flash,
    "a = einsum g v; s = einsum q k; c = mul s; o = sub c l; p = exp o; dv = einsum g p; i = mul g y; t = sum i; "
    "u = rearrange t; e = sub a u; f = mul p e; h = mul f; dq = einsum h k; dk = einsum h q": flash_backward,
}
