"""Muon: momentum SGD with orthogonalized updates of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from ..algebra.polynomial import as_poly
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Tensor,
    base_name,
    need_call,
    need_choice,
)
from ..ir.strides import (
    Sizes,
    numel,
)
from ..notation.validation import (
    READ,
    guarded,
)
from ..ops.elementwise import (
    cast,
    pointwise,
)
from ..ops.index import Gather
from ..ops.layout import keep_alive, reshape
from ..ops.loops import fused
from ..ops.operators import matmul, transpose
from ..ops.updates import ADD_SCALED
from .adaptive import AdamW
from .optimizer import (
    Calls,
    Column,
    Optimizer,
    Slot,
    bounds,
    need_slots,
    norm,
    one_by_one,
)

__all__ = ["Muon", "has_matrix"]


def has_matrix(slot: Slot) -> bool:
    """Return whether a parameter has two or more axes and is not a bias."""
    # a bias may have several axes, as its output does
    return len(slot.axes()) > 1 and base_name(slot.param.storage.name).rpartition("/")[2] != "bias"


def _levels(slot: Slot) -> list[str]:
    return slot.param.storage.name.lower().replace(".", "/").split("/")


def _is_hidden(slot: Slot) -> bool:
    """Return whether a parameter is a hidden-layer matrix, neither an embedding nor the head."""
    if not has_matrix(slot) or any("embed" in name or name in ("head", "lm_head") for name in _levels(slot)):
        return False
    tables = (op.operands[0] for op in slot.param.graph.root.ops if isinstance(op.kind, Gather))
    return all(t.storage is not slot.param.storage for t in tables)


def _has_experts(slot: Slot) -> bool:
    """Return whether the first axis of a parameter indexes experts with a matrix each."""
    return len(slot.axes()) == 3 and "experts" in _levels(slot)


@guarded()
@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon, op for op as torch.optim.Muon, which loops over parameters.

    Muon updates hidden-layer matrices; AdamW updates embeddings, the head, biases and norms. This is the split of
    Muon's author (Jordan 2024, github.com/KellerJordan/Muon), torch's documentation, and DeepSpeed's
    `set_optimizer_flags`.

    A parameter of more than two axes, which torch refuses, is flattened to a matrix of its first axis by all others;
    each expert of a mixture has its own matrix, as in DeepSpeed's `muon_update`. The Gram matrix is taken over the
    shorter side, which must be known: `graph.assume("F >= D")`. For symbolic sizes the size-dependent factor of the
    learning rate is omitted; it changes no cost.

    Raises
    ------
    GraphError
        If another implementation is requested, or torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Muon, Slot
    >>> D, F = cg.dims("D F")
    >>> with cg.Graph("g") as g:
    ...     g.assume("F >= D")
    ...     slots = Muon(ns_steps=1).update([Slot(g.param("w", (D, F)), g.input("w.grad", (D, F)))])
    >>> cg.matmul_flops(g)  # the Gram matrix, its square, and the product with it
    2*D**3 + 4*D**2*F
    """

    available: ClassVar[tuple[str, ...]] = ("for-loop",)

    implementation: str = "for-loop"
    weight_decay: float = 0.1
    """Decoupled weight decay; torch multiplies by 1 if it is 0."""
    momentum: float = 0.95
    """Weight of the old momentum in the new one."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Coefficients of the Newton-Schulz iteration."""
    eps: float = 1e-7
    """Lower bound of the norm that the momentum is divided by."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    adjust_lr_fn: str = "original"
    """original or match_rms_adamw: how the shape of a matrix scales its learning rate."""
    takes: Callable[[Slot], bool] = _is_hidden
    """Selects the parameters that Muon updates: by default those with two axes or more, except biases, lookup tables
    (tied heads included), and names with a level `head`, `lm_head` or `*embed*`."""
    others: Optimizer | None = None
    """Optimizer of the other parameters: by default AdamW with the same implementation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inf = float("inf")
        bounds("Muon", weight_decay=(self.weight_decay, 0, inf), momentum=(self.momentum, 0, inf))
        bounds("Muon", eps=(self.eps, 0, inf), ns_steps=(self.ns_steps, 0, 99))
        if not isinstance(self.ns_steps, int):
            raise GraphError(f"Muon: ns_steps is {self.ns_steps!r}, expected an integer")
        need_choice("Muon: adjust_lr_fn", self.adjust_lr_fn, ("original", "match_rms_adamw"))
        need_call("Muon: takes", self.takes)
        if self.others is not None and not isinstance(self.others, Optimizer):
            raise GraphError(f"Muon: others {self.others!r}, expected an optimizer")

    def update(self, slots: Annotated[Sequence[Slot], READ]) -> list[Slot]:
        """Add the ops that update parameters, first those selected by `takes`, then the others.

        Raises
        ------
        GraphError, ShapeError
            If there is no slot, a selected parameter is not a matrix, or its shorter side is unknown.
        """
        checked = need_slots("Muon", slots)
        updated = dict(enumerate(checked))
        matrices = [i for i, s in enumerate(checked) if self.takes(s)]
        vector = next((checked[i] for i in matrices if not has_matrix(checked[i])), None)
        if vector is not None:
            raise ShapeError(f"Muon: parameter {vector.param!r}, expected at least two axes")
        remaining = [i for i in updated if i not in matrices]
        others = AdamW(implementation=self.implementation, step=self.step) if self.others is None else self.others
        if matrices:
            updated |= dict(zip(matrices, super().update([checked[i] for i in matrices]), strict=True))
        if remaining:
            updated |= dict(zip(remaining, others.update([checked[i] for i in remaining]), strict=True))
        return list(updated.values())

    def _states(self, slot: Slot) -> Column:
        return (slot.state("momentum_buffer"),)

    def _kind(self, slot: Slot) -> object:
        return slot.updated.dtype, _has_experts(slot)

    def _run(self, groups: list[Column], slots: list[Slot]) -> list[tuple[Tensor, Tensor]]:
        update = partial(self._update_of, _has_experts(slots[0]))
        return [(p, g) for p, g in one_by_one(update, groups, "muon")]

    def _update_of(self, experts: bool, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        sizes = p[0].sizes
        as_matrix = (lambda x: x) if experts else _as_matrix
        matrix, grad, buffer = (calls.each("matrix", as_matrix, c)[0] for c in (p, g, states[0]))
        buffer = calls.inplace("lerp", buffer, grad, 1 - self.momentum)
        update = calls.new("lerp", grad, buffer, self.momentum) if self.nesterov else buffer
        (orthogonal,) = calls.each("orthogonal", partial(_orthogonal, self), update)
        matrix = calls.inplace("mul", matrix, 1 - self.lr * self.weight_decay)
        matrix = calls.add(matrix, orthogonal, -self._rate(matrix[0].sizes[-2:]), inplace=True)
        flat = len(sizes) > 2 and not experts
        return calls.each("parameter", lambda m: reshape(m, sizes), matrix)[0] if flat else matrix, g

    def _rate(self, sizes: Sizes) -> float:
        rows, columns = (n.constant for n in sizes)
        if rows is None or columns is None:
            return self.lr
        if self.adjust_lr_fn == "original":
            return self.lr * math.sqrt(max(1, rows / columns))
        return self.lr * 0.2 * math.sqrt(max(rows, columns))


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else reshape(x, (x.sizes[0], numel(x.sizes[1:])), name="matrix")


def _is_tall(x: Tensor) -> bool:
    rows, columns = x.sizes[-2:]
    relations = x.graph.root.relations
    if relations.nonnegative(columns - rows):
        return False
    if relations.nonnegative(rows - columns):
        return True
    default_sizes = {name: as_poly(size) for name, size in x.graph.root.defaults.items()}
    wider = (columns - rows).bind(default_sizes).constant  # for the default sizes of the model
    if wider is not None:
        return wider < 0
    raise ShapeError(
        f"Muon: parameter of {rows} by {columns}, expected to know which is larger, for example by "
        f"graph.assume('{rows} >= {columns}')"
    )


def _orthogonal(muon: Muon, update: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix by Newton-Schulz in bf16: `zeropower_via_newtonschulz`."""
    tall = _is_tall(update)
    x = cast(update, "bf16")
    size = norm(x) if x.ndim == 2 else _batched_norm(x)
    x = transpose(x) if tall else x
    x = pointwise("div", x, pointwise("maximum", size, muon.eps), inplace=True)
    a, b, c = muon.ns_coefficients
    for _ in range(muon.ns_steps):
        gram = matmul(x, transpose(x))
        # Python variables keep the Gram matrix and the operand alive after their last read
        x = keep_alive(_addmm(x, _addmm(gram, gram, gram, b, c), x, a, 1), gram)
    x = transpose(x) if tall else x
    # if it is bf16 already, the update itself was divided in place
    return x if update.dtype == x.dtype else keep_alive(x, update)


def _batched_norm(x: Tensor) -> Tensor:
    """Return the norm of each matrix in a batch."""
    count, *matrix = x.sizes
    return reshape(norm(reshape(x, (count, numel(matrix))), axis=1), (count, 1, 1))


def _addmm(addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return `beta * added + alpha * left @ right` in one kernel."""

    def body(addend: Tensor, left: Tensor, right: Tensor) -> Tensor:
        scaled, product = pointwise("mul", addend, beta), matmul(left, right)
        return pointwise("add", scaled, product) if alpha == 1 else pointwise(ADD_SCALED, scaled, product, alpha)

    result = fused("addmm", body, addend, left, right)
    assert isinstance(result, Tensor)
    return result
