import pytest

import costgraph as cg
from costgraph import BindingError, GraphError

B, D, F, L, N, S, T = cg.dims("B D F L N S T")


def block(x):
    y = cg.linear(cg.rms_norm(x), "b d -> b f", f=F, name="up")
    return x + cg.linear(cg.silu(y), "b f -> b d", d=D, name="down")


def looped(body, count, **options):
    with cg.Graph("looped") as g:
        g.output(cg.repeat(count, body, g.input("x", (B, D)), name="layers"))
    return g


def by_hand(body, count):
    """The same model with a Python loop: no Repeat is involved."""
    with cg.Graph("by hand") as g:
        x = g.input("x", (B, D))
        for i in range(count):
            with cg.scope(f"layer{i}"):
                x = body(x)
        g.output(x)
    return g


QUESTIONS = [cg.flops, cg.matmul_flops, cg.bytes_moved, cg.param_count, cg.param_bytes, cg.peak_memory]
SIZES = {"B": 3, "D": 5, "F": 7}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_unrolling_is_the_model_written_out(question, count):
    expected = question(by_hand(block, count), **SIZES)
    assert question(cg.unroll(looped(block, L), L=count), **SIZES) == expected
    assert question(looped(block, L), L=count, **SIZES) == expected
    assert question(looped(block, count), **SIZES) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_unrolling_nested_repeats(count):
    with cg.Graph("nested") as g:
        g.output(cg.repeat(L, lambda x: cg.repeat(N, block, x, name="inner"), g.input("x", (B, D)), name="outer"))
    for inner in (1, 2, 4):
        flat = by_hand(block, count * inner)
        for question in QUESTIONS:
            assert question(g, L=count, N=inner, **SIZES) == question(flat, **SIZES)
            assert question(cg.unroll(g, L=count, N=inner), **SIZES) == question(flat, **SIZES)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_unrolling_a_scan_keeps_its_stack(count):
    with cg.Graph("rnn") as g:
        xs = cg.rearrange(g.input("xs", (B, T, D)), "b t d -> t b d")

        def step(state, x):
            new = cg.tanh(cg.linear(state, "b d -> b e", e=D, name="w") + x)
            return new, new

        _, states = cg.scan(T, step, g.input("h0", (B, D)), xs)
        g.output(cg.relu(states))
    flat = cg.unroll(g, T=count)
    for question in QUESTIONS:
        assert question(flat, B=3, D=5) == question(g, T=count, B=3, D=5)
    assert cg.bytes_moved(flat, fused=True, B=3, D=5) == cg.bytes_moved(g, fused=True, T=count, B=3, D=5)
    # T steps on (B, D): tanh, sum; the stack of T*B*D is read and written once more by relu
    assert cg.flops(flat, B=3, D=5) == count * (2 * 3 * 5 * 5 + 3 * 5 + 3 * 5) + count * 3 * 5


def test_unrolling_keeps_what_a_body_captures():
    with cg.Graph("captured") as g:
        w = g.param("shared", (D, D))
        memory = cg.relu(g.input("m", (B, D)))
        g.output(cg.repeat(L, lambda x: cg.relu(x @ w) + memory, g.input("x", (B, D))))
    flat = cg.unroll(g, L=4)
    assert cg.param_count(flat) == D**2  # one matrix for all iterations
    assert cg.peak_memory(flat, B=3, D=5) == cg.peak_memory(g, L=4, B=3, D=5)


def test_unrolling_needs_the_count():
    with pytest.raises(BindingError, match="count L of 'layers' is not bound"):
        cg.unroll(looped(block, L))


def test_a_transform_leaves_its_graph_alone():
    g = looped(block, L)
    before = (len(g), cg.flops(g), cg.peak_memory(g))
    cg.unroll(g, L=3)
    cg.fuse(g)
    assert (len(g), cg.flops(g), cg.peak_memory(g)) == before


# -- fusion --------------------------------------------------------------------------------------------------------


def test_a_chain_of_elementwise_ops_reads_and_writes_once():
    with cg.Graph("chain") as g:
        x, y = g.input("x", (B, D)), g.input("y", (B, D))
        g.output(cg.gelu(x * y + 1))
    fused = cg.fuse(g)
    # mul 2 reads 1 write, add 1 and 1, gelu 1 and 1: 7; fused two reads and one write: 3; 4 bytes each
    assert cg.bytes_moved(g) == 7 * 4 * B * D
    assert cg.bytes_moved(fused) == 3 * 4 * B * D == cg.bytes_moved(g, fused=True)
    assert cg.flops(fused) == cg.flops(g) == 7 * B * D  # 1 + 1 + 5
    # x, y and two intermediates at once, then x, y and the result
    assert cg.peak_memory(g) == 16 * B * D
    assert cg.peak_memory(fused) == 12 * B * D


