"""Contraction gradients: their transposes, their FLOPs, and torch's autograd."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pulls import built, check, gradients, walk

import costgraph as cg
from costgraph import testing
from costgraph.ir.graph import Domain
from costgraph.ops.elementwise import pointwise
from costgraph.testing import run


def arrays(*shapes, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.normal(size=s) for s in shapes]


def transposed(build, shapes, **dims):
    """Return <J v, g> and <v, J^T g> per operand, for a function that is linear in each operand."""
    graph, xs, results, seeds = built(build, shapes)
    forward = len(graph.ops)
    with graph:
        found = walk(results, seeds, xs)
        graph.output(results[0], *(f for f in found if f is not None))
    done = run(graph, None, **dims)
    value = {t.name: v.array for t, v in done.values if t.producer is None}
    held = np.nansum(done.outputs[0] * value[seeds[0].name])
    grads = iter(done.outputs[1:])
    pairs = []
    for x, f in zip(xs, found, strict=True):
        grad = np.zeros(value[x.name].shape) if f is None else next(grads)
        pairs.append((held, np.nansum(grad * value[x.name])))
    return pairs, graph.ops[forward:]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(testing.patterns(2))
def test_the_rule_of_two_operands_is_the_transpose(drawn):
    text, extents, shapes, _ = drawn
    given_ = {n: extents[n] for n in set(extents)}
    pairs, _ = transposed(lambda a, b: cg.einsum(a, b, text, **given_), shapes)
    for held, other in pairs:
        assert np.isclose(held, other, rtol=1e-9), text


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(testing.patterns(3))
def test_the_rule_of_three_operands_is_the_transpose(drawn):
    """In pairs where one order is the best, else in one op."""
    text, extents, shapes, _ = drawn
    pairs, _ = transposed(lambda *x: cg.einsum(*x, text, **extents), shapes)
    for held, other in pairs:
        assert np.isclose(held, other, rtol=1e-9), text


INDICES = st.builds(
    lambda h, r, p: (h, r, p), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)
)  # stride, dilation, padding


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(INDICES, st.integers(1, 4), st.integers(2, 9), st.sampled_from(["b c h", "b h", "h c r", "c h b r"]))
def test_the_rule_of_a_window_is_the_transpose(index, width, size, kept):
    stride, dilation, padding = index
    reach = (width - 1) * dilation
    size, padding = max(size, reach + 1), min(padding, reach)
    place = f"h*{stride}+r*{dilation}" + (f"-{padding}" if padding else "")
    if stride == dilation == 1 and not padding:
        place = "h+r"
    text = f"b {place}, c r -> {kept}"
    pairs, _ = transposed(lambda x, w: cg.einsum(x, w, text), [(2, size), (3, width)])
    for held, other in pairs:
        assert np.isclose(held, other, rtol=1e-9), text


def test_gradients_with_diagonals_and_single_operand_axes():
    check(lambda a, b: cg.einsum(a, b, "i i j, k -> j k"), *arrays((3, 3, 2), (2,)))
    check(lambda a, b: cg.einsum(a, b, "i i j, j -> i"), *arrays((3, 3, 2), (2,)))
    check(lambda a, b: cg.einsum(a, b, "(i j) k, k m -> m", i=2), *arrays((6, 3), (3, 2)))
    check(lambda a, b: cg.einsum(a, b, "(i j) k, k m j -> m j", i=2), *arrays((6, 3), (3, 2, 3)))
    check(lambda a, b: cg.einsum(a, b, "i, -> i"), *arrays((3,), ()))
    check(lambda a, b: cg.einsum(a, b, "i 1 j, 1 j -> j"), *arrays((3, 1, 2), (1, 2)))
    check(lambda a, b, c: cg.einsum(a, b, c, "i i, i j, j -> i j"), *arrays((3, 3), (3, 2), (2,)))


def test_gradient_over_single_operand_axis_is_a_view():
    """y[j] = sum over i of x, times sum over k of w: both gradients are views with 2 elements."""
    _, ops = check(lambda x, w: cg.einsum(x, w, "i j, j k -> j"), *arrays((3, 2), (2, 5)))
    kinds = [op.kind.name for op in ops]
    assert kinds == ["einsum", "expand", "einsum", "expand"]
    assert all(op.results[0].is_view for op in ops if op.kind.name == "expand")


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)])
def test_attention_gradients_under_a_domain(window, sizes):
    queries, keys = sizes
    from costgraph.algebra.polynomial import poly

    domain = Domain(True, None if window is None else poly(window))

    def scores(q, k, v):
        s = cg.einsum(q, k, "b s d, b t d -> b s t", domain=domain, over=("s", "t"))
        return cg.einsum(pointwise("exp", pointwise("mul", s, 0.25)), v, "b s t, b t e -> b s e")

    _, ops = check(scores, *arrays((1, queries, 2), (1, keys, 2), (1, keys, 3)))
    points = sum(
        1 for s in range(queries) for t in range(keys)
        if t <= s + keys - queries and (window is None or t > s + keys - queries - window)
    )  # fmt: skip
    flops = [op.kind.flops(op) for op in ops if op.kind.name == "einsum"]
    # dP and dV over 3 e, dQ and dK over 2 d, 2 FLOPs per index point
    assert sorted(f.matmul.constant for f in flops) == sorted([2 * points * n for n in (3, 3, 2, 2)])
    inside = [op for op in ops if op.kind.name == "pointwise"]
    assert {op.kind.flops(op).pointwise.constant for op in inside} == {points}


def test_sum_gradients_under_a_domain():
    domain = Domain(True, None)

    def sums(q, k):
        s = cg.einsum(q, k, "s d, t d -> s t", domain=domain, over=("s", "t"))
        return cg.reduce(pointwise("neg", s), "s t -> s", "sum"), cg.reduce(s, "s t -> t", "max")

    _, ops = check(sums, *arrays((4, 2), (4, 2)))
    negated = next(op for op in ops if op.kind.name == "pointwise" and op.kind.function.name == "neg")
    assert negated.kind.flops(negated).pointwise == 10  # 4 * 5 / 2 points


def test_gradient_under_single_operand_domain():
    domain = Domain(True, None)
    pairs, _ = transposed(lambda x: cg.einsum(x, "s t d -> s d", domain=domain, over=("s", "t")), [(3, 3, 2)])
    assert np.isclose(*pairs[0])


def test_undecided_orders_stay_one_op():
    """a b, b c, c d with all sizes open: neither the product nor its gradients have a best order."""
    a, b, c, d = cg.dims("A B C D")
    build = lambda *x: cg.einsum(*x, "a b, b c, c d -> a d")  # noqa: E731
    pairs, ops = transposed(build, [(a, b), (b, c), (c, d)], A=2, B=3, C=5, D=2)
    assert all(np.isclose(*p) for p in pairs)
    assert [len(op.operands) for op in ops] == [3, 3, 3]
    assert all(op.kind.orders is not None for op in ops)
    # first gradient: g is A*D, so the minimum is over (g c) b and g (c b), a chain (A D)(C D)(B C)
    expected = {2 * (2 * 2 * 5 + 2 * 5 * 3), 2 * (3 * 5 * 2 + 2 * 2 * 3)}
    from costgraph.bind.evaluate import evaluate

    assert int(evaluate(ops[0].kind.flops(ops[0]).matmul.expr, A=2, B=3, C=5, D=2)) == min(expected)


def test_gradients_have_operand_dtypes():
    with cg.Graph("g", dtype="bf16") as g:
        x, w = g.input("x", (2, 3)), g.input("w", (3, 5), "fp32")
        y = cg.einsum(x, w, "i j, j k -> i k")
        dx, dw = walk([y], [g.input("g", (2, 5), "fp32")], [x, w])
    assert (dx.dtype.name, dw.dtype.name) == ("bf16", "fp32")


def test_second_order_gradients():
    """A window's gradient is a contraction with an index on the result side: its rule is the transpose again."""
    graph, xs, results, seeds = built(lambda x, w: cg.einsum(x, w, "b h*2+r-1, c r -> b c h"), [(2, 7), (3, 3)])
    with graph:
        (dx,) = walk(results, seeds, xs[:1])
        again = graph.input("again", (2, 7))
        (ddg,) = walk([dx], [again], seeds)
        graph.output(ddg, cg.einsum(again, xs[1], "b h*2+r-1, c r -> b c h", h=4))
    found, expected = run(graph).outputs
    assert np.allclose(found, expected)


