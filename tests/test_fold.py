"""Folding: equal unrolled blocks become a loop with the costs of the same model at any depth."""

from collections import Counter
from fractions import Fraction

import pytest
from budget import drawing
from each import each
from hypothesis import assume, given, reject
from hypothesis import strategies as st

import costgraph as cg
from costgraph import testing
from costgraph.algebra.polynomial import ZERO, poly
from costgraph.ir.graph import Call
from costgraph.ops.opaque import CustomCall
from costgraph.testing.properties import QUESTIONS, Trial

B, D, F, L, S = cg.dims("B D F L S")
SIZES = {"B": 3, "D": 5, "F": 7}
COSTS = {name: ask for name, ask in QUESTIONS.items() if name != "fused"}


def answers(g, **sizes):
    rows = Counter()
    for row in cg.costs(g, **sizes).rows:
        rows[row.kind, row.phase, row.dtype, row.direction] += row.amount
    return {name: Fraction(ask(g, **sizes)) for name, ask in COSTS.items()} | dict(rows)


# -- unrolled blocks ---------------------------------------------------------------------------------------------


def residual(g, i, x, *rest):
    return x + cg.nn.mlp(cg.layer_norm(x), F)


def shared(g, i, x, mask, w):
    # all blocks read one outer tensor and share one parameter
    return cg.relu(x * mask) @ w


def two_back(g, i, x, *rest):
    # also reads the output of the block before the previous one
    history.append(x)
    return cg.tanh(x) + history[max(i - 1, 0)]


def held(g, i, x, *rest):
    return cg.ops.keep_alive(cg.tanh(cg.relu(x)), x)


def passed(g, i, x, *rest):
    y = cg.softmax(x @ g.param("w", (D, D)))
    return cg.rearrange(cg.rearrange(y, "b d -> d b"), "d b -> b d") + x


history = []
BODIES = {f.__name__: f for f in (residual, shared, two_back, held, passed)}


def model(body, count, edges=()):
    """A stack of blocks; edge blocks can have extra ops."""
    history.clear()
    with cg.Graph("model") as g:
        x = cg.gelu(g.input("x", (B, D)))
        around = (cg.relu(g.input("mask", (B, D))), g.param("w", (D, D)))
        for i in range(count):
            with cg.scope(f"net/h/{i}"):
                x = body(g, i, x, *around)
                for edge, at in edges:
                    x = edge(g, x) if i == at % count else x
        g.output(cg.reduce(x, "b d -> b", "sum"))
    return g


@pytest.mark.parametrize("name", BODIES)
def test_folded_blocks_cost_the_same_as_unrolled_blocks(name):
    sizes = {k: n for k, n in SIZES.items() if k != "F" or name == "residual"}
    folded = cg.fold(model(BODIES[name], 7), "net/h", "L")
    (loop,) = [op for op in folded.ops if op.loop is not None]
    assert loop.name == "net/h"
    least = cg.timeline(folded, **sizes).holds_from.get("L", 1)
    formula = cg.peak_memory(folded, **sizes)
    for n in range(3, 12):
        plain = model(BODIES[name], n)
        assert answers(folded, L=n, **sizes) == answers(plain, **sizes), n
        if n >= least:
            known = {"L": n} if hasattr(formula, "free_symbols") and formula.free_symbols else {}
            assert cg.evaluate(formula, **known) == cg.peak_memory(plain, **sizes)


def test_folded_graph_keeps_all_laws():
    testing.check(cg.fold(model(residual, 4), "net/h", "L"), L=5, **SIZES)


def test_fold_removes_block_numbers_from_names():
    folded = cg.fold(model(residual, 4), "net/h", "L")
    assert {op.scope for op in folded.walk() if op.name.startswith("net/")} == {
        "net", "net/h", "net/h/layer_norm/norm", "net/h/mlp", "net/h/mlp/up", "net/h/mlp/down"
    }  # fmt: skip
    assert [t.name for t in folded.params] == [
        "w", "net/h/layer_norm/weight", "net/h/layer_norm/bias", "net/h/mlp/up/weight", "net/h/mlp/down/weight"
    ]  # fmt: skip
    assert not folded.defaults


def turning(period):
    """Layers in which every `period`-th is of another kind, with extra parameters."""

    def body(g, i, x, *rest):
        if i % period < period - 1:
            return cg.gelu(x @ g.param("w", (D, D))) + x
        return cg.tanh(x) * g.param("scale", (D,)) + x

    return body


