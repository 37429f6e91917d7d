"""Gradients for every op kind except contractions and elementwise functions."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from pulls import built, check, gradients, walk

import costgraph as cg
from costgraph.ir.graph import BodyKind, apply
from costgraph.ops.elementwise import pointwise
from costgraph.ops.fill import assign, fill, pad
from costgraph.ops.layout import index
from costgraph.ops.registry import KINDS
from costgraph.transforms.vjp import NOT_DIFFERENTIABLE
from costgraph.transforms.vjp.table import RULES


def distinct(*shape, seed=0):
    """Return numbers that are well separated."""
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(count) / count + 0.5).reshape(shape)


def kinds(ops):
    return [op.kind.function.name if op.kind.name == "pointwise" else op.kind.name for op in ops]


def test_every_kind_has_a_rule_or_a_reason():
    bodies = {name for name, kind in KINDS.items() if issubclass(kind, BodyKind)}
    external = {name for name, kind in KINDS.items() if not kind.infer.__module__.startswith("costgraph.")}
    covered = {kind.name for kind in (*RULES, *NOT_DIFFERENTIABLE)}
    assert sorted(set(KINDS) - bodies - external - covered) == []
    assert not set(RULES) & set(NOT_DIFFERENTIABLE)
    assert all(NOT_DIFFERENTIABLE.values())


# -- reductions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("pattern", ["a b c -> a c", "a b c -> c 1 a", "a b c -> ", "a b c -> 1 b 1"])
def test_reduction_gradients(operation, pattern):
    check(lambda x: cg.reduce(x, pattern, operation), distinct(2, 3, 5))


def test_reduction_gradient_costs():
    """A sum's gradient is a view; a mean's one division per element; a maximum's 4 kernels, as in torch."""
    _, ops = check(lambda x: cg.reduce(x, "a b -> b", "sum"), distinct(3, 5))
    assert kinds(ops) == ["expand"]
    _, ops = check(lambda x: cg.reduce(x, "a b -> b", "mean"), distinct(3, 5))
    assert kinds(ops) == ["expand", "div"]
    _, ops = check(lambda x: cg.reduce(x, "a b -> b", "max"), distinct(3, 5))
    assert kinds(ops) == ["expand", "eq", "reduce", "expand", "div", "mul"]


def test_mean_gradient_with_open_sizes():
    a, b = cg.dims("A B")
    _, ops = check(lambda x: cg.reduce(x, "a b -> b", "mean"), (distinct(3, 5), (a, b)), dims={"A": 3, "B": 5})
    assert str(ops[-1].kind.scalars[1]) == "A"


def test_equal_maxima_share_the_gradient():
    torch = pytest.importorskip("torch")
    x = np.array([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    (mine,), _, _, _ = gradients(lambda t: cg.reduce(t, "a b -> a", "max"), [x], seed=1)
    t = torch.tensor(x, requires_grad=True)
    torch.amax(t, 1).backward(torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, 2)))
    assert np.allclose(mine, t.grad.numpy())


@pytest.mark.parametrize("operation", ["any", "all", "argmax", "argmin"])
def test_step_reductions_have_no_gradient(operation):
    graph, xs, results, seeds = built(lambda x: cg.reduce(x, "a b -> a", operation), [(2, 3)])
    with graph:
        assert walk(results, seeds, xs) == [None]


def test_mean_over_domain_raises():
    from costgraph.ir.graph import Domain

    def mean(q, k):
        s = cg.einsum(q, k, "s d, t d -> s t", domain=Domain(True, None), over=("s", "t"))
        return cg.reduce(s, "s t -> s", "mean")

    with pytest.raises(cg.UnsupportedError, match=r"of 'mean': mean of einsum.*expected a tensor without a domain"):
        gradients(mean, [distinct(3, 2), distinct(3, 2)])


# -- data movement -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda x: cg.rearrange(x, "a (b c) d -> c (d a) b", b=2),
        lambda x: cg.rearrange(x, "a b c -> b c a"),
        lambda x: cg.ops.reshape(x, (6, 4)),
        lambda x: cg.ops.contiguous_copy(cg.rearrange(x, "a b c -> c b a")),
        lambda x: cg.ops.slice_axis(x, 1, 1, 2),
        lambda x: cg.ops.slice_axis(x, 2, 0, 2, 2),
        lambda x: index(x, (0, slice(None), slice(None, None, 2))),
        lambda x: cg.ops.split(x, (1, 3), 1),
        lambda x: pad(x, 1, 2, 9, 2),
        lambda x: pad(x, 0, 0, 3),
        lambda x: cg.ops.expand(x, "a b c -> a n b c", n=5),
        lambda x: cg.ops.expand(cg.ops.reshape(x, (2, 1, 12)), "a 1 c -> a c b", b=3),
        lambda x: cg.ops.expand(cg.ops.reshape(x, (2, 1, 12)), "a b c -> a b c", b=3),
        lambda x: cg.ops.concat([x, pointwise("exp", x)], 1),
        lambda x: cg.ops.stack([x, x]),
        lambda x: cg.ops.transfer(x),
        lambda x: pointwise("mul", x, fill(x.shape, 2.5, x.dtype)),
        lambda x: assign(fill(x.shape, 0, "fp32"), x),
        lambda x: assign(pointwise("exp", x), pointwise("square", x)),
        lambda x: pointwise("mul", x, cg.ops.cast(cg.ops.arange(3), "fp64")),
    ],
)
def test_data_movement_gradients(build):
    check(build, distinct(2, 4, 3))


