"""Layer patterns, and the building blocks of self-attention, rotary positions and gated layers."""

import numpy as np
import pytest
from each import each

import costgraph as cg
from costgraph import testing

B, S, D, F, H, G, K, L, R = cg.dims("B S D F H G K L R")


def two(x):
    return cg.linear(cg.linear(x, "b d -> b f", f=F, name="up"), "b f -> b d", d=D, name="down")


def one(x):
    return cg.linear(x, "b d -> b e", e=D, name="one")


BODIES = {"one": one, "two": two}  # D**2 and 2*D*F parameters


def stacked(kinds, rest=0, count=L, **options):
    with cg.Graph("g") as g:
        g.output(cg.nn.layers(count, BODIES, g.input("x", (B, D)), kinds, rest=rest, **options))
    return g


def unrolled(kinds, depth):
    """The same layers, unrolled."""
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for i in range(depth):
            x = BODIES[kinds[i % len(kinds)]](x)
        g.output(x)
    return g


SIZES = {"B": 3, "D": 5, "F": 7}
PATTERNS = [
    (("one", "two"), 0), (("one", "two"), 1), (("one",) * 3 + ("two",), 2), (("two", "one", "two"), 2),
    (("one", "one", "two", "two", "one"), 3), (("two",), 0), (("one", "one"), 0), (("one", "one"), 1),
]  # fmt: skip


@each("periods", [1, 2, 3, 5])
@each(("kinds", "rest"), PATTERNS)
def test_layer_pattern_costs_match_unrolled_layers(kinds, rest, periods):
    depth = periods * len(kinds) + rest
    g, same = stacked(kinds, rest), unrolled(kinds, depth)
    for question in (cg.param_count, cg.flops, cg.bytes_moved, cg.peak_memory):
        used = {s.name for s in question(same).free_symbols}
        sizes = {k: v for k, v in SIZES.items() if k in used}
        assert question(g, L=depth, **sizes) == question(same, **sizes)


def test_pattern_depth_stays_symbolic():
    # periods with 3 narrow layers and a wide one, then 2 narrow ones
    g = stacked(("one", "one", "one", "two"), 2)
    assert cg.param_count(g).expand() == ((L - 2) / 4 * (3 * D**2 + 2 * D * F) + 2 * D**2).expand()
    assert cg.matmul_flops(g).expand() == (2 * B * cg.param_count(g)).expand()


@each("depth", [2, 3, 4, 5, 7, 8, 9])
def test_depth_with_partial_period_raises(depth):
    g = stacked(("one", "one", "one", "two"), 2)
    with pytest.raises(cg.BindingError, match=rf"L={depth}: count of 'layers' has size L/4 - 1/2"):
        cg.param_count(g, L=depth, D=2, F=3)


def test_layer_kinds_become_scopes_if_several():
    g = stacked(("one", "one", "two"), 2, count=8)
    names = {op.name for op in g.walk()}
    assert {"layers/one/one/matmul", "layers/two/up/matmul", "layers_rest/one/one/matmul"} <= names
    assert "layers/one/matmul" in {op.name for op in stacked(("one",)).walk()}


def test_repeated_kinds_have_separate_parameters():
    g = stacked(("one", "two", "one"), count=3)
    assert cg.param_count(g) == 2 * D**2 + 2 * D * F
    assert len({p.name for p in g.params}) == len(g.params) == 4


def test_tuple_state_is_unpacked_into_arguments():
    def body(x, y):
        return y, cg.relu(x)

    with cg.Graph("g") as g:
        made = cg.nn.layers(L, {"swap": body, "keep": lambda x, y: (x, y)}, (g.input("x", (B,)), g.input("y", (B,))),
                         ("swap", "keep"))  # fmt: skip
        assert isinstance(made, tuple)
        g.output(made[0])
    assert cg.flops(g, L=6, B=5) == 3 * 5


def test_training_step_through_a_pattern():
    with cg.Graph("g") as g:
        x = cg.nn.layers(L, BODIES, g.input("x", (B, D)), ("one", "one", "two"), rest=1)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    step = cg.training_step(g, optimizer=cg.SGD())
    forward, weights = cg.matmul_flops(g), 2 * B * D**2  # the first layer needs no input gradient
    assert (cg.matmul_flops(step) - 3 * forward + weights).expand() == 0


