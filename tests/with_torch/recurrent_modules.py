"""Plain torch modules of recurrent models that transformers lacks, after their published code."""

import torch
from torch import nn
from torch.nn import functional


class WordLanguageModel(nn.Module):
    """`RNNModel` from pytorch/examples, word_language_model."""

    def __init__(self, cell: type[nn.RNNBase], width: int, layers: int, words: int, *, tied: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = cell(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, words)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])


class LinearAttentionLayer(nn.Module):
    """`TransformerEncoderLayer` with `AttentionLayer(CausalLinearAttention())` of idiap/fast-transformers.

    Its CUDA kernel accumulates keys times values position by position, like the loop here.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        state = x.new_zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1])
        total = x.new_zeros(x.shape[0], self.heads, q.shape[-1])
        out = []
        for t in range(x.shape[1]):
            state = state + k[:, t, :, :, None] * v[:, t, :, None]
            total = total + k[:, t]
            y = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
            out.append(y / (torch.einsum("bhk,bhk->bh", q[:, t], total) + 1e-6)[..., None])
        return self.out(torch.stack(out, 1).flatten(-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.linear2(functional.relu(self.linear1(x))))


class LinearTransformer(nn.Module):
    """Map pixels to logits of the next one, with fixed sinusoidal positions."""

    def __init__(self, width: int, heads: int, inner: int, layers: int, words: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.register_buffer("positions", torch.zeros(positions, width))
        self.layers = nn.ModuleList(LinearAttentionLayer(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _shift(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 0, 1, -1))


class TimeMix(nn.Module):
    """`RWKV_Tmix_x070` from BlinkDL/RWKV-LM; the loop computes its kernel `wkv7`."""

    def __init__(self, width: int, size: int, ranks: dict[str, int], first: bool) -> None:
        super().__init__()
        self.size, self.first = size, first
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "k_k", "k_a"):
            setattr(self, name, nn.Parameter(torch.zeros(width)))
        if not first:
            self.v0 = nn.Parameter(torch.zeros(width))
        for name, rank in ranks.items():
            if not (first and name == "v"):
                setattr(self, f"{name}1", nn.Parameter(torch.zeros(width, rank)))
                setattr(self, f"{name}2", nn.Parameter(torch.zeros(rank, width)))
        self.r_k = nn.Parameter(torch.zeros(width // size, size))
        self.receptance, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.ln_x = nn.GroupNorm(width // size, width, eps=64e-5)

    def forward(self, x: torch.Tensor, v_first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        batch, steps, width = x.shape
        change = _shift(x) - x
        xr, xw, xk, xv, xa, xg = (x + change * getattr(self, f"x_{n}") for n in "rwkvag")
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w = -functional.softplus(-(self.w0 + torch.tanh(xw @ self.w1) @ self.w2)) - 0.5
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + (xv @ self.v1) @ self.v2)
        a = torch.sigmoid(self.a0 + (xa @ self.a1) @ self.a2)
        g = torch.sigmoid(xg @ self.g1) @ self.g2
        heads = (batch, steps, -1, self.size)
        kk = functional.normalize((k * self.k_k).view(heads), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, w, k, v, a = (t.view(heads) for t in (r, w, k, v, a))
        y = self.wkv(r, torch.exp(-torch.exp(w)), k, v, -kk, kk * a)
        y = self.ln_x(y.reshape(batch * steps, width)).view(batch, steps, width)
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).view(batch, steps, width)
        return self.output(y * g), v_first

    @staticmethod
    def wkv(*given: torch.Tensor) -> torch.Tensor:
        state = given[0].new_zeros(given[0].shape[0], *given[0].shape[2:], given[0].shape[-1])
        out = []
        for t in range(given[0].shape[1]):
            r, w, k, v, a, b = (x[:, t] for x in given)
            removed = torch.einsum("bhvk,bhk->bhv", state, a)
            state = state * w[:, :, None] + removed[..., None] * b[:, :, None] + v[..., None] * k[:, :, None]
            out.append(torch.einsum("bhvk,bhk->bhv", state, r))
        return torch.stack(out, 1)


class ChannelMix(nn.Module):
    """`RWKV_CMix_x070`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(width))
        self.key, self.value = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(torch.relu(self.key(x + (_shift(x) - x) * self.x_k)) ** 2)


class RWKV7(nn.Module):
    """The model `RWKV` with its blocks, the first of which normalizes the embedding."""

    def __init__(self, width: int, size: int, inner: int, layers: int, words: int, ranks: dict[str, int]) -> None:
        super().__init__()
        self.emb, self.ln0 = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.ModuleList((
                nn.LayerNorm(width), TimeMix(width, size, ranks, i == 0), nn.LayerNorm(width), ChannelMix(width, inner),
            ))
            for i in range(layers)
        )  # fmt: skip
        self.ln_out, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, v_first = self.ln0(self.emb(tokens)), None
        for ln1, time, ln2, channel in self.blocks:
            y, v_first = time(ln1(x), v_first)
            x = x + y
            x = x + channel(ln2(x))
        return self.head(self.ln_out(x))


