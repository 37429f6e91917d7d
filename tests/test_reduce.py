"""Reductions over merged and split axes, over domains, and inside bodies."""

from math import prod

import einops
import numpy as np
import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graph_of, strides

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError, testing
from costgraph.ops.reduce import REDUCTIONS


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_strides_of_a_sum_are_torchs(data):
    shape = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    gone = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    keep = data.draw(st.booleans())
    expected = torch.empty(shape).permute(order).sum(dim=gone, keepdim=keep)
    names = "abcd"[: len(shape)]
    right = " ".join("1" if i in gone else n for i, n in enumerate(names) if keep or i not in gone)

    def build(x):
        return cg.reduce(
            cg.rearrange(x, f"{' '.join(names)} -> {' '.join(names[i] for i in order)}"),
            f"{' '.join(names)} -> {right}",
            "sum",
        )

    _, y = graph_of(build, tuple(shape))
    assert y.shape == tuple(expected.shape)
    assert [s for n, s in zip(expected.shape, strides(y), strict=True) if n > 1] == [
        s for n, s in zip(expected.shape, expected.stride(), strict=True) if n > 1
    ]


@each("operation", ["sum", "mean", "max", "min", "prod"])
@each(
    ("pattern", "shape", "sizes"),
    [
        ("b s d -> b s", (2, 3, 5), {}),
        ("b s d -> d b", (2, 3, 5), {}),
        ("b s d -> ", (2, 3, 5), {}),
        ("b s d -> b 1 d", (2, 3, 5), {}),
        ("... d -> ...", (2, 3, 5), {}),
        ("b (h p) (w q) -> b h w", (2, 6, 10), {"p": 2, "q": 5}),
        ("b s d -> b (s d)", (2, 3, 5), None),
        ("a b c d -> a (d c)", (2, 3, 5, 7), {}),
    ],
)
def test_shapes_match_einops_with_one_flop_per_element(operation, pattern, shape, sizes):
    if sizes is None:
        with pytest.raises(PatternError, match="nothing is reduced, expected an axis that the result omits"):
            graph_of(lambda x: cg.reduce(x, pattern, operation), shape)
        return
    expected = einops.reduce(torch.ones(shape), pattern, operation, **sizes)
    g, y = graph_of(lambda x: cg.reduce(x, pattern, operation, **sizes), shape)
    assert y.shape == tuple(expected.shape)
    count = 1
    for n in shape:
        count *= n
    assert cg.flops(g) == count
    reduction = cg.costs(g).filter(op=operation).total()
    assert (reduction.read, reduction.written) == (4 * count, 4 * expected.numel())


@each("dtype", ["fp32", "bf16", "int32", "bool"])
@each("operation", ["sum", "prod", "max", "any", "argmax", "argmin"])
def test_reduction_dtypes_match_torch(dtype, operation):
    formats = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "int32": torch.int32,
        "bool": torch.bool,
        "int64": torch.int64,
    }
    if dtype == "bool" and operation in ("argmax", "argmin"):
        expected = torch.int64  # torch has no argmax for bools; ours returns indices as usual
    else:
        run = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "any": torch.any, "argmax": torch.argmax}
        run["argmin"] = torch.argmin
        expected = run[operation](torch.ones(3, 5).to(formats[dtype]), dim=1).dtype
    with cg.Graph("g") as g:
        y = cg.reduce(g.input("x", (3, 5), dtype=dtype), "a b -> a", operation)
    assert formats[y.dtype.name] == expected


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.reduce(x, "a b -> a", "median"), GraphError, "operation 'median', expected one of sum, mean"),
        (lambda x: cg.reduce(x, "a b -> a", None), GraphError, "operation is None, expected text"),
        (lambda x: cg.reduce(3, "a b -> a", "sum"), GraphError, "reduce: x is 3, expected a tensor"),
        (lambda x: cg.reduce(x, None, "sum"), PatternError, "pattern None: expected text"),
        (lambda x: cg.reduce(x, "a b -> a c", "sum"), PatternError, "axis 'c' of the result is not in the operand"),
        (lambda x: cg.reduce(x, "a b+1 -> a", "sum"), PatternError, "expected axis names"),
        (lambda x: cg.reduce(x, "a b c -> a", "sum"), ShapeError, "has 2 axes, the pattern 'a b c' has 3"),
        (lambda x: cg.reduce(x, "a (b c) -> a", "sum"), ShapeError, "sizes of b and c"),
        (lambda x: cg.reduce(x, "a (b c) -> a", "sum", b=2), ShapeError, "does not split"),
        (
            lambda x: cg.reduce(x, "a b -> a", "sum", c=2),
            PatternError,
            "size given for 'c', which is not one of its axes",
        ),
        (lambda x: cg.reduce(x, "a a -> a", "sum"), PatternError, "expected each axis of the operand once"),
    ],
)
def test_refusals_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        with pytest.raises(error, match=text):
            call(x)


B, L = cg.dims("B L")