# -- FLOPs -------------------------------------------------------------------------------------------------------


def matmuls(ops):
    return [op.kind.flops(op).matmul.constant for op in ops if op.kind.name == "einsum"]


@pytest.mark.parametrize(
    ("text", "shapes", "run"),
    [
        ("i j, j k -> i k", [(7, 3), (3, 5)], lambda a, b: a @ b),
        ("n i j, n j k -> n i k", [(2, 7, 3), (2, 3, 5)], lambda a, b: a.bmm(b)),
        ("b s d, f d -> b s f", [(2, 3, 5), (7, 5)], lambda a, b: __import__("torch").nn.functional.linear(a, b)),
        ("b h s d, b h t d -> b h s t", [(2, 3, 5, 2), (2, 3, 7, 2)], lambda a, b: a @ b.mT),
    ],
)
def test_matmul_gradient_flops_match_torch(text, shapes, run):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    given_ = arrays(*shapes)
    mine, _, _, ops = gradients(lambda a, b: cg.einsum(a, b, text), given_, seed=1)
    xs = [torch.tensor(a, requires_grad=True) for a in given_]
    y = run(*xs)
    seed = torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, y.shape))
    with FlopCounterMode(display=False) as counter:
        y.backward(seed)
    assert sum(matmuls(ops)) == counter.get_total_flops()
    for a, x in zip(mine, xs, strict=True):
        assert np.allclose(a, x.grad.numpy())