def test_view_gradients_are_views():
    _, ops = check(lambda x: cg.rearrange(x, "a b c -> c a b"), distinct(2, 3, 5))
    assert ops[0].results[0].is_view
    _, ops = check(lambda x, y: cg.ops.concat([x, y], 0), distinct(2, 3), distinct(5, 3))
    assert all(op.results[0].is_view for op in ops)
    _, ops = check(lambda x: cg.ops.contiguous_copy(cg.rearrange(x, "a b -> b a")), distinct(2, 3))
    assert kinds(ops) == ["rearrange"]  # the copy gets the gradient of its result


def test_split_parts_are_marked():
    with cg.Graph("g") as g:
        parts = cg.ops.split(g.input("x", (5,)), (2, 3))
        alone = cg.ops.slice_axis(parts[1], 0, 0, 2)
    assert [p.producer.kind.split for p in (*parts, alone)] == [True, True, False]


# -- indexing ----------------------------------------------------------------------------------------------------

IDS = np.array([[0.0, 2.0], [2.0, 1.0]])


def test_gather_gradient_accumulates_repeated_rows():
    """One row is gathered twice: its gradients add up."""
    _, ops = check(lambda t, i: cg.ops.gather(t, i), distinct(5, 3), IDS, dtypes={1: "int64"})
    assert kinds(ops) == ["fill", "scatter"]
    # zeros are written to 15 elements; 12 updates are read, added and written, and their target rows are read
    read, written = sum(ops[1].kind.reads(ops[1])[i].constant for i in (0, 2)), ops[1].kind.writes(ops[1])[0].constant
    assert (ops[0].kind.writes(ops[0])[0].constant, read, written) == (15, 24, 12)
    assert ops[1].kind.flops(ops[1]).pointwise == 12


def test_embedding_gradients_match_torch():
    torch = pytest.importorskip("torch")
    table = distinct(5, 3)
    (mine,), _, _, _ = gradients(lambda t, i: cg.ops.gather(t, i), [table, IDS], dtypes={1: "int64"}, seed=1)
    t = torch.tensor(table, requires_grad=True)
    y = torch.nn.functional.embedding(torch.tensor(IDS, dtype=torch.int64), t)
    y.backward(torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, y.shape)))
    assert np.allclose(mine, t.grad.numpy())


def test_take_along_gradients():
    check(lambda x, i: cg.ops.take_along(x, i), distinct(2, 5), np.array([[0.0, 3.0, 3.0], [4.0, 1.0, 4.0]]),
          dtypes={1: "int64"})  # fmt: skip


