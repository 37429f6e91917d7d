"""Published FLOPs and parameters of forward passes, each derived from a declared graph.

`forward.json` has the numbers with their sources, and the ids of numbers that need more than a forward pass.
"""

import json
from decimal import Decimal
from pathlib import Path

import pytest
import sympy

import costgraph as cg
from costgraph import models

FILE = json.loads(Path(__file__).with_name("forward.json").read_text())
ROWS = {row["id"]: row for row in FILE["answered"]}
DERIVED = {}


def derives(*ids):
    """Register what answers these rows; the row is its argument."""

    def register(function):
        for i in ids:
            assert i not in DERIVED
            DERIVED[i] = function
        return function

    return register


@pytest.mark.parametrize("row", [r for r in ROWS.values() if "formula" not in r], ids=lambda r: r["id"])
def test_number(row):
    derived = DERIVED[row["id"]](row)
    if "digits" in row:  # as many as are printed
        derived = Decimal(f"{Decimal(float(derived)):.{row['digits'] - 1}e}")
    assert derived == Decimal(str(row["expected"]))


@pytest.mark.parametrize("row", [r for r in ROWS.values() if "formula" in r], ids=lambda r: r["id"])
def test_formula(row):
    derived, expected = DERIVED[row["id"]](row)
    assert sympy.simplify(derived - expected) == 0


def test_every_row_is_derived_or_left_for_a_reason():
    assert DERIVED.keys() == ROWS.keys()
    later = [i for ids in FILE["later"].values() for i in ids]
    assert len(set(later)) == len(later)
    assert not set(later) & ROWS.keys()


# -- single ops ------------------------------------------------------------------------------------------------


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


# -- GPT-2 as nanoGPT has it: no biases ------------------------------------------------------------------------


def nanogpt():
    B, S, D, H, L, V, P = cg.dims("B S D H L V P")

    def block(x):
        y = cg.layer_norm(x, bias=False, name="attention/norm")
        kqv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, name="attention/kqv")
        q, k, v = (cg.rearrange(kqv[:, :, i], "b s h k -> b h s k") for i in range(3))
        y = cg.rearrange(cg.attention(q, k, v, name="attention"), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, name="attention/proj")
        return x + cg.mlp(cg.layer_norm(x, bias=False, name="mlp/norm"), 4 * D, name="mlp")

    with cg.Graph("nanogpt") as g:
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("token", (V, D))
        x = cg.embedding(tokens, table) + cg.embedding(cg.arange(S), g.param("position", (P, D)))
        x = cg.layer_norm(cg.repeat(L, block, x, name="layers"), bias=False)
        with cg.scope("head"):
            g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
    return g


def params_of(g, scope, *, vectors=True, **dims):
    """Count the parameters whose names begin so, of a single layer where they are inside one."""
    found = [t for t in g.params if t.name.startswith(scope) and (vectors or t.ndim > 1)]
    formula = sum(sympy.prod(t.shape) for t in found)
    return cg.evaluate(formula, **{s.name: dims[s.name] for s in formula.free_symbols})


NANOGPT = {"D": 768, "H": 12, "V": 50257, "P": 1024}


@derives("nanogpt-total-124337664")
def nanogpt_total(row):
    return cg.param_count(nanogpt(), **NANOGPT, L=12)


@derives(
    "nanogpt-position-786432",
    "nanogpt-token-38597376",
    "nanogpt-attention-2360064",
    "nanogpt-mlp-4719360",
    "nanogpt-params-7079424",
)
def nanogpt_part(row):
    part = row["id"].split("-")[1]
    scope = {"attention": "layers/attention", "mlp": "layers/mlp", "params": "layers"}.get(part, part)
    return params_of(nanogpt(), scope, **NANOGPT)


@derives("nanogpt-12-84953088")
def nanogpt_blocks(row):
    g = nanogpt()
    return cg.param_count(g, **NANOGPT, L=13) - cg.param_count(g, **NANOGPT, L=1)