class Headwise(nn.Module):
    """`LinearHeadwiseExpand` from NX-AI/xlstm: a matrix per channel block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width // heads, width // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...hd,hod->...ho", x.unflatten(-1, (self.weight.shape[0], -1)), self.weight).flatten(-2)


class CausalConv(nn.Module):
    """`CausalConv1d` from NX-AI/xlstm, depthwise."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, window, padding=window - 1, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class HeadNorm(nn.Module):
    """`MultiHeadLayerNorm` from NX-AI/xlstm: scales without shifts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:]).flatten(-2) * self.weight


class MLSTMBlock(nn.Module):
    """`mLSTMBlock` from NX-AI/xlstm, with its cell position by position."""

    def __init__(self, width: int, heads: int, window: int, block: int) -> None:
        super().__init__()
        inner = 2 * width
        self.heads = heads
        self.norm = nn.LayerNorm(width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv = CausalConv(inner, window)
        self.q, self.k, self.v = (Headwise(inner, inner // block) for _ in range(3))
        self.i, self.f = nn.Linear(3 * inner, heads), nn.Linear(3 * inner, heads)
        self.out_norm, self.skip = HeadNorm(inner), nn.Parameter(torch.zeros(inner))

    def cell(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gates = torch.cat((q, k, v), -1)
        i, f = self.i(gates), functional.logsigmoid(self.f(gates))
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        size = q.shape[-1]
        c, n, m = (q.new_zeros(q.shape[0], self.heads, *shape) for shape in ((size, size), (size,), (1,)))
        out = []
        for t in range(q.shape[1]):
            after = torch.maximum(f[:, t, :, None] + m, i[:, t, :, None])
            forget, let = torch.exp(f[:, t, :, None] + m - after), torch.exp(i[:, t, :, None] - after)
            m, key = after, k[:, t] / size**0.5
            c = forget[..., None] * c + let[..., None] * (key[..., None] * v[:, t, :, None])
            n = forget * n + let * key
            y = torch.einsum("bhk,bhkv->bhv", q[:, t], c)
            along = torch.einsum("bhk,bhk->bh", q[:, t], n)[..., None]
            out.append(y / (torch.maximum(along.abs(), torch.exp(-m)) + 1e-6))
        return self.out_norm(torch.stack(out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.up(self.norm(x)).chunk(2, -1)
        seen = self.conv(y)
        y = self.cell(self.q(seen), self.k(seen), self.v(y))
        return x + self.down((y + self.skip * seen) * functional.silu(z))


class SLSTMBlock(nn.Module):
    """`sLSTMBlock` from NX-AI/xlstm, with its gated feed-forward layer."""

    def __init__(self, width: int, heads: int, inner: int, window: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.norm, self.ffn_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.conv = CausalConv(width, window)
        self.i, self.f, self.z, self.o = (Headwise(width, heads) for _ in range(4))
        self.recurrent = nn.Parameter(torch.zeros(heads, size, 4, size))
        self.bias = nn.Parameter(torch.zeros(heads, 4, size))
        self.group_norm = HeadNorm(width)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def cell(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.conv(x)
        given = [
            f(t).unflatten(-1, (self.heads, -1)) for f, t in ((self.i, seen), (self.f, seen), (self.z, x), (self.o, x))
        ]
        y, c, n, m = (given[0].new_zeros(given[0][:, 0].shape) for _ in range(4))
        out = []
        for t in range(x.shape[1]):
            own = torch.einsum("bhk,hkne->bhne", y, self.recurrent) + self.bias
            i, f, z, o = (part[:, t] + own[:, :, j] for j, part in enumerate(given))
            after = torch.maximum(functional.logsigmoid(f) + m, i)
            forget, let = torch.exp(functional.logsigmoid(f) + m - after), torch.exp(i - after)
            m, c, n = after, forget * c + let * torch.tanh(z), forget * n + let
            y = torch.sigmoid(o) * c / n
            out.append(y)
        return self.group_norm(torch.stack(out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.cell(self.norm(x))
        gate, up = self.up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(functional.gelu(gate) * up)


class XLSTM(nn.Module):
    """`xLSTMLMModel` from NX-AI/xlstm."""

    def __init__(
        self, width: int, heads: int, inner: int, layers: int, words: int, slstm: tuple[int, ...] = (),
        *, window: int = 4, block: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            SLSTMBlock(width, heads, inner, window) if i in slstm else MLSTMBlock(width, heads, window, block)
            for i in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
