"""Leaving a graph's block finishes it: adding to it raises until it is entered again."""

import copy
from contextlib import suppress

import networkx as nx
import pytest
from each import each

import costgraph as cg

B, D, F, L, S = cg.dims("B D F L S")


def block(x):
    with cg.kernel("gate"):
        y = x * cg.sigmoid(x)
    return cg.linear(y, "b s d -> b s e", e=D)


def declared(name="declared"):
    with cg.Graph(name) as g:
        x = cg.linear(g.input("x", (B, S, D)), "b s d -> b s f", f=F, name="up")
        x = cg.linear(cg.relu(x), "b s f -> b s d", d=D, name="down")
        x = cg.repeat(L, block, cg.tanh(2 * x + 1), name="layers")
        g.output(cg.softmax(x))
        g.loss = "cross_entropy"
    return g


def entered_by_none():
    g = cg.Graph("plain")
    g.output(cg.relu(g.input("x", (B, S, D))))
    return g.freeze()


def left_by_an_error():
    with suppress(ZeroDivisionError), declared() as g:
        g.output(cg.relu(g.outputs[0]))
        raise ZeroDivisionError
    return g


def saved(tmp_path):
    cg.save(declared(), tmp_path / "g.json")
    return cg.load(tmp_path / "g.json")


def stepped():
    with cg.Graph("step") as g:
        x = cg.linear(g.input("x", (B, S, D)), "b s d -> b s f", f=F, name="up")
        g.output(cg.reduce(cg.repeat(L, cg.relu, x, name="layers"), "b s f -> ", "mean"))
    return cg.training_step(g)


def folded():
    with cg.Graph("deep") as g:
        x = g.input("x", (B, S, D))
        for i in range(4):
            with cg.scope(f"h/{i}"):
                x = cg.linear(cg.relu(x), "b s d -> b s e", e=D, name="up")
        g.output(x)
    return cg.fold(g, "h", "N")


def traced():
    torch = pytest.importorskip("torch")
    from costgraph.torch import trace

    return trace(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()), torch.zeros(2, 4), dims=[("B", None)])


GRAPHS = {
    "declared": declared,
    "entered by none": entered_by_none,
    "left by an error": left_by_an_error,
    "of the zoo": lambda: cg.models.load("gpt2"),
    "training_step": stepped,
    "accumulated": lambda: cg.training_step(cg.models.load("mlp"), accumulate=L),
    "backward": lambda: cg.backward(lossy()),
    "decode": lambda: cg.decode(cg.models.load("gpt2")),
    "prefill": lambda: cg.prefill(cg.models.load("gpt2")),
    "fuse": lambda: cg.fuse(declared()),
    "unroll": lambda: cg.unroll(declared(), L=3),
    "apply_precision": lambda: cg.apply_precision(declared(), "bf16-mixed"),
    "quantize": lambda: cg.quantize(declared(), weights="fp8_e4m3"),
    "fold": folded,
    "traced": traced,
    "saved and loaded": saved,
}


def lossy():
    with cg.Graph("lossy") as g:
        g.output(cg.reduce(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F), "b f -> ", "mean"))
    return g


@pytest.fixture(params=GRAPHS)
def graph(request, tmp_path):
    make = GRAPHS[request.param]
    return make(tmp_path) if make is saved else make()


def figures(g):
    """Return a graph's description and costs."""
    nodes = [(len(b.ops), len(b.tensors), b.number_of_edges(), b.frozen) for b in g.bodies()]
    stated = [r.text for r in g.relations.relations], dict(g.defaults), g.loss, g.dtype, list(g.outputs)
    return nodes, stated, cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g), cg.param_count(g)


def first(g):
    return next(t for t in (*g.outputs, *g.tensors) if t.dtype.kind == "float")


def factors(g):
    """Return two tensors that `@` can multiply."""
    wanted = ((a, b) for a in g.tensors for b in g.tensors if a.ndim > 1 and b.ndim == 2)
    return next(((a, b) for a, b in wanted if a.sizes[-1] == b.sizes[0]), None)


def letters(t):
    return " ".join(f"a{i}" for i in range(t.ndim))