@each(
    ("change", "text"),
    [
        ({"kinds": ()}, r"kinds \(\), expected one of one, two"),
        ({"kinds": ("one", "tow")}, "kinds 'tow', expected one of one, two"),
        ({"kinds": "one"}, "layers: kinds is 'one', expected a list, each text"),
        ({"kinds": (["one"],)}, "layers: kinds is .*, expected a list, each text"),
        ({"rest": 2}, "rest 2, expected a whole number below 2"),
        ({"rest": -1}, "rest -1, expected a whole number below 2"),
        ({"rest": True}, "layers: rest is True, expected a whole number"),
        ({"rest": 0.5}, "layers: rest is 0.5, expected a whole number"),
        ({"name": "my layers"}, "expected an identifier as its name"),
        ({"count": 0}, "count: 0, expected a positive integer"),
        ({"count": "L"}, "count"),
        ({"count": 3}, "3/2, expected a positive integer"),
        ({"bodies": {}}, "expected a mapping of identifiers to functions"),
        ({"bodies": {"no name": one}}, "expected a mapping of identifiers to functions"),
        ({"bodies": one}, "bodies is .*, expected a mapping from text to a function"),
        ({"bodies": {"one": 3, "two": two}}, "bodies is .*, expected a mapping from text to a function"),
        ({"x": 3}, "layers: x is 3, expected a tensor or a list, each a tensor"),
        ({"bodies": {"one": one, "two": lambda x: None}}, "expected 1 tensors as next carries"),
    ],
)
def test_invalid_pattern_arguments_raise(change, text):
    with cg.Graph("g") as g:
        given = {"count": 4, "bodies": BODIES, "x": g.input("x", (B, D)), "kinds": ("one", "two"), **change}
        count, bodies, x, kinds = (given.pop(k) for k in ("count", "bodies", "x", "kinds"))
        with pytest.raises(cg.CostGraphError, match=text):
            cg.nn.layers(count, bodies, x, kinds, **given)


# -- partial rotary positions -----------------------------------------------------------------------------------------


def rotated(width, *shape):
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.nn.rotary(g.input("x", (*shape, K)), *cg.nn.rotary_tables(cg.ops.arange(S), width)))
    return g


def test_partial_rotary_computes_rotated_part_and_moves_all():
    g = rotated(R, B, H, S)
    kernel = cg.costs(g).filter(op="rotary").total()
    assert kernel.pointwise == 3 * B * H * S * R
    # x and the result in bf16; cosines and sines have R/2 elements in fp32
    assert kernel.bytes.expand() == (2 * 2 * B * H * S * K + 2 * 4 * S * R / 2).expand()
    full = cg.costs(rotated(K, B, H, S)).filter(op="rotary").total()
    assert full.pointwise == 3 * B * H * S * K


@pytest.mark.parametrize("width", [10, 12])
def test_rotary_tables_must_be_narrower_than_the_head(width):
    g = rotated(R, B, S)
    with pytest.raises(cg.BindingError, match=rf"R={width}"):
        cg.flops(g, B=1, S=2, K=10, R=width)
    assert cg.flops(g, B=1, S=2, K=11, R=10) > 0  # an odd head size


def test_rotary_tables_must_have_two_axes():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, K))
        with pytest.raises(cg.ShapeError, match=r"expected two axes \(positions, half the rotated size\)"):
            cg.nn.rotary(x, x, x)


# -- gated layers ------------------------------------------------------------------------------------------------------


def gated(**options):
    with cg.Graph("g") as g:
        x = g.input("x", (S, D), grad=True)
        y = cg.repeat(2, lambda x: x + cg.nn.gated_mlp(x, F, **options), x, name="layers")
        g.output(cg.reduce(y * y, "s d -> ", "mean"))
    return cg.backward(g)


def test_fused_gate_saves_only_its_inputs():
    apart, fused, packed = gated(), gated(fused=True), gated(fused=True, packed=True)
    one, other = (testing.run(g, S=3, D=5, F=7) for g in (apart, fused))
    for name, found in one.gradients.items():
        np.testing.assert_allclose(other.gradients[name], found, rtol=1e-12, err_msg=name)
    # x; gate, up and their product with F elements each; by default silu(gate) as well
    assert cg.saved_bytes(apart)["layers"] == 4 * S * D + 16 * S * F
    assert cg.saved_bytes(fused)["layers"] == cg.saved_bytes(packed)["layers"] == 4 * S * D + 12 * S * F


# -- packed layers -----------------------------------------------------------------------------------------------------


def attended(**options):
    with cg.Graph("g") as g:
        g.output(cg.nn.self_attention(g.input("x", (B, S, D)), H, K, groups=G, **options))
    return g