CONVOLUTIONS = [
    ((2, 3, 7, 5), (5, 3, 3, 2), {}),
    ((2, 3, 7, 5), (5, 3, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 2, 11, 7), (3, 2, 3, 2), {"stride": (3, 1), "padding": (2, 0), "dilation": (2, 3)}),
    ((2, 4, 7), (6, 2, 3), {"groups": 2, "padding": 1}),
    ((2, 3, 7), (3, 1, 3), {"groups": 3}),
    ((1, 2, 6), (3, 2, 2), {"stride": 3}),  # some positions lie in no window
]


@pytest.mark.parametrize(("shape", "weight", "options"), CONVOLUTIONS)
def test_convolution_gradients_match_torch(shape, weight, options):
    """dX and dW each have the FLOPs of the forward pass, padded positions included."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    rank = len(shape) - 2
    spread = "h w"[: 2 * rank - 1]
    x_, w_ = arrays(shape, weight)

    def build(x, w):
        result = cg.conv(x, f"b c {spread} -> b o {spread}", window=weight[2:], o=weight[0], **options)
        return apply_to(result, x, w)

    mine, _, graph, ops = gradients(build, [x_, w_], seed=1)
    xs = [torch.tensor(a, requires_grad=True) for a in (x_, w_)]
    function = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}[rank]
    y = function(*xs, **options)
    seed = torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, y.shape))
    for a, b in zip(mine, torch.autograd.grad(y, xs, seed), strict=True):
        assert np.allclose(a, b.numpy())
    forward = [op.kind.flops(op).matmul.constant for op in graph.ops if "conv" in op.name][-1]
    assert matmuls(ops) == [forward, forward]
    if options.get("groups", 1) == 1:  # for groups, torch's counter assumes more channels in the backward pass
        with FlopCounterMode(display=False) as counter:
            function(*xs, **options).backward(seed)
        assert forward + sum(matmuls(ops)) == counter.get_total_flops()


def apply_to(made, x, w):
    """Apply the same convolution to an input in place of the parameter."""
    from costgraph.ir.graph import apply

    return apply(made.producer.kind, [x, w], "conv")[0]


def test_convolution_gradient_with_open_sizes():
    b, c, h, o = cg.dims("B C H O")

    def build(x, w):
        return apply_to(cg.conv(x, "b c h -> b o h", window=3, stride=2, padding=1, o=o), x, w)

    pairs, ops = transposed(build, [(b, c, h), (o, c, 3)], B=2, C=3, H=7, O=5)
    assert all(np.isclose(*p) for p in pairs)
    assert [op.kind.flops(op).matmul for op in ops] == [ops[0].kind.flops(ops[0]).matmul] * 2


def test_window_gradient_survives_a_file(tmp_path):
    graph, xs, results, seeds = built(lambda x, w: cg.einsum(x, w, "b h*2+r-1, c r -> b c h"), [(2, 7), (3, 3)])
    with graph:
        graph.output(*walk(results, seeds, xs))
    cg.save(graph, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert cg.flops(again) == cg.flops(graph)
    assert cg.bytes_moved(again) == cg.bytes_moved(graph)
    text = (tmp_path / "g.json").read_text()
    (tmp_path / "odd.json").write_text(text.replace('"sizes"', '"seizes"'))
    with pytest.raises(cg.FormatError, match="attribute 'seizes' of 'einsum'"):
        cg.load(tmp_path / "odd.json")
