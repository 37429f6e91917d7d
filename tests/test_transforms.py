"""Graph transforms: invariants, and which ops may share a kernel."""

from contextlib import nullcontext

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph import BindingError, GraphError

B, D, F, L, N, S, T, W = cg.dims("B D F L N S T W")


def block(x):
    y = cg.linear(cg.rms_norm(x), "b d -> b f", f=F, name="up")
    return x + cg.linear(cg.silu(y), "b f -> b d", d=D, name="down")


def looped(body, count, **options):
    with cg.Graph("looped") as g:
        g.output(cg.repeat(count, body, g.input("x", (B, D)), name="layers"))
    return g


def by_hand(body, count):
    """Build the same model with a Python loop instead of `repeat`."""
    with cg.Graph("by hand") as g:
        x = g.input("x", (B, D))
        for i in range(count):
            with cg.scope(f"layer{i}"):
                x = body(x)
        g.output(x)
    return g


QUESTIONS = [cg.flops, cg.matmul_flops, cg.bytes_moved, cg.param_count, cg.param_bytes, cg.peak_memory]
SIZES = {"B": 3, "D": 5, "F": 7}


@each("question", QUESTIONS, ids=lambda f: f.__name__)
@each("count", [1, 2, 3, 4, 6])
def test_unroll_matches_python_loop(question, count):
    expected = question(by_hand(block, count), **SIZES)
    assert question(cg.unroll(looped(block, L), L=count), **SIZES) == expected
    assert question(looped(block, L), L=count, **SIZES) == expected
    assert question(looped(block, count), **SIZES) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_unroll_nested_repeats(count):
    with cg.Graph("nested") as g:
        g.output(cg.repeat(L, lambda x: cg.repeat(N, block, x, name="inner"), g.input("x", (B, D)), name="outer"))
    for inner in (1, 2, 4):
        flat = by_hand(block, count * inner)
        for question in QUESTIONS:
            assert question(g, L=count, N=inner, **SIZES) == question(flat, **SIZES)
            assert question(cg.unroll(g, L=count, N=inner), **SIZES) == question(flat, **SIZES)


@each("count", [1, 2, 3, 5])
def test_unroll_scan_keeps_stack(count):
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
    # T steps on (B, D): tanh, sum; relu reads and writes the stack of T*B*D once more
    assert cg.flops(flat, B=3, D=5) == count * (2 * 3 * 5 * 5 + 3 * 5 + 3 * 5) + count * 3 * 5


def test_unroll_shares_captured_tensors():
    with cg.Graph("captured") as g:
        w = g.param("shared", (D, D))
        memory = cg.relu(g.input("m", (B, D)))
        g.output(cg.repeat(L, lambda x: cg.relu(x @ w) + memory, g.input("x", (B, D))))
    flat = cg.unroll(g, L=4)
    assert cg.param_count(flat) == D**2  # one matrix for all iterations
    assert cg.peak_memory(flat, B=3, D=5) == cg.peak_memory(g, L=4, B=3, D=5)


def test_unroll_requires_numeric_count():
    with pytest.raises(BindingError, match="count L of 'layers' is not bound"):
        cg.unroll(looped(block, L))


def test_transforms_do_not_modify_input_graph():
    g = looped(block, L)
    before = (len(g), cg.flops(g), cg.peak_memory(g))
    cg.unroll(g, L=3)
    cg.fuse(g)
    assert (len(g), cg.flops(g), cg.peak_memory(g)) == before


# -- fusion --------------------------------------------------------------------------------------------------------


def test_fused_elementwise_chain_reads_and_writes_once():
    with cg.Graph("chain") as g:
        x, y = g.input("x", (B, D)), g.input("y", (B, D))
        g.output(cg.gelu(x * y + 1))
    fused = cg.fuse(g)
    # mul reads 2 and writes 1, add 1 and 1, gelu 1 and 1: 7; fused two reads and one write: 3; 4 bytes each
    assert cg.bytes_moved(g) == 7 * 4 * B * D
    assert cg.bytes_moved(fused) == 3 * 4 * B * D == cg.bytes_moved(g, fused=True)
    assert cg.flops(fused) == cg.flops(g) == 7 * B * D  # 1 + 1 + 5
    # x, y and two intermediates at once, then x, y and the result
    assert cg.peak_memory(g) == 16 * B * D
    assert cg.peak_memory(fused) == 12 * B * D


