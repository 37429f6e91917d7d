"""Lower traced calls by replaying them, and opaque ops by calling the caller's functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...dtypes import DType
from ...errors import UnsupportedError
from ...ir.graph import Call, OpKind
from ...ops.opaque import Opaque
from .context import LoweringContext, lowering, torch_dtype
from .elementwise import item, leaf

__all__ = [
    "replay",
    "runs_on",
]


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
