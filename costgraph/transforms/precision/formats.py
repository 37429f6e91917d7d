"""Formats that stand in attributes of ops, and those that carries of loops settle on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce as fold
from typing import Any

from ...dtypes import DTYPES, DType, promote
from ...errors import FormatError, UnsupportedError
from ...graph.op import Op
from ...graph.tensor import Tensor
from .policy import Policy

__all__ = ["Attributes", "Carries", "common", "is_float"]


def is_float(t: Tensor) -> bool:
    """Whether a tensor holds fractions: all others keep their format."""
    return t.dtype.kind == "float"


def common(tensors: Sequence[Tensor]) -> DType:
    """Return the common format of tensors, as torch promotes."""
    return fold(promote, (t.dtype for t in tensors if is_float(t)))


def _derived(tensors: Sequence[Tensor]) -> DType | None:
    try:
        return fold(promote, (t.dtype for t in tensors))
    except FormatError:
        return None  # floats of 8 bits: the format of the result was stated


class Carries:
    """Formats that carries of loops have in all iterations, found by rewriting until nothing changes."""

    def __init__(self) -> None:
        self.settled: dict[tuple[Op, int], DType] = {}
        self.seen: dict[tuple[Op, int], list[DType]] = {}
        self.changed = False

    def settle(self, op: Op, i: int, entry: DType, after: DType) -> None:
        """Take note of a body that was given one format and handed out another."""
        seen = self.seen.setdefault((op, i), [entry])
        # a body that goes back and forth is held at a format that loses nothing
        wanted = fold(promote, seen, after) if after in seen else after
        if wanted != entry:
            self.settled[op, i] = wanted
            self.changed = True
        if after not in seen:
            seen.append(after)


class Attributes:
    """Formats in attributes of ops, as the rewritten operands have them.

    Parameters
    ----------
    policy : Policy
        Its scopes have formats of their own.
    default, base : DType
        Default format of the old graph, and what stands for it.
    given : mapping of Tensor to DType
        Format that an input of a body, of the old graph, is taken in.
    """

    def __init__(self, policy: Policy, default: DType, base: DType, given: Mapping[Tensor, DType]) -> None:
        self.policy, self.default, self.base, self.given = policy, default, base, given

    @staticmethod
    def format(name: str) -> DType:
        """Return the format of a canonical name."""
        return DTYPES[name]

    def of(self, op: Op, operands: Sequence[Tensor]) -> dict[str, Any]:
        """Return the attributes of an op for other operands; a body is left out."""
        attrs = {k: v for k, v in op.attrs.items() if k != "body"}
        kind = op.kind.name
        if kind == "opaque":
            attrs["outputs"] = self._stated(op, operands)
        elif kind == "einsum":
            self._contraction(op, operands, attrs)
        elif "dtype" in attrs:
            attrs["dtype"] = self._same_as(op, attrs["dtype"])
        elif kind == "pointwise" and attrs.get("inplace"):
            if operands[0].dtype.kind == "float" and any(t.dtype != operands[0].dtype for t in operands[1:]):
                attrs["dtype"] = operands[0].dtype  # written into it, whatever is computed
        elif kind not in ("dropout", "kernel", "repeat"):
            attrs = {k: self._declared(v, op) for k, v in attrs.items()}
        return attrs

    def _contraction(self, op: Op, operands: Sequence[Tensor], attrs: dict[str, Any]) -> None:
        old = attrs["dtype"]
        new = _derived(operands) if old == _derived(op.operands) else None
        attrs["dtype"] = self._same_as(op, old) if new is None else new
        if "workspace" in attrs:
            attrs["workspace"] = attrs["workspace"] * attrs["dtype"].bits / old.bits

    def _same_as(self, op: Op, stated: DType) -> DType:
        """Return a format that an op states: inside a kernel, of the operand that had it."""
        graph = op.graph
        while graph.fused and graph.formals:
            for i, f in enumerate(graph.formals):
                if f.dtype == stated and (i == 0 or stated == self.default):
                    return self.given[f]
            if graph.parent is None:
                break
            graph = graph.parent
        return self._declared(stated, op)  # type: ignore[no-any-return]  # a format stays one

    def _declared(self, value: Any, op: Op) -> Any:
        """Return an attribute with the policy's format in place of the default one."""
        if isinstance(value, DType):
            own = self.policy.scope_format(op.name)
            return (own or self.base) if value == self.default and value.kind == "float" else value
        if isinstance(value, tuple):
            return tuple(self._declared(v, op) for v in value)
        if isinstance(value, Mapping):
            return {k: self._declared(v, op) for k, v in value.items()}
        return value

    def _stated(self, op: Op, operands: Sequence[Tensor]) -> Any:
        """Return outputs of an opaque op; those in the default format are in that of the operands that had it."""
        default = self.default
        given = [t for old, t in zip(op.operands, operands, strict=True) if old.dtype == default and is_float(t)]
        own = common(given) if given else self._declared(default, op)
        outputs = tuple((sizes, own if dtype == default else dtype) for sizes, dtype in op.attrs["outputs"])
        before = [t.dtype for t in op.operands], [t.dtype for t in op.results]
        for what, old, new in (
            ("reads", before[0], [t.dtype for t in operands]),
            ("writes", before[1], [dtype for _, dtype in outputs]),
        ):
            if op.attrs[what] is not None and old != new:
                raise UnsupportedError(
                    f"opaque {op.name!r}: states the bytes that it {what}, of formats that go from "
                    f"{', '.join(d.name for d in old)} to {', '.join(d.name for d in new)}; expected none stated, or a "
                    f"policy that keeps its formats"
                )
        return outputs
