"""What transforms keep, and which ops one kernel may and may not run."""

import pytest

import costgraph as cg

B, D, L, S, W = cg.dims("B D L S W")


def fused_ops(g):
    """Names of the ops in each kernel of a graph."""
    return [[inner.name.split("/")[-1] for inner in op.body.ops] for op in g.ops if op.kind.body == "fused"]


# -- unrolling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 5, 100])
def test_unrolling_binds_the_windows_of_domains(window):
    def body(x):
        return cg.attention(x, x, x, causal=True, window=W)

    with cg.Graph("g") as g:
        g.output(cg.repeat(L, body, g.input("x", (2, 3, S, 5)), name="layers"))
    flat = cg.unroll(g, L=3, W=window)
    assert cg.flops(flat, S=7) == cg.flops(g, L=3, S=7, W=window)
    assert cg.bytes_moved(flat, S=7) == cg.bytes_moved(g, L=3, S=7, W=window)
    with pytest.raises(cg.BindingError, match="'W' is no dimension"):
        cg.flops(flat, S=7, W=3)


def test_unrolling_keeps_scopes_names_and_defaults():
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


def test_slices_of_an_unrolled_scan_lie_side_by_side():
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


def test_a_kernel_of_a_scope_has_its_name_and_the_workspace_of_its_ops():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with cg.scope("a"), cg.scope("b"):
            (y,) = cg.opaque("one", [cg.relu(x)], [((7, 5), "fp32")], flops=0, workspace=11)
            (y,) = cg.opaque("two", [y], [((7, 5), "fp32")], flops=0, workspace=100)
        g.output(y)
    made = cg.fuse(g, scope="a/b")
    (kernel,) = made.ops
    assert (kernel.name, kernel.scope) == ("a_b", "a/b")
    at = 4 * 7 * 5
    assert cg.peak_memory(g) == max(2 * at, 3 * at + 11, 3 * at + 100)
    assert cg.peak_memory(made) == 2 * at + 11 + 100
    assert cg.bytes_moved(made) == 2 * at


def test_a_chain_is_a_kernel_in_the_scope_of_its_last_op():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with cg.scope("mlp"):
            y = cg.relu(cg.tanh(x))
        g.output(y)
    (kernel,) = cg.fuse(g).ops
    assert (kernel.name, kernel.scope) == ("mlp/fused", "mlp")


@pytest.mark.parametrize(("axis", "kernels"), [(-1, 1), (0, 0)])
def test_a_kernel_joins_a_chain_if_it_works_along_rows(axis, kernels):
    with cg.Graph("g") as g:
        g.output(cg.relu(cg.softmax(cg.relu(g.input("x", (7, 5))), axis)))
    made = cg.fuse(g)
    at = 4 * 7 * 5
    assert cg.bytes_moved(made) == (2 * at if kernels else 6 * at)
    assert cg.flops(made) == cg.flops(g)


def test_ops_over_more_rows_are_a_kernel_of_their_own():
    with cg.Graph("g") as g:
        h = cg.relu(cg.tanh(g.input("x", (3, 5))))
        g.output(cg.relu(h + g.input("z", (7, 3, 5))))
    made = cg.fuse(g)
    assert len(made.ops) == 2
    small, large = 4 * 3 * 5, 4 * 7 * 3 * 5
    assert cg.bytes_moved(made) == 2 * small + (small + 2 * large)


def test_what_overwrites_an_operand_in_between_keeps_a_scope_apart():
    with cg.Graph("g") as g:
        h, z = cg.gelu(g.input("x", (7, 5))), cg.gelu(g.input("z", (7, 5)))
        with cg.scope("a"):
            y = cg.tanh(h)
        w = cg.relu(h, inplace=True)
        v = cg.relu(z, inplace=True)
        with cg.scope("a"):
            y = cg.tanh(y)
        g.output(y + w + v)
    with pytest.raises(cg.GraphError, match="'relu' outside needs what is made inside"):
        cg.fuse(g, scope="a")