OPERATORS = {
    "add": lambda t: t + 1,
    "add from the right": lambda t: 1 + t,
    "sub": lambda t: t - t,
    "sub from the right": lambda t: 1 - t,
    "mul": lambda t: t * 2.0,
    "mul from the right": lambda t: 2.0 * t,
    "div": lambda t: t / 2,
    "div from the right": lambda t: 2 / t,
    "pow": lambda t: t**2,
    "neg": lambda t: -t,
    "index": lambda t: t[None],
    "transpose": lambda t: t.T,
    "transpose of the last two": lambda t: t.mT,
}
FUNCTIONS = {
    "relu": cg.relu,
    "gelu": cg.gelu,
    "silu": cg.silu,
    "tanh": cg.tanh,
    "sigmoid": cg.sigmoid,
    "softmax": cg.softmax,
    "layer_norm": cg.layer_norm,
    "rms_norm": cg.rms_norm,
    "dropout": lambda t: cg.dropout(t, 0.5),
    "einsum": lambda t: cg.einsum(t, t, f"{letters(t)}, {letters(t)} ->"),
    "linear": lambda t: cg.linear(t, "... d -> ... e", e=7, name="named"),
    "reduce": lambda t: cg.reduce(t, f"{letters(t)} ->", "sum"),
    "rearrange": lambda t: cg.rearrange(t, f"{letters(t)} -> 1 {letters(t)}"),
    "opaque": lambda t: cg.opaque("sort", [t], [((3,), "int32")], flops=1),
    "repeat": lambda t: cg.repeat(2, cg.tanh, t),
    "scan": lambda t: cg.scan(2, lambda h, _: (cg.tanh(h), ()), t),
}
#: Functions that need an axis.
AXES = ("index", "reduce", "linear", "softmax", "layer_norm", "rms_norm")
METHODS = {
    "input 'new'": lambda g: g.input("new", (B,)),
    "param 'new'": lambda g: g.param("new", (B,)),
    "buffer 'new'": lambda g: g.buffer("new", (B,)),
    "cache 'new'": lambda g: g.buffer("new", (B,), role="cache"),
    "add_node 'new'": lambda g: g.add_node("new"),
    "add_nodes_from": lambda g: g.add_nodes_from(["new"]),
    "add_edge": lambda g: g.add_edge("new", "other"),
    "add_edges_from": lambda g: g.add_edges_from([("new", "other")]),
    "remove_node": lambda g: g.remove_node(first(g)),
    "remove_nodes_from": lambda g: g.remove_nodes_from([first(g)]),
    "remove_edge": lambda g: g.remove_edge(*next(iter(g.edges))),
    "remove_edges_from": lambda g: g.remove_edges_from(list(g.edges)),
    "clear": lambda g: g.clear(),
    "clear_edges": lambda g: g.clear_edges(),
}


def expect_finished(g, asked):
    text = f"{asked}: graph '{g.root.name}' is finished, expected an open one: 'with g:' opens graph g again"
    return pytest.raises(cg.GraphError, match=f"^{text}$")


def test_adding_to_a_finished_graph_raises(graph):
    before, t, pair = figures(graph), first(graph), factors(graph)
    assert nx.is_frozen(graph)
    for asked, call in (OPERATORS | FUNCTIONS).items():
        if t.ndim > 1 or ((t.ndim or asked not in AXES) and "transpose" not in asked):
            with expect_finished(graph, asked.partition(" ")[0]):
                call(t)
    for asked, call in METHODS.items():
        with expect_finished(graph, asked):
            call(graph)
    if pair is not None:
        with expect_finished(graph, "matmul"):
            pair[0] @ pair[1]
    assert figures(graph) == before


def test_reentered_graph_accepts_ops(graph):
    ops, count, flops = len(graph.ops), cg.param_count(graph), cg.flops(graph)
    t = first(graph)
    with graph as again:
        assert again is graph
        assert not nx.is_frozen(graph)
        result = cg.tanh(t) * 2.0
        graph.param("new", (7,))
        graph.output(result)
    assert (len(graph.ops), cg.param_count(graph)) == (ops + 2, count + 7)
    points = t.numel.expr.subs({n: graph.defaults.get(n.name, n) for n in t.numel.expr.free_symbols})
    assert (cg.flops(graph) - flops - 2 * points).expand() == 0
    assert graph.outputs[-1] is result
    with expect_finished(graph, "relu"):
        cg.relu(result)


@each("make", [declared, stepped, folded])
def test_bodies_finish_with_their_graph(make):
    g = make()
    bodies = [b for b in g.bodies() if b is not g]
    assert bodies
    before = figures(g)
    for body in bodies:
        t = body.ops[-1].results[0]
        for asked, call in (("relu", cg.relu), ("mul", lambda t: t * 2.0)):
            with expect_finished(g, asked):
                call(t)
            with expect_finished(g, asked), body:  # a body opens with its graph, not on its own
                call(t)
        for asked in ("param 'new'", "add_edge", "remove_node"):
            with expect_finished(g, asked):
                METHODS[asked](body)
    assert figures(g) == before
    with g:
        assert not any(map(nx.is_frozen, bodies))
    assert all(map(nx.is_frozen, bodies))


