from dataclasses import dataclass

import networkx as nx
import pytest
from each import each

import costgraph as cg
from costgraph import BindingError, GraphError, PatternError, ShapeError
from costgraph.ir.graph import (
    Op,
    OpKind,
    Result,
    Tensor,
    apply,
)
from costgraph.ops import rules
from costgraph.ops.registry import KINDS, register

B, S, D, F, H, K = cg.dims("B S D F H K")


def small():
    with cg.Graph("small") as g:
        x = g.input("x", (B, D))
        h = cg.linear(x, "b d -> b f", f=F, name="up")
        g.output(cg.linear(cg.relu(h), "b f -> b d", d=D, name="down"))
    return g


# -- as a networkx graph -------------------------------------------------------------------------------------------


def test_graph_is_bipartite_between_tensors_and_ops():
    g = small()
    assert all(isinstance(n, Op | Tensor) for n in g.nodes)
    assert all(isinstance(a, Op) != isinstance(b, Op) for a, b in g.edges)
    assert nx.is_bipartite(g)


def test_program_order_is_a_topological_order():
    g = small()
    place = {n: i for i, n in enumerate(g.nodes)}
    assert all(place[a] < place[b] for a, b in g.edges)
    assert [n.name for n in nx.lexicographical_topological_sort(g, key=place.get)] == [n.name for n in g.nodes]


def test_descendants_depend_on_the_tensor():
    g = small()
    x = g.tensors[0]
    assert nx.descendants(g, x) == set(g.nodes) - {x} - set(g.params)
    assert nx.ancestors(g, g.outputs[0]) == set(g.nodes) - {g.outputs[0]}


def test_copies_subgraphs_and_reversed_views_keep_nodes_and_order():
    g = small()
    copy = g.copy()
    assert type(copy) is cg.Graph
    assert list(copy.nodes) == list(g.nodes)
    assert (cg.flops(copy), cg.peak_memory(copy)) == (cg.flops(g), cg.peak_memory(g))
    ops = g.subgraph(g.ops[:1] + list(g.ops[0].operands) + list(g.ops[0].results))
    assert cg.flops(ops) == 2 * B * D * F
    turned = g.reverse(copy=False)
    assert set(turned.edges) == {(b, a) for a, b in g.edges}
    assert nx.dag_longest_path_length(g) == 6  # three ops, each between two tensors


def test_changing_a_copy_leaves_the_original():
    g = small()
    nodes = len(g)
    copy = g.copy()
    copy.remove_node(copy.outputs[0])
    assert len(g) == nodes


def test_copies_and_views_keep_defaults_assumptions_and_outputs():
    g = small()
    with g:
        g.assume("F >= D")
        g.defaults["B"] = 3
    for other in (g.copy(), g.subgraph(list(g)), g.reverse(copy=False), nx.DiGraph.copy(g)):
        assert other.outputs == g.outputs
        assert cg.flops(other, D=5, F=7) == 3 * (2 * 2 * 5 * 7 + 7)
        with pytest.raises(BindingError, match="against the assumption 'F >= D'"):
            cg.flops(other, D=7, F=5)
    copy = g.copy()
    copy.output(copy.tensors[0])
    assert len(g.outputs) == 1


def test_frozen_graphs_answer_queries_and_reject_changes():
    g = small()
    assert nx.is_frozen(g)
    assert g.freeze() is g
    assert nx.is_frozen(g)
    assert cg.flops(g, B=2, D=3, F=5) == 2 * 2 * 3 * 5 * 2 + 2 * 5
    for change in (
        lambda: g.input("y", (B,)),
        lambda: g.param("w", (B,)),
        lambda: cg.relu(g.tensors[0]),
    ):
        with pytest.raises(GraphError, match="graph 'small' is finished; reopen it with 'with g:'"):
            change()


# -- names and scopes ------------------------------------------------------------------------------------------------


