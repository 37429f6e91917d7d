"""The kernels of a raw record, declared with costgraph's public names, each size a symbol."""

from functools import cache

import costgraph as cg

M, K, N, E, R, C, B, H, S, T, V, D, O, X, G = cg.dims("M K N E R C B H S T V D O X G")

FUNCTIONS = {
    "relu": cg.relu, "gelu": cg.gelu, "silu": cg.silu, "tanh": cg.tanh, "softmax": cg.softmax,
    "layer_norm": cg.layer_norm, "rms_norm": cg.rms_norm,
    "exp": lambda x: cg.ops.pointwise("exp", x), "sum": lambda x: cg.reduce(x, "n -> ", "sum"),
}  # fmt: skip


def _matmul(g):
    return cg.einsum(g.input("a", (M, K)), g.input("b", (K, N)), "m k, k n -> m n")


def _copy(g):
    # `contiguous` of a dense tensor is a no-op, so the copy into another tensor is declared as opaque
    return cg.opaque("copy", [g.input("x", (E,))], (E,), flops=0)


def _add(g):
    return g.input("x", (E,)) + g.input("y", (E,))


def _heads(g, queries, keys):
    return g.input("q", (B, H, queries, K)), g.input("k", (B, H, keys, K)), g.input("v", (B, H, keys, K))


def _sdpa(g, causal):
    return cg.attention(*_heads(g, S, S), causal=causal, kernel="flash")


def _decode(g, queries):
    return cg.attention(*_heads(g, queries, T), causal=False, kernel="flash")


def _eager(g):
    return cg.attention(*_heads(g, S, S), causal=False, kernel="eager")


def _conv(g, window):
    x = g.input("x", (B, C, X, X))
    return cg.conv(x, "b c h w -> b o h w", window=(window, window), padding=window // 2, groups=G, o=O)


def _embedding(g):
    return cg.embedding(g.input("ids", (N,), dtype="int64"), g.param("table", (V, D)))


def _cross_entropy(g):
    return cg.cross_entropy(cg.ops.cast(g.input("logits", (R, V)), "fp32"), g.input("targets", (R,), dtype="int64"))


#: Declaration of each case by its name in the record, and the facts that are not tensor sizes.
DECLARED = {
    "matmul": (_matmul, ()),
    "copy": (_copy, ()),
    "add": (_add, ()),
    "sdpa": (_sdpa, ("causal",)),
    "sdpa_decode": (_decode, ("s",)),
    "attention_eager": (_eager, ()),
    "conv2d": (_conv, ("window",)),
    "embedding": (_embedding, ()),
    "cross_entropy": (_cross_entropy, ()),
}
#: Symbols of facts that are abbreviated differently.
SYMBOLS = {"elements": "E", "rows": "R", "cols": "C", "hw": "X", "groups": "G", "tokens": "N"}


@cache
def _declare(name, dtype, *options):
    with cg.Graph(name, dtype=dtype.partition("->")[0]) as g:
        if name in DECLARED:
            g.output(DECLARED[name][0](g, *options))
        else:
            rowwise = name in ("softmax", "layer_norm", "rms_norm")
            g.output(FUNCTIONS[name](g.input("x", (R, C) if rowwise else (E,))))
    return g


def kernel(name, facts):
    """Return the declared graph of a case and its sizes."""
    options = DECLARED.get(name, (None, ()))[1]
    graph = _declare(name, facts["dtype"], *(facts[o] for o in options))
    sizes = {k: v for k, v in facts.items() if k not in (*options, "dtype")}
    return graph, {SYMBOLS.get(k, k.upper()): v for k, v in sizes.items()}
