"""Translations of backward kernels, derived from the forward translations by reverse mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....algebra.polynomial import Poly
from ....errors import UnsupportedError
from ....ir.graph import (
    Graph,
    Tensor,
    building,
    current_graph,
)
from ....ir.strides import Sizes
from ....ops.elementwise import cast
from ....ops.layout import broadcast, rearrange
from ....ops.loops import fused
from ....transforms.backward import pull_back
from ....transforms.rewrite import Rewriter
from ....transforms.vjp.kernels import row_sums
from ..call import Call, Spec
from .contraction import (
    adaptive_mean,
    convolution,
    max_pool,
    mean_pool,
    repeated,
)
from .elementwise import (
    elementwise,
    entropy,
    gated,
    log_sigmoid,
    margin,
    mse_loss,
    nondefault_parameters,
    smooth_l1,
)
from .kernels import (
    attended,
    batch_norm,
    group_norm,
    layer_norm,
    nll,
    root_norm,
    softmax_kernel,
    spec_of,
    stated_kernel,
)
from .reductions import weight_norm
from .table import Translation, translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


def _inputs(tensors: Sequence[Tensor | Spec]) -> list[Tensor]:
    """Return inputs like the given tensors in a new graph."""
    graph = Graph("forward")
    graph.relations = current_graph().root.relations
    inputs = [Tensor(graph, f"x{i}", t.sizes, t.dtype, role="input", strides=t.strides) for i, t in enumerate(tensors)]
    for t in inputs:
        graph.add_node(t)
    return inputs


def _input_gradients(
    result: Tensor, grad: Tensor, inputs: Sequence[Tensor], saved_tensors: Mapping[Tensor, Tensor]
) -> list[Tensor | None]:
    """Return input gradients from the saved tensors, recomputing others."""
    graph, rewriter = current_graph(), Rewriter()
    rewriter.tensors |= saved_tensors
    for op in result.graph.ops:
        op.scope = ""  # the call's own scope encloses them

    def saved(t: Tensor) -> Tensor:
        if t not in rewriter.tensors:
            if t.producer is None:
                raise UnsupportedError(f"gradient of {result.name!r}: it reads {t!r}, which is not saved")
            for o in t.producer.operands:
                saved(o)
            rewriter.copy(t.producer, graph)
        tensor: Tensor = rewriter.tensors[t]
        return tensor

    return pull_back(result, grad, inputs, saved)


def _gradients(
    call: Call,
    forward: Translation,
    operands: Mapping[str, Tensor | Spec | None],
    grad: Tensor,
    saved: Mapping[int, str],
    *,
    kernel: bool = False,
    results: tuple[Spec, ...] = (),
) -> list[Tensor | None]:
    """Return a gradient per operand of the forward kernel, whose arguments the backward call shares.

    `operands` are saved operands, or specs if not saved; `grad` is the gradient of the first result.
    `saved` maps saved results by index to their argument names in this call. With `kernel`, the forward ops are fused
    into one kernel, which decides itself which intermediates are saved. `results` are the specs of the forward results,
    if the translation reads them.
    """
    present = {name: t for name, t in operands.items() if t is not None}
    inputs = dict(zip(present, _inputs(list(present.values())), strict=True))

    def forward_results(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = {**call.arguments, **dict.fromkeys(operands), **dict(zip(present, tensors, strict=True))}
        return _forward_results(forward, replace(call, arguments=arguments, results=results))

    with building(next(iter(inputs.values())).graph):
        returned: Any = (
            fused("forward", forward_results, *inputs.values()) if kernel else forward_results(*inputs.values())
        )
    saved_tensors = {inputs[n]: t for n, t in present.items() if isinstance(t, Tensor)}
    for index, name in saved.items():
        saved_tensors[returned[index]] = cast(call[name], returned[index].dtype)
    mask = call.get("output_mask") or (True,) * len(operands)
    requested = [
        n
        for n, is_requested in zip(operands, mask, strict=False)
        if is_requested and n in inputs and _is_float(inputs[n])
    ]
    gradients = dict(
        zip(requested, _input_gradients(returned[0], grad, [inputs[n] for n in requested], saved_tensors), strict=True)
    )
    return [gradients.get(n) for n in operands]


def _forward_results(forward: Translation, call: Call) -> tuple[Tensor, ...]:
    """Return a forward kernel's results."""
    results = forward(call)
    if results is None:
        raise UnsupportedError(f"{call.name}: no op kind accepts these arguments")
    return (results,) if isinstance(results, Tensor) else tuple(t for t in results if t is not None)