def test_names_are_unique_and_scopes_nest():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.scope("block/attn"):
            for _ in range(3):
                x = cg.relu(x)
            w = g.param("w", (D,))
        with cg.scope("block"), cg.scope("mlp"):
            x = cg.relu(x * w)
        g.output(x)
    names = [op.name for op in g.ops]
    assert names == ["block/attn/relu", "block/attn/relu_1", "block/attn/relu_2", "block/mlp/mul", "block/mlp/relu"]
    assert w.name == "block/attn/w"
    assert len({n.name for n in g.tensors}) == len(g.tensors)
    assert {op.scope for op in g.ops} == {"block/attn", "block/mlp"}


def test_op_names_never_collide():
    with cg.Graph("g") as g:
        x = g.input("relu", (B,))
        y = cg.relu(cg.relu(x))
    assert [op.name for op in g.ops] == ["relu_1", "relu_2"]
    assert y.name == "relu_2"


def test_ops_without_context_join_their_operands_graph():
    g = cg.Graph("g")
    y = cg.relu(g.input("x", (B,)))
    assert y in g


# -- declarations ----------------------------------------------------------------------------------------------------


def test_dtype_defaults_to_the_graph_dtype():
    with cg.Graph("g", dtype="bf16") as g:
        assert g.input("x", (B,)).dtype.name == "bf16"
        assert g.param("w", (B,), dtype="fp32").dtype.name == "fp32"
        assert not g.param("f", (B,), grad=False).requires_grad


def test_tensor_output_twice_is_written_once():
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (B,)))
        g.output(y, y)
    assert cg.bytes_moved(g, fused=True) == 4 * B + 4 * B
    assert cg.peak_memory(g) == 8 * B


def test_input_as_output_moves_nothing():
    with cg.Graph("g") as g:
        g.output(g.input("x", (B,)))
    assert cg.bytes_moved(g, fused=True) == 0
    assert cg.peak_memory(g) == 4 * B


def test_empty_graph_costs_nothing():
    g = cg.Graph("empty")
    assert (cg.flops(g), cg.bytes_moved(g), cg.param_count(g), cg.peak_memory(g)) == (0, 0, 0, 0)
    assert (len(cg.costs(g)), cg.lifetimes(g)) == (0, [])
    with pytest.raises(GraphError, match="intensity of graph 'empty': it moves no bytes"):
        cg.intensity(g)