@derives(*(i for i in ROWS if i.startswith("nanogpt-flops-")))
def nanogpt_flops(row):
    # biases are no matmul, so that the zoo's GPT-2 answers
    part = row["id"].removeprefix("nanogpt-flops-")
    scope = {
        "block": "layers",
        "12-blocks": "layers",
        "dense-(lm-head)": "head",
        "forward_total": None,
    }.get(part, f"layers/{part.replace('attention-', 'attention/')}")
    depth = 12 if part in ("12-blocks", "forward_total") else 1
    table = cg.costs(models.load("gpt2"), count="full", B=1, S=1024, L=depth).filter(kind="matmul")
    return (table if scope is None else table.filter(scope=scope)).total().matmul


# -- the zoo ---------------------------------------------------------------------------------------------------


@derives("params-llama2-7b", "params-llama3-8b", "params-llama3-70b", "params-gpt2", "params-gpt2-xl")
def zoo_params(row):
    name = row["id"].removeprefix("params-").replace("llama", "llama-")
    g = models.load(name)
    renamed = {"Hkv": "G", "dh": "K", "ctx": "P"}
    sizes = {renamed.get(k, k): v for k, v in row["inputs"].items() if k not in ("biases", "tied")}
    assert sizes.items() <= g.defaults.items()
    return cg.param_count(g)


@derives("nar-params-1.7B", "nar-params-145.6B")
def megatron_params(row):
    n = row["inputs"]
    sizes = {"D": n["h"], "H": n["heads"], "F": 4 * n["h"], "L": n["l"], "V": n["V"], "P": n["s"]}
    return Decimal(cg.param_count(models.load("gpt2", symbolic=True), **sizes)) / 10**9


def llama():
    return models.load("llama-3-8b", symbolic=True)


@derives("sb-tf-q1-attn")
def attention_share(row):
    # as many heads of keys as of queries, D = H*K, F = 4*D
    sizes = {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 4 * 4096}
    attention, whole = (params_of(llama(), scope, vectors=False, **sizes) for scope in ("layers/attention", "layers"))
    return Decimal(attention) / whole


@derives("sb-tf-frac")
def attention_to_the_rest(row):
    S, D, H, G, K, F = cg.dims("S D H G K F")
    layers = cg.costs(llama(), count="full").filter(kind="matmul", scope="layers")
    pairs = [layers.filter(scope=f"layers/attention/{part}").total().matmul for part in ("scores", "reduce")]
    rest = layers.total().matmul - sum(pairs)
    ratio = (sum(pairs) / rest).subs({F: 4 * D, G: H}).subs(H, D / K)
    return ratio, S / (8 * D)


@derives("sb-train-q1-ffw", "sb-train-q1-attn")
def llama_13b_part(row):
    g = models.load("llama-2-13b")
    scope = "layers/mlp" if row["id"].endswith("ffw") else "layers/attention"
    return g.defaults["L"] * params_of(g, scope, vectors=False, **g.defaults)


@derives("sb-train-q1-vocab")
def llama_13b_vocabulary(row):
    g = models.load("llama-2-13b")
    return params_of(g, "tokens", **g.defaults) + params_of(g, "head", **g.defaults)


@derives("sb-at-attn")
def llama_70b_attention(row):
    g = models.load("llama-3-70b")
    return g.defaults["L"] * params_of(g, "layers/attention", vectors=False, **g.defaults)


@derives("sb-inf-q1")
def tied_llama(row):
    n = row["inputs"]
    sizes = {"L": n["L"], "D": n["D"], "F": n["F"], "H": n["N"], "G": n["K"], "K": n["H"], "V": n["V"]}
    return cg.param_count(llama(), **sizes) - n["V"] * n["D"]  # one table for both ends


# -- torchvision -----------------------------------------------------------------------------------------------


def conv(x, o, window, stride=1, padding=0, *, norm=False, name):
    y = cg.conv(
        x,
        "b c h w -> b o h w",
        window=(window, window),
        stride=stride,
        padding=padding,
        bias=not norm,
        o=o,
        name=name,
    )
    if norm:  # the scale and the shift of a batch norm; its statistics are buffers
        g = x.graph
        scale, shift = (g.param(f"{name}/{part}", (o, 1, 1)) for part in ("scale", "shift"))
        y = cg.pointwise("fma", y, scale, shift)
    return y


def linear(x, o, name):
    return cg.linear(x, "b c -> b o", o=o, bias=True, name=name)