@each("options", [{}, {"bias": True, "out_bias": True}, {"qk_norm": "head"}, {"qk_norm": "all"}])
@each("kernel", ["flash", "eager"])
def test_packed_qkv_matches_separate_projections(kernel, options):
    apart, packed = (attended(kernel=kernel, packed=p, **options) for p in (False, True))
    assert cg.param_count(apart) == cg.param_count(packed)
    assert cg.flops(apart) == cg.flops(packed)
    # x is read once, not three times; the strided parts are read as views
    saved = cg.bytes_moved(apart) - cg.bytes_moved(packed)
    assert saved.subs({H: 2 * G}).expand() == (2 * 4 * B * S * D).expand()


def test_packed_layer_parts_are_views():
    ops = list(attended(packed=True).walk())
    (qkv,) = [op.results[0] for op in ops if op.name == "attention/qkv/matmul"]
    assert [str(n) for n in qkv.sizes] == ["B", "S", "2*G + H", "K"]
    parts = [op.results[0] for op in ops if op.name.startswith("attention/parts")]
    assert [str(t.sizes[2]) for t in parts] == ["H", "G", "G"]
    assert all(t.storage is qkv.storage for t in parts)


def test_invalid_packed_layers_raise():
    with pytest.raises(cg.GraphError, match="packed with a different bias for keys"):
        attended(packed=True, bias=True, key_bias=False)
    with pytest.raises(cg.GraphError, match="self_attention: packed is 1, expected True or False"):
        attended(packed=1)
    with cg.Graph("g") as g, pytest.raises(cg.GraphError, match="packed is 'yes', expected True or False"):
        cg.nn.gated_mlp(g.input("x", (B, D)), F, packed="yes")
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError, match=r"gated_mlp: f"):
        cg.nn.gated_mlp(g.input("x", (B, D)), 0, packed=True)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_gate_up_matches_separate_projections(bias):
    graphs = []
    for packed in (False, True):
        with cg.Graph("g") as g:
            g.output(cg.nn.gated_mlp(g.input("x", (B, S, D)), F, bias=bias, packed=packed))
        graphs.append(g)
    apart, packed = graphs
    assert cg.param_count(apart) == cg.param_count(packed) == 3 * D * F + (2 * F + D if bias else 0)
    assert cg.flops(apart) == cg.flops(packed)
    assert (cg.bytes_moved(apart) - cg.bytes_moved(packed)).expand() == 4 * B * S * D


POLICIES = [cg.every_block(), cg.every(2), cg.from_start(), cg.every(2, inside=cg.every_block())]
TURNS = [(("a", "b"), 1, 9), (("a", "b", "b"), 2, 8), (("a", "a", "b"), 0, 12)]


@pytest.mark.parametrize(
    ("kinds", "rest", "count", "policy"),
    [  # a plain run holds each of both in a few pairs
        pytest.param(*turn, policy, marks=() if (i + j) % 3 == 0 else pytest.mark.long)
        for i, turn in enumerate(TURNS)
        for j, policy in enumerate(POLICIES)
    ],
)
def test_mixed_layers_are_recomputed_one_by_one(kinds, rest, count, policy, tmp_path):
    def layer(x):
        return x + cg.nn.mlp(x, 4 * D, activation=cg.relu)

    def loss(stack):
        with cg.Graph("g") as g:
            x = stack(cg.linear(g.input("x", (B, D)), "b d -> b e", e=D))
            g.output(cg.reduce(x, "b d -> ", "mean"))
        return g

    alike = loss(lambda x: cg.repeat(L, layer, x, name="layers"))
    turns = loss(lambda x: cg.nn.layers(L, {"a": layer, "b": lambda x: layer(x)}, x, kinds, rest=rest))
    cg.save(turns, tmp_path / "g.json")
    for g in (turns, cg.load(tmp_path / "g.json"))[: 2 if rest == 1 else 1]:
        step = cg.backward(g, checkpoint=policy)
        again = cg.costs(step).filter(phase="recompute", kind="matmul").total().matmul
        alone = cg.unroll(step, L=count)
        for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
            assert question(alone, B=2, D=3) == question(step, B=2, D=3, L=count)
        if policy == cg.every_block():
            assert cg.evaluate(again, B=7, D=3, L=count) == 2 * 7 * 3 * 12 * count  # the last product is not needed
            expected = cg.peak_memory(cg.backward(alike, checkpoint=policy), B=211, D=3, L=count)
            assert cg.peak_memory(step, B=211, D=3, L=count) == expected
