"""Training step: forward and backward pass, gradient accumulation over micro-batches, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..algebra.polynomial import ONE, Poly
from ..errors import GraphError
from ..ir.graph import (
    Graph,
    Tensor,
    building,
    carry_facts,
    need_flag,
    opened,
    positive,
)
from ..ir.strides import contiguous
from ..ops.collectives import need_of_all
from ..ops.elementwise import pointwise
from ..ops.loops import (
    Repeat,
    slice_of,
    undef,
    written_slices,
)
from ..optimizers import Optimizer, Slot, clip_grad_norm, optimizer_of, over, source_like, unscale, zero_grad
from .backward import (
    differentiate,
    loss_of,
    prepared,
)
from .checkpoint import Checkpoint, policy_of
from .loss import (
    Loss,
    with_loss,
)
from .precision import (
    Policy,
    apply_precision,
    find_policy,
)
from .reverse_mode import Leaf, Update
from .rewrite import Rewriter
from .selection import with_frozen

__all__ = ["training_step"]


@dataclass(frozen=True)
class _Pass:
    """A graph with forward and backward pass, and its gradients."""

    graph: Graph
    grads: dict[Tensor, Tensor]
    """gradients by source"""
    persistent: set[Tensor]
    """sources whose gradient buffers persist across steps"""


def training_step(
    graph: Graph,
    /,
    loss: str | Loss | None = None,
    optimizer: Optimizer | type | str | None = None,
    precision: object = None,
    checkpoint: Checkpoint | bool | None = None,
    accumulate: object = 1,
    *,
    clip: float | None = None,
    set_to_none: bool = True,
    autocast_device: str | None = None,
    optimizer_in_backward: bool = False,
    defer_accumulation: bool = False,
    freeze: str | Sequence[str] | None = None,
    trainable: str | Sequence[str] | None = None,
) -> Graph:
    """Turn a forward graph into a complete training step, in its steady state.

    Parameters
    ----------
    graph : Graph
        The model; it is not modified.
    loss : str or callable, optional
        `cross_entropy` in the format of the logits, `fp32` in fp32, `transformers` as in transformers >= 4.49 (fp32,
        with the lifetimes of its variables), `contrastive`, `binary_cross_entropy`, `mean_squared_error`, or a function
        that takes the outputs and returns a scalar. Default: the loss that the graph names, or its only output if that
        is a scalar.
    optimizer : Optimizer, type or str, optional
        Default: `costgraph.AdamW()` with its foreach implementation. A name (`"adamw"`), a class, or a class of
        `torch.optim` selects that optimizer with its default options.
    precision : str, mapping or Policy, optional
        `fp32`, `bf16`, `bf16-master`, `bf16-mixed`, `fp16-mixed`, `megatron-bf16`, `fp8`, or a custom policy. Default:
        the declared formats.
    checkpoint : Checkpoint or bool, optional
        Activation checkpointing policy, such as `costgraph.selective("attention")`. True means `every_block()`.
    accumulate : sympy.Expr or int
        Micro-batches whose gradients are accumulated before the update. Inputs get a leading axis of that size; sizes
        such as `B` refer to one micro-batch.
    clip : float, optional
        Maximum total norm of all gradients, as in `torch.nn.utils.clip_grad_norm_`.
    set_to_none : bool
        Whether gradients are freed after the update. False fills them with zeros, so that they stay allocated.
    autocast_device : str, optional
        `cuda` (default) or `cpu`: the device whose autocast op lists apply.
    optimizer_in_backward : bool
        Whether each parameter is updated as soon as its gradient is complete, and the gradient freed, as by torch's
        `register_post_accumulate_grad_hook` (Lv et al. 2023, arXiv 2306.09782).
    defer_accumulation : bool
        Whether gradients that are kept in a wider format are accumulated only at the end of a backward pass, as in
        nanotron (`FP32GradientAccumulator.backward` in optim/gradient_accumulator.py at e24d248). By default each is
        added as soon as it is computed, as by the hooks of Megatron-LM.
    freeze, trainable : str or sequence of str, optional
        Parameters to freeze, or the only ones to train: names or scopes in which `*` matches anything, such as
        `layers/*/bias`, or layers of a stack, such as `layers[:16]` or `layers/31/mlp`.

    Returns
    -------
    Graph
        With phases forward, recompute, backward and optimizer. Its output is the loss, one per micro-batch. Parameters
        of a Repeat are declared outside it, one storage per iteration.

    Raises
    ------
    GraphError
        If there is no loss, nothing to train, or an argument is invalid.
    UnsupportedError
        If an op has no vector-Jacobian rule, or is an external call recorded by a trace.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("gpt2"), precision="bf16-mixed", checkpoint=cg.every_block())
    >>> cg.param_count(step), round(cg.peak_memory(step, B=8, S=1024) / 1e9, 1)
    (124439808, 6.9)
    """
    optimizer = optimizer_of(optimizer, "training_step")
    policy = policy_of(checkpoint, "training_step")
    times = positive("training_step: accumulate", accumulate)
    need_flag("training_step", optimizer_in_backward=optimizer_in_backward, defer_accumulation=defer_accumulation)
    need_of_all("training_step", graph)
    if graph.gradients or any(op.phase != "forward" for op in graph.walk()):
        raise GraphError(f"training_step: graph {graph.name!r} already has a backward pass; expected a forward pass")
    formats = find_policy(precision, autocast_device=autocast_device)
    if optimizer_in_backward:
        _need_separate_updates(formats, accumulate=times != ONE, clip=clip is not None, set_to_none=set_to_none)
    forward = prepared(apply_precision(with_loss(with_frozen(graph, freeze, trainable), loss), formats), policy)
    if defer_accumulation:
        _need_wider(forward, formats)
    always = not set_to_none
    new = Rewriter().run(forward) if times == ONE else Graph(forward.name, dtype=forward.dtype)
    with new:
        if times == ONE:
            at_once = optimizer if optimizer_in_backward else None
            result = _single_batch(new, policy, formats, at_once, always=always, defer=defer_accumulation)
        else:
            result = _accumulated(forward, new, policy, formats, times, always=always, defer=defer_accumulation)
        _update(result, optimizer, formats, clip)
    return new


def _need_separate_updates(formats: Policy, *, accumulate: bool, clip: bool, set_to_none: bool) -> None:
    """Raise GraphError if an update needs more than its own parameter's gradient, or that gradient must persist."""
    wants = {
        "accumulate, because an update needs the sum over all micro-batches": accumulate,
        "clip, because the total norm needs all gradients": clip,
        "set_to_none=False, because gradients are freed after their update": not set_to_none,
        f"precision {formats.name!r}, because loss scaling checks all gradients before an update": formats.loss_scaling,
    }
    for text, requested in wants.items():
        if requested:
            raise GraphError(f"training_step: optimizer_in_backward cannot be combined with {text}")