def pool(x, window, stride, padding=0):
    return cg.pool(x, "max", window=window, stride=stride, padding=padding)


def alexnet(x):
    x = pool(cg.relu(conv(x, 64, 11, 4, 2, name="c0")), 3, 2)
    x = pool(cg.relu(conv(x, 192, 5, 1, 2, name="c1")), 3, 2)
    for i, channels in enumerate((384, 256, 256)):
        x = cg.relu(conv(x, channels, 3, 1, 1, name=f"c{i + 2}"))
    x = cg.rearrange(pool(x, 3, 2), "b c h w -> b (c h w)")
    return linear(cg.relu(linear(cg.relu(linear(x, 4096, "f0")), 4096, "f1")), 1000, "f2")


def vgg16(x):
    for i, (channels, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for j in range(depth):
            x = cg.relu(conv(x, channels, 3, 1, 1, name=f"c{i}_{j}"))
        x = pool(x, 2, 2)
    x = cg.rearrange(x, "b c h w -> b (c h w)")
    return linear(cg.relu(linear(cg.relu(linear(x, 4096, "f0")), 4096, "f1")), 1000, "f2")


def resnet(x, depths, bottleneck):
    x = pool(cg.relu(conv(x, 64, 7, 2, 3, norm=True, name="stem")), 3, 2, 1)
    for i, depth in enumerate(depths):
        width = 64 * 2**i
        out = width * (4 if bottleneck else 1)
        # output channels, window and which convolution has the stride
        shape = ((width, 1), (width, 3), (out, 1)) if bottleneck else ((width, 3), (out, 3))
        for j in range(depth):
            stride = 2 if i and not j else 1
            y, name = x, f"layer{i + 1}/block{j}"
            for k, (channels, window) in enumerate(shape):
                step = stride if k == len(shape) - 2 else 1
                y = conv(y, channels, window, step, window // 2, norm=True, name=f"{name}/c{k}")
                y = cg.relu(y) if k < len(shape) - 1 else y
            if x.shape != y.shape:
                x = conv(x, out, 1, stride, norm=True, name=f"{name}/down")
            x = cg.relu(x + y)
    return linear(cg.reduce(x, "b c h w -> b c", "mean"), 1000, "head")


def vit(x):
    x = conv(x, 768, 16, 16, name="patches")
    g = x.graph
    token = cg.expand(g.param("class", (1, 1, 768)), "1 s d -> b s d", b=x.shape[0])
    x = cg.concat([token, cg.rearrange(x, "b d h w -> b (h w) d")], 1)

    def block(x):
        y = cg.linear(cg.layer_norm(x, name="n0"), "b s d -> b s n h k", n=3, h=12, k=64, bias=True, name="kqv")
        q, k, v = (cg.rearrange(y[:, :, i], "b s h k -> b h s k") for i in range(3))
        y = cg.rearrange(cg.attention(q, k, v, causal=False), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=768, bias=True, name="proj")
        return x + cg.mlp(cg.layer_norm(x, name="n1"), 3072, bias=True)

    x = x + g.param("positions", (1, 197, 768))
    x = cg.layer_norm(cg.repeat(12, block, x, name="layers"))
    return linear(x[:, 0], 1000, "head")


VISION = {
    "AlexNet": alexnet,
    "VGG16": vgg16,
    "ResNet18": lambda x: resnet(x, (2, 2, 2, 2), bottleneck=False),
    "ResNet50": lambda x: resnet(x, (3, 4, 6, 3), bottleneck=True),
    "ViT_B_16": vit,
}


def vision(name):
    with cg.Graph(name) as g:
        g.output(VISION[name](g.input("image", (1, 3, 224, 224))))
    return g


@derives(*(i for i in ROWS if i.startswith("tv-")))
def torchvision(row):
    g = vision(row["inputs"]["model"])
    if "params" in row["id"]:
        return cg.param_count(g)
    return Decimal(cg.matmul_flops(g)) / 2 / 10**9  # multiply-adds


@derives("pt-resnet18-layer1-conv-fwd")
def layer1(row):
    return cg.costs(vision("ResNet18")).filter(scope="layer1", kind="matmul").total().matmul
