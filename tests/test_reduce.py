import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graph_of, strides

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError


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


@pytest.mark.parametrize("operation", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(
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
def test_shapes_are_those_of_einops_and_each_element_costs_one(operation, pattern, shape, sizes):
    if sizes is None:
        with pytest.raises(PatternError, match="nothing is reduced, expected an axis that the result leaves out"):
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int32", "bool"])
@pytest.mark.parametrize("operation", ["sum", "prod", "max", "any", "argmax", "argmin"])
def test_formats_are_torchs(dtype, operation):
    formats = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "int32": torch.int32,
        "bool": torch.bool,
        "int64": torch.int64,
    }
    if dtype == "bool" and operation in ("argmax", "argmin"):
        expected = torch.int64  # torch has no argmax of bools; indices are indices
    else:
        run = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "any": torch.any, "argmax": torch.argmax}
        run["argmin"] = torch.argmin
        expected = run[operation](torch.ones(3, 5).to(formats[dtype]), dim=1).dtype
    with cg.Graph("g") as g:
        y = cg.reduce(g.input("x", (3, 5), dtype=dtype), "a b -> a", operation)
    assert formats[y.dtype.name] == expected


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: cg.reduce(x, "a b -> a", "median"), GraphError, "operation 'median', expected one of sum, mean"),
        (lambda x: cg.reduce(x, "a b -> a", None), GraphError, "operation is None, expected text"),
        (lambda x: cg.reduce(3, "a b -> a", "sum"), GraphError, "reduce: x is 3, expected a tensor"),
        (lambda x: cg.reduce(x, None, "sum"), PatternError, "pattern None: expected text"),
        (lambda x: cg.reduce(x, "a b -> a c", "sum"), PatternError, "axis 'c' of the result is not in the operand"),
        (lambda x: cg.reduce(x, "a b+1 -> a", "sum"), PatternError, "expected names"),
        (lambda x: cg.reduce(x, "a b c -> a", "sum"), ShapeError, "has 2 axes, the pattern 'a b c' has 3"),
        (lambda x: cg.reduce(x, "a (b c) -> a", "sum"), ShapeError, "sizes of b and c"),
        (lambda x: cg.reduce(x, "a (b c) -> a", "sum", b=2), ShapeError, "does not split"),
        (lambda x: cg.reduce(x, "a b -> a", "sum", c=2), PatternError, "size given for 'c', which is no axis of it"),
        (lambda x: cg.reduce(x, "a a -> a", "sum"), PatternError, "expected each axis of the operand once"),
    ],
)
def test_refusals_name_the_place_the_value_and_what_was_expected(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        with pytest.raises(error, match=text):
            call(x)