def test_manual_softmax_fuses_into_one_kernel():
    with cg.Graph("softmax") as g:
        x = g.input("x", (B, S))
        e = cg.ops.pointwise("exp", x - cg.reduce(x, "b s -> b 1", "max"))
        g.output(e / cg.reduce(e, "b s -> b 1", "sum"))
    fused = cg.fuse(g)
    assert [op.kind.name for op in fused.ops] == ["kernel"]
    assert cg.bytes_moved(fused) == 8 * B * S


def test_fused_value_with_other_readers_is_written():
    with cg.Graph("shared") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        h = cg.relu(x)
        y = cg.tanh(h)
        g.output(y, h @ w)
    fused = cg.fuse(g)
    # the kernel reads x and writes h and y; the matmul reads h and w and writes its result
    assert cg.bytes_moved(fused) == 4 * (3 * B * D + 2 * B * D + D**2)


def test_matmul_separates_fusion_groups():
    with cg.Graph("separated") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        y = cg.relu(x)
        z = y @ w
        g.output(cg.relu(z) + y)
    kernels = [op for op in cg.fuse(g).ops if op.kind.name == "kernel"]
    # the sum joins the second relu; the first must finish before the matmul starts
    assert [[inner.name for inner in k.body.ops] for k in kernels] == [["relu_1", "add"]]


def test_full_reduction_ends_kernel():
    with cg.Graph("whole") as g:
        x = g.input("x", (B, D))
        total = cg.reduce(cg.relu(x), "b d -> ", "sum")
        g.output(x / total)
    kernels = [op for op in cg.fuse(g).ops if op.kind.name == "kernel"]
    assert [[inner.name for inner in k.body.ops] for k in kernels] == [["relu", "sum"]]


def test_fusion_does_not_move_reads_past_overwrites():
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
    assert saved == 0  # norm is already a kernel, and silu and the sum have no neighbours to fuse


def test_fused_scope_contains_all_its_ops():
    with cg.Graph("mlp") as g:
        x = g.input("x", (B, D))
        g.output(cg.nn.mlp(x, F, name="mlp"))
    fused = cg.fuse(g, scope="mlp")
    assert [op.kind.name for op in fused.ops] == ["kernel"]
    assert cg.matmul_flops(fused) == cg.matmul_flops(g) == 4 * B * D * F
    assert cg.bytes_moved(fused) == 4 * (2 * B * D + 2 * D * F)  # x, both weights, the result
    assert cg.peak_memory(fused) == 4 * (2 * B * D + 2 * D * F)


def test_scope_inside_repeat_is_fused_per_iteration():
    g = looped(lambda x: x + cg.nn.mlp(x, F, name="mlp"), L)
    fused = cg.fuse(g, scope="layers/mlp")
    # per iteration: the kernel reads x and two weights and writes h, the sum reads two and writes one
    assert cg.bytes_moved(fused, L=2, **SIZES) == 2 * 4 * (2 * 3 * 5 + 2 * 5 * 7 + 3 * 3 * 5)


def test_unfusible_scope_is_refused():
    with cg.Graph("torn") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        with cg.scope("a"):
            y = cg.relu(x)
        z = y @ w
        with cg.scope("a"):
            g.output(cg.relu(z) + y)
    with pytest.raises(GraphError, match="fuse scope 'a': 'matmul' outside the scope must run between its ops"):
        cg.fuse(g, scope="a")
    with pytest.raises(GraphError, match="no op in scope 'b' of graph 'torn'"):
        cg.fuse(g, scope="b")
    with pytest.raises(GraphError, match="contains a Repeat"):
        cg.fuse(looped(lambda x: cg.repeat(2, cg.relu, x, name="inner"), L), scope="layers")


