"""Small models in plain torch and as declarations, and the ops that each version runs."""

import math
from itertools import groupby

import costgraph as cg
from costgraph.transforms.precision import word

B, S, D, H, F, L, V = cg.dims("B S D H F L V")

#: Our op name for each torch op; casts are counted with their elements.
NAMES = {
    "_to_copy": "cast", "mm": "matmul", "bmm": "matmul", "addmm": "addmm", "_softmax": "softmax", "mul": "mul",
    "native_layer_norm": "norm", "add": "add", "gelu": "gelu_tanh", "silu": "silu", "embedding": "gather",
    "_scaled_dot_product_flash_attention_for_cpu": "attention", "_log_softmax": "cross_entropy",
    "nll_loss_forward": "nll",
}  # fmt: skip
FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
SEEN = {*NAMES.values(), "rotary"}


def recorder(torch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.rows, self.paused = [], False

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            first = out[0] if isinstance(out, tuple) else out
            name = NAMES.get(function.overloadpacket.__name__)
            if name is not None and not self.paused and first.is_floating_point():
                self.rows.append((name, FORMATS[str(first.dtype)], first.numel()))
            return out

        def kernel(self, name, run):
            """A composite torch op counts as one kernel."""
            self.paused = True
            out = run()
            self.paused = False
            self.rows.append((name, FORMATS[str(out.dtype)], out.numel()))
            return out

    return Recorder()


def rows(graph):
    """Return the op, dtype and elements of every result in a graph without loops."""
    out = []
    for op in graph.ops:
        name = word(op)
        t = op.results[0]
        if name in SEEN and t.dtype.kind == "float":
            out.append((name, t.dtype.name, t.numel.constant))
    return out


def in_order(made):
    """Sort the casts before an op by size: C++ does not define the evaluation order of arguments."""
    out = []
    for is_cast, group in groupby(made, key=lambda row: row[0] == "cast"):
        out += (sorted if is_cast else list)(group)
    return out


SIZES = {"B": 2, "S": 5, "D": 12, "H": 3, "F": 29, "V": 31, "L": 2}


def plain(torch, *shape):
    return torch.nn.Parameter(torch.randn(shape) / 10)


def gpt2_rows(torch):
    """Run a two-layer GPT-2 with eager attention and a tied head in plain torch."""
    b, s, d, h, f, v, layers = (SIZES[n] for n in "BSDHFVL")
    fn, k = torch.nn.functional, d // h
    table, positions = plain(torch, v, d), plain(torch, s, d)
    blocks = [
        [plain(torch, *n) for n in ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,))]
        + [plain(torch, *n) for n in ((f, d), (f,), (d, f), (d,))]
        for _ in range(layers)
    ]
    last = plain(torch, d), plain(torch, d)
    ids = torch.randint(0, v, (b, s))
    mask = torch.ones(s, s).tril() == 0
    with recorder(torch) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        x = fn.embedding(ids, table) + fn.embedding(torch.arange(s), positions)
        for n1, m1, w, wb, p, pb, n2, m2, up, ub, down, db in blocks:
            qkv = fn.linear(fn.layer_norm(x, (d,), n1, m1), w, wb)
            q, key, val = (t.view(b, s, h, k).transpose(1, 2) for t in qkv.split(d, -1))
            scores = (q @ key.transpose(-1, -2)) * (1 / math.sqrt(k))
            y = torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ val
            x = x + fn.linear(y.transpose(1, 2).reshape(b, s, d), p, pb)
            y = fn.gelu(fn.linear(fn.layer_norm(x, (d,), n2, m2), up, ub), approximate="tanh")
            x = x + fn.linear(y, down, db)
        logits = fn.linear(fn.layer_norm(x, (d,), *last), table)
        fn.cross_entropy(logits.view(-1, v), ids.view(-1))
    return seen.rows


def gpt2_graph(dtype="fp32", attention="eager"):
    def block(x):
        y = cg.layer_norm(x, name="norm1")
        qkv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="kqv")
        q, k, v = (cg.rearrange(qkv[:, :, i], "b s h k -> b h s k") for i in range(3))
        y = cg.rearrange(cg.attention(q, k, v, kernel=attention), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, bias=True, name="proj")
        return x + cg.nn.mlp(
            cg.layer_norm(x, name="norm2"), F, bias=True, activation=lambda h: cg.gelu(h, approximate="tanh")
        )

    with cg.Graph("gpt2", dtype=dtype) as g:
        ids = g.input("ids", (B, S), dtype="int64")
        table = g.param("table", (V, D))
        x = cg.embedding(ids, table) + cg.embedding(cg.ops.arange(S), g.param("positions", (S, D)))
        x = cg.layer_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        with cg.scope("head"):
            logits = cg.einsum(x, table, "b s d, v d -> b s v", name="matmul")
        g.output(cg.cross_entropy(logits, ids))
    return g


def llama_rows(torch):
    """Run a two-layer Llama with fused attention, RMSNorm, rotary positions and SwiGLU in plain torch."""
    b, s, d, h, f, v, layers = (SIZES[n] for n in "BSDHFVL")
    fn, k = torch.nn.functional, d // h
    table, head, last = plain(torch, v, d), plain(torch, v, d), plain(torch, d)
    shapes = ((d,), (d, d), (d, d), (d, d), (d, d), (d,), (f, d), (f, d), (d, f))
    blocks = [[plain(torch, *n) for n in shapes] for _ in range(layers)]
    ids, cos = torch.randint(0, v, (b, s)), torch.ones(s, k)

    def rms(x, w):
        return seen.kernel("norm", lambda: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w)

    def rotary(x):
        return seen.kernel("rotary", lambda: (x * cos + x.roll(k // 2, -1) * cos).to(x.dtype))

    with recorder(torch) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        x = fn.embedding(ids, table)
        for n1, wq, wk, wv, wo, n2, gate, up, down in blocks:
            y = rms(x, n1)
            q, key, val = (fn.linear(y, w).view(b, s, h, k).transpose(1, 2) for w in (wq, wk, wv))
            y = fn.scaled_dot_product_attention(rotary(q), rotary(key), val, is_causal=True)
            x = x + fn.linear(y.transpose(1, 2).reshape(b, s, d), wo)
            y = rms(x, n2)
            x = x + fn.linear(fn.silu(fn.linear(y, gate)) * fn.linear(y, up), down)
        fn.linear(rms(x, last), head)
    return seen.rows


def llama_graph(dtype="fp32"):
    K = D / H

    def block(x):
        y = cg.rms_norm(x, name="norm1")
        q, k, v = (
            cg.rearrange(cg.linear(y, "b s d -> b s h k", h=H, k=K, name=n), "b s h k -> b h s k") for n in "qkv"
        )
        y = cg.attention(cg.nn.rotary(q, cos, sin), cg.nn.rotary(k, cos, sin), v)
        x = x + cg.linear(cg.rearrange(y, "b h s k -> b s (h k)"), "b s e -> b s d", d=D, name="proj")
        return x + cg.nn.gated_mlp(cg.rms_norm(x, name="norm2"), F)

    with cg.Graph("llama", dtype=dtype) as g:
        ids = g.input("ids", (B, S), dtype="int64")
        x = cg.embedding(ids, g.param("table", (V, D)))
        cos, sin = (g.buffer(n, (S, K / 2), dtype="fp32") for n in ("cos", "sin"))
        x = cg.rms_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
    return g
