"""Models as plain torch modules, written as transformers writes them: what the declared zoo is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "ConvNet", "GPTBlock", "Llama", "LlamaBlock", "Loss", "Perceptron"]

Call = Callable[..., Any]


def again(call: Call, *arguments: Any) -> Any:
    """Call, and in the backward pass once more instead of keeping what it saves."""
    return checkpoint(call, *arguments, use_reentrant=False, preserve_rng_state=False)


def direct(call: Call, *arguments: Any) -> Any:
    """Call."""
    return call(*arguments)


def through(layers: Sequence[nn.Module], policy: str, x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """Run layers one after the other, groups of them computed again where the policy says so."""
    size = {"every-block": 1, "every-2": 2}.get(policy, 0)
    if not size:
        for layer in layers:
            x = layer(x, *rest)
        return x
    for i in range(0, len(layers), size):
        x = again(_group(layers[i : i + size]), x, *rest)
    return x


def _group(layers: Sequence[nn.Module]) -> Call:
    def run(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        return through(layers, "", x, *rest)

    return run


def hidden_keys(x: torch.Tensor, kernel: str) -> torch.Tensor | None:
    """Return a mask of shape (1, 1, S, S) to be added, the least number where the key comes after the query."""
    if kernel == "flash":
        return None
    S = x.shape[1]
    return torch.full((1, 1, S, S), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend from q to k, v of shape (B, H, S, K): in one kernel where there is no mask."""
    if mask is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores + mask
    scores = functional.softmax(scores, dim=-1)
    return scores @ v


def merged(y: torch.Tensor) -> torch.Tensor:
    """Return heads (B, H, S, K) side by side, as (B, S, H*K)."""
    return y.transpose(1, 2).flatten(2)


class GPTBlock(nn.Module):
    """A layer of GPT-2; `policy` "selective" recomputes its attention."""

    def __init__(self, D: int, H: int, F: int, policy: str = "") -> None:
        super().__init__()
        self.H, self.policy = H, policy
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.kqv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return what is added to x."""
        q, k, v = (t.unflatten(2, (self.H, -1)).transpose(1, 2) for t in self.kqv(self.norm1(x)).chunk(3, 2))
        return self.proj(merged(attend(q, k, v, mask)))  # type: ignore[no-any-return]  # torch's modules return Any

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to x."""
        x = self.up(self.norm2(x))
        return self.down(functional.gelu(x, approximate="tanh"))  # type: ignore[no-any-return]  # as above

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D)."""
        call = again if self.policy == "selective" else direct
        x = x + call(self.attention, x, mask)
        return x + self.mlp(x)


class GPT(nn.Module):
    """GPT-2 with a tied head: tokens (B, S) to logits (B, S, V)."""

    def __init__(self, D: int, H: int, F: int, L: int, V: int, P: int, kernel: str, policy: str = "") -> None:
        super().__init__()
        self.kernel, self.policy = kernel, policy
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(P, D)
        self.layers = nn.ModuleList(GPTBlock(D, H, F, policy) for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = through(list(self.layers), self.policy, x, hidden_keys(x, self.kernel))
        return functional.linear(self.norm(x), self.tokens.weight)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    """Return the second half of the last axis, negative, and then the first."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), dim=-1)


class LlamaBlock(nn.Module):
    """A layer of Llama."""

    def __init__(self, D: int, H: int, G: int, K: int, F: int) -> None:
        super().__init__()
        self.K, self.rank = K, H // G
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(D, n * K, bias=False) for n in (H, G, G))
        self.proj = nn.Linear(H * K, D, bias=False)
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what is added to x."""
        x = self.norm1(x)
        q, k, v = (f(x).unflatten(2, (-1, self.K)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
        if self.rank > 1:
            k, v = k.repeat_interleave(self.rank, 1), v.repeat_interleave(self.rank, 1)
        return self.proj(merged(attend(q, k, v, mask)))  # type: ignore[no-any-return]  # torch's modules return Any

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to x."""
        x = self.norm2(x)
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]  # as above

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D)."""
        x = x + self.attention(x, cos, sin, mask)
        return x + self.mlp(x)


def frequencies(K: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the frequencies of the rotary embedding of heads of size K, in fp32."""
    return 10000.0 ** -(torch.arange(0, K, 2, device=device, dtype=torch.float32) / K)


def rotations(S: int, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angles of S positions, of shape (S, K)."""
    angles = torch.arange(S, device=frequencies.device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Llama(nn.Module):
    """Llama: tokens (B, S) to logits (B, S, V)."""

    frequencies: torch.Tensor

    def __init__(self, D: int, H: int, G: int, K: int, F: int, L: int, V: int, kernel: str, policy: str = "") -> None:
        super().__init__()
        self.kernel, self.policy = kernel, policy
        self.register_buffer("frequencies", frequencies(K), persistent=False)
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(LlamaBlock(D, H, G, K, F) for _ in range(L))
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(ids)
        cos, sin = rotations(ids.shape[1], self.frequencies, x.dtype)
        x = through(list(self.layers), self.policy, x, cos, sin, hidden_keys(x, self.kernel))
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # torch's modules return Any


class Perceptron(nn.Module):
    """Features (B, D) to logits (B, C)."""

    def __init__(self, D: int, F: int, L: int, C: int, policy: str = "") -> None:
        super().__init__()
        self.policy = policy
        self.first, self.head = nn.Linear(D, F), nn.Linear(F, C)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(F, F), nn.ReLU()) for _ in range(L))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = torch.relu(self.first(x))
        return self.head(through(list(self.layers), self.policy, x))  # type: ignore[no-any-return]  # as above


class ConvNet(nn.Module):
    """Images (B, C, X, X) through L convolutions of D channels to logits (B, V)."""

    def __init__(self, C: int, D: int, L: int, V: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(C, D, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1, bias=False) for _ in range(L))
        self.head = nn.Linear(D, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]  # torch's modules return Any


class Loss(nn.Module):
    """The cross-entropy of a model's logits, all of it in a region of autocast where a format is given."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a scalar for what the model takes, and a class for each position."""
        if self.autocast is None:
            return self.loss(x, targets)
        with torch.autocast(x.device.type, self.autocast):
            return self.loss(x, targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over all positions."""
        logits = self.model(x)
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