@pytest.mark.parametrize(
    ("what", "period", "count"),
    [
        ("forward", 2, 8), ("forward", 3, 14), ("step", 2, 9), ("step, folded first", 2, 8),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [
            ("forward", 2, 9), ("forward", 4, 20), ("forward", 5, 24), ("step", 3, 14), ("step, folded first", 3, 14),
        ]),
    ],
)  # fmt: skip
def test_alternating_layers_fold_by_period(period, count, what):
    def made(n, fold):
        graph = model(turning(period), n)
        (x,) = graph.outputs[0].producer.operands
        with graph:
            graph.outputs = []
            graph.output(cg.reduce(cg.einsum(x, graph.param("head", (D, F)), "b d, d f -> b f"), "b f ->", "mean"))
        if what == "forward":
            return cg.fold(graph, default=True) if fold else graph
        first = fold and what.endswith("first")
        step = cg.training_step(cg.fold(graph, default=True) if first else graph, optimizer=cg.SGD())
        return cg.fold(step, default=True) if fold and not first else step

    folded = made(count, fold=True)
    assert folded.defaults == {"L": count}
    for n in (count, count + period, count + 3 * period):
        assert answers(folded, L=n, **SIZES) == answers(made(n, fold=False), **SIZES), n
    with pytest.raises(cg.BindingError, match=r"expected a (positive |nonnegative )?integer"):
        cg.flops(folded, L=count + 1, **SIZES)


def extra(g, x):
    return cg.tanh(x)


@pytest.mark.parametrize(
    ("edges", "outside"), [(((extra, 0),), 1), (((extra, -1),), 1), (((extra, 0), (extra, -1)), 2), (((extra, 1),), 2)]
)
def test_differing_edge_blocks_stay_outside_the_loop(edges, outside):
    folded = cg.fold(model(residual, 6, edges), "net/h", "L")
    (loop,) = [op for op in folded.ops if op.loop is not None]
    assert loop.kind.count == poly(L) - outside
    for n in (6, 7, 9):
        assert answers(folded, L=n, **SIZES) == answers(model(residual, n, edges), **SIZES)
    with pytest.raises(cg.BindingError, match=f"L={outside}"):
        cg.flops(folded, L=outside, **SIZES)


def test_two_stacks_fold_separately():
    def both(n, m):
        with cg.Graph("g") as g:
            x = y = g.input("x", (B, D))
            for i in range(n):
                with cg.scope(f"encoder/{i}"):
                    x = x + cg.nn.mlp(x, F)
            for i in range(m):
                with cg.scope(f"decoder/{i}"):
                    y = cg.softmax(y @ g.param("w", (D, D))) * x  # every decoder block reads the encoder output
            g.output(y)
        return g

    folded = cg.fold(cg.fold(both(4, 3), "encoder", "N"), "decoder", "M")
    assert answers(folded, N=6, M=5, **SIZES) == answers(both(6, 5), **SIZES)
    assert answers(cg.fold(both(4, 3)), L_encoder=6, L_decoder=5, **SIZES) == answers(both(6, 5), **SIZES)


def stages(*depths, widths):
    """Stages of blocks, as in convolutional networks: `widths` parameters in each block of a stage."""
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for j in range(depth):
                with cg.scope(f"net/stages/{i}/blocks/{j}"):
                    for k in range(width):
                        x = cg.relu(x @ g.param(f"w{k}", (D, D)))
        g.output(x)
    return g


def test_fold_without_path_folds_every_uniform_stack():
    """Without a path, different stages fold into loops over blocks and equal stages into a loop over stages."""
    folded = cg.fold(stages(4, 3, 5, widths=(1, 2, 3)), None, "N")
    counts = {f"N_{i}_blocks": n for i, n in enumerate((6, 4, 7))}
    assert answers(folded, **counts, B=3, D=5) == answers(stages(6, 4, 7, widths=(1, 2, 3)), B=3, D=5)
    alike = cg.fold(stages(*(3,) * 4, widths=(2,) * 4))
    assert answers(alike, L=6, B=3, D=5) == answers(stages(*(3,) * 6, widths=(2,) * 6), B=3, D=5)
    weights = sum(w * cg.dims(f"N_{i}_blocks") for i, w in enumerate((1, 2, 3)))
    assert cg.param_count(folded) == (cg.dims("D") ** 2 * weights).expand()
    assert cg.param_count(alike) == 3 * 2 * cg.dims("D") ** 2 * cg.dims("L")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: stages(2, 2, widths=(1, 2)), "no scope has blocks 0, 1, ..., expected a graph with a stack of layers"),
        (lambda: stages(2, 2, 2, widths=(1, 2, 3)), "blocks 0 and 1 differ: block 1 has"),
    ],
)
def test_fold_without_uniform_stack_raises(make, text):
    with pytest.raises(cg.GraphError, match=text):
        cg.fold(make())