def test_a_softmax_written_by_hand_becomes_one_kernel():
    with cg.Graph("softmax") as g:
        x = g.input("x", (B, S))
        e = cg.ops.pointwise("exp", x - cg.reduce(x, "b s -> b 1", "max"))
        g.output(e / cg.reduce(e, "b s -> b 1", "sum"))
    fused = cg.fuse(g)
    assert [op.kind.name for op in fused.ops] == ["kernel"]
    assert cg.bytes_moved(fused) == 8 * B * S


def test_a_value_that_others_read_is_still_written():
    with cg.Graph("shared") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        h = cg.relu(x)
        y = cg.tanh(h)
        g.output(y, h @ w)
    fused = cg.fuse(g)
    # the kernel reads x, writes h and y; the product reads h and w and writes its result
    assert cg.bytes_moved(fused) == 4 * (3 * B * D + 2 * B * D + D**2)


def test_what_a_product_separates_is_not_fused():
    with cg.Graph("separated") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        y = cg.relu(x)
        z = y @ w
        g.output(cg.relu(z) + y)
    kernels = [op for op in cg.fuse(g).ops if op.kind.name == "kernel"]
    # the sum joins the second relu; the first has to end before the product begins
    assert [[inner.name for inner in k.body.ops] for k in kernels] == [["relu_1", "add"]]


def test_a_full_reduction_ends_its_kernel():
    with cg.Graph("whole") as g:
        x = g.input("x", (B, D))
        total = cg.reduce(cg.relu(x), "b d -> ", "sum")
        g.output(x / total)
    kernels = [op for op in cg.fuse(g).ops if op.kind.name == "kernel"]
    assert [[inner.name for inner in k.body.ops] for k in kernels] == [["relu", "sum"]]


def test_an_overwritten_operand_is_not_carried_past():
    with cg.Graph("in place") as g:
        x = g.input("x", (B, D))
        h = x * 2
        a = cg.relu(h)
        k = cg.relu(h, inplace=True)
        g.output(cg.tanh(a), k)
    fused = cg.fuse(g)
    assert cg.flops(fused) == cg.flops(g)
    assert all(not inner.kind.overwrites() for op in fused.ops if op.body for inner in op.body.ops)


def test_fusion_reaches_into_repeats():
    g = looped(block, L)
    fused = cg.fuse(g)
    assert cg.flops(fused) == cg.flops(g)
    saved = cg.bytes_moved(g, L=3, **SIZES) - cg.bytes_moved(fused, L=3, **SIZES)
    assert saved == 0  # norm is a kernel already, and silu and the sum stand alone


def test_fusing_a_scope_takes_all_its_ops():
    with cg.Graph("mlp") as g:
        x = g.input("x", (B, D))
        g.output(cg.nn.mlp(x, F, name="mlp"))
    fused = cg.fuse(g, scope="mlp")
    assert [op.kind.name for op in fused.ops] == ["kernel"]
    assert cg.matmul_flops(fused) == cg.matmul_flops(g) == 4 * B * D * F
    assert cg.bytes_moved(fused) == 4 * (2 * B * D + 2 * D * F)  # x, both weights, the result
    assert cg.peak_memory(fused) == 4 * (2 * B * D + 2 * D * F)


def test_a_scope_inside_a_repeat_is_fused_in_each_iteration():
    g = looped(lambda x: x + cg.nn.mlp(x, F, name="mlp"), L)
    fused = cg.fuse(g, scope="layers/mlp")
    # each iteration: the kernel reads x and two weights and writes h, the sum reads two and writes one
    assert cg.bytes_moved(fused, L=2, **SIZES) == 2 * 4 * (2 * 3 * 5 + 2 * 5 * 7 + 3 * 3 * 5)


def test_a_scope_that_cannot_be_one_kernel_is_refused():
    with cg.Graph("torn") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        with cg.scope("a"):
            y = cg.relu(x)
        z = y @ w
        with cg.scope("a"):
            g.output(cg.relu(z) + y)
    with pytest.raises(GraphError, match="fuse scope 'a': 'matmul' outside needs what is made inside before it ends"):
        cg.fuse(g, scope="a")
    with pytest.raises(GraphError, match="no op in scope 'b' of graph 'torn'"):
        cg.fuse(g, scope="b")
    with pytest.raises(GraphError, match="holds a Repeat"):
        cg.fuse(looped(lambda x: cg.repeat(2, cg.relu, x, name="inner"), L), scope="layers")


def test_fusion_never_adds_bytes_or_changes_flops_of_models():
    for name in ("gpt2", "llama-3-8b"):
        for attention in ("flash", "eager"):
            g = cg.models.load(name, attention=attention)
            fused = cg.fuse(g)
            assert cg.flops(fused) == cg.flops(g)
            assert cg.bytes_moved(fused, B=2, S=64) <= cg.bytes_moved(g, B=2, S=64)
            assert cg.bytes_moved(fused, fused=True) == cg.bytes_moved(g, fused=True)
            assert cg.peak_memory(fused, B=2, S=64) <= cg.peak_memory(g, B=2, S=64)
            assert cg.param_count(fused) == cg.param_count(g)