def test_reduction_operations_and_result_dtypes():
    assert sorted(REDUCTIONS) == sorted(["sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin"])
    formats = {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        for operation in REDUCTIONS:
            y = cg.reduce(x, "a b -> a", operation)
            assert (y.dtype.name, y.producer.name) == (formats.get(operation, "fp32"), operation)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
@pytest.mark.parametrize("operation", ["any", "all", "max", "min", "prod"])
def test_integer_reduction_dtypes(operation, dtype):
    with cg.Graph("g") as g:
        y = cg.reduce(g.input("x", (3, 5), dtype=dtype), "a b -> b", operation)
    expected = {"any": "bool", "all": "bool", "prod": "int64"}.get(operation, dtype)
    assert y.dtype.name == expected


@pytest.mark.parametrize(
    ("pattern", "shape", "sizes", "axes", "result"),
    [
        ("a b c -> (a b)", (2, 3, 5), {}, (2,), (6,)),
        ("a b c d -> (a b) c", (2, 3, 5, 7), {}, (3,), (6, 5)),
        ("a b c d -> 1 (a b) 1", (2, 3, 5, 7), {}, (2, 3), (1, 6, 1)),
        ("a b c d -> a (b c) 1", (2, 3, 5, 7), {}, (3,), (2, 15, 1)),
        ("a 1 c -> a", (2, 1, 5), {}, (1, 2), (2,)),
        ("a 1 c -> 1 a", (2, 1, 5), {}, (1, 2), (1, 2)),
        ("a 1 c -> (a c)", (2, 1, 5), {}, None, None),
        ("(a b) 1 c -> b (c) 1", (6, 1, 5), {"a": 2}, None, None),
        ("(a b) c -> a", (6, 5), {"a": 2}, None, (2,)),
        ("(a b) c -> (b c)", (6, 5), {"a": 2}, None, (15,)),
    ],
)
def test_merged_result_axes_match_numpy(pattern, shape, sizes, axes, result):
    with cg.Graph("g") as g:
        x = g.input("x", shape)
        try:
            y = cg.reduce(x, pattern, "sum", **sizes)
        except cg.CostGraphError:
            assert result is None
            return
        g.output(y)
    values = np.arange(prod(shape), dtype=float).reshape(shape)
    if axes is not None:
        assert y.shape == result
        expected = values.sum(axis=axes).reshape(result)
        assert np.array_equal(testing.run(g, {"x": values}).outputs[0], expected)
    elif result is not None:
        split = values.reshape(2, 3, 5)
        expected = split.sum(axis=(1, 2)) if result == (2,) else split.sum(axis=0).reshape(15)
        assert np.array_equal(testing.run(g, {"x": values}).outputs[0], expected)
    assert cg.flops(g) == prod(shape)
    testing.check(g)


@pytest.mark.parametrize("pattern", ["h s t -> s t", "h s t -> t s", "h s t -> s", "h s t -> h t", "h s t -> t 1 s"])
@pytest.mark.parametrize("dims", [("s", "t"), ("t", "s")])
def test_domain_is_kept_if_both_axes_are(pattern, dims):
    causal = cg.Domain(causal=True)
    with cg.Graph("g") as g:
        q, k = g.input("q", (2, 7, 3)), g.input("k", (2, 7, 3))
        left = " ".join(["h", *dims])
        scores = cg.einsum(q, k, f"h s d, h t d -> {left}", domain=causal, over=("s", "t"))
        y = cg.reduce(scores, pattern.replace("h s t", left), "sum")
        z = cg.relu(y)
        g.output(z)
    axes = pattern.split("-> ")[1].split()
    if "s" in axes and "t" in axes:
        assert y.domain == (causal, axes.index("s"), axes.index("t"))
    else:
        assert y.domain is None
    # two heads with 7 * 8 / 2 pairs are summed
    assert cg.costs(g).filter(op="sum").total().pointwise == 2 * 28
    assert cg.costs(g).filter(op="relu").total().pointwise == (28 if y.domain else prod(y.shape))
    testing.check(g)


def test_reduction_in_body_captures_its_operand():
    with cg.Graph("g") as g:
        x, w = g.input("x", (3, 5)), g.input("w", (3, 5, 7))

        def body(h):
            return h + cg.reduce(w, "a b c -> a b", "sum")

        g.output(cg.repeat(L, body, x))
        with cg.kernel("inside"):
            y = cg.reduce(w, "a b c -> (a b)", "max")
        g.output(y)
    assert cg.flops(g, L=2) == 2 * (3 * 5 * 7 + 3 * 5) + 3 * 5 * 7
    testing.check(g, L=2)


@pytest.mark.parametrize("dtype", ["int32", "bool", "int64"])
def test_integer_mean_is_refused_as_in_torch(dtype):
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5), dtype=dtype)
        with pytest.raises(cg.ShapeError, match=r"mean of .* expected a floating format"):
            cg.reduce(x, "a b -> a", "mean")
        for half in ("bf16", "fp64"):
            assert cg.reduce(g.input(half, (3, 5), dtype=half), "a b -> a", "mean").dtype.name == half


def test_invalid_size_error_names_function():
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError, match=r"^reduce: "):
        cg.reduce(g.input("x", (6, 5)), "(a b) c -> a", "sum", a="two")
