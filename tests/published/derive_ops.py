"""Single ops: products, convolutions, attention, contraction orders."""

from fractions import Fraction

import sympy
from published_rows import ROWS, derives

import costgraph as cg


def product(pattern, *shapes, bias=None):
    with cg.Graph("g", dtype="bf16") as g:
        operands = [g.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
        y = cg.einsum(*operands, pattern)
        g.output(y if bias is None else y + g.input("bias", bias))
    return g


@derives("pt-mm")
def mm(row):
    m, k, n = (row["inputs"][c] for c in "mkn")
    return cg.matmul_flops(product("m k, k n -> m n", (m, k), (k, n)))


@derives("pt-bmm", "pt-baddbmm")
def bmm(row):
    b, m, k, n = (row["inputs"][c] for c in "bmkn")
    bias = (b, m, n) if row["id"] == "pt-baddbmm" else None
    return cg.matmul_flops(product("b m k, b k n -> b m n", (b, m, k), (b, k, n), bias=bias))


@derives("pt-addmm3")
def addmm(row):
    m, k, n = (row["inputs"][c] for c in "mkn")
    biases = [(m, n), (m, 1), (n,)]
    return sum(cg.matmul_flops(product("m k, k n -> m n", (m, k), (k, n), bias=bias)) for bias in biases)


@derives("pt-conv2d")
def conv2d(row):
    n = row["inputs"]
    with cg.Graph("g") as g:
        x = g.input("x", n["x"])
        g.output(cg.conv(x, "b c h w -> b o h w", window=n["w"][2:], padding=n["padding"], o=n["w"][0]))
    return cg.matmul_flops(g)


@derives("pt-variety")
def variety(row):
    parts = [
        product("m k, k n -> m n", (4, 5), (5, 6)),
        product("m k, k n -> m n", (4, 5), (5, 6), bias=(4, 6)),
        product("m k, k n -> m n", (5, 6), (6, 7)),
        product("a b, b c -> a c", (6, 7), (7, 8)),
    ]
    with cg.Graph("linear") as g:
        g.output(cg.linear(g.input("x", (8, 9)), "b d -> b f", f=10, bias=True))
    return sum(map(cg.matmul_flops, [*parts, g]))


@derives("pt-sdpa-fwd")
def sdpa(row):
    n = row["inputs"]
    shapes = [("q", n["sq"], n["d"]), ("k", n["sk"], n["d"]), ("v", n["sk"], n["dv"])]
    with cg.Graph("g") as g:
        q, k, v = (g.input(name, (n["b"], n["h"], s, d)) for name, s, d in shapes)
        g.output(cg.attention(q, k, v, causal=n["is_causal"]))
    return cg.matmul_flops(g, count="full")


def network(order):
    with cg.Graph("g", dtype="fp32") as g:
        shapes = [(10, 10), (10, 10), (10, 10, 10, 10), (10, 10), (10, 10)]
        operands = [g.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
        g.output(cg.einsum(*operands, "p i, q j, i j k l, r k, s l -> p q r s", order=order))
    return g


@derives("oe-opt")
def path_given(row):
    return cg.matmul_flops(network(row["inputs"]["path"]))


@derives("oe-largest")
def largest_intermediate(row):
    made = [life for life in cg.lifetimes(network(None)) if life.role != "input"]
    return max(life.bytes for life in made) // 4  # fp32


@derives("oe-xyf-optimal")
def path_found(row):
    n = row["inputs"]
    pattern = "x y f, x t f, y t p f, f r -> t p r"
    return cg.matmul_flops(product(pattern, *(n[name] for name in "MABC")))


@derives("fvcore-einsum-1")
def multiply_adds(row):
    n, c, t, p = (row["inputs"][name] for name in "nctp")
    return cg.matmul_flops(product("n c t, n c p -> n t p", (n, c, t), (n, c, p))) / 2  # MACs


@derives("sb-tpu-q4-flops")
def one_row(row):
    return cg.matmul_flops(product("b d, d f -> b f", (1, row["inputs"]["W"][0]), row["inputs"]["W"]))


@derives("sb-tf-q3")
def no_axis_summed_twice(row):
    # the book counts a multiply and an add for each index point, two of whose axes are summed
    sizes = I, J, K, L, M, N, O = cg.dims("I J K L M N O")
    g = product("i j k l, i j m n o -> k l m n o", (I, J, K, L), (I, J, M, N, O))
    return cg.matmul_flops(g), 2 * sympy.prod(sizes)


@derives("sb-matmul-intensity")
def matmul_intensity(row):
    B, D, F = cg.dims("B D F")
    return cg.intensity(product("b d, d f -> b f", (B, D), (D, F))), B * D * F / (B * D + D * F + B * F)


@derives("sb-tf-q4")
def attention_intensity(row):
    # K heads of keys, G heads of queries for each, T queries, S keys, heads of size H
    B, T, S, K, G, H = cg.dims("B T S K G H")
    with cg.Graph("g", dtype="bf16") as g:
        q = g.input("q", (B, K * G, T, H))
        k, v = (g.input(name, (B, K, S, H)) for name in "kv")
        g.output(cg.attention(q, k, v, causal=False))
    expected = 4 * B * T * S * K * G * H / (4 * B * H * K * (T * G + S))
    return cg.matmul_flops(g) / cg.bytes_moved(g), expected


def loop_nest(expression, sizes):
    """All factors multiplied at each index point, then added up: what no contraction in pairs does."""
    left, right = expression.split("->")
    axes = "".join(sorted(set(left) - {","}))
    point = cg.ops.functions.Function("product", left.count(",") + 1, left.count(","))
    with cg.Graph("g") as g:
        operands = []
        for i, names in enumerate(left.split(",")):
            x = g.input(f"x{i}", [sizes[n] for n in names])
            more = {n: sizes[n] for n in axes if n not in names}
            operands.append(cg.ops.expand(x, f"{' '.join(names)} -> {' '.join(axes)}", **more))
        y = cg.ops.pointwise(point, *operands)
        g.output(cg.reduce(y, f"{' '.join(axes)} -> {' '.join(right)}", "sum"))
    return g


@derives("oe-naive-run")
def five_factors(row):
    n = row["inputs"]
    return cg.flops(loop_nest(n["expr"], dict.fromkeys("pqrsijkl", n["N"])))


@derives("oe-xyf-naive")
def four_factors(row):
    shapes = ROWS["oe-xyf-optimal"]["inputs"]
    expression = row["inputs"]["expr"]
    sizes = {}
    for names, shape in zip(expression.split("->")[0].split(","), "MABC", strict=True):
        sizes |= dict(zip(names, shapes[shape], strict=True))
    return cg.flops(loop_nest(expression, sizes))


@derives("llama3-tokens-8192-8192", "sb-gpu-meg-16B", "sb-gpu-meg-314B", "sb-at-fsdp")
def tokens_of_a_batch(row):
    n = row["inputs"]
    sequences = {"dp": n.get("dp", 1) * n.get("batch_per_dp", 1), "gpus": n.get("batch", 1), "chips": n.get("B", 1)}
    shared = next(k for k in sequences if k in n)
    with cg.Graph("g") as g:
        tokens = g.input("tokens", (sequences[shared], n.get("seq", 1)), dtype="int64")
        g.output(cg.ops.contiguous_copy(tokens))
    return Fraction(tokens.numel.constant, 1 if shared == "dp" else n[shared])
