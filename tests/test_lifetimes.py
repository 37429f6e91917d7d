import pytest

import costgraph as cg

B, D, F, K, L = cg.dims("B D F K L")


def rows(g, **sizes):
    return [(r.tensor, r.role, r.bytes, r.born, r.dies) for r in cg.lifetimes(g, **sizes)]


def worked():
    with cg.Graph("worked") as g:
        x, w1, w2 = g.input("x", (B, D)), g.param("w1", (D, F)), g.param("w2", (F, K))
        h = cg.einsum(x, w1, "b d, d f -> b f", name="first")
        r = cg.relu(h)
        g.output(cg.einsum(r, w2, "b f, f k -> b k", name="second"))
    return g


def test_lifetimes_match_worked_example():
    assert rows(worked()) == [
        ("x", "input", 4 * B * D, None, None),
        ("w1", "param", 4 * D * F, None, None),
        ("w2", "param", 4 * F * K, None, None),
        ("first", "activation", 4 * B * F, "first", "relu"),
        ("relu", "activation", 4 * B * F, "relu", "second"),
        ("second", "output", 4 * B * K, "second", None),
    ]


def test_view_keeps_its_base_alive():
    with cg.Graph("g") as g:
        h = cg.gelu(g.input("x", (B, D)))
        view = cg.rearrange(h, "b d -> d b")
        y = cg.tanh(g.tensors[0])
        g.output(cg.einsum(view, y, "d b, b d -> "))
    assert [(r.tensor, r.born, r.dies) for r in cg.lifetimes(g)] == [
        ("x", None, None), ("gelu", "gelu", "einsum"), ("tanh", "tanh", "einsum"), ("einsum", "einsum", None),
    ]  # fmt: skip


def test_output_view_keeps_storage_to_the_end():
    with cg.Graph("g") as g:
        h = cg.gelu(g.input("x", (B, D)))
        g.output(h[:1])
        cg.tanh(g.tensors[0])
    assert [(r.tensor, r.role, r.dies) for r in cg.lifetimes(g)][1:] == [
        ("gelu", "output", None), ("tanh", "activation", "tanh"),
    ]  # fmt: skip


def test_unused_result_lives_during_its_op():
    with cg.Graph("g") as g:
        x = g.input("x", (B,))
        cg.tanh(x)
        g.output(cg.relu(x))
    assert ("tanh", "activation", 4 * B, "tanh", "tanh") in rows(g)


def test_in_place_results_share_storage():
    with cg.Graph("g") as g:
        h = cg.relu(cg.gelu(g.input("x", (B,))), inplace=True)
        g.output(cg.tanh(h))
    assert [(r.tensor, r.born, r.dies) for r in cg.lifetimes(g)][1:] == [
        ("gelu", "gelu", "tanh"),
        ("tanh", "tanh", None),
    ]


def test_roles_of_permanent_storage():
    with cg.Graph("g") as g:
        x = g.input("x", (B,))
        for t in (g.param("w", (B,)), g.buffer("table", (B,)), g.buffer("state", (B,), role="cache")):
            x = x + t
        g.output(x)
    assert [r.role for r in cg.lifetimes(g)] == [
        "input",
        "param",
        "buffer",
        "cache",
        "activation",
        "activation",
        "output",
    ]


def test_repeat_lists_first_middle_and_last_iteration():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.tanh(cg.relu(x)), g.input("x", (B,)), name="layers"))
    listed = [r.tensor for r in cg.lifetimes(g)]
    assert listed == [
        "x", "layers/relu[0]", "layers/tanh[0]", "layers/relu[i]", "layers/tanh[i]",
        "layers/relu[L-1]", "layers/tanh[L-1]",
    ]  # fmt: skip
    assert [r.tensor for r in cg.lifetimes(g, L=1)] == ["x", "layers/relu[0]", "layers/tanh[0]"]


def test_body_parameters_exist_per_iteration():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.linear(x, "b d -> b e", e=D), g.input("x", (B, D)), name="layers"))
    assert rows(g)[1] == ("layers/linear/weight", "param", 4 * D**2 * L, None, None)


def test_lifetime_sizes_bind_per_row():
    assert [r.bytes for r in cg.lifetimes(worked(), B=2, D=3, F=5, K=7)] == [24, 60, 140, 40, 40, 56]
    with pytest.raises(cg.BindingError, match="'Q' is not a dimension"):
        cg.lifetimes(worked(), Q=3)
