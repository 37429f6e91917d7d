"""Attention in one kernel, with what its gradient needs, and the gradient."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.stochastic import Dropout
from .bodies import Bound, given_node, match, named_results, narrow, number_of, record_of
from .functions import item, mask_of
from .site import Site

__all__ = ["flash", "flash_backward"]

_SCORES = "b g r s k, b g t k -> b g r s t"
_REDUCE = "b g r s t, b g t v -> b s g r v"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, first: int, scale: float,
    p: float,
) -> torch.Tensor:  # fmt: skip
    """Attend in one kernel: q (b, g, r, s, k), k (b, g, t, k), v (b, g, t, v) to (b, s, g, r, v)."""
    b, g, r, s, _ = q.shape
    t = k.shape[2]
    # one query at the end sees all keys; torch's flag aligns at the first positions, so that as many have to be there
    plain = window is None and (not causal or (s == 1 and first == t - 1))
    flag = window is None and causal and s == t and s > 1
    mask = None if plain or flag else mask_of(s, t, causal, window, first, q.device)
    made = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(b, g * r, s, -1), k, v, mask, dropout_p=p, is_causal=flag, scale=scale, enable_gqa=r > 1
    )
    return made.transpose(1, 2).reshape(b, s, g, r, -1).contiguous()


#: Which pairs are seen, where torch's `is_causal` does not say it: `mask_of` without its device.
Pairs = tuple[int, int, bool, int | None, int]


def _bias(x: torch.Tensor, pairs: Pairs | None) -> torch.Tensor | None:
    """Return what torch's kernel for CPUs adds to scores."""
    if pairs is None:
        return None
    seen = mask_of(*pairs, x.device)
    return x.new_zeros(seen.shape).masked_fill_(seen.logical_not_(), float("-inf"))


def attend_and_keep(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, pairs: Pairs | None = None
) -> list[torch.Tensor]:
    """Attend, and keep the logarithm of the sum of each row, (b, g, r, s, 1), from which the gradient starts."""
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
    """Go back through CUDA's kernel for fp32: its row sums are padded to 32 rows, its heads are all of their own."""
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))
    state = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
    keys, values = _each(k, share), _each(v, share)
    more = (padded, *state, 0.0, [True, True, True, False], causal)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dy, q, keys, values, None, y, *more, scale=scale
    )
    return [found[0], *(t.unflatten(1, (-1, share)).sum(2) if share > 1 else t for t in found[1:3])]


#: What a flash kernel does between its two products, with what it keeps for its gradient and without.
_SOFTMAX = "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z"
_KEEPING = f"{_SOFTMAX}; l = log z; t = add m l"


def flash(site: Site[Kernel], found: Bound) -> bool:
    """Lower attention that never writes its scores."""
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


def _seen(site: Site[Kernel], scores: Einsum, queries: int, keys: int) -> tuple[bool, int | None, int]:
    """Return whether later keys are hidden, the window, and where the first query stands."""
    return (False, None, 0) if scores.domain is None else site.seen(scores.domain[0], queries, keys)


def _pairs(site: Site[Kernel], q: Any, k: Any, v: Any, scores: Einsum) -> tuple[bool] | tuple[bool, Pairs] | None:
    """Return torch's `is_causal`, of a rank's own queries a mask beside it; None where torch's kernels have neither."""
    queries, keys = site.shadow(q).shape[3], site.shadow(k).shape[2]
    size, other = site.shadow(q).shape[-1], site.shadow(v).shape[-1]
    causal, window, first = _seen(site, scores, queries, keys)
    device = site.emitter.device.type
    if size != other or (device == "cuda" and size % 8):
        return None
    if scores.domain is not None and scores.domain[0].ranks:  # on CUDA its kernels take no mask
        return None if device == "cuda" else (False, (queries, keys, causal, window, first))
    if window is not None or (causal and queries not in (1, keys)):
        return None
    return (causal and queries > 1,)


def flash_backward(site: Site[Kernel], found: Bound) -> bool:
    """Lower the gradient of attention, which computes the scores again."""
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