def test_fusion_keeps_flops_and_never_adds_bytes():
    for name in ("gpt2", "llama-3-8b"):
        for attention in ("flash", "eager"):
            g = load(name, attention=attention)
            fused = cg.fuse(g)
            assert cg.flops(fused) == cg.flops(g)
            assert cg.bytes_moved(fused, B=2, S=64) <= cg.bytes_moved(g, B=2, S=64)
            assert cg.bytes_moved(fused, fused=True) == cg.bytes_moved(g, fused=True)
            assert cg.peak_memory(fused, B=2, S=64) <= cg.peak_memory(g, B=2, S=64)
            assert cg.param_count(fused) == cg.param_count(g)


def fused_ops(g):
    """Return the op names in each kernel of a graph."""
    return [
        [inner.name.split("/")[-1] for inner in op.body.ops] for op in g.ops if op.body is not None and op.loop is None
    ]


# -- unrolling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 5, 100])
def test_unroll_binds_domain_windows(window):
    def body(x):
        return cg.attention(x, x, x, causal=True, window=W)

    with cg.Graph("g") as g:
        g.output(cg.repeat(L, body, g.input("x", (2, 3, S, 5)), name="layers"))
    flat = cg.unroll(g, L=3, W=window)
    assert cg.flops(flat, S=7) == cg.flops(g, L=3, S=7, W=window)
    assert cg.bytes_moved(flat, S=7) == cg.bytes_moved(g, L=3, S=7, W=window)
    with pytest.raises(cg.BindingError, match="'W' is not a dimension"):
        cg.flops(flat, S=7, W=3)


def test_unroll_keeps_scopes_names_and_defaults():
    def body(x):
        with cg.scope("mlp"):
            return cg.tanh(cg.linear(x, "b d -> b e", e=D, name="up"))

    with cg.Graph("model", dtype="bf16") as g:
        g.output(cg.repeat(L, body, cg.relu(g.input("x", (B, D))), name="layers"))
    flat = cg.unroll(g, L=3)
    assert (flat.name, {t.dtype.name for t in flat.tensors}) == ("model", {"bf16"})
    mine = cg.costs(flat, B=2, D=5).group("scope", 2).total()
    theirs = cg.costs(g, L=3, B=2, D=5).group("scope", 2).total()
    assert mine == theirs
    assert set(mine) == {"", "layers/mlp"}
    assert cg.param_count(flat, D=5) == 3 * 25


def test_unrolled_scan_slices_are_contiguous():
    def body(h, x):
        h = cg.tanh(h + x)
        return h, cg.relu(h)

    with cg.Graph("g") as g:
        g.output(cg.scan(3, body, g.input("h", (5,)), g.input("xs", (3, 5)))[1])
    flat = cg.unroll(g)
    (xs,) = [t for t in flat.tensors if t.name == "xs"]
    read = [t.offset.constant for t in flat.tensors if t.storage is xs.storage and t is not xs and t.ndim == 1]
    assert sorted(set(read)) == [0, 5, 10]
    written = [op.results[0].offset.constant for op in flat.ops if op.name.split("/")[-1].startswith("relu")]
    assert written == [0, 5, 10]


# -- fusing ------------------------------------------------------------------------------------------------------------


def test_scope_kernel_takes_scope_name_and_workspace():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with cg.scope("a"), cg.scope("b"):
            (y,) = cg.opaque("one", [cg.relu(x)], [((7, 5), "fp32")], flops=0, workspace=11)
            (y,) = cg.opaque("two", [y], [((7, 5), "fp32")], flops=0, workspace=100)
        g.output(y)
    fused = cg.fuse(g, scope="a/b")
    (kernel,) = fused.ops
    assert (kernel.name, kernel.scope) == ("a_b", "a/b")
    at = 4 * 7 * 5
    assert cg.peak_memory(g) == max(2 * at, 3 * at + 11, 3 * at + 100)
    assert cg.peak_memory(fused) == 2 * at + 11 + 100
    assert cg.bytes_moved(fused) == 2 * at