@pytest.mark.parametrize("mode", ["add", "set"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("along", [True, False])
def test_scatter_gradients(mode, inplace, along):
    ids = np.array([[0.0, 3.0], [4.0, 1.0]]) if along else np.array([3.0, 0.0])
    updates = distinct(2, 2) if along else distinct(2, 5)
    target = distinct(2, 5) if along else distinct(4, 5)

    def build(x, i, u):
        return cg.ops.scatter(pointwise("copy", x), i, u, mode, inplace=inplace, along=along)

    check(build, target, ids, updates, dtypes={1: "int64"})


def test_indices_along_an_axis_must_match_its_shape():
    with (
        cg.Graph("g") as g,
        pytest.raises(cg.ShapeError, match=r"indices i\(3, 2.*along x\(2, 5.*expected the same axes except the last"),
    ):
        cg.ops.scatter(g.input("x", (2, 5)), g.input("i", (3, 2), "int64"), g.input("u", (3, 2)), along=True)


# -- random, windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["bool", "fp32"])
def test_dropout_gradients(mask):
    _, ops = check(lambda x: cg.dropout(x, 0.25, mask=mask), distinct(3, 5))
    assert kinds(ops) == ["masked_scale"]
    assert ops[0].kind.flops(ops[0]).pointwise == 30  # 2 per element


def with_argmax(made):
    """The same pooling with a second result, the argmax positions, as in a backward pass."""
    return apply(replace(made.producer.kind, indices=True), made.producer.operands, "pool")[0]


POOLS = [((2, 7), {"window": (3,)}), ((1, 2, 5, 7), {"window": 2, "stride": (1, 2), "padding": 1}),
         ((1, 1, 7, 5), {"window": (3, 2), "stride": 2, "padding": (1, 1)})]  # fmt: skip


@pytest.mark.parametrize("operation", ["mean", "max"])
@pytest.mark.parametrize(("shape", "options"), POOLS)
def test_pooling_gradients(operation, shape, options):
    def build(x):
        pooled = cg.nn.pool(x, operation, **options)
        return with_argmax(pooled) if operation == "max" else pooled

    (mine,), ops = check(build, distinct(*shape))
    (op,) = ops
    # one per window element, as in the forward pass; a maximum routes its gradient to one position
    forward = op.graph.ops[0]
    windows = int(prod(forward.results[0].shape))
    assert op.kind.flops(op).pointwise == (windows if operation == "max" else forward.kind.flops(forward).pointwise)
    torch = pytest.importorskip("torch")
    if len(shape) == 4:
        f = torch.nn.functional.max_pool2d if operation == "max" else torch.nn.functional.avg_pool2d
        window = options["window"]
        x = torch.tensor(distinct(*shape), requires_grad=True)
        y = f(x, window, options.get("stride"), options.get("padding", 0))
        y.backward(torch.tensor(np.random.default_rng(0).uniform(0.5, 1.5, y.shape)))
        assert np.allclose(mine, x.grad.numpy())


def test_max_pool_saves_argmax_positions():
    """8-byte positions; the input is saved for its shape only and never read."""
    asked = []
    _, _, _, ops = gradients(
        lambda x: with_argmax(cg.nn.pool(x, "max", window=(2,))), [distinct(2, 6)], saved=lambda t: asked.append(t) or t
    )
    assert [(t.name, t.dtype.name) for t in asked] == [("x0", "fp64"), ("pool_1", "int64")]
    assert [n.constant for n in ops[0].kind.reads(ops[0])] == [6, 0, 6]


def test_max_pool_without_saved_positions_raises():
    with pytest.raises(cg.UnsupportedError, match=r"backward of 'max_pool': .* expected attribute 'indices'"):
        gradients(lambda x: cg.nn.pool(x, "max", window=(2,)), [distinct(2, 6)])


# -- collectives and opaque ops ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "back", "shape"),
    [
        ("all_reduce", "all_reduce", (3, 2)),
        ("all_gather", "reduce_scatter", (3, 2)),
        ("reduce_scatter", "all_gather", (6, 2)),
        ("all_to_all", "all_to_all", (3, 2)),
        ("send", "send", (3, 2)),
    ],
)
def test_collective_gradients(name, back, shape):
    graph, xs, results, seeds = built(lambda x: cg.ops.collective(x, name, 3), [shape])
    with graph:
        (dx,) = walk(results, seeds, xs)
    assert dx.producer.kind.collective == back
    assert dx.sizes == xs[0].sizes


def test_transfer_gradient_uses_the_same_link():
    graph, xs, results, seeds = built(lambda x: cg.ops.transfer(x, "nvlink"), [(3,)])
    with graph:
        (dx,) = walk(results, seeds, xs)
    assert dx.producer.kind.link == "nvlink"


def stated(**backward):
    n = cg.dims("N")

    def build(x, y):
        return cg.opaque("fft", [x, y], [(n,), (n,)], flops=5 * n, backward=backward)

    return built(build, [(n,), (n,)])


def test_opaque_op_with_declared_backward():
    """7N FLOPs; reads both gradients, the second input and the first output, 8N bytes each; writes 2 gradients."""
    n = cg.dims("N")
    graph, xs, results, seeds = stated(
        flops={"matmul": 7 * n}, saves={"inputs": (1,), "outputs": [0]}, workspace=16 * n
    )
    asked = []
    with graph:
        grads = walk(results, seeds, xs, lambda t: asked.append(t) or t)
    op = grads[0].producer
    assert asked == [xs[1], results[0]]
    assert op is grads[1].producer
    assert op.operands == (*seeds, *asked)
    assert op.kind.flops(op).matmul.expr == 7 * n
    assert [r.expr for r in op.kind.reads(op)] == [n] * 4
    assert op.kind.workspace.expr == 16 * n


def test_declared_bytes_of_backward_pass():
    """In total or per tensor: 24 bytes are 3 8-byte elements; absent gradients read nothing."""
    n = cg.dims("N")
    for reads, expected in ((24, [3, 0, 0]), ([8, 16, 32], [1, 2, 4])):
        graph, xs, results, seeds = stated(flops=0, saves={"inputs": [0]}, reads=reads, writes=[8 * n, 16 * n])
        with graph:
            op = walk(results, seeds, xs)[0].producer
        assert [r.constant for r in op.kind.reads(op)] == expected
        assert [w.expr for w in op.kind.writes(op)] == [n, 2 * n]


def test_only_required_gradients_are_computed():
    graph, _, results, seeds = stated(flops=0, saves={}, reads=[8, 16], writes=[8, 16])
    from costgraph.transforms.vjp.table import VJPContext, rule_of

    op = results[0].producer
    with graph:
        first, second = rule_of(op)(VJPContext(op, (None, seeds[1]), (False, True), lambda t: t))
    assert first is None
    backward_op = second.producer
    assert len(backward_op.results) == 1
    assert [r.constant for r in backward_op.kind.reads(backward_op)] == [2]
    assert [w.constant for w in backward_op.kind.writes(backward_op)] == [2]


@pytest.mark.parametrize(
    ("backward", "text"),
    [
        ({"flops": 1}, "expected a mapping with flops and saves"),
        ({"flops": 1, "saves": {}, "more": 1}, "no keys but flops, saves, reads, writes, workspace"),
        ({"flops": 1, "saves": {"input": [0]}}, "expected indices by 'inputs' and 'outputs'"),
        ({"flops": 1, "saves": {"inputs": [2]}}, r"saves inputs \(2,\), expected indices below 2"),
        ({"flops": 1, "saves": {}, "reads": [1]}, "reads: 1 amounts, expected one for each of 2"),
        ({"flops": {}, "saves": {}}, "no FLOPs stated"),
        ({"flops": 1, "saves": {}, "workspace": -1}, "workspace: -1, expected an amount that is not negative"),
    ],
)
def test_invalid_backward_declarations_raise(backward, text):
    with pytest.raises(cg.CostGraphError, match=text):
        stated(**backward)


def test_opaque_op_without_backward_raises():
    with pytest.raises(cg.UnsupportedError, match="backward of 'fft': it has no backward costs, expected backward= of"):
        gradients(lambda x: cg.opaque("fft", [x], (3,), flops=0), [distinct(3)])


# -- files -------------------------------------------------------------------------------------------------------


def every_new_attribute():
    n = cg.dims("N")
    with cg.Graph("g") as g:
        x, ids = g.input("x", (n, 6)), g.input("i", (n, 2), "int64")
        part, _ = cg.ops.split(x, (2, 4))
        zeros = fill((n, 6), 0.5)
        total = cg.ops.scatter(zeros, ids, part, along=True)
        assigned = assign(fill((n, 2)), part)
        mean = pointwise("div", x, x.sizes[0])
        top = with_argmax(cg.nn.pool(x, "max", window=(2,)))
        function = cg.ops.functions.Function("own", 1, 2, grad=(("mul", "g", "a"),))
        y = cg.opaque("fft", [x], (n,), flops=0, backward={"flops": n, "saves": {"inputs": [0]}, "reads": 8 * n})
        g.output(total, assigned, mean, top, y, pad(x, 1, 1, 9), pointwise(function, x))
        seed = g.input("s", (n, 3))
        kind = top.producer.kind
        kind = KINDS["pool_backward"](pattern=kind.pattern, extents=kind.extents, operation=kind.operation)
        g.output(*apply(kind, [seed, x, top.producer.results[1]], "pool_backward"))
    return g


def test_new_kinds_and_attributes_survive_a_file(tmp_path):
    graph = every_new_attribute()
    cg.save(graph, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert cg.flops(again) == cg.flops(graph)
    assert cg.bytes_moved(again) == cg.bytes_moved(graph)
    assert cg.peak_memory(again) == cg.peak_memory(graph)
    cg.save(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "g.json").read_text()


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: fill((2,), "0"), "fill: value '0', expected a number"),
        (lambda x: assign(x, x[:2]), r"assign .* expected equal shapes"),
        (
            lambda x: assign(cg.ops.expand(x, "a -> n a", n=2), cg.ops.stack([x, x])),
            "expected a tensor that is not expanded",
        ),
        (lambda x: pad(x, 0, 2, 4), "room is -1 on axis 0, expected 3 positions from 2 by 1 within 4"),
        (lambda x: pad(x, 0, -1, 4), "start is -1 on axis 0"),
        (lambda x: pad(x, 0, 0, 4, 0), "step 0, expected a positive integer"),
        (lambda x: pad(x, 1, 0, 4), "axis 1 of x"),
    ],
)
def test_invalid_gradient_ops_raise(make, text):
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError, match=text):
        make(g.input("x", (3,)))


def test_second_rule_for_a_kind_raises():
    with pytest.raises(cg.GraphError, match="op kind 'einsum' already has a vector-Jacobian rule, expected a new name"):
        cg.vjp(KINDS["einsum"])(lambda pull: [])


def test_rule_requires_an_op_kind_class():
    with pytest.raises(cg.GraphError, match=r"vjp: kinds\[0\] is 'einsum', expected a type"):
        cg.vjp("einsum")
