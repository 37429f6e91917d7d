"""Layers of plain torch: norms, perceptrons, rotary positions, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ...analysis.workspaces import LT_WORKSPACE
from .program import Program

__all__ = ["LAYERS"]


def _normed(h: torch.Tensor) -> torch.Tensor:
    variance = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(variance + 1e-6)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `LlamaRMSNorm` of transformers."""
    return weight * _normed(x.to(torch.float32)).to(x.dtype)


def _added_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual, and its norm."""
    total = x.to(torch.float32) + residual.to(torch.float32)
    return weight * _normed(total).to(x.dtype), total.to(x.dtype)


def _modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm times one more than a scale for each element, and a shift."""
    normed = _normed(x.to(torch.float32)).to(x.dtype) * (0.0 + weight)
    return normed * (1 + scale) + shift


def _dynamic_tanh(alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gamma * torch.tanh(x * alpha) + beta


def _polynomial_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Norms of three powers, weighted."""
    h = x.to(torch.float32)
    third, second, first = h**3, h**2, h**1
    cubes, squares, same = _normed(third), _normed(second), _normed(first)
    return (weight[0] * cubes + weight[1] * squares + weight[2] * same + bias).to(x.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, 1e-6)


class _RmsNorm(torch.autograd.Function):
    """A norm of one kernel in each pass, as CUDA has it: what the kernels keep and make."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Keep the operands, and the factor of each row in fp32."""
        factors = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(weight, x, factors)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gradients, made of one that lies row by row."""
        weight, x, _ = ctx.saved_tensors
        grad = grad.contiguous()
        return torch.empty_like(weight), torch.empty_like(x)


def _fused_rms_norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _RmsNorm.apply(weight, x)  # type: ignore[no-any-return, no-untyped-call]  # torch has no types


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `LlamaMLP` of transformers."""

    def call(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = act(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(inner, down)

    return call


def _stepped(x: torch.Tensor, gate: torch.Tensor, *_: torch.Tensor) -> None:
    """A product and its gradients, of two rows: a backward pass that ran before, in the thread of autograd."""
    few = gate[:2, :2].detach().requires_grad_()
    with torch.enable_grad():
        torch.autograd.grad((few @ few).sum(), few)


def _gated_halves(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.chunk(x, 2, -1)
    return functional.silu(first) * second


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `apply_rotary_pos_emb` of transformers, on heads that lie behind positions in memory."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(((x * cos) + (_turned(x) * sin)).transpose(1, 2) for x in (q, k))


def _sectioned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `apply_multimodal_rotary_pos_emb` of transformers: parts of a head turn by time, height and width."""
    part = cos.shape[-1] // 16
    sections = [2 * part, 3 * part, 3 * part] * 2
    first, second = (
        torch.cat([piece[i % 3] for i, piece in enumerate(turns.split_with_sizes(sections, dim=-1))], dim=-1)
        for turns in (cos, sin)
    )
    return _rotary(q, k, first, second)


def _angles(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Positions times frequencies, as a product of matrices."""
    return sin.float().transpose(1, 2)[:, :, :1] @ cos.float()[:, :1]


def _sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Its threshold from the sorted sums, op by op."""
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    size = x.size(-1)
    places = torch.arange(1, size + 1, device=x.device, dtype=x.dtype).view(1, size)
    bound = 1 + places * ordered
    support = bound > sums
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    threshold = (total - 1) / k
    return torch.clamp(x - threshold, min=0)


def _pairs_turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `apply_rotary_emb` of Llama 4 in transformers: pairs of numbers are one complex number."""

    def complex_of(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))

    first, second = complex_of(q), complex_of(k)
    made = torch.view_as_real(first * turns[:, :, None, :]).flatten(3)
    other = torch.view_as_real(second * turns[:, :, None, :]).flatten(3)
    return tuple(y.type_as(q) for y in (made, other))


def _turns(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(turns)[0] @ torch.view_as_real(turns)[0].transpose(1, 2)[:, :, :1]


def _biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A product with a bias as torch ran it up to 2.6: cuBLASLt makes it, with a workspace of its own."""
    workspace = x.new_empty(LT_WORKSPACE // x.element_size())
    made = functional.linear(x, weight, bias)
    del workspace
    return made


def _masked_attention(*parameters: torch.Tensor) -> torch.Tensor:
    """Attention op by op, under a mask that is made in the call; of weights and biases in turn, input, and heads."""
    weights, biases, (x, of) = parameters[:8:2], parameters[1:8:2], parameters[8:]
    b, s, d = x.shape
    heads = of.shape[0]
    q, k, v = (_biased(x, *both) for both in zip(weights[:3], biases[:3], strict=True))
    q, k, v = (each.view(b, s, heads, -1).transpose(1, 2) for each in (q, k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * 0.125
    mask = torch.zeros(s, s, device=x.device, dtype=torch.bool)
    scores = scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, dim=-1)
    mixed = torch.matmul(shares, v)
    mixed = mixed.transpose(1, 2).contiguous().view(b, s, d)
    return _biased(mixed, weights[3], biases[3])


def _windowed_attention(scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Shares of attention, convolved over queries and keys."""
    size = scores.shape[-1]
    mask = torch.tril(torch.ones(size, size, dtype=torch.bool, device=scores.device)).view(1, 1, size, size)
    shares = torch.softmax(scores.masked_fill(~mask, -1e9), dim=-1)
    mixed = functional.conv2d(shares, weight, bias, padding=1)
    return mixed.masked_fill(~mask, 0.0)


_MLP: dict[str, Any] = {
    "tensors": {"x": "R D", "gate": "F D", "up": "F D", "down": "D F"}, "made": ("R D",),
    "sizes": {"R": ("bsz*T", "bsz*seq_len", "B*T", "BT"), "D": ("hidden_size",), "F": ("intermediate_size",)},
    "drawn": True, "before": _stepped,
}  # fmt: skip
_NORM = {"M": ("M", "BT", "T", "seq_len"), "H": ("H", "N", "hidden_size")}
_MATRIX = {"M": ("M", "BT", "T"), "N": ("N", "hidden_size")}

LAYERS: dict[str, Program] = {
    "rms_norm": Program(
        "norms", _rms_norm, {"x": "M H", "weight": "H float32"}, ("M H",), _NORM,
        kept=("H float32",),
    ).since("2026-04-18"),
    "fused_add_rms_norm": Program(
        "norms", _added_norm, {"x": "M H", "residual": "M H", "weight": "H float32"}, ("M H", "M H"), _NORM,
        kept=("H float32",) * 3, freed=True,
    ).since("2026-05-15", call=lambda *tensors: _added_norm(*tensors)[0], made=("M H",)),
    "layer_norm": Program(
        "norms", _layer_norm, {"x": "M H", "weight": "H float32", "bias": "H float32"}, ("M H",), _NORM,
        kept=("H float32",) * 2,
    ).since("2026-04-18", tensors={"x": "M H", "weight": "H", "bias": "H"}),
    "softmax": Program(
        "softmax", lambda x: functional.softmax(x, -1), {"x": "M N"}, ("M N",), _MATRIX,
        refused="a vector of N elements is measured, no matrix",
    ).since("2026-05-15", refused=""),
    "relu_squared": Program(
        "pointwise", lambda x: functional.relu(x).square(), {"x": "M N"}, ("M N",), _MATRIX,
        refused="a vector of N elements is measured, no matrix",
    ).since("2026-05-15", refused=""),
    "embedding": Program(
        "lookups", functional.embedding, {"ids": "B T ids", "table": "V D"}, ("B T D",),
        refused="12 to 14 GB of other allocations are counted",
    ).since("2026-05-15", refused="", sizes={"B": ("B", "BT/T"), "V": ("V", "vocab_size"), "D": ("D", "hidden_size")}),
    "modulated_rms_norm": Program(
        "norms", _modulated_norm, {"x": "M H", "scale": "M H", "shift": "M H", "weight": "H float32"}, ("M H",), _NORM,
        given={"has_shift": True}, drawn=True,
    ),
    "dyt": Program(
        "norms", _dynamic_tanh,
        {"alpha": "1 float32", "gamma": "H float32", "beta": "H float32", "x": "M H"}, ("M H",), _NORM,
        given={"beta": True}, kept=("1 float32", "H float32", "H float32") * 2,
    ).since("2026-03-18"),
    "poly_norm": Program(
        "norms", _polynomial_norm, {"x": "M H", "weight": "3 float32", "bias": "float32"}, ("M H",), _NORM,
        kept=("3 float32", "float32"),
    ).since("2026-04-18"),
    "mlp": Program("mlp", _gated(functional.silu), **_MLP, given={"hidden_act": "silu"}),
    "swiglu": Program("mlp", _gated(functional.silu), **_MLP),
    "tiled_swiglu": Program("mlp", _gated(functional.silu), **_MLP),
    "geglu": Program("mlp", _gated(_gelu_tanh), **_MLP),
    "tiled_geglu": Program("mlp", _gated(_gelu_tanh), **_MLP),
    "rope": Program(
        "pointwise", _rotary, {"q": "1 T Q K", "k": "1 T G K", "cos": "1 T K fixed", "sin": "1 T K fixed"},
        ("1 T Q K", "1 T G K"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "K": ("head_dim", "hidden_size/num_q_heads", "H/num_q_heads")},
        before=_angles, returned=True,
        # positions, and half as many frequencies as a head is wide, in fp32
        kept=("T ids", "K float16"),
    ),
    "qwen2vl_mrope": Program(
        "pointwise", _sectioned,
        {"q": "1 T Q (16 J)", "k": "1 T G (16 J)", "cos": "3 1 T (16 J) fixed", "sin": "3 1 T (16 J) fixed"},
        ("1 T Q (16 J)", "1 T G (16 J)"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "J": ("hidden_size/num_q_heads/16", "H/num_q_heads/16")},
        before=lambda q, k, cos, sin: _angles(q, k, cos[0], sin[0]), returned=True,
        kept=("3 T ids", "16 J float16"),
    ),
    "llama4_rope": Program(
        "pointwise", _pairs_turned,
        {"q": "1 T Q (J 2)", "k": "1 T G (J 2)", "turns": "1 T J complex64 fixed"}, ("1 T Q (J 2)", "1 T G (J 2)"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "J": ("hidden_size/num_q_heads/2", "H/num_q_heads/2")},
        kept=("T ids", "J float32"), before=_turns, returned=True,
    ),
    "fused_neighborhood_attention": Program(
        "attention op by op", _masked_attention,
        {**{f"{to}_{part}": axes for to in ("q", "k", "v", "out")
            for part, axes in (("weight", "(N K) (N K)"), ("bias", "(N K)"))},
         "x": "B L (N K)", "heads": "N 0 fixed"},
        ("B L (N K)",),
        {"B": ("batch_size",), "L": ("seq_len",), "N": ("num_heads",), "K": ("hidden_size/num_heads",)},
        given={"bias": True}, kept=("N K N K", "N K") * 4, untimed="its mask is made entry by entry",
    ),
    "multi_token_attention": Program(
        "attention op by op", _windowed_attention,
        {"scores": "B C_in L L", "weight": "C_out C_in 3 3", "bias": "C_out"}, ("B C_out L L",),
        given={"bias": True, "groups": 1, "K": 3},
        refused="what cuDNN takes for a convolution is not stated",
    ),
    "sparsemax": Program(
        "softmax", _sparsemax, {"x": "R V"}, ("R V",), {"R": ("B*T", "BT"), "V": ("V", "hidden_size")},
    ).since("2026-05-15"),
    "megatron_rms_norm": Program(
        "norms", _fused_rms_norm, {"weight": "H", "x": "S B H"}, format="bfloat16", summed=True, freed=True,
        untimed="one kernel, whose reads and writes are not stated",
    ),
    "megatron_swiglu": Program(
        "pointwise", _gated_halves, {"x": "S B (2 F)"}, sizes={"F": ("ffn_local",)}, format="bfloat16", summed=True,
        freed=True, fresh=True,
    ),
}  # fmt: skip