@each(
    ("call", "error", "text"),
    [
        (lambda g: g.input("x", (B,)), GraphError, "input 'x': the name is taken in graph 'g', expected a new one"),
        (lambda g: g.input("a b", (B,)), GraphError, "input 'a b': expected a name of letters, digits"),
        (lambda g: g.input(None, (B,)), GraphError, "Graph.input: name is None, expected text"),
        (lambda g: g.input("1x", (B,)), GraphError, "input '1x': expected a name"),
        (lambda g: g.input("y", "BS"), GraphError, "input 'y': shape 'BS', expected a tuple of sizes"),
        (lambda g: g.input("y", 3), GraphError, "input 'y': shape 3, expected a tuple of sizes"),
        (lambda g: g.input("y", {2, 3}), GraphError, "expected a tuple of sizes"),
        (lambda g: g.input("y", (2, 0)), ShapeError, "input 'y': axis 1: 0, expected a positive integer"),
        (lambda g: g.input("y", (B / B / 2,)), ShapeError, "input 'y': axis 0: 1/2, expected a positive integer"),
        (lambda g: g.input("y", (2.0,)), ShapeError, "input 'y': axis 0: size '?2.0"),
        (lambda g: g.input("y", (None,)), ShapeError, "input 'y': axis 0: size '?None"),
        (lambda g: g.input("y", (B,), dtype="fp33"), cg.FormatError, "fp33"),
        (lambda g: g.param("w", (B,), grad=None), GraphError, "Graph.param: grad is None, expected True or False"),
        (lambda g: g.buffer("b", (B,), role="input"), GraphError, "role 'input', expected one of buffer, cache"),
        (lambda g: g.output(3), GraphError, r"Graph.output: tensors\[0\] is 3, expected a tensor"),
        (lambda g: g.output(cg.Graph("o").input("z", (B,))), GraphError,
         "tensor 'z' belongs to graph 'o', expected one of graph 'g'"),
        (lambda g: cg.relu(g.tensors[0]) + cg.Graph("o").input("z", (B,)), GraphError,
         "tensor 'z' belongs to graph 'o'"),
        (lambda g: cg.scope("a b").__enter__(), GraphError, "scope 'a b': expected identifiers separated by '/'"),
        (lambda g: cg.scope("").__enter__(), GraphError, "scope '': expected identifiers"),
        (lambda g: cg.scope(None).__enter__(), GraphError, "scope: name is None, expected text"),
        (lambda g: cg.Graph(3), GraphError, "graph: name 3, expected text"),
        (lambda g: cg.Graph("h", dtype="fp33"), cg.FormatError, "fp33"),
        (lambda g: cg.flops(3), GraphError, "flops: graph is 3, expected a graph"),
        (lambda g: cg.peak_memory(None), GraphError, "peak_memory: graph is None, expected a graph"),
        (lambda g: cg.lifetimes("g"), GraphError, "lifetimes: graph is 'g', expected a graph"),
        (lambda g: cg.timeline("g"), GraphError, "timeline: graph is 'g', expected a graph"),
        (lambda g: cg.param_count([]), GraphError, r"param_count: graph is \[\], expected a graph"),
        (lambda g: register(OpKind), GraphError, "register: got .*, expected a subclass of OpKind with a name"),
        (lambda g: register("einsum"), GraphError, "register: got 'einsum', expected a subclass of OpKind with a name"),
        (lambda g: register(KINDS["einsum"]), GraphError, "op kind 'einsum' already has a record"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        g.input("x", (B,))
        with pytest.raises(error, match=text):
            call(g)


def test_failed_op_leaves_graph_unchanged():
    g = small()
    nodes = list(g.nodes)
    with pytest.raises(ShapeError, match="'add' in graph 'small': axis -2 has sizes B and F"), g:
        g.tensors[0] + g.params[0].T
    assert [n for n in g.nodes if n not in nodes and n.name == "add"] == []
    with g:
        assert cg.relu(g.tensors[0]).name == "relu_1"


# -- validation --------------------------------------------------------------------------------------------------------


def test_foreign_nodes_raise():
    with pytest.raises(GraphError, match="node 'stranger', expected tensors and ops only"), small() as g:
        g.add_node("stranger")


def test_cycles_raise():
    with pytest.raises(GraphError, match="its edges form a cycle"), small() as g:
        g.add_edge(g.outputs[0], g.ops[0])


def test_operands_without_edges_raise():
    match = "op 'up/matmul': tensor 'x' is not joined to it, expected an edge"
    with pytest.raises(GraphError, match=match), small() as g:
        g.remove_edge(g.tensors[0], g.ops[0])


def test_ops_out_of_program_order_raise():
    g = small()
    late = cg.Graph("late")
    for node in sorted(g.nodes, key=lambda n: isinstance(n, Op) and n.name == "up/matmul"):
        late.add_node(node)
    late.add_edges_from(g.edges)
    with pytest.raises(GraphError, match="reads 'up/matmul' before it is produced, expected program order"):
        late.validate()


def test_graph_is_validated_on_exit_unless_an_error_is_raised():
    def build():
        with cg.Graph("g") as g:
            with cg.kernel("k"):
                cg.relu(g.input("x", (B,)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()


# -- assumptions and bindings -----------------------------------------------------------------------------------------


def test_assumed_equalities_bind_dependent_sizes():
    with cg.Graph("g") as g:
        g.assume("D == H*K", "F >= D")
        x = cg.ops.reshape(g.input("x", (B, D)), (B, H, K))
        g.output(cg.relu(x))
    assert cg.flops(g, B=2, H=3, K=5) == 2 * 15
    assert cg.flops(g, B=2, D=15, H=3, K=5) == 30


@each(
    ("dims", "text"),
    [
        ({"B": 2, "D": 14, "H": 3, "K": 5}, "against the assumption 'D == H[*]K'|makes"),
        ({"F": 3, "D": 4}, "against the assumption 'F >= D'"),
        ({"B": 0}, "B=0: expected a positive integer"),
        ({"B": -1}, "B=-1: expected a positive integer"),
        ({"B": 2.0}, "B=.*: expected a positive integer"),
        ({"B": "2"}, "B=.*: expected a positive integer"),
        ({"B": None}, "B=.*: expected a positive integer"),
        ({"B": True}, "B=.*: expected a positive integer"),
        ({"B": int}, "B=.*: expected a positive integer"),
        ({"Q": 2}, "'Q' is not a dimension of graph 'g', expected one of B, D, F, H, K"),
        ({"D": 15, "H": 2}, "K|H=2"),
    ],
)
@each("question", [cg.flops, cg.bytes_moved, cg.peak_memory, cg.param_count, cg.costs, cg.lifetimes])
def test_invalid_bindings_raise_in_every_query(question, dims, text):
    with cg.Graph("g") as g:
        g.assume("D == H*K", "F >= D")
        w = g.param("w", (D, F))
        g.output(cg.ops.reshape(cg.einsum(g.input("x", (B, D)), w, "b d, d f -> b f"), (B, F)))
        g.output(cg.ops.reshape(g.tensors[1], (B, H, K)))
    with pytest.raises(BindingError, match=text):
        question(g, **dims)


@each("text", ["F", "F >> D", "F == ", 3, "F >= D +", "__import__('os')", "F >= D; D"])
def test_invalid_assumptions_raise(text):
    with pytest.raises(PatternError, match="expected"):
        cg.Graph("g").assume(text)


def test_contradictory_assumptions_raise():
    g = cg.Graph("g")
    g.assume("D == H*K")
    with pytest.raises(PatternError, match="contradicts"):
        g.assume("D < H")


def test_sizes_bound_to_fractions_raise():
    with cg.Graph("g") as g:
        g.output(cg.rearrange(g.input("x", (B, D)), "b (h k) -> b h k", h=H))
    assert cg.peak_memory(g, B=2, D=15, H=3) == 4 * 30
    with pytest.raises(BindingError, match="D=14, H=3: axis 2 of 'rearrange' has size D/H = 14/3"):
        cg.flops(g, D=14, H=3)


def test_graph_inside_foreign_scope_has_its_own_names():
    with cg.Graph("outer") as outer, cg.scope("attn"):
        a = outer.param("w", (2,))
        with cg.Graph("inner") as inner:
            b = inner.param("w", (2,))
        c = outer.param("v", (2,))
    assert [t.name for t in (a, b, c)] == ["attn/w", "w", "attn/v"]


def test_removing_nodes_invalidates_derived_results():
    B = cg.dims("B")
    with cg.Graph("g") as g:
        kept = cg.relu(g.input("x", (B,)))
        cg.tanh(kept)
        g.output(kept)
    assert cg.flops(g) == 2 * B
    with g:
        g.remove_nodes_from([g.ops[1], *g.ops[1].results])
    assert (cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g)) == (B, 8 * B, 8 * B)
    with pytest.raises(GraphError, match="remove_node: graph 'g' is finished"):
        g.remove_node(g.ops[0])


def test_unresolvable_annotations_raise():
    @dataclass(frozen=True, kw_only=True)
    class Odd(OpKind):
        name = "odd"
        size: "Nowhere" = None  # noqa: F821  # that is the point
        flops, reads, writes = rules.free, rules.whole, rules.all_results

        def infer(self, operands):
            return [Result(operands[0].sizes, operands[0].dtype)]

    with cg.Graph("g") as g:
        g.output(apply(Odd(), [g.input("x", (B,))], "odd")[0])
    text = "op kind Odd: name 'Nowhere' is not defined in its annotations; import the name at run time"
    with pytest.raises(GraphError, match=text):
        cg.peak_memory(g, B=2)
