"""Elementwise functions, dropout, and masks of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from ...graph.op import OpKind
from ...ops.pointwise import Pointwise
from ...ops.stochastic import Dropout
from .functions import FLEXIBLE, IN_PLACE, KERNELS, SWAPPED, WITH_NUMBER, hidden, item
from .site import Site
from .table import lowering

__all__ = ["chosen", "held"]


def held(site: Site[OpKind], i: int, fill: float) -> Any:
    """Return an operand with a number where its domain has nothing."""
    t, x = site.op.operands[i], site.operands[i]
    if t.domain is None:
        return x
    domain, query, key = t.domain
    sizes = site.sizes(t)
    return site.call(hidden, x, query, key, *site.seen(domain, sizes[query], sizes[key]), fill)


@lowering(Pointwise)
def _pointwise(site: Site[Pointwise]) -> None:
    record, name = site.kind.function, site.kind.function.name
    if name.startswith("causal_mask"):
        _masked(site, 0.0 if name.endswith("backward") else float("-inf"))
        return
    operands = iter(site.operands)
    template = site.of(site.kind.scalars) or (None,) * len(site.operands)
    number = float if site.kind.numbers == "float" else _as_it_is  # D/H is one where it comes out whole too
    given = [next(operands) if s is None else number(s) for s in template]
    if name in site.shared.functions:
        _place(site, name, site.shared.functions[name], given)
    elif name == "cast":
        _cast(site, given[0])
    elif name not in KERNELS:
        raise UnsupportedError(
            f"lower {site.op.name!r}: torch has no function {name!r} ({record.formula or 'no formula'}), expected one "
            f"in functions="
        )
    else:
        function, given = chosen(name, _taken(site, name, given))
        _place(site, name, function, given)


def _as_it_is(number: Any) -> Any:
    return number


def _cast(site: Site[Pointwise], x: Any) -> None:
    if site.kind.overwrites():
        site.alias(site.call(torch.Tensor.copy_, site.operands[0], x))
    else:
        site.own(torch.ops.aten._to_copy, x, dtype=site.dtype(site.op.results[0]))


def _masked(site: Site[Pointwise], fill: float) -> None:
    x, old = site.operands[0], site.op.operands[0]
    # a gradient is zero where its operand holds nothing
    domain = old.domain[0] if site.kind.masked is None and old.domain is not None and not fill else site.kind.masked
    if domain is None:
        function, given = KERNELS["copy"], [x]
    else:
        query, key = old.domain[1:] if old.domain is not None else (old.ndim - 2, old.ndim - 1)
        sizes = site.sizes(old)
        function, given = hidden, [x, query, key, *site.seen(domain, sizes[query], sizes[key]), fill]
    _place(site, "causal_mask", function, given)


def _place(site: Site[OpKind], name: str, function: Callable[..., Any], given: list[Any]) -> None:
    if not site.kind.overwrites():
        site.own(function, *given)
        return
    target = site.operands[0]
    if name in IN_PLACE and given[0] is target:
        site.alias(site.call(IN_PLACE[name], *given))
        return
    written = site.into(target, function, *given)
    if written is None:
        written = site.call(torch.Tensor.copy_, target, site.call(function, *given))
    site.alias(written)


def chosen(name: str, given: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return torch's function for these tensors and numbers, and its arguments in order."""
    numbers = [isinstance(v, int | float | complex) for v in given]
    if numbers == [True, False] and name in SWAPPED:
        return SWAPPED[name], given[::-1]
    if numbers == [False, True] and name in WITH_NUMBER:
        return WITH_NUMBER[name], given
    return KERNELS[name], given


def _taken(site: Site[OpKind], name: str, given: list[Any]) -> list[Any]:
    """Return operands as torch's kernel takes them: in a format that it has, and whole where it does not broadcast."""
    result = site.dtype(site.op.results[0])
    shadows = [None if isinstance(v, int | float | complex) else site.shadow(v) for v in given]
    formats = [s.dtype for s in shadows if s is not None]
    wide = _format_for(name, formats, result)
    if wide is not None:
        first = 1 if name == "where" else 0
        given = [
            v if s is None or i < first else site.cast(v, wide)
            for i, (v, s) in enumerate(zip(given, shadows, strict=True))
        ]
    if name in FLEXIBLE or len(given) == 1:
        return given
    dtype = wide or torch.result_type(*[torch.empty((), dtype=f, device="meta") for f in (formats * 2)[:2]])
    sizes = site.sizes(site.op.results[0])
    return [_full(site, v, sizes, dtype) for v in given] if name.endswith("_backward") else given


def _full(site: Site[OpKind], v: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
    if isinstance(v, int | float | complex):
        v = site.call(torch.full, (), v, dtype=dtype, device=site.emitter.device)
    v = site.cast(v, dtype)
    return v if tuple(site.shadow(v).shape) == sizes else site.call(torch.broadcast_to, v, sizes)


_ARITHMETIC = FLEXIBLE - {"copy", "cast", "where", "masked_fill", "logical_and", "logical_not", "eq"}


def _format_for(name: str, formats: list[torch.dtype], result: torch.dtype) -> torch.dtype | None:
    """Return the format to compute in, None for that of the operands."""
    if all(f == torch.bool for f in formats) and name in _ARITHMETIC:
        return torch.uint8
    if any(f.is_floating_point and f.itemsize == 1 for f in (*formats, result)):
        return torch.float32  # torch stores these, and computes with none
    if name not in FLEXIBLE and not any(f.is_floating_point or f.is_complex for f in formats):
        return result if result.is_floating_point else torch.float64
    return None


# -- random numbers ----------------------------------------------------------------------------------------------


def dropped(x: torch.Tensor, p: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero elements at random and scale the others; returns where they are kept as well."""
    if x.is_cuda and dtype == torch.bool:
        return torch.native_dropout(x, p, True)
    mask = torch.empty_like(x, dtype=dtype).bernoulli_(1 - p)
    made = torch.mul(x, 1 / (1 - p))
    if dtype != torch.bool:
        return made.mul_(mask), mask
    # in place, where torch's own function makes a mask of numbers
    made.masked_fill_(mask.logical_not_(), 0)
    return made, mask.logical_not_()


@lowering(Dropout)
def _dropout(site: Site[Dropout]) -> None:
    x, p = site.operands[0], site.kind.p
    mask = site.dtype(site.op.results[1])
    shadow = site.shadow(x)
    if shadow.dtype.itemsize == 1:
        x = site.cast(x, torch.float32)
    both = site.call(dropped, x, p, mask)
    for i in range(2):
        site.settle(site.call(item, both, i), i)
