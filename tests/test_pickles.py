"""Pickles and deep copies of graphs, formulas and results, and graphs in networkx formats."""

import copy
import pickle
import subprocess
import sys
from functools import cache

import networkx as nx
import pytest
import sympy
from each import each
from hypothesis import given, settings
from shared import load, training_step

import costgraph as cg
from costgraph.testing import graphs

A, B, D, F, L, S = cg.dims("A B D F L S")

WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "oldest protocol with slots": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "deepcopy": copy.deepcopy,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def net(name="net"):
    with cg.Graph(name, dtype="bf16") as g:
        h = cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up"))
        h = cg.repeat(L, lambda y: cg.relu(cg.linear(y, "b f -> b g", g=F, name="mid")), h)
        g.output(cg.softmax(cg.linear(h, "b f -> b d", d=D, name="down"), axis=1))
        g.assume("F >= D")
        g.defaults = {"L": 3}
    return g


def answers(g):
    questions = (cg.flops, cg.bytes_moved, cg.param_count, cg.peak_memory, cg.costs, cg.timeline, cg.lifetimes)
    return [question(g) for question in questions] + [cg.regimes(cg.peak_memory(g)), cg.peak_memory(g, L=2, B=1)]


def facts(g):
    """Return all node attributes in order, and the edges of each node."""
    return [
        (repr(n), [repr(m) for m in b.pred[n]], [repr(m) for m in b.succ[n]], n.graph is b,
         getattr(n, "strides", None), getattr(n, "domain", None), getattr(n, "phase", None))
        for b in g.bodies() for n in b
    ]  # fmt: skip


@ways
def test_copy_gives_same_answers(way):
    g = net()
    out = way(g)
    assert type(out) is cg.Graph
    assert (out.name, out.defaults, out.dtype) == (g.name, g.defaults, g.dtype)
    assert answers(out) == answers(g)
    assert facts(out) == facts(g)
    assert not {id(n) for b in g.bodies() for n in b} & {id(n) for b in out.bodies() for n in b}
    assert all(t in out for t in out.outputs)
    out.validate()


@ways
def test_copy_keeps_refusals(way):
    with pytest.raises(cg.BindingError, match="against the assumption 'F >= D'"):
        cg.flops(way(net()), F=2, D=3)


@ways
@each("first", [True, False])
def test_copies_are_independent(way, first):
    g = net()
    before = answers(g), facts(g)
    out = way(g)
    changed, kept = (g, out) if first else (out, g)
    with changed:
        h = cg.relu(changed.outputs[0])
        changed.output(cg.linear(h, "b d -> b f", f=F, name="more"))
        changed.assume("B <= 8")
        changed.defaults = {}
    assert (answers(kept), facts(kept)) == before
    assert cg.flops(kept, B=9) != cg.flops(kept)
    with pytest.raises(cg.BindingError, match="B <= 8"):
        cg.flops(changed, B=9)
    assert cg.param_count(changed) != cg.param_count(kept)


@ways
def test_copy_of_frozen_graph_is_frozen(way):
    out = way(net().freeze())
    assert nx.is_frozen(out)
    assert all(nx.is_frozen(b) for b in out.bodies())
    changes = (
        lambda: out.input("more", (B,)),
        lambda: cg.relu(out.outputs[0]),
        lambda: out.add_node(out.ops[0]),
    )
    for change in changes:
        with pytest.raises((cg.GraphError, nx.NetworkXError), match="graph 'net' is finished"):
            change()
    assert answers(out) == answers(net())
    with out:  # reopened, bodies included
        out.defaults.clear()
        out.output(cg.relu(out.outputs[0]))
    assert out.defaults == {}
    assert len(out.outputs) == 2


@ways
def test_training_and_inference_steps_can_be_copied(way):
    for g in (training_step(load("gpt2"), optimizer=cg.AdamW()), cg.decode(load("gpt2"))):
        out = way(g)
        assert answers(out) == answers(g)
        assert facts(out) == facts(g)
        assert [(t.name, d.name) for t, d in out.gradients.items()] == [
            (t.name, d.name) for t, d in g.gradients.items()
        ]


@ways
def test_copying_a_node_copies_its_graph(way):
    g = net()
    tensor, again, op = way((g.outputs[0], g.outputs[0], g.ops[0]))
    assert tensor is again
    assert tensor.graph is op.graph is not g
    assert tensor is tensor.graph.outputs[0]
    assert op is tensor.graph.ops[0]
    alone = way(g.ops[1])
    assert alone is alone.graph.ops[1]
    body = next(b for b in g.bodies() if b is not g)
    assert answers(way(body).root) == answers(g)


@ways
def test_subgraph_copy(way):
    g = net()
    part = g.copy()
    part.remove_node(part.ops[-1])
    out = way(part)
    assert [repr(n) for n in out] == [repr(n) for n in part]
    assert cg.costs(out) == cg.costs(part) != cg.costs(g)
    assert {n.graph for n in out} == {out.outputs[0].graph} != {g}


def test_shallow_copy_is_an_independent_graph():
    g = net()
    out = copy.copy(g)
    out.outputs.clear()
    out.remove_node(out.ops[0])
    assert answers(g) == answers(net())
    assert copy.copy(g.ops[0]) is g.ops[0]


@ways
def test_long_graphs_can_be_pickled(way):
    with cg.Graph("long") as g:
        x = g.input("x", (B,))
        for _ in range(1500):  # deeper than Python's recursion limit
            x = cg.relu(x)
        g.output(x)
    assert cg.flops(way(g)) == 1500 * B


