"""Linear layers in formats of 8 bits: operands quantized with a scale for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algebra.polynomial import ZERO
from ...dtypes import DTYPES, DType
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.scopes import opened
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ..vjp.scaled import SCALED_MM, backward_rule, quantize, unscaled
from .autocast import family, word
from .formats import is_float
from .retype import Retyper

__all__ = ["ScaledRetyper"]


def _product(op: Op) -> Op | None:
    """Return the one contraction of an op that may be a linear layer."""
    if op.body is not None:
        if not isinstance(op.kind, Kernel) or family(op.body) != "addmm":
            return None
        op = next(o for o in op.body.ops if isinstance(o.kind, Einsum))
    return op if isinstance(op.kind, Einsum) and word(op) == "matmul" and len(op.operands) == 2 else None


def _quantize(graph: Graph, t: Tensor, name: str, wanted: DType) -> tuple[Tensor, Tensor]:
    """Quantize a tensor in some graph, under some name."""
    with opened(graph=graph, levels=tuple(name.split("/")) if name else ()):
        return quantize(t, wanted)


class ScaledRetyper(Retyper):
    """Copies a graph in other formats, and its linear layers in the policy's `matmul`."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if not new.fused and self._is_scaled(op):
            self._place_scaled(op, new)
        else:
            super().emit(op, new, suffix)

    def _is_scaled(self, op: Op) -> bool:
        if self.policy.matmul is None or self.kernels or self.policy.scope_format(op.name) is not None:
            return False
        return self.listed(op) is None and self._is_linear(op)

    def _is_linear(self, op: Op) -> bool:
        """Whether an op multiplies activations by a parameter, both in the format of activations."""
        product = _product(op)
        if product is None:
            return False
        outer = [self._outside(op, t) for t in product.operands]
        if any(t is None or not is_float(t) or t.dtype.bits < 16 or not t.ndim for t in outer):
            return False
        weights = [t for t in outer if t is not None and self._is_weight(t)]
        return len(weights) == 1 and all(t.dtype == self.default for t in product.operands)

    def _outside(self, op: Op, t: Tensor) -> Tensor | None:
        """Return the rewritten tensor that an operand of the product stands for, None if it is made in the kernel."""
        if op.body is None:
            made: Tensor = self.tensors[t]
            return made
        if t not in op.body.formals:
            return None
        outer: Tensor = self.tensors[op.operands[op.body.formals.index(t)]]
        return outer

    def _is_weight(self, t: Tensor) -> bool:
        leaf = self.leaf(t)
        while leaf.is_view and leaf.producer is not None:
            leaf = self.leaf(leaf.producer.operands[0])
        return self.slices.get(leaf, leaf).role == "param"

    def _place_scaled(self, op: Op, new: Graph) -> None:
        """Add a linear layer whose product reads quantized operands, as one kernel with its bias."""
        product = _product(op)
        assert product is not None
        wanted = DTYPES[self.policy.matmul or ""]
        pairs = []
        for t in product.operands:
            outer = self._outside(op, t)
            assert outer is not None
            if self.param(outer) is not None:
                pairs.append(self.once(outer, wanted, lambda graph, leaf, name: _quantize(graph, leaf, name, wanted)))
            else:
                pairs.append(_quantize(new, outer, op.scope, wanted))
        old = op.body
        body = new.start_body(SCALED_MM if old is None else old.name, fused=True)
        y = self._multiplied(op, product, pairs, body)
        if old is None:
            body.outputs.append(y)
        else:
            self._add_bias(op, product, y, new, body)
        kind = Kernel(
            body=body,
            workspace=ZERO if old is None else op.workspace,
            backward=backward_rule(self.policy.grad_matmul or wanted.name),
        )
        self.add(op, kind, body.captured, new)

    def _multiplied(self, op: Op, product: Op, pairs: Sequence[tuple[Tensor, Tensor]], body: Graph) -> Tensor:
        """Multiply narrow copies and divide by their scales."""
        (x, x_scale), (w, w_scale) = pairs
        name = product.name if product is not op else f"{op.name}/matmul"
        assert isinstance(product.kind, Einsum)
        (y,) = body.add_op(replace(product.kind, dtype=DTYPES["fp32"]), [x, w], name, op.phase).results
        with opened(graph=body, levels=tuple(op.name.split("/"))):
            return unscaled(y, x_scale, w_scale, self.base)

    def _add_bias(self, op: Op, product: Op, y: Tensor, new: Graph, body: Graph) -> None:
        """Copy what a kernel does with its product."""
        old = op.body
        assert old is not None
        self.tensors[product.results[0]] = y
        for f, t in zip(old.formals, op.operands, strict=True):
            given = self.tensors[t]
            wanted = None if f in product.operands else self.wanted(op, t, given)
            if wanted is not None and wanted != given.dtype:
                given = self.converted(given, wanted, op, new)
            self.tensors[f], self.given[f] = given, given.dtype
        self.kernels.append(op)
        for inner in old.ops:
            if inner is not product:
                self.emit(inner, body)
        self.kernels.pop()
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