def test_per_block_outputs_become_a_stacked_output():
    def cached(n):
        with cg.Graph("g") as g:
            x = g.input("x", (B, D))
            for i in range(n):
                with cg.scope(f"h/{i}"):
                    key = x @ g.param("w", (D, D))
                    x = cg.relu(key)
                    g.output(key)
            g.output(x)
        return g

    folded = cg.fold(cached(4), "h", "L")
    assert [str(n) for n in folded.outputs[0].sizes] == ["L", "B", "D"]
    assert answers(folded, L=7, B=3, D=5) == answers(cached(7), B=3, D=5)


# -- folding unrolled graphs -------------------------------------------------------------------------------------


def looped():
    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D)
        x = cg.repeat(L, lambda x: x + cg.nn.mlp(cg.layer_norm(x), F), x, name="layers")
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


STEPS = {
    "forward": looped,
    "backward": lambda: cg.backward(looped()),
    "checkpointed": lambda: cg.training_step(looped(), optimizer=cg.SGD(), checkpoint=cg.every_block()),
    "sgd": lambda: cg.training_step(looped(), optimizer=cg.SGD(momentum=0.9)),
    "foreach": lambda: cg.training_step(looped(), optimizer=cg.AdamW(implementation="foreach")),
    "for-loop": lambda: cg.training_step(looped(), optimizer=cg.AdamW(implementation="for-loop")),
    "mixed": lambda: cg.training_step(looped(), optimizer=cg.AdamW(), precision="bf16-mixed"),
}


@pytest.mark.parametrize("name", [
    n if n in ("forward", "checkpointed", "foreach", "mixed") else pytest.param(n, marks=pytest.mark.long)
    for n in STEPS
])  # fmt: skip
def test_unrolled_graph_folds_back(name):
    graph = STEPS[name]()
    folded = cg.fold(cg.unroll(graph, L=5), "layers", "L")
    assert any(getattr(op.kind, "reverse", None) for op in folded.ops) is (name != "forward")
    for n in (1, 2, 3, 5, 8):
        assert answers(folded, L=n, **SIZES) == answers(graph, L=n, **SIZES), n
    assert cg.peak_memory(folded, B=3, D=5, F=7) == cg.peak_memory(graph, B=3, D=5, F=7)
    if name != "forward":
        assert set(folded.gradients) == set(folded.params)


def test_folded_training_step_keeps_all_laws():
    testing.check(cg.fold(cg.unroll(STEPS["for-loop"](), L=4), "layers", "L"), L=3, **SIZES)


def test_training_step_of_folded_model_matches_loop():
    folded = cg.training_step(cg.fold(cg.unroll(looped(), L=4), "layers", "L"))
    assert answers(folded, L=6, **SIZES) == answers(cg.training_step(looped()), L=6, **SIZES)


def alone(graph, point):
    """A loop whose count is a symbol used nowhere else, and the symbol."""
    free = Trial(graph, point).counts
    counts = Counter(str(op.kind.count) for op in graph.walk() if op.loop is not None)
    loops = (op for op in graph.ops if op.loop is not None)
    loop = next((op for op in loops if (name := str(op.kind.count)) in free and counts[name] == 1), None)
    assume(loop is not None)
    return loop, str(loop.kind.count)


def folded_back(graph, loop, sizes):
    """Fold an unrolled loop; swapped carries, and inner loops with equal names, raise."""
    try:
        return cg.fold(cg.unroll(graph, **sizes), loop.name, "N")
    except cg.GraphError:
        reject()


@given(case=testing.ops("repeat"))
@drawing(30)
def test_a_drawn_loop_that_is_unrolled_and_folded_back_costs_the_same(case):
    graph, point = case
    loop, name = alone(graph, point)
    folded = folded_back(graph, loop, {**point, name: 5})
    for n in (4, 5, 8):
        plain = cg.unroll(graph, **{**point, name: n})
        for question, ask in COSTS.items():
            assert Fraction(ask(folded, N=n)) == Fraction(ask(plain)), question