def test_chain_kernel_is_in_scope_of_last_op():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with cg.scope("mlp"):
            y = cg.relu(cg.tanh(x))
        g.output(y)
    (kernel,) = cg.fuse(g).ops
    assert (kernel.name, kernel.scope) == ("mlp/fused", "mlp")


@pytest.mark.parametrize(("axis", "kernels"), [(-1, 1), (0, 0)])
def test_row_wise_kernels_join_chains(axis, kernels):
    with cg.Graph("g") as g:
        g.output(cg.relu(cg.softmax(cg.relu(g.input("x", (7, 5))), axis)))
    fused = cg.fuse(g)
    at = 4 * 7 * 5
    assert cg.bytes_moved(fused) == (2 * at if kernels else 6 * at)
    assert cg.flops(fused) == cg.flops(g)


@pytest.mark.parametrize(("operands", "kernels"), [(1, 1), (4, 1), (5, 2)])
def test_cheap_broadcast_operands_are_recomputed_at_readers(operands, kernels):
    with cg.Graph("g") as g:
        h = cg.relu(sum((cg.tanh(g.input(f"x{i}", (3, 5))) for i in range(operands)), start=1))
        g.output(cg.relu(h + g.input("z", (7, 3, 5))))
    fused = cg.fuse(g)
    assert len(fused.ops) == kernels
    small, large = 4 * 3 * 5, 4 * 7 * 3 * 5
    # in a separate kernel it is written and read once more
    assert cg.bytes_moved(fused) == operands * small + 2 * large + (2 * small if kernels == 2 else 0)


def test_intervening_overwrite_prevents_scope_fusion():
    with cg.Graph("g") as g:
        h, z = cg.gelu(g.input("x", (7, 5))), cg.gelu(g.input("z", (7, 5)))
        with cg.scope("a"):
            y = cg.tanh(h)
        w = cg.relu(h, inplace=True)
        v = cg.relu(z, inplace=True)
        with cg.scope("a"):
            y = cg.tanh(y)
        g.output(y + w + v)
    with pytest.raises(cg.GraphError, match="'relu' outside the scope must run between its ops"):
        cg.fuse(g, scope="a")


# -- kernel membership, by name ----------------------------------------------------------------------------------------


def scores(x, **options):
    """Return query-key scores with a domain."""
    q, k = x(7, 3), x(7, 3)
    return cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True, **options), over=("s", "t"))


def unfused_and_fused(build):
    with cg.Graph("g") as g:
        made = build(lambda *shape: g.input(f"x{len(g)}", shape))
        g.output(*made if isinstance(made, tuple) else (made,))
    made = cg.fuse(g)
    assert cg.flops(made) == cg.flops(g)
    return g, made


@pytest.mark.parametrize("scopes", [("", "a", "b"), ("", "", "b"), ("a", "a", ""), ("a", "", "b")])
def test_kernel_over_scopes_is_named_by_last(scopes):
    with cg.Graph("g") as g:
        y = g.input("x", (7, 5))
        for name in scopes:
            with cg.scope(name) if name else nullcontext():
                y = cg.ops.pointwise("exp", y)
        g.output(y)
    (kernel,) = cg.fuse(g).ops
    last = scopes[-1]
    assert (kernel.name, kernel.scope, kernel.phase) == (f"{last}/fused" if last else "fused", last, "forward")
    assert [op.scope for op in kernel.body.ops] == list(scopes)


def test_scope_kernel_has_requested_scope():
    with cg.Graph("g") as g:
        with cg.scope("a"):
            y = cg.relu(g.input("x", (7, 5)))
            with cg.scope("b"):
                y = cg.tanh(y)
        with cg.scope("ab"):
            y = cg.tanh(y)
        g.output(y)
    kernel, other = cg.fuse(g, scope="a").ops
    assert (kernel.name, kernel.scope, other.name) == ("a", "a", "ab/tanh")
    assert fused_ops(cg.fuse(g, "a/b")) == [["tanh"]]


