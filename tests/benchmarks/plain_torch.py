"""GPT-2 and Llama as plain torch modules with eager attention, as references for the zoo's graphs."""

import torch
from torch import nn
from torch.nn import functional

LLAMA_7B = {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 11008, "L": 32, "V": 32000}


def later_keys(ids):
    return torch.ones((ids.shape[1],) * 2, dtype=torch.bool, device=ids.device).triu(1)


def attend(q, k, v, hidden):
    """Causal attention in separate ops, so that FlopCounterMode counts both matmuls."""
    rank = q.shape[1] // k.shape[1]
    if rank > 1:
        k, v = k.repeat_interleave(rank, 1), v.repeat_interleave(rank, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2)


def split_heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class GPT2Block(nn.Module):
    def __init__(self, D, H, F):
        super().__init__()
        self.H = H
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.kqv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x, hidden):
        q, k, v = (split_heads(t, self.H) for t in self.kqv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(attend(q, k, v, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, D, H, F, L, V, P):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(P, D)
        self.layers = nn.ModuleList(GPT2Block(D, H, F) for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        hidden = later_keys(ids)
        for layer in self.layers:
            x = layer(x, hidden)
        return functional.linear(self.norm(x), self.tokens.weight)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    def __init__(self, D, H, G, K, F):
        super().__init__()
        self.H, self.G = H, G
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, n * K, bias=False) for n in (H, G, G))
        self.proj = nn.Linear(H * K, D, bias=False)
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def forward(self, x, cos, sin, hidden):
        y = self.norm1(x)
        q, k, v = (
            split_heads(self.q(y), self.H),
            split_heads(self.k(y), self.G),
            split_heads(self.v(y), self.G),
        )
        x = x + self.proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, hidden))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, D, H, G, K, F, L, V):
        super().__init__()
        self.K = K
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(LlamaBlock(D, H, G, K, F) for _ in range(L))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        powers = torch.arange(0, self.K, 2, device=ids.device) / self.K
        angles = positions[:, None] * 10000.0**-powers
        cos, sin, hidden = angles.cos(), angles.sin(), later_keys(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, hidden)
        return self.head(self.norm(x))