def test_graph_unpickles_in_another_process():
    wanted = net()
    program = (
        "import pickle, sys; g = pickle.load(sys.stdin.buffer); import costgraph as cg\nwith g:\n"
        " cg.linear(g.outputs[0], 'b d -> b f', f=7, name='more')\nprint(cg.peak_memory(g, B=2, D=3, F=5), cg.flops(g))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(wanted), capture_output=True, check=True)
    with wanted:
        cg.linear(wanted.outputs[0], "b d -> b f", f=7, name="more")
    assert done.stdout.decode().strip() == f"{cg.peak_memory(wanted, B=2, D=3, F=5)} {cg.flops(wanted)}"


def test_unregistered_kind_is_refused():
    kind = net().ops[0].kind
    data = pickle.dumps(kind)
    assert pickle.loads(data) == kind
    assert type(pickle.loads(data)) is type(kind)
    name = type(kind).__name__.encode()
    with pytest.raises(AttributeError, match=r"x+"):
        pickle.loads(data.replace(name, b"x" * len(name)))


@settings(max_examples=25)
@given(case=graphs())
def test_drawn_graphs_keep_their_formulas(case):
    g, point = case
    for way in WAYS.values():
        out = way(g)
        assert facts(out) == facts(g)
        assert cg.peak_memory(out) == cg.peak_memory(g)
        assert (cg.flops(out), cg.bytes_moved(out), cg.bytes_moved(out, fused=True)) == (
            cg.flops(g), cg.bytes_moved(g), cg.bytes_moved(g, fused=True),
        )  # fmt: skip
        assert cg.costs(out, **point) == cg.costs(g, **point)


# -- formulas and results --------------------------------------------------------------------------------------------

FORMULAS = {
    "Max": lambda: cg.Max(2 * B * D, F, S + 1),
    "Min": lambda: 3 + B * cg.Min(D, F),
    "of a graph": lambda: cg.peak_memory(net()),
    "intensity": lambda: cg.intensity(net()),
    "sum": lambda: 2 * A * B + sympy.sqrt(D),
}


@ways
@each("name", FORMULAS)
def test_formulas_and_compiled_formulas_can_be_pickled(way, name):
    formula = FORMULAS[name]()
    assert way(formula) == formula
    assert type(way(formula)) is type(formula)
    compiled = cg.compile(formula)
    out = way(compiled)
    assert out.formula == compiled.formula
    assert out.names == compiled.names
    sizes = dict.fromkeys(compiled.names, 5)
    assert out(**sizes) == compiled(**sizes) == cg.evaluate(formula, **sizes)
    arrays = {n: [3, 5, 7] for n in compiled.names}
    assert list(out(**arrays)) == list(compiled(**arrays))


@ways
def test_compiled_formula_keeps_out_of_range_mode(way):
    formula = cg.peak_memory(net())
    sizes = {"B": 1, "D": [2, 9], "F": 4}
    with pytest.raises(cg.BindingError, match="F >= D"):
        way(cg.compile(formula))(**sizes)
    found = way(cg.compile(formula, outside="nan"))(**sizes)
    assert (found[0], found[1] != found[1]) == (cg.evaluate(formula, B=1, D=2, F=4), True)


RESULTS = {
    "costs": cg.costs,
    "bound costs": lambda g: cg.costs(g, B=2),
    "groups": lambda g: cg.costs(g).group("scope"),
    "total": lambda g: cg.costs(g).total(),
    "roofline": lambda g: cg.roofline(g, "h100-sxm", B=2, D=3, F=5),
    "timeline": cg.timeline,
    "bound timeline": lambda g: cg.timeline(g, B=2, D=3, F=5),
    "lifetimes": cg.lifetimes,
    "hardware": lambda g: cg.load_hardware("mi300x"),
    "report": lambda g: cg.report(g, "h100-sxm", B=2, D=3, F=5),
    "comparison": lambda g: cg.compare(g, g),
    "throughput": lambda g: cg.plan.throughput(cg.decode(cg.models.load("llama-3-8b")), "h100-sxm", "B", [1, 2], S=128),
    "search": lambda g: cg.plan.search(
        cg.models.load("gpt2"), devices=2, hardware="h100-sxm", B=2, S=128, tp=1, zero=1, checkpoint="none"
    ),
}


@cache
def result(name):
    return RESULTS[name](net())


@ways
@pytest.mark.parametrize("name", RESULTS)
def test_results_can_be_pickled(way, name):
    found = result(name)
    out = way(found)
    assert out == found
    assert type(out) is type(found)
    assert (repr(out), str(out)) == (repr(found), str(found))


# -- files of networkx -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [net, lambda: cg.training_step(cg.models.load("mlp"), optimizer=cg.SGD())])
def test_graphml_export(make, tmp_path):
    g = make()
    g.graph["note"] = "mine"
    nx.write_graphml(nx.relabel_nodes(g, str), tmp_path / "g.graphml")
    read = nx.read_graphml(tmp_path / "g.graphml")
    assert set(read.nodes) == {str(n) for n in g}
    assert set(read.edges) == {(str(a), str(b)) for a, b in g.edges}
    assert read.graph["name"] == g.name
    assert read.graph["note"] == "mine"


def test_networkx_copies_keep_graph_metadata():
    g = net()
    for out in (g.copy(), nx.relabel_nodes(g, {}), g.reverse(), g.reverse(copy=False), g.subgraph(list(g))):
        assert (out.name, out.dtype, out.outputs, out.defaults) == (g.name, g.dtype, g.outputs, g.defaults)
    assert dict(nx.DiGraph(g).graph) == {"name": "net"}
    assert set(g.to_undirected()) == set(g)
