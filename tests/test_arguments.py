import numpy as np
import pytest
import sympy

import costgraph as cg

B, D = cg.dims("B D")


def odd_values():
    """Invalid or unusual argument values; the text "own" is replaced by a tensor from the graph."""
    foreign = cg.Graph("other").input("f", (2, 3))
    numbers = [3.5, -1, 0, 10**30, float("nan"), float("inf"), True, 1j, np.float64(2), np.int64(3), -5, 2]
    formulas = [sympy.Symbol("q"), sympy.oo, sympy.nan, sympy.I, sympy.Rational(1, 2), sympy.Float(2.5)]
    texts = ["x", "", "a b -> b a", "a -> a", "\u00e9", "a" * 100_000, b"x"]
    containers = [[], (), {}, [None], ("a",), {"a": 1}, {1, 2}, np.array([1, 2])]
    return [None, object(), int, foreign, "own", *numbers, *formulas, *texts, *containers]


TENSORS = {
    "x": lambda g: g.input("x", (B, 3)), "n": lambda g: g.input("n", (2, 3)), "w": lambda g: g.param("w", (3, 5)),
    "ids": lambda g: g.input("ids", (B,), dtype="int64"), "q": lambda g: g.input("q", (2, 4, 5, 6)),
    "im": lambda g: g.input("im", (2, 4, 9, 9)), "p": lambda g: g.input("p", (5,), dtype="int64"),
    "cos": lambda g: g.input("cos", (5, 3)),
}  # fmt: skip


class Tensors(dict):
    """Tensors of a graph, declared on first access: a call needs one or two of them."""

    def __init__(self, g):
        self.g = g

    def __missing__(self, name):
        self[name] = TENSORS[name](self.g)
        return self[name]


def setting():
    g = cg.Graph("g")
    tensors = Tensors(g)
    assert tensors["x"] is g.tensors[0]
    return g, tensors


def in_kernel(g, e, a):
    with cg.kernel(a(0, "k"), workspace=a(1, 0)):
        y = cg.relu(e["x"])
    g.output(y)


def in_scope(g, e, a):
    with cg.scope(a(0, "k")):
        g.output(cg.relu(e["x"]))


def asked(question):
    def ask(g, e, a):
        g.output(e["x"] @ e["w"])
        return question(a(0, g), B=a(1, 3))

    return ask


def table(use):
    def ask(g, e, a):
        g.output(e["x"] @ e["w"])
        return use(cg.costs(g), a)

    return ask


