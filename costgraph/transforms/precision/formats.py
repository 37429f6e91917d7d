"""Formats that stand in records of ops, and those that carries of loops settle on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce as fold
from typing import Any

from ...dtypes import DType, promote
from ...errors import FormatError, UnsupportedError
from ...graph.op import Op, OpKind
from ...graph.strides import Sizes
from ...graph.tensor import Tensor
from ...ops.contraction import Einsum
from ...ops.pointwise import Pointwise
from ...ops.stated import Opaque
from .policy import Policy

__all__ = ["Carries", "Records", "common", "is_float"]


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


class Records:
    """Formats in records of ops, as the rewritten operands have them; scopes of the policy have formats of their own.

    `default` is the default format of the old graph, `base` what stands for it, and `given` the format that an input of
    a body, of the old graph, is taken in.
    """

    def __init__(self, policy: Policy, default: DType, base: DType, given: Mapping[Tensor, DType]) -> None:
        self.policy, self.default, self.base, self.given = policy, default, base, given

    def of(self, op: Op, operands: Sequence[Tensor]) -> OpKind:
        """Return the record of an op for other operands; a body is still the old one."""
        kind = op.kind
        if isinstance(kind, Opaque):
            return replace(kind, outputs=self._stated(op, kind, operands))
        if isinstance(kind, Einsum):
            return self._contraction(op, kind, operands)
        if isinstance(kind, Pointwise) and kind.inplace and kind.dtype is None:
            own = operands[0].dtype
            mixed = own.kind == "float" and any(t.dtype != own for t in operands[1:])
            return replace(kind, dtype=own) if mixed else kind  # written into it, whatever is computed
        changed: dict[str, Any] = {
            name: self._same_as(op, v) if isinstance(v, DType) else self._declared(v, op)
            for name, v in kind.stated().items()
        }
        return replace(kind, **changed)

    def _contraction(self, op: Op, kind: Einsum, operands: Sequence[Tensor]) -> Einsum:
        old = kind.dtype
        new = _derived(operands) if old == _derived(op.operands) else None
        dtype = self._same_as(op, old) if new is None else new
        return replace(kind, dtype=dtype, workspace=kind.workspace * dtype.bits / old.bits)

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
        """Return a fact with the policy's format in place of the default one."""
        if isinstance(value, DType):
            own = self.policy.scope_format(op.name)
            return (own or self.base) if value == self.default and value.kind == "float" else value
        if isinstance(value, tuple):
            return tuple(self._declared(v, op) for v in value)
        if isinstance(value, Mapping):
            return {k: self._declared(v, op) for k, v in value.items()}
        return value

    def _stated(self, op: Op, kind: Opaque, operands: Sequence[Tensor]) -> tuple[tuple[Sizes, DType], ...]:
        """Return outputs of an opaque op; those in the default format are in that of the operands that had it."""
        default = self.default
        given = [t for old, t in zip(op.operands, operands, strict=True) if old.dtype == default and is_float(t)]
        own = common(given) if given else self._declared(default, op)
        outputs = tuple((sizes, own if dtype == default else dtype) for sizes, dtype in kind.outputs)
        before = [t.dtype for t in op.operands], [t.dtype for t in op.results]
        for what, amounts, old, new in (
            ("reads", kind.bytes_read, before[0], [t.dtype for t in operands]),
            ("writes", kind.bytes_written, before[1], [dtype for _, dtype in outputs]),
        ):
            if amounts is not None and old != new:
                raise UnsupportedError(
                    f"opaque {op.name!r}: states the bytes that it {what}, of formats that go from "
                    f"{', '.join(d.name for d in old)} to {', '.join(d.name for d in new)}; expected none stated, or a "
                    f"policy that keeps its formats"
                )
        return outputs