def _need_wider(forward: Graph, formats: Policy) -> None:
    """Raise GraphError if no gradient is kept in a wider format than it is computed in."""
    if not any(_is_wider(t, formats) for t in _differentiable_sources(forward)):
        raise GraphError(
            f"training_step: defer_accumulation needs gradients in a wider format than they are computed in, which "
            f"precision {formats.name!r} does not keep; expected a policy such as megatron-bf16"
        )


# -- forward and backward ----------------------------------------------------------------------------------------


def _differentiable_sources(graph: Graph) -> list[Tensor]:
    sources = [t for t in graph.tensors if t.producer is None and t.requires_grad]
    if not any(t.role == "param" for t in sources):
        raise GraphError(
            f"training_step: no parameter of graph {graph.name!r} requires a gradient; expected at least one"
        )
    return sources


def _is_wider(t: Tensor, formats: Policy) -> bool:
    """Whether a tensor's gradient is kept in a wider format than it is computed in."""
    return t.role == "param" and formats.formats_of(t).grad.bits > t.dtype.bits


def _buffer(t: Tensor, formats: Policy, *, always: bool) -> Tensor | None:
    """Declare the gradient buffer of a parameter if it persists across steps."""
    if t.role != "param":
        return None
    if not (always or _is_wider(t, formats)):
        return None
    return source_like(t, "grad", t.sizes, formats.formats_of(t).grad, role="gradient")