def _is_float(t: Tensor) -> bool:
    return t.dtype.kind == "float"


def _bias_spec(call: Call) -> Spec | None:
    """Return the bias spec if its gradient is requested; no gradient reads its values."""
    mask = call["output_mask"]
    return call.results[-1] if len(mask) > 2 and mask[2] else None


@translation("convolution_backward")
def convolution_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate into two convolutions, and the sum for a bias."""
    operands = {"input": call["input"], "weight": call["weight"], "bias": _bias_spec(call)}
    return _gradients(call, convolution, operands, call["grad_output"], {})


@translation(
    "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward", "_fused_rms_norm_backward"
)
def norm_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate from saved statistics, or from running ones."""
    forward, saved = _NORMS[call.name.removesuffix("_backward")]
    weight = call.get("weight")
    operands = {"input": call["input"], "weight": weight, "bias": _bias_spec(call)}
    if call.get("train") is False:
        operands, saved = {**operands, **{n: call[n] for n in ("running_mean", "running_var")}}, {}
    forward_call = replace(call, arguments={**call.arguments, "training": call.get("train")})
    gradients = _gradients(forward_call, forward, operands, call["grad_out"], saved, kernel=True)
    return gradients[: len(call["output_mask"])]


_NORMS: dict[str, tuple[Translation, dict[int, str]]] = {
    "_fused_rms_norm": (root_norm, {1: "rstd"}),
    "native_layer_norm": (layer_norm, {1: "mean", 2: "rstd"}),
    "native_group_norm": (group_norm, {1: "mean", 2: "rstd"}),
    "native_batch_norm": (batch_norm, {1: "save_mean", 2: "save_invstd"}),
}