def test_metadata_of_a_finished_graph_can_change(graph):
    t = first(graph)
    peak = cg.peak_memory(graph)
    graph.assume("Z >= 2", "Z <= 5")
    graph.loss = "cross_entropy"
    graph.output(t)
    assert graph.outputs[-1] is t
    assert graph.loss == "cross_entropy"
    assert [r.text for r in graph.relations.relations][-2:] == ["Z >= 2", "Z <= 5"]
    graph.outputs = graph.outputs[:-1]
    assert cg.peak_memory(graph) == peak
    before = cg.flops(graph)
    name = min(map(str, before.free_symbols), default=None)
    if name is not None:
        graph.defaults = {**graph.defaults, name: 2}
        assert name not in map(str, getattr(cg.flops(graph), "free_symbols", ()))
    with expect_finished(graph, "relu"):
        cg.relu(t)


def test_saved_tensors_of_a_kernel_are_set_while_open():
    from costgraph.ops.loops import save

    g = declared()
    op = next(op for op in g.walk() if op.graph.fused)
    with expect_finished(g, "save"):
        save(op.results[0])
    assert not op.kind.save


def test_nested_with_block_leaves_graph_open():
    g = declared()
    with g:
        with g:
            cg.relu(g.outputs[0])
        with cg.Graph("inner") as inner:
            cg.relu(g.outputs[0])
        assert nx.is_frozen(inner)
        g.output(cg.relu(g.outputs[0]))
    assert nx.is_frozen(g)


def test_reentered_graph_is_validated_on_exit():
    g = declared()
    with pytest.raises(cg.GraphError, match="kernel 'unread': no op outside reads"), g, cg.kernel("unread"):
        cg.relu(g.outputs[0])
    with expect_finished(g, "relu"):
        cg.relu(g.outputs[0])


def test_never_entered_graph_is_open():
    g = cg.Graph("plain")
    x = g.input("x", (B,))
    g.output(cg.relu(x))
    assert cg.flops(g) == B
    g.output(-x)
    assert cg.flops(g) == 2 * B
    assert not nx.is_frozen(g)


def test_foreign_tensor_error_comes_first():
    a, b = declared("a"), declared("b")
    for left, right in ((a, b), (b, a)):
        text = f"belongs to graph '{right.name}', expected one of graph '{left.name}'"
        with pytest.raises(cg.GraphError, match=text), b:
            left.outputs[0] + right.outputs[0]
    with expect_finished(a, "relu"), b:
        cg.relu(a.outputs[0])


def test_copies_are_open_and_views_are_finished():
    g = declared()
    before = figures(g)
    for made in (g.copy(), copy.copy(g), cg.Graph(g), g.reverse(copy=False).copy()):
        assert not nx.is_frozen(made)
    twin = g.copy()
    twin.remove_nodes_from([twin.ops[-1], twin.outputs[0]])
    twin.outputs.clear()
    twin.defaults["B"] = 2
    twin.param("new", (7,))
    with twin:
        twin.output(twin.ops[-1].results[0])
    assert nx.is_frozen(twin)
    with expect_finished(g, "relu"):
        cg.relu(twin.outputs[0])  # its tensors belong to the original
    for view in (g.subgraph(list(g)), g.reverse(copy=False), g.copy(as_view=True)):
        assert cg.flops(view) == cg.flops(g)
        with expect_finished(g, "param 'new'"), view:
            view.param("new", (7,))
    assert figures(g) == before


def test_networkx_frozen_graph_reopens_on_entry():
    g = cg.Graph("plain")
    g.output(cg.relu(g.input("x", (B,))))
    nx.freeze(g)
    with expect_finished(g, "relu"):
        cg.relu(g.outputs[0])
    with g:
        g.output(cg.relu(g.outputs[0]))
    assert cg.flops(g) == 2 * B
    with expect_finished(g, "add_node 'new'"):
        g.add_node("new")


def test_in_place_list_changes_invalidate_cached_costs():
    g = declared()
    assert cg.param_count(g) == 2 * D * F + D**2 * L
    with g:
        assert str(cg.flops(g)).count("B") > 1
        g.defaults.update(B=2)
    assert "B" not in map(str, cg.flops(g).free_symbols)