def _leaf(t: Tensor, formats: Policy, total: Tensor | None, optimizer: Optimizer | None = None) -> Leaf:
    """Return how a tensor's gradient is stored or consumed."""
    if t.role != "param":
        return Leaf(total)
    stored, update = formats.formats_of(t), None
    if optimizer is not None:
        if stored.grad.bits > t.dtype.bits:
            raise GraphError(
                f"training_step: optimizer_in_backward cannot be combined with precision {formats.name!r}, whose "
                f"{stored.grad.name} gradients persist across steps"
            )
        update = Update(optimizer, partial(source_like, t), stored.master, stored.moments)
    return Leaf(total, None if stored.grad == t.dtype else stored.grad, update)


def _accumulate_deferred(grads: Mapping[Tensor, Tensor], totals: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Add deferred gradients to their buffers, one after the other."""
    deferred = [t for t in totals if t in grads]
    with opened(phase="backward"):
        groups = [(totals[t], grads[t]) for t in deferred]
        sums = over(groups, lambda total, grad: pointwise("add", total, grad, inplace=True), "accumulate")
    return {**grads, **{t: total for t, (total,) in zip(deferred, sums, strict=True)}}


def _single_batch(
    new: Graph, policy: Checkpoint, formats: Policy, at_once: Optimizer | None, *, always: bool, defer: bool
) -> _Pass:
    """Add the backward pass of a single batch."""
    sources = _differentiable_sources(new)
    buffers = {t: None if at_once else _buffer(t, formats, always=always) for t in sources}
    loss = loss_of(new)
    scaled = _scaled(loss, formats, ONE)
    deferred = {t: b for t, b in buffers.items() if b is not None and defer and _is_wider(t, formats)}
    leaves = {t: Leaf() if t in deferred else _leaf(t, formats, buffers[t], at_once) for t in sources}
    final = _accumulate_deferred(differentiate(new, new.ops, scaled, leaves, policy).final, deferred)
    params = [t for t in sources if t in final and leaves[t].update is None]
    return _Pass(new, {t: final[t] for t in params}, {t for t in params if buffers[t] is not None})


def _scaled(loss: Tensor, formats: Policy, times: Poly) -> Tensor:
    """Divide the loss by the number of micro-batches and apply the loss scale."""
    scaled = loss if times == ONE else pointwise("div", loss, times if times.constant is None else int(times.constant))
    return pointwise("mul", scaled, 65536.0, name="scale") if formats.loss_scaling else scaled


class _IntoLoop(Rewriter):
    """Copies a forward pass into the body of a loop over micro-batches, with slices as inputs."""

    def __init__(self, inputs: dict[Tensor, Tensor]) -> None:
        super().__init__()
        self.inputs = inputs

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        return self.inputs[old]


def _accumulated(
    forward: Graph, new: Graph, policy: Checkpoint, formats: Policy, times: Poly, *, always: bool, defer: bool
) -> _Pass:
    """Run forward and backward pass for each micro-batch and accumulate the gradients."""
    carry_facts(forward, new)
    body, copier = new.start_body("microbatches", fused=False), Rewriter()
    sources = {t: _source(t, new, copier, times) for t in forward.tensors if t.producer is None}
    inner = {
        t: slice_of(body, source, f"{t.name}.micro") if t.role == "input" else body.capture(source)
        for t, source in sources.items()
    }
    into = _IntoLoop(inner)
    into.fill(forward, body)
    differentiable = _differentiable_sources(forward)
    trained = [t for t in differentiable if t.role == "param"]
    buffers = {t: _buffer(sources[t], formats, always=always) for t in trained}
    totals = {t: _total(sources[t], body, formats, buffers[t]) for t in trained}
    loss = into.tensors[loss_of(forward)]
    with building(body):
        scaled = _scaled(loss, formats, times)
    deferred = {inner[t]: totals[t] for t in trained if defer and _is_wider(sources[t], formats)}
    leaves = {
        inner[t]: Leaf() if inner[t] in deferred else _leaf(sources[t], formats, totals.get(t)) for t in differentiable
    }
    walked = differentiate(body, body.ops, scaled, leaves, policy).final
    with building(body):
        final = _accumulate_deferred(walked, deferred)
    params = [t for t in trained if inner[t] in final]
    for t in trained:
        if t not in params:  # nothing contributes to its gradient
            body.remove_node(totals[t])
    with building(body):
        after = [final[inner[t]] for t in params]
        slices = [t for t in differentiable if t.role == "input" and inner[t] in final]
        parts = [final[inner[t]] for t in slices]
        body.outputs += [*after, *written_slices(body, after, [loss, *parts])]
    inputs = [t for t in sources if t.role == "input"]
    body.formals[:] = [
        *(totals[t] for t in params), *(inner[t] for t in inputs), *map(body.capture, body.captured),
    ]  # fmt: skip
    starts = [buffers[t] or undef(totals[t].sizes, totals[t].dtype, totals[t].storage.pieces) for t in params]
    kind = Repeat(body=body, count=times, carries=len(params), xs=len(inputs))
    loop = new.add_op(kind, (*starts, *(sources[t] for t in inputs), *body.captured), "microbatches")
    body.owner = loop
    grads = dict(zip((*params, loss, *slices), loop.results, strict=True))
    new.output(grads.pop(loss))
    return _Pass(new, {sources[t]: g for t, g in grads.items()}, {sources[t] for t in params if buffers[t] is not None})


def _source(t: Tensor, new: Graph, copier: Rewriter, times: Poly) -> Tensor:
    """Redeclare a source; inputs get a leading micro-batch axis."""
    if t.role != "input":
        copy: Tensor = copier.source(t, new, "")
        return copy
    copy = Tensor(new, new.unique(t.name), (times, *t.sizes), t.dtype, role="input")
    new.add_node(copy)
    return copy


def _total(t: Tensor, body: Graph, formats: Policy, buffer: Tensor | None) -> Tensor:
    """Add the formal that carries the accumulated gradient through the loop."""
    total = body.formal(t if buffer is None else buffer, f"{t.name}.total", t.sizes, contiguous(t.sizes))
    total.dtype = formats.formats_of(t).grad
    return total


def _update(result: _Pass, optimizer: Optimizer, formats: Policy, clip: float | None) -> None:
    """Add the optimizer phase: unscaling, clipping, the update, and zeroing of persistent gradients."""
    graph = result.graph
    with opened(graph=graph, levels=(), phase="optimizer"):
        params = [t for t in result.grads if t.role == "param"]
        slots = [_slot(t, result.grads[t], formats) for t in params]
        graph.gradients = dict(result.grads)
        if not slots:  # updated during the backward pass
            return
        if formats.loss_scaling:
            _, slots = unscale(slots)
        if clip is not None:
            _, slots = clip_grad_norm(slots, clip)
        slots = optimizer.update(slots)
        stay = [slot for t, slot in zip(params, slots, strict=True) if t in result.persistent]
        if stay:
            zero_grad(stay, set_to_none=False)


def _slot(t: Tensor, grad: Tensor, formats: Policy) -> Slot:
    stored = formats.formats_of(t)
    master = None if stored.master is None else source_like(t, "master", t.sizes, stored.master)
    return Slot(t, grad, master, stored.moments)
