"""GPT-2, Llama and an MLP as plain torch modules, written as in transformers, with eager attention.

Key-value heads are repeated, rotary positions rotate halves, and an additive mask is a tensor. RMSNorm is one op, as
torch's CUDA kernel; on a CPU torch decomposes it.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def hidden_keys(x):
    """Return an additive mask (1, 1, S, S), with the minimum value where the key comes after the query."""
    size = x.shape[1]
    return torch.full((1, 1, size, size), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)


def repeated(x, count):
    """Repeat each head, like `repeat_kv`."""
    if count == 1:
        return x
    b, g, t, k = x.shape
    return x[:, :, None].expand(b, g, count, t, k).reshape(b, g * count, t, k)


def attend(q, k, v, mask, p=0.0):
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores + mask
    scores = functional.softmax(scores, dim=-1)
    if p:
        scores = functional.dropout(scores, p)
    return torch.matmul(scores, v).transpose(1, 2).contiguous()


@torch.library.custom_op("plain_models::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * scale * weight).to(x.dtype), scale


@rms_norm.register_fake
def _(x, weight):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("plain_models::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, g = x.float(), grad.float()
    y, scaled = wide * scale, g * weight
    along = (scaled * y).mean(-1, keepdim=True)
    return ((scaled - y * along) * scale).to(x.dtype), (g * y).flatten(0, -2).sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(grad, x, weight, scale):
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


rms_norm.register_autograd(lambda ctx, g, _: rms_norm_backward(g, *ctx.saved_tensors), setup_context=_save)


class RMSNorm(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return rms_norm(x, self.weight)[0]


class RMSNormInSteps(RMSNorm):
    """`LlamaRMSNorm` as separate ops."""

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class GPT2Attention(nn.Module):
    def __init__(self, D, H, p):
        super().__init__()
        self.D, self.H, self.p = D, H, p
        self.kqv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, mask):
        q, k, v = (t.view(*t.shape[:2], self.H, -1).transpose(1, 2) for t in self.kqv(x).split(self.D, dim=2))
        y = attend(q, k, v, mask, self.p)
        y = self.proj(y.reshape(*y.shape[:2], -1))
        return functional.dropout(y, self.p) if self.p else y


class GPT2MLP(nn.Module):
    def __init__(self, D, F, p):
        super().__init__()
        self.p = p
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        x = self.up(x)
        x = functional.gelu(x, approximate="tanh")
        x = self.down(x)
        return functional.dropout(x, self.p) if self.p else x


class GPT2Block(nn.Module):
    def __init__(self, D, H, F, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = GPT2Attention(D, H, p), GPT2MLP(D, F, p)

    def forward(self, x, mask):
        residual = x
        x = self.norm1(x)
        x = self.attention(x, mask)
        x = x + residual
        residual = x
        x = self.norm2(x)
        x = self.mlp(x)
        return residual + x


class GPT2(nn.Module):
    def __init__(self, D, H, F, L, V, P, p=0.0):
        super().__init__()
        self.p = p
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(P, D)
        self.layers = nn.ModuleList(GPT2Block(D, H, F, p) for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        if self.p:
            x = functional.dropout(x, self.p)
        mask = hidden_keys(x)
        for layer in self.layers:
            x = layer(x, mask)
        return functional.linear(self.norm(x), self.tokens.weight)


def half_turned(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, D, H, G, K):
        super().__init__()
        self.K, self.rank = K, H // G
        self.q, self.k, self.v = (nn.Linear(D, n * K, bias=False) for n in (H, G, G))
        self.proj = nn.Linear(H * K, D, bias=False)

    def forward(self, x, cos, sin, mask):
        q, k, v = (f(x).view(*x.shape[:2], -1, self.K).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = (q * cos) + (half_turned(q) * sin)
        k = (k * cos) + (half_turned(k) * sin)
        y = attend(q, repeated(k, self.rank), repeated(v, self.rank), mask)
        return self.proj(y.reshape(*y.shape[:2], -1).contiguous())


class LlamaMLP(nn.Module):
    def __init__(self, D, F):
        super().__init__()
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, D, H, G, K, F, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(D), norm(D)
        self.attention, self.mlp = LlamaAttention(D, H, G, K), LlamaMLP(D, F)

    def forward(self, x, cos, sin, mask):
        residual = x
        x = self.norm1(x)
        x = self.attention(x, cos, sin, mask)
        x = residual + x
        residual = x
        x = self.norm2(x)
        x = self.mlp(x)
        return residual + x


class Llama(nn.Module):
    def __init__(self, D, H, G, K, F, L, V, norm=RMSNorm):
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(LlamaBlock(D, H, G, K, F, norm) for _ in range(L))
        self.norm = norm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, K, 2) / K), persistent=False)

    def forward(self, ids):
        x = self.tokens(ids)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequencies.float()
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = hidden_keys(x)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.head(self.norm(x))


class Perceptron(nn.Module):
    def __init__(self, D, F, L, C):
        super().__init__()
        self.first, self.head = nn.Linear(D, F), nn.Linear(F, C)
        self.layers = nn.ModuleList(nn.Linear(F, F) for _ in range(L))

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def loss_of(module, ids, targets):
    """Return cross-entropy as in transformers, without shifting: logits of all positions are flattened."""
    logits = module(ids)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def attend_in_one_kernel(q, k, v, mask, p=0.0):
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2)


def no_mask(x):
    """Replaces the mask function; a `Mock` would keep its call arguments."""


@contextmanager
def flash():
    """Attend in one kernel without a mask tensor."""
    with (
        mock.patch(f"{__name__}.attend", attend_in_one_kernel),
        mock.patch(f"{__name__}.hidden_keys", no_mask),
    ):
        yield


def _again(function, **more):
    return lambda *arguments: checkpoint(function, *arguments, use_reentrant=False, **more)


def _saving(every):
    """Save attention, and every n-th matmul of a layer, as torchtitan counts them."""
    counts = Counter()

    def policy(context, op, *arguments, **more):
        if op == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            return wanted[counts[context.is_recompute] % every == 1 % every]
        return wanted[op == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]

    wanted = {True: CheckpointPolicy.MUST_SAVE, False: CheckpointPolicy.PREFER_RECOMPUTE}
    return create_selective_checkpoint_contexts(policy)


@contextmanager
def checkpointed(again):
    """Recompute `layers`, the `core` of attention, or nothing in the backward pass.

    In layers, `products` saves attention and all matmuls, `products 2` every other one.
    """
    if again == "core":
        with mock.patch(f"{__name__}.attend", _again(attend)):
            yield
    elif again:
        call = nn.Module.__call__
        word, _, every = again.partition(" ")
        saved = {} if word == "layers" else {"context_fn": lambda: _saving(int(every or 1))}

        def layer(module, *arguments):
            inner = _again(lambda *a: call(module, *a), **saved)
            return inner(*arguments) if isinstance(module, GPT2Block | LlamaBlock) else call(module, *arguments)

        with mock.patch.object(nn.Module, "__call__", layer):
            yield
    else:
        yield