@pytest.mark.parametrize("inplace", [False, True])
def test_unrelated_ops_between_do_not_prevent_fusion(inplace):
    def build(x):
        a, z = x(7, 5), cg.gelu(x(7, 5)) @ x(5, 5)
        h = cg.relu(a)
        w = cg.relu(z, inplace=True) if inplace else a @ x(5, 5)
        return cg.tanh(h), w

    _, fused = unfused_and_fused(build)
    assert ["relu", "tanh"] in fused_ops(fused)


def test_in_place_ops_fuse_but_workspace_kernels_do_not():
    def in_place(x):
        return cg.tanh(cg.relu(cg.gelu(x(7, 5)) @ x(5, 5), inplace=True))

    def with_space(x):
        with cg.kernel("k", workspace=100):
            y = cg.relu(x(7, 5))
        return cg.tanh(y)

    def without(x):
        with cg.kernel("k"):
            y = cg.relu(x(7, 5))
        return cg.tanh(y)

    assert fused_ops(unfused_and_fused(in_place)[1]) == [["relu", "tanh"]]
    assert fused_ops(unfused_and_fused(with_space)[1]) == [["relu"]]
    assert fused_ops(unfused_and_fused(without)[1]) == [["k", "tanh"]]


def test_kernel_containing_matmul_is_not_fused():
    def build(x):
        with cg.kernel("k"):
            y = cg.tanh(cg.relu(x(7, 5) @ x(5, 5)))
        return cg.tanh(y)

    assert fused_ops(unfused_and_fused(build)[1]) == [["matmul", "relu", "tanh"]]


def test_scope_with_loop_and_other_ops_is_refused():
    with cg.Graph("g") as g, cg.scope("a"):
        g.output(cg.tanh(cg.repeat(3, cg.relu, cg.relu(g.input("x", (7, 5))), name="loop")))
    with pytest.raises(cg.GraphError, match="contains a Repeat, expected ops that one kernel can run"):
        cg.fuse(g, scope="a")


def test_dropout_fuses_into_chain():
    _, fused = unfused_and_fused(lambda x: cg.relu(cg.dropout(cg.tanh(x(7, 5)), 0.1)))
    assert fused_ops(fused) == [["tanh", "dropout", "relu"]]


@pytest.mark.parametrize("turned", [False, True])
def test_kernel_results_keep_written_layout(turned):
    def build(x):
        y = cg.relu(cg.rearrange(x(7, 5), "a b -> b a") if turned else x(5, 7))
        return y, cg.reduce(y, "b a -> b", "sum")

    g, fused = unfused_and_fused(build)
    assert [t.is_contiguous for t in g.outputs] == [not turned, True]
    assert fused_ops(fused) == ([] if turned else [["relu", "sum"]])


def test_loops_split_chains_and_bodies_fuse_separately():
    def build(x):
        h = cg.tanh(cg.relu(x(7, 5)))
        h = cg.repeat(3, lambda y: cg.tanh(cg.relu(y)), h, name="loop")
        return cg.relu(cg.tanh(h))

    g, fused = unfused_and_fused(build)
    assert [op.kind.name for op in fused.ops] == ["kernel", "repeat", "kernel"]
    assert [len(names) for names in fused_ops(fused)] == [2, 2]
    (loop,) = [op for op in fused.ops if op.loop is not None]
    assert fused_ops(loop.body) == [["relu", "tanh"]]
    # two ops read and write 35 elements each, a kernel once; before fusion, three times in the loop and once after it
    assert (cg.bytes_moved(g), cg.bytes_moved(fused)) == (5 * 4 * 4 * 35, 5 * 2 * 4 * 35)


def test_ops_with_different_domains_are_not_fused():
    def same(x):
        return cg.relu(scores(x)) + x(7, 7)

    def other(x):
        return cg.ops.pointwise("causal_mask_backward", cg.relu(scores(x)))  # gradients of all elements again

    assert fused_ops(unfused_and_fused(same)[1]) == [["relu", "add"]]
    assert fused_ops(unfused_and_fused(other)[1]) == []