@given(case=testing.losses(5, around="repeat"), optimizer=st.sampled_from(["foreach", "for-loop"]))
@drawing(16)
def test_a_drawn_training_step_is_folded_back(case, optimizer):
    graph, point = case
    loop, name = alone(graph, point)
    try:
        gradients = cg.backward(graph).gradients
    except cg.UnsupportedError:  # for example the mean of a tensor restricted to a domain
        reject()
    except cg.GraphError as error:  # in-place ops can overwrite saved tensors
        if "has overwritten in place" not in str(error):
            raise
        reject()
    assume(any(t.role == "param" for t in gradients))  # otherwise nothing is updated
    step = cg.training_step(graph, optimizer=cg.AdamW(implementation=optimizer))
    # the first and last iterations can be peeled off the loop, as their gradients differ
    assume(not any(op.name.startswith((f"{loop.name}.first", f"{loop.name}.last")) for op in step.ops))
    try:
        folded = folded_back(step, loop, {**point, name: 6})
    except cg.BindingError as error:  # a one-iteration loop next to it has nothing left between its peeled ends
        if "count of" not in str(error):
            raise
        reject()
    for n in (4, 6, 9):
        plain = cg.unroll(step, **{**point, name: n})
        for question, ask in COSTS.items():
            assert Fraction(ask(folded, N=n)) == Fraction(ask(plain)), question


# -- torch foreach calls -----------------------------------------------------------------------------------------


def stated(g, target, operands, shape, *, of=None, arguments=None, phase="forward", pointwise=0):
    """Add a call as a trace records it."""
    sizes = tuple(poly(n) for n in shape)
    places = tuple({"operand": i} for i in range(len(operands)))
    kind = CustomCall(outputs=((sizes, operands[0].dtype, None, of, ZERO),), pointwise=poly(pointwise))
    op = g.add_op(kind, operands, target.partition(".")[0], phase)
    op.call = Call(target, arguments or places, {}, (0,))
    return op.results


def listed(count, numbers=0.5):
    """A stack whose weights are updated by foreach calls, one entry per block and one for an outer weight."""
    with cg.Graph("g") as g:
        x, head = g.input("x", (B, 5)), g.param("head", (5, 5))
        for i in range(count):
            with cg.scope(f"h/{i}"):
                x = stated(g, "mm.default", (x, g.param("w", (5, 5))), (B, 5), pointwise=50 * B)[0]
        g.output(stated(g, "mm.default", (x, head), (B, 5), pointwise=50 * B)[0])
        weights = [head, *(t for t in g.params if t is not head)]

        def each(target, lists, of=None, number=None, rate=1):
            row = [({"operand": i},) for i in range(len(lists))]
            for i, tensors in enumerate(zip(*lists, strict=True)):
                facts = (*row, number[i] if isinstance(number, list) else number)
                yield stated(
                    g, target, tensors, (5, 5), of=of, arguments=facts, phase="optimizer", pointwise=25 * rate
                )[0]

        roots = list(each("_foreach_sqrt.default", [weights]))
        roots = list(each("_foreach_mul_.Scalar", [roots], 0, numbers))
        list(each("_foreach_add_.List", [weights, roots], 0, rate=2))
    return g


def test_foreach_calls_become_loops():
    folded = cg.fold(listed(4), "h", "L")
    loops = [op for op in folded.ops if op.loop is not None]
    assert [op.name for op in loops] == ["h", "h.optimizer", "h.optimizer_1", "h.optimizer_2"]
    # the result of one call lives until the next, one storage per block
    assert [str(t.shape) for t in loops[2].operands] == ["(L, 5, 5)"]
    for n in (3, 4, 9):
        assert answers(folded, L=n, B=3) == answers(listed(n), B=3)


def test_mismatched_foreach_calls_raise():
    with pytest.raises(cg.GraphError, match="blocks 1 and 2 differ: '_foreach_mul__3' has call"):
        cg.fold(listed(4, [0.5, 0.5, 0.5, 0.25, 0.5]), "h", "L")


def test_folded_foreach_calls_unroll():
    folded = cg.fold(listed(4), "h", "L")
    assert answers(cg.unroll(folded, L=6), B=3) == answers(listed(6), B=3)


def test_folded_foreach_calls_survive_a_file(tmp_path):
    folded = cg.fold(listed(4), "h", "L")
    cg.save(folded, tmp_path / "g.json")
    assert answers(cg.load(tmp_path / "g.json"), L=5, B=3) == answers(folded, L=5, B=3)


# -- errors ------------------------------------------------------------------------------------------------------


def different(g, i, x, *rest):
    return cg.relu(x) if i % 2 else cg.tanh(x @ g.param("w", (D, D)))


def growing(g, i, x, *rest):
    return cg.linear(cg.linear(x, "b d -> b f", f=F * (i + 1)), "b f -> b d", d=D)