@translation("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(call: Call) -> Sequence[Tensor | None] | None:
    """Translate from the saved result alone."""
    y: Tensor = call["output"]
    forward_call = replace(call, name=call.name.removesuffix("_backward_data"))
    (gradient,) = _gradients(forward_call, softmax_kernel, {"self": spec_of(y)}, call["grad_output"], {0: "output"})
    return None if gradient is None else [cast(gradient, call.out.dtype)]


@translation("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate into a scatter into zeros."""
    operands = {n: call[n] for n in ("self", "target", "weight")}
    return _first_gradient(call, nll, operands, {1: "total_weight"})


def _first_gradient(
    call: Call,
    forward: Translation,
    operands: Mapping[str, Tensor | Spec | None],
    saved: Mapping[int, str] | None = None,
    results: tuple[Spec, ...] = (),
) -> list[Tensor | None]:
    """Return only the first operand's gradient."""
    mask = (True, *(False for _ in range(len(operands) - 1)))
    forward_call = replace(
        call, name=call.name.removesuffix("_backward"), arguments={**call.arguments, "output_mask": mask}
    )
    return _gradients(forward_call, forward, operands, call["grad_output"], saved or {}, results=results)[:1]


@translation(
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward",
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
)  # fmt: skip
def pool_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate into a scatter to each window's maximum, or an even spread over each window."""
    forward = adaptive_mean if "adaptive" in call.name else mean_pool
    if "indices" in call.arguments:
        return _gradients(call, max_pool, {"self": call["self"]}, call["grad_output"], {1: "indices"})
    if forward is adaptive_mean and not _are_multiples(call["self"].sizes, call["grad_output"].sizes):
        return stated_kernel(call)
    return _gradients(call, forward, {"self": call["self"]}, call["grad_output"], {})


def _are_multiples(large: Sizes, small: Sizes) -> bool:
    """Whether each size is a constant integer multiple of its counterpart."""
    return all(isinstance((n / k).constant, int) for n, k in zip(large, small, strict=True))


@translation(*(f"upsample_nearest{rank}d_backward" for rank in (1, 2, 3)))
def repeated_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate into a sum over each element's copies."""
    grad: Tensor = call["grad_output"]
    if not _are_multiples(grad.sizes, call.out.sizes):
        return stated_kernel(call)
    return _gradients(call, repeated, {"self": call.out}, grad, {}, results=(spec_of(grad),))


#: Forward translations by backward op.
_LOSSES: dict[str, Translation] = {
    "mse_loss_backward": mse_loss,
    "smooth_l1_loss_backward": smooth_l1,
    "huber_loss_backward": smooth_l1,
    "soft_margin_loss_backward": margin,
    "binary_cross_entropy_backward": entropy,
}


@translation(*_LOSSES)
def loss_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate an elementwise loss's backward, reduced or not."""
    operands = {n: call.get(n) for n in ("self", "target", "weight")}
    return _first_gradient(call, _LOSSES[call.name], operands)


@translation("log_sigmoid_backward")
def log_sigmoid_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate from the saved exponential."""
    return _first_gradient(call, log_sigmoid, {"self": call["self"]}, {1: "buffer"})


@translation("_prelu_kernel_backward")
def slopes_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate `prelu`'s backward; the gradient of the slope is not yet reduced."""
    grad, slope = call["grad_output"], call["weight"]
    operands = {"self": call["self"], "weight": slope if slope.sizes == grad.sizes else broadcast(slope, grad.sizes)}
    forward_call = replace(call, name="_prelu_kernel", arguments=operands)
    return _gradients(forward_call, elementwise, operands, grad, {}, results=(spec_of(grad),))


@translation(*(f"{n}_backward" for n in ("elu", "hardshrink", "hardtanh", "leaky_relu", "softplus", "softshrink")))
def activation_backward(call: Call) -> Tensor | Sequence[Tensor | None] | None:
    """Translate into a gradient op, or, with nondefault parameters, into the gradient of the forward translation."""
    x = call["self_or_result" if call.name == "elu_backward" else "self"]
    parameters = nondefault_parameters(call, [])
    if not parameters or call.get("is_result") or any(isinstance(v, Poly) for v in parameters.values()):
        return elementwise(call)
    arguments = {k: v for k, v in call.arguments.items() if not isinstance(v, Tensor | bool)}
    forward_call = replace(call, name=call.name.removesuffix("_backward"), arguments={"self": x, **arguments})
    grad = call["grad_out" if call.name == "hardshrink_backward" else "grad_output"]
    return _gradients(forward_call, elementwise, {"self": x}, grad, {}, results=(spec_of(x),))


@translation("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate from the saved norms."""
    operands = {n: call[f"saved_{n}"] for n in ("v", "g")}
    return _gradients(call, weight_norm, operands, call["grad_w"], {1: "saved_norms"})


@translation("glu_backward")
def gated_backward(call: Call) -> Sequence[Tensor | None]:
    """Translate `glu`'s backward for both halves, recomputing the sigmoid."""
    results = (spec_of(call["grad_output"]),)
    return _gradients(call, gated, {"self": call["self"]}, call["grad_output"], {}, results=results)


@translation("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(call: Call) -> Sequence[Tensor | None] | None:
    """Translate into five matmuls, recomputing probabilities from the logsumexp."""
    tensors = [call[n] for n in ("query", "key", "value", "attn_mask") if call[n] is not None]
    inputs = _inputs(tensors)
    q, k, v, *masks = inputs
    result = attended(call, q, k, v, masks[0] if masks else None)
    if result is None:
        return None
    y, op = result
    assert op.body is not None
    heads = tensors[1].sizes[1].expr
    saved_tensors = dict(zip(inputs, tensors, strict=True)) | {
        op.results[0]: rearrange(call["out"], "b (g r) s v -> b s g r v", g=heads),
        op.body.export(row_sums(op)[1]): rearrange(call["logsumexp"], "b (g r) s -> b g r s 1", g=heads),
    }
    return _input_gradients(y, call["grad_out"], [q, k, v], saved_tensors)