@pytest.mark.parametrize(
    "pattern",
    [
        "a b c -> a b", "a b c -> a b 1", "a b c -> a", "a b c -> b c", "a b c -> a c", "a b c -> b a",
        "a b c -> a 1 c", "a b c -> ",
    ],
)  # fmt: skip
def test_ops_over_reduced_results_join_reduction(pattern):
    _, fused = unfused_and_fused(lambda x: cg.tanh(cg.reduce(cg.relu(x(2, 3, 5)), pattern, "sum")))
    assert fused_ops(fused) == [["relu", "sum", "tanh"]]


@pytest.mark.parametrize(
    ("pattern", "kernels"),
    [
        ("a b c -> a b 1", [["relu", "sum", "div"]]),
        ("a b c -> a 1 1", [["relu", "sum", "div"]]),
        # different thread blocks reduce: results exist only after the kernel ends
        ("a b c -> 1 b c", []),
        ("a b c -> a 1 c", []),
        ("a b c -> 1 1 1", []),
    ],
)
def test_ops_needing_their_row_reduction_join_it(pattern, kernels):
    def build(x):
        y = cg.relu(x(2, 3, 5))
        return y / cg.reduce(y, pattern, "sum")

    assert fused_ops(unfused_and_fused(build)[1]) == kernels


def test_row_statistics_are_not_column_statistics():
    """Both are 7 elements of 7 * 7: a row of the quotient needs one of them, or all."""

    def build(columns):
        def quotient(x):
            y = x(7, 7)
            rows = cg.reduce(y, "a b -> a", "sum")
            return y / (rows if columns else cg.rearrange(rows, "a -> a 1"))

        return quotient

    assert fused_ops(unfused_and_fused(build(columns=False))[1]) == [["sum", "rearrange", "div"]]
    assert fused_ops(unfused_and_fused(build(columns=True))[1]) == []


def test_broadcast_operand_joins_its_reader():
    def small_first(x):
        return cg.tanh(cg.relu(x(5)) + x(7, 5))  # relu runs over 5, the sum over 7 * 5

    def leading(x):
        return cg.relu(cg.relu(x(7, 5)) + x(5))

    def column(x):
        return cg.tanh(cg.relu(x(7, 1)) * x(7, 5))

    assert fused_ops(unfused_and_fused(small_first)[1]) == [["relu", "add", "tanh"]]
    assert fused_ops(unfused_and_fused(leading)[1]) == [["relu", "add", "relu_1"]]
    assert fused_ops(unfused_and_fused(column)[1]) == [["relu", "mul", "tanh"]]


def test_kernel_includes_all_fusible_producers():
    def build(x):
        a, b = cg.relu(x(7, 5)), cg.tanh(x(7, 5))
        return a + b

    _, fused = unfused_and_fused(build)
    assert fused_ops(fused) == [["relu", "tanh", "add"]]
    assert cg.bytes_moved(fused) == 4 * 35 * 3  # two are read and one is written


def test_ops_with_shared_operands_are_one_kernel():
    def build(x):
        a = x(7, 5)
        return cg.relu(a), cg.tanh(a), cg.reduce(a, "a b -> a", "sum")

    _, fused = unfused_and_fused(build)
    assert fused_ops(fused) == [["relu", "tanh", "sum"]]
    assert cg.bytes_moved(fused) == 4 * (3 * 35 + 7)


def test_scalar_ops_are_fused():
    _, fused = unfused_and_fused(lambda x: cg.tanh(cg.relu(x())))
    assert fused_ops(fused) == [["relu", "tanh"]]
    _, fused = unfused_and_fused(lambda x: cg.relu(cg.tanh(cg.reduce(x(7, 5), "a b -> ", "sum"))))
    assert fused_ops(fused) == [["sum", "tanh", "relu"]]


