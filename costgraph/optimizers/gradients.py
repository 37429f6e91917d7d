"""Gradient operations of a training step besides the update: zeroing, clipping and unscaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..errors import GraphError
from ..ir.graph import Tensor, apply, building, current_graph, need_flag, need_tensor, phase, scope
from ..ops.elementwise import cast, pointwise
from ..ops.fill import fill
from ..ops.layout import concat, reshape
from ..ops.updates import Unscale, ZeroGrad
from .optimizer import Slot, bounds, declare_state, in_parts, need_slots, norm, over

__all__ = [
    "clip_grad_norm",
    "unscale",
    "zero_grad",
]


@contextmanager
def _step(name: str, slots: object) -> Iterator[list[Slot]]:
    checked = need_slots(name, slots)
    with building(current_graph(checked[0].param.graph)), phase("optimizer"), scope(name):
        yield [in_parts(s) for s in checked]


def _with_grads(slots: Sequence[Slot], grads: Sequence[tuple[Tensor, ...]]) -> list[Slot]:
    return [replace(s, grad=g) for s, (g,) in zip(slots, grads, strict=True)]


def zero_grad(slots: Sequence[Slot], *, set_to_none: bool = True) -> list[Slot]:
    """Free gradients, or set them to zero in place, as `torch.optim.Optimizer.zero_grad`.

    Parameters
    ----------
    slots : list of Slot
        Slots with the gradients.
    set_to_none : bool
        Whether to free them, torch's default: no op.

    Returns
    -------
    list of Slot
        The slots with the gradients to read from now on.

    Raises
    ------
    GraphError
        If there is no slot.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Slot, zero_grad
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = zero_grad([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))], set_to_none=False)
    >>> cg.bytes_moved(g)
    4*N
    """
    need_flag("zero_grad", set_to_none=set_to_none)
    with _step("zero_grad", slots) as real_slots:
        if set_to_none:
            return real_slots
        zeros = over([(s.grad,) for s in real_slots], lambda g: apply(ZeroGrad(), [g], "zero_"), "zero_grad")
        return _with_grads(real_slots, zeros)


def clip_grad_norm(slots: Sequence[Slot], max_norm: float, *, foreach: bool = True) -> tuple[Tensor, list[Slot]]:
    """Clip the global norm of gradients in place, as torch's `clip_grad_norm_`.

    Parameters
    ----------
    slots : list of Slot
        Slots with the gradients.
    max_norm : float
        Maximal 2-norm over all gradients.
    foreach : bool
        Whether to use one call for the list instead of one per gradient; ops and temporaries are the same.

    Returns
    -------
    Tensor, list of Slot
        The norm before clipping, and the slots with the gradients to read from now on.

    Raises
    ------
    GraphError
        If there is no slot, or the norm is not a positive number.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Slot, clip_grad_norm
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     total, slots = clip_grad_norm([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))], 1.0)
    >>> cg.costs(g).filter(kind="pointwise").total().flops  # square, sum and product, and scalars
    3*N + 6
    """
    need_flag("clip_grad_norm", foreach=foreach)
    bounds("clip_grad_norm", max_norm=(max_norm, 0, float("inf")))
    with _step("clip_grad_norm", slots) as real_slots:
        grads = [(s.grad,) for s in real_slots]
        norms = [n for (n,) in over(grads, lambda g: reshape(norm(g), (1,), name="one"), "norms")]
        total = norm(concat(norms, 0, name="stack"))
        inverse = pointwise("reciprocal", pointwise("add", total, 1e-6))
        factor = pointwise("minimum", pointwise("mul", inverse, float(max_norm)), 1.0)
        # a gradient keeps its dtype, whatever that of the norm
        clipped = over(grads, lambda g: pointwise("mul", g, factor, inplace=True, dtype=g.dtype), "clip")
        return total, _with_grads(real_slots, clipped)


def unscale(slots: Sequence[Slot], scale: Tensor | None = None) -> tuple[Tensor, list[Slot]]:
    """Divide gradients by the loss scale in place, and check that they are finite, as GradScaler's `unscale_`.

    Parameters
    ----------
    slots : list of Slot
        Slots with the gradients; torch refuses fp16, here every dtype is unscaled in place.
    scale : Tensor, optional
        Loss scale, a scalar; by default declared as state `loss_scale`.

    Returns
    -------
    Tensor, list of Slot
        A scalar that is 1 if a gradient is not finite, and the slots with the gradients to read from now on.

    Raises
    ------
    GraphError
        If there is no slot, or the scale is not a scalar.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Slot, unscale
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     found_inf, slots = unscale([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.flops(g)
    2*N + 1
    """
    with _step("unscale", slots) as real_slots:
        if scale is None:
            scale = declare_state(real_slots[0].param.graph, "loss_scale", (), "fp32")
        need_tensor("unscale: scale", scale)
        if scale.ndim:
            raise GraphError(f"unscale: scale {scale!r}, expected a scalar")
        # torch computes the reciprocal in fp64
        inverse = cast(pointwise("reciprocal", cast(scale, "fp64", name="double")), "fp32", name="float")
        found_inf = fill((), 0.0, "fp32", name="found_inf")

        def unscale_one(g: Tensor) -> Tensor:
            return apply(Unscale(), [g, inverse, found_inf], "unscale")[0]

        return found_inf, _with_grads(real_slots, over([(s.grad,) for s in real_slots], unscale_one, "unscale"))