def scaled(g, i, x, *rest):
    return x * (i + 1)


def rising(g, i, x, *rest):
    for _ in range(i // 2):
        x = cg.tanh(x)
    return x @ g.buffer("w", (D, D))


def crossed(g, i, x, *rest):
    a, b = cg.relu(x), cg.tanh(x)
    return (b if i >= 3 else a) + a


def tapped(count):
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for i in range(count):
            with cg.scope(f"h/{i}"):
                x = cg.relu(x)
            if i == 1:
                second = x
        g.output(x + second)
    return g


def kept(count):
    with cg.Graph("g") as g:
        x, held = g.input("x", (B, D)), []
        for i in range(count):
            with cg.scope(f"h/{i}"):
                x = cg.relu(x)
            held.append(x)
        g.output(cg.ops.keep_alive(cg.tanh(x), held[2]))
    return g


def shuffled(order):
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for i in order:
            with cg.scope(f"h/{i}"):
                x = cg.relu(x)
        g.output(x)
    return g


def lent(count):
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        weights = [g.param(f"w{i}", (D, D)) for i in range(count)]
        for i in range(count):
            with cg.scope(f"h/{i}"):
                x = cg.relu(x @ weights[0]) @ weights[i]
        g.output(x)
    return g


def joined(count):
    with cg.Graph("g") as g:
        x, parts = g.input("x", (B, D)), []
        for i in range(count):
            with cg.scope(f"h/{i}"):
                x = cg.relu(x)
            parts.append(x)
        g.output(cg.ops.concat(parts, 1))
    return g


REFUSED = {
    "no stack": (
        lambda: model(residual, 4), "h", "L",
        "fold of graph 'model': no blocks 0, 1, ... in scope 'h', expected one of 'net/h'"),
    "no blocks at all": (looped, "h", "N", "no blocks 0, 1, ... in scope 'h', expected a graph with a stack of layers"),
    "too few": (
        lambda: model(residual, 2), "net/h", "L", "2 blocks in scope 'net/h', expected at least 3 equal blocks"),
    "too few turns": (
        lambda: model(different, 5), "net/h", "L",
        "expected at least 3 consecutive equal blocks, not counting the edges"),
    "growing": (
        lambda: model(growing, 5), "net/h", "L",
        "blocks 2 and 3 differ: 'net/h/3/linear/weight' is net/h/3/linear/weight(D, 4*F; fp32), 'net/h/2/linear"),
    "another op": (
        lambda: model(rising, 5), "net/h", "L",
        "blocks 3 and 4 differ: 'net/h/4/tanh_1' has kind 'pointwise', 'net/h/3/matmul' has 'einsum'"),
    "another operand": (
        lambda: model(crossed, 5), "net/h", "L",
        "blocks 2 and 3 differ: 'net/h/3/add' reads 'net/h/3/tanh', 'net/h/2/add' reads 'net/h/2/relu'"),
    "another attribute": (
        lambda: model(scaled, 5), "net/h", "L",
        "blocks 2 and 3 differ: 'net/h/3/mul' has scalars (None, 4), 'net/h/2/mul' has (None, 3)"),
    "a symbol in use": (lambda: model(residual, 4), "net/h", "D", "count 'D', expected the name of a symbol that is"),
    "no name": (lambda: model(residual, 4), "net/h", "1 L", "count '1 L', expected the name"),
    "no scope": (lambda: model(residual, 4), 5, "L", "fold: scope is 5, expected text"),
    "one of the middle": (
        lambda: tapped(6), "h", "L", "'add' reads 'h/1/relu' of one block, expected a value of the last block"),
    "held from the middle on": (
        lambda: kept(6), "h", "L", "'keep_alive' reads 'h/2/relu' of one block, expected a value of the last"),
    "in no order": (lambda: shuffled((0, 2, 3, 1)), "h", "L", "no pass executes the blocks in order"),
    "lent": (lambda: lent(5), "h", "L", "'h/4/matmul' reads w0(D, D; fp32) in every block, but it belongs to a single"),
    "all of them": (
        lambda: joined(4), "h", "L", "'concat' reads 'h/0/relu' of one block, expected a value of the last block"),
    "no graph": (lambda: "g", "h", "L", "fold: graph is 'g', expected a graph"),
}  # fmt: skip


@each("name", REFUSED)
def test_unfoldable_graphs_raise(name):
    make, scope, count, text = REFUSED[name]
    with pytest.raises(cg.GraphError) as error:
        cg.fold(make(), scope, count)
    assert text in str(error.value)