# a(i, default): positional argument i, which the test replaces
CALLS = {
    "dims": lambda g, e, a: cg.dims(a(0, "B")),
    "einsum": lambda g, e, a: cg.einsum(
        a(0, e["x"]),
        a(1, e["w"]),
        a(2, "b d, d f -> b f"),
        order=a(3, None),
        domain=a(4, None),
        over=a(5, ()),
        dtype=a(6, None),
        name=a(7, "nm"),
    ),
    "einsum3": lambda g, e, a: cg.einsum(e["x"], e["w"], e["w"], "b d, d f, e f -> b e", order=a(0, ((0, 1), (0, 1)))),
    "einsum_size": lambda g, e, a: cg.einsum(e["x"], e["w"], "b d, d (f g) -> b f g", f=a(0, 5)),
    "einsum_dom": lambda g, e, a: cg.einsum(
        e["x"], e["w"], "b d, d f -> b d f", domain=cg.Domain(a(0, True), a(1, None)), over=a(2, ("d", "f"))
    ),
    "rearrange": lambda g, e, a: cg.rearrange(a(0, e["x"]), a(1, "b (d c) -> c d b"), name=a(2, "nm"), d=a(3, 3)),
    "reshape": lambda g, e, a: cg.ops.reshape(a(0, e["n"]), a(1, (6,)), name=a(2, "nm")),
    "reshape1": lambda g, e, a: cg.ops.reshape(e["n"], (a(0, 6),)),
    "slice": lambda g, e, a: cg.ops.slice_axis(a(0, e["n"]), a(1, 1), a(2, 0), a(3, 2), a(4, 1), name=a(5, "nm")),
    "split": lambda g, e, a: cg.ops.split(a(0, e["n"]), a(1, [1, 2]), a(2, 1), name=a(3, "nm")),
    "split1": lambda g, e, a: cg.ops.split(e["n"], [a(0, 1), 2]),
    "expand": lambda g, e, a: cg.ops.expand(a(0, e["n"]), a(1, "s d -> b s d"), b=a(2, 4), name=a(3, "nm")),
    "concat": lambda g, e, a: cg.ops.concat(a(0, [e["n"], e["n"]]), a(1, 0), name=a(2, "nm")),
    "stack": lambda g, e, a: cg.ops.stack(a(0, [e["n"], e["n"]]), name=a(1, "nm")),
    "index": lambda g, e, a: e["n"][a(0, 0)],
    "index2": lambda g, e, a: e["n"][a(0, 0) : a(1, 1) : a(2, 1), ...],
    "index3": lambda g, e, a: e["n"][a(0, 0), a(1, 0)],
    "add": lambda g, e, a: e["n"] + a(0, 1),
    "radd": lambda g, e, a: a(0, 1) + e["n"],
    "sub": lambda g, e, a: a(0, 1) - e["n"],
    "mul": lambda g, e, a: a(0, 1) * e["n"],
    "pow": lambda g, e, a: e["n"] ** a(0, 1),
    "matmul_op": lambda g, e, a: e["x"] @ a(0, e["w"]),
    "matmul": lambda g, e, a: cg.ops.matmul(a(0, e["x"]), a(1, e["w"])),
    "transpose": lambda g, e, a: cg.ops.transpose(a(0, e["x"])),
    "pointwise": lambda g, e, a: cg.ops.pointwise(
        a(0, "add"), a(1, e["x"]), a(2, 1.0), inplace=a(3, False), dtype=a(4, None), name=a(5, "nm")
    ),
    "cast": lambda g, e, a: cg.ops.cast(a(0, e["x"]), a(1, "bf16"), name=a(2, "nm")),
    "reduce": lambda g, e, a: cg.reduce(a(0, e["x"]), a(1, "b d -> b"), a(2, "sum"), name=a(3, "nm")),
    "reduce_s": lambda g, e, a: cg.reduce(e["x"], "b (d c) -> b", "sum", d=a(0, 3)),
    "gather": lambda g, e, a: cg.ops.gather(a(0, e["w"]), a(1, e["ids"]), name=a(2, "nm")),
    "take_along": lambda g, e, a: cg.ops.take_along(a(0, e["ids"]), a(1, e["ids"]), name=a(2, "nm")),
    "scatter": lambda g, e, a: cg.ops.scatter(
        a(0, e["w"]), a(1, e["ids"]), a(2, g.input("u", (B, 5))), a(3, "add"), inplace=a(4, True), name=a(5, "nm")
    ),
    "arange": lambda g, e, a: cg.ops.arange(a(0, 5), a(1, "int64"), name=a(2, "nm")),
    "dropout": lambda g, e, a: cg.dropout(a(0, e["x"]), a(1, 0.1), mask=a(2, "bool"), name=a(3, "nm")),
    "opaque": lambda g, e, a: cg.opaque(
        a(0, "op"),
        a(1, [e["x"]]),
        a(2, [((B,), "fp32")]),
        flops=a(3, B),
        reads=a(4, None),
        writes=a(5, None),
        workspace=a(6, 0),
    ),
    "opaque2": lambda g, e, a: cg.opaque(
        "op", [a(0, e["x"])], [(a(1, (B,)), a(2, "fp32"))], flops={"matmul": a(3, B)}, reads=[a(4, 1)], writes=[a(5, 1)]
    ),
    "opaque3": lambda g, e, a: cg.opaque("op", [e["x"]], [a(0, ((B,), "fp32"))], flops=a(1, {"matmul": B})),
    "transfer": lambda g, e, a: cg.ops.transfer(a(0, e["x"]), a(1, "pcie"), name=a(2, "nm")),
    "collective": lambda g, e, a: cg.ops.collective(a(0, e["x"]), a(1, "all_reduce"), a(2, 8), name=a(3, "nm")),
    "conv": lambda g, e, a: cg.conv(
        a(0, e["im"]),
        a(1, "b c h w -> b o h w"),
        window=a(2, 3),
        stride=a(3, 1),
        padding=a(4, 0),
        dilation=a(5, 1),
        groups=a(6, 1),
        bias=a(7, False),
        name=a(8, "nm"),
        o=a(9, 4),
    ),
    "pool": lambda g, e, a: cg.nn.pool(
        a(0, e["im"]), a(1, "max"), window=a(2, 2), stride=a(3, None), padding=a(4, 0), name=a(5, "nm")
    ),
    "attention": lambda g, e, a: cg.attention(
        a(0, e["q"]),
        a(1, e["q"]),
        a(2, e["q"]),
        a(3, True),
        a(4, None),
        a(5, "flash"),
        softcap=a(6, None),
        p=a(7, 0),
        name=a(8, "nm"),
    ),
    "linear": lambda g, e, a: cg.linear(
        a(0, e["x"]), a(1, "b d -> b f"), bias=a(2, False), weight=a(3, None), name=a(4, "nm"), f=a(5, 4)
    ),
    "embedding": lambda g, e, a: cg.embedding(a(0, e["ids"]), a(1, e["w"]), name=a(2, "nm")),
    "softmax": lambda g, e, a: cg.softmax(a(0, e["x"]), a(1, -1), name=a(2, "nm")),
    "log_softmax": lambda g, e, a: cg.nn.log_softmax(a(0, e["x"]), a(1, -1), name=a(2, "nm")),
    "layer_norm": lambda g, e, a: cg.layer_norm(a(0, e["x"]), affine=a(1, True), bias=a(2, True), name=a(3, "nm")),
    "rms_norm": lambda g, e, a: cg.rms_norm(a(0, e["x"]), affine=a(1, True), name=a(2, "nm")),
    "rotary_tables": lambda g, e, a: cg.nn.rotary_tables(a(0, e["p"]), a(1, 6), base=a(2, 1e4), name=a(3, "nm")),
    "rotary": lambda g, e, a: cg.nn.rotary(a(0, e["q"]), a(1, e["cos"]), a(2, e["cos"]), name=a(3, "nm")),
    "mlp": lambda g, e, a: cg.nn.mlp(
        a(0, e["x"]), a(1, 4), activation=a(2, cg.gelu), bias=a(3, False), p=a(4, 0), name=a(5, "nm")
    ),
    "gated_mlp": lambda g, e, a: cg.nn.gated_mlp(
        a(0, e["x"]), a(1, 4), activation=a(2, cg.silu), bias=a(3, False), name=a(4, "nm")
    ),
    "cross_entropy": lambda g, e, a: cg.cross_entropy(a(0, e["x"]), a(1, e["ids"]), name=a(2, "nm")),
    "relu": lambda g, e, a: cg.relu(a(0, e["x"]), inplace=a(1, False)),
    "gelu": lambda g, e, a: cg.gelu(a(0, e["x"]), approximate=a(1, "none")),
    "silu": lambda g, e, a: cg.silu(a(0, e["x"]), inplace=a(1, False)),
    "sigmoid": lambda g, e, a: cg.sigmoid(a(0, e["x"])),
    "tanh": lambda g, e, a: cg.tanh(a(0, e["x"])),
    "repeat": lambda g, e, a: cg.repeat(a(0, 3), a(1, cg.relu), a(2, e["x"]), name=a(3, "nm")),
    "repeat_r": lambda g, e, a: cg.repeat(3, lambda x: a(0, x), e["x"]),
    "scan": lambda g, e, a: cg.scan(
        a(0, 2), a(1, lambda c, x: (c + x, x)), a(2, e["w"][0, 0:3]), a(3, e["n"]), name=a(4, "nm")
    ),
    "scan_r": lambda g, e, a: cg.scan(2, lambda c, x: (a(0, c), a(1, x)), e["w"][0, 0:3], e["n"]),
    "scan_r2": lambda g, e, a: cg.scan(2, lambda c, x: a(0, (c, x)), e["w"][0, 0:3], e["n"]),
    "kernel": in_kernel,
    "scope": in_scope,
    "Graph": lambda g, e, a: cg.Graph(a(0, "g"), a(1, "fp32")),
    "input": lambda g, e, a: g.input(a(0, "z"), a(1, (B,)), a(2, "fp32")),
    "input1": lambda g, e, a: g.input("z", (a(0, B),)),
    "param": lambda g, e, a: g.param(a(0, "z"), a(1, (B,)), a(2, "fp32"), grad=a(3, True)),
    "buffer": lambda g, e, a: g.buffer(a(0, "z"), a(1, (B,)), a(2, "fp32"), role=a(3, "buffer")),
    "output": lambda g, e, a: g.output(a(0, e["x"])),
    "assume": lambda g, e, a: g.assume(a(0, "B >= 2")),
    "Domain": lambda g, e, a: cg.Domain(a(0, True), a(1, None)),
}
CALLS |= {
    q.__name__: asked(q)
    for q in (
        cg.flops, cg.matmul_flops, cg.bytes_moved, cg.intensity, cg.param_count, cg.param_bytes, cg.peak_memory,
        cg.timeline, cg.lifetimes, cg.costs,
    )
}  # fmt: skip
CALLS |= {
    "filter": table(lambda t, a: t.filter(kind=a(0, "matmul"))),
    "group": table(lambda t, a: t.group(a(0, "scope"), a(1, None))),
    "bind": table(lambda t, a: t.bind(B=a(0, 3))),
}


def arguments(call):
    names = set()
    g, e = setting()
    with g:
        call(g, e, lambda i, default: names.add(i) or default)
    return sorted(names)


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_raise_or_give_nonnegative_answers(name):
    call = CALLS[name]
    for number in arguments(call):
        for odd in odd_values():
            g, e = setting()
            value = g.tensors[0] if isinstance(odd, str) and odd == "own" else odd
            try:
                with g:
                    call(g, e, lambda i, default, number=number, value=value: value if i == number else default)
                answers = [question(g, B=2) for question in (cg.flops, cg.bytes_moved, cg.peak_memory)]
            except cg.CostGraphError as error:
                length, answers = len(str(error)), []
            else:
                length = 1
            assert 0 < length <= 2000
            assert all(answer >= 0 for answer in answers), (number, value)