def test_unrolled_stack_starts_as_empty_storage():
    with cg.Graph("g") as g:
        _, ys = cg.scan(L, lambda h, x: (cg.relu(h), h + x), g.input("h", (D,)), g.input("xs", (L, D)))
        g.output(ys)
    flat = cg.unroll(g, L=3)
    assert [op.kind.name for op in flat.ops].count("empty") == 1
    assert flat.ops[0].kind.name == "empty"
    rows = {row.op: row for row in cg.costs(flat)}
    assert flat.ops[0].name not in rows  # nothing is read or written
    assert cg.peak_memory(flat, D=7) == cg.peak_memory(g, L=3, D=7)


# -- epilogues, and exclusions from fusion -----------------------------------------------------------------------------


def convolved(x, then):
    """Build a convolution with batch norm, an in-place activation, and a residual."""
    y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, o=x.sizes[1], name="conv")
    y = cg.nn.batch_norm(y, name="norm")
    return then(cg.relu(y, inplace=True) + x)


def image():
    with cg.Graph("image") as g:
        g.output(convolved(g.input("x", (2, 3, 7, 7)), cg.tanh))
    return g


def test_norm_activation_and_residual_fuse_after_convolution():
    g, at, made = image(), 4 * 2 * 3 * 7 * 7, cg.fuse(image())
    assert fused_ops(made) == [["batch_norm", "relu", "add", "tanh"]]
    weights, channels = 4 * 3 * 3 * 9, 4 * 4 * 3
    # the convolution reads x and writes; the kernel reads that, x and four numbers per channel, and writes
    assert cg.bytes_moved(made) == 2 * at + weights + 3 * at + channels
    assert cg.flops(made) == cg.flops(g)
    # x, the convolution's output and the result: intermediates have no storage
    assert cg.peak_memory(made) == 3 * at + weights + channels + 8
    assert cg.peak_memory(g) == cg.peak_memory(made)


def test_epilogues_fuse_into_convolution():
    g, at = image(), 4 * 2 * 3 * 7 * 7
    fused = cg.fuse(g, epilogues=True)
    assert fused_ops(fused) == [["conv", "batch_norm", "relu", "add", "tanh"]]
    weights, channels = 4 * 3 * 3 * 9, 4 * 4 * 3
    assert cg.bytes_moved(fused) == 2 * at + weights + channels  # x once, and the result
    assert cg.peak_memory(fused) == 2 * at + weights + channels + 8
    assert cg.flops(fused) == cg.flops(g)


def test_epilogue_joins_one_matmul_and_stays_elementwise():
    def build(x):
        a, b = x(7, 5) @ x(5, 5), x(7, 5) @ x(5, 5)
        return cg.softmax(cg.tanh(a + b), -1)

    with cg.Graph("g") as g:
        g.output(build(lambda *shape: g.input(f"x{len(g)}", shape)))
    # one of two matmuls takes the sum; softmax needs whole rows
    assert fused_ops(cg.fuse(g, epilogues=True)) == [["matmul", "add", "tanh"], ["max", "sub", "exp", "sum", "div"]]


def test_epilogues_with_scope_are_refused():
    with pytest.raises(cg.GraphError, match="fuse scope 'a': epilogues=True, expected only one of the two: a scope"):
        cg.fuse(image(), "a", epilogues=True)


def test_in_place_op_on_caller_storage_is_not_fused():
    def build(x):
        a = x(7, 5)
        return cg.tanh(cg.relu(a, inplace=True))

    assert fused_ops(unfused_and_fused(build)[1]) == []


def test_value_before_in_place_op_keeps_storage():
    def build(x):
        h = cg.gelu(x(7, 5))
        early = h @ x(5, 5)
        late = cg.relu(h, inplace=True)
        return early, late

    # code outside reads h before the overwrite, so the overwriting op stays separate
    assert fused_ops(unfused_and_fused(build)[1]) == []


def test_op_moves_after_kernel_it_depends_on():
    def build(x):
        h = cg.relu(x(7, 5))
        z = h @ x(5, 5)
        return cg.tanh(h), z

    _, fused = unfused_and_fused(build)
    assert fused_ops(fused) == [["relu", "tanh"]]
    assert [op.name for op in fused.ops] == ["fused", "matmul"]
