"""A refused change leaves the graph unchanged: a program with refusals declares the same graph as one without."""

import copy
import inspect
import pickle
from contextlib import suppress

import pytest
from budget import drawing, examples
from each import each
from hypothesis import given
from hypothesis import strategies as st
from public import FUNCTIONS

import costgraph as cg
from costgraph.ir.graph import Op, here

B, S, V = cg.dims("B S V")


class Declared:
    """A graph with various inputs, on which a call can be made."""

    def __init__(self):
        self.graph = g = cg.Graph("g")
        self.x = g.input("x", (B, S, 8))
        self.rows, self.image = g.input("rows", (B, 8)), g.input("image", (B, 8, 8, 8))
        self.nhwc = g.input("nhwc", (B, 8, 8, 8))
        self.q = g.input("q", (B, 2, S, 4))
        self.ids, self.table = g.input("ids", (B, S), dtype="int64"), g.input("table", (V, 8))
        self.times, self.targets = g.input("times", (B,), dtype="int64"), g.input("targets", (B,), dtype="int64")
        self.cos, self.sin = g.input("cos", (S, 2)), g.input("sin", (S, 2))
        self.order = g.input("order", (B, 2), dtype="int64")
        self.weights = g.input("weights", (B, S, 2))
        self.chosen = g.input("chosen", (B, S, 2), dtype="int64")
        self.experts, self.ends = g.input("experts", (4, 8, 2)), g.input("ends", (4,), dtype="int32")
        self.row = g.input("row", (8,))
        self.rows_of = g.input("rows_of", (B,), dtype="int64")
        self.at = g.input("at", (S,), dtype="int64")
        self.turned, self.cut = self.x.mT, cg.nn.window_partition(self.nhwc, 2, 1)


def step(state, item):
    new = cg.tanh(state + item)
    return new, new


#: One call of every public function that adds to a graph.
CALLS = {
    "adaptive_pool": lambda d: cg.nn.adaptive_pool(d.image, (2, 2)),
    "arange": lambda d: cg.ops.arange(S),
    "attention": lambda d: cg.attention(d.q, d.q, d.q, kernel="eager", p=0.1),
    "batch_norm": lambda d: cg.nn.batch_norm(d.image),
    "binary_cross_entropy": lambda d: cg.nn.binary_cross_entropy(d.rows, d.rows),
    "cache": lambda d: cg.ops.cache(d.q, "b h s k", along="s"),
    "cast": lambda d: cg.ops.cast(d.x, "bf16"),
    "causal_conv": lambda d: cg.nn.causal_conv(d.x, 3),
    "collective": lambda d: cg.ops.collective(d.x, "all_reduce", 4),
    "concat": lambda d: cg.ops.concat([d.turned, d.turned]),
    "contiguous_copy": lambda d: cg.ops.contiguous_copy(d.turned),
    "conv": lambda d: cg.conv(d.image, "b c h w -> b o h w", window=3, padding=1, o=4, bias=True),
    "conv_transpose": lambda d: cg.nn.conv_transpose(d.image, "b c h w -> b o h w", window=3, stride=2, o=4, bias=True),
    "cross_attention": lambda d: cg.nn.cross_attention(d.x, d.x, 2, 4, bias=True, p=0.1),
    "cross_entropy": lambda d: cg.cross_entropy(d.rows, d.targets),
    "cumulative_sum": lambda d: cg.nn.cumulative_sum(d.x),
    "dot_interaction": lambda d: cg.nn.dot_interaction(d.x),
    "dropout": lambda d: cg.dropout(d.x, 0.1),
    "einsum": lambda d: cg.einsum(d.x, d.table, d.rows, "b s d, v d, b d -> b s v"),
    "embedding": lambda d: cg.embedding(d.ids, d.table),
    "embedding_bag": lambda d: cg.nn.embedding_bag(d.ids, d.table),
    "equal": lambda d: cg.ops.equal(d.x, 1.0),
    "exp": lambda d: cg.ops.exp(d.x),
    "expand": lambda d: cg.ops.expand(d.rows, "b d -> b s d", s=S),
    "experts": lambda d: cg.nn.experts(d.x, d.weights, d.chosen, 4, 16),
    "full": lambda d: cg.ops.full((B, 4), 2.5),
    "gated_mlp": lambda d: cg.nn.gated_mlp(d.x, 16, bias=True),
    "gather": lambda d: cg.ops.gather(d.table, d.ids),
    "gelu": lambda d: cg.gelu(d.x, approximate="tanh"),
    "greater": lambda d: cg.ops.greater(d.x, 1.0),
    "greater_equal": lambda d: cg.ops.greater_equal(d.x, 1.0),
    "group_norm": lambda d: cg.nn.group_norm(d.image, 2),
    "grouped_matmul": lambda d: cg.ops.grouped_matmul(d.rows, d.experts, d.ends, 1),
    "gru": lambda d: cg.nn.gru(d.x, 4),
    "head_norm": lambda d: cg.nn.head_norm(d.q),
    "initial_state": lambda d: cg.ops.initial_state((B, 4)),
    "inverted_residual": lambda d: cg.nn.inverted_residual(d.image, 16, 8, squeezed=4, residual=True, p=0.1),
    "keep_alive": lambda d: cg.ops.keep_alive(d.x, d.rows),
    "latent_attention": lambda d: cg.nn.latent_attention(
        d.x, 2, latent=4, nope=4, rotated=4, value=4, rope=(d.cos, d.sin), query_latent=4
    ),
    "layer_norm": lambda d: cg.layer_norm(d.x),
    "layers": lambda d: cg.nn.layers(3, {"a": cg.layer_norm, "b": cg.tanh}, d.x, ("a", "b"), rest=1),
    "less": lambda d: cg.ops.less(d.x, 1.0),
    "less_equal": lambda d: cg.ops.less_equal(d.x, 1.0),
    "linear": lambda d: cg.linear(d.x, "b s d -> b s f", f=4, bias=True),
    "log": lambda d: cg.ops.log(d.x),
    "log_softmax": lambda d: cg.nn.log_softmax(d.x),
    "lstm": lambda d: cg.nn.lstm(d.x, 4),
    "matmul": lambda d: d.x @ d.turned,
    "maximum": lambda d: cg.ops.maximum(d.x, 1.0),
    "minimum": lambda d: cg.ops.minimum(d.x, 1.0),
    "mlp": lambda d: cg.nn.mlp(d.x, 16, bias=True, p=0.1),
    "moe": lambda d: cg.nn.moe(d.x, 4, 2, 16),
    "patch_embedding": lambda d: cg.nn.patch_embedding(d.image, 2, 4),
    "patch_merging": lambda d: cg.nn.patch_merging(d.nhwc),
    "pointwise": lambda d: cg.ops.pointwise("add", d.x, 1.0),
    "pool": lambda d: cg.nn.pool(d.image, "max", window=2),
    "rearrange": lambda d: cg.rearrange(d.turned, "b d (s v) -> (b d s) v", v=V),
    "recurrence": lambda d: cg.nn.recurrence(step, d.rows, d.x),
    "reduce": lambda d: cg.reduce(d.x, "b s d -> b d", "mean"),
    "relative_bias": lambda d: cg.nn.relative_bias(d.at, d.at, 2),
    "relu": lambda d: cg.relu(d.x),
    "repeat": lambda d: cg.repeat(3, lambda x: cg.linear(x, "b s d -> b s e", e=8) + d.rows[:, None], d.x),
    "reshape": lambda d: cg.ops.reshape(d.turned, (B, 8 * S)),
    "rms_norm": lambda d: cg.rms_norm(d.x),
    "roll": lambda d: cg.ops.roll(d.x, 1, 1),
    "rotary": lambda d: cg.nn.rotary(d.q, d.cos, d.sin),
    "rotary_tables": lambda d: cg.nn.rotary_tables(d.at, 4),
    "router": lambda d: cg.nn.router(d.x, 4, 2, score="sigmoid", normalize=True, correction=True),
    "scan": lambda d: cg.scan(B, step, d.row, d.rows),
    "scatter": lambda d: cg.ops.scatter(d.table, d.ids, d.x, inplace=False),
    "segment_softmax": lambda d: cg.nn.segment_softmax(d.rows, d.rows_of, 3),
    "self_attention": lambda d: cg.nn.self_attention(d.x, 2, 4, rope=(d.cos, d.sin), bias=True, p=0.1),
    "sigmoid": lambda d: cg.sigmoid(d.x),
    "silu": lambda d: cg.silu(d.x),
    "slice_axis": lambda d: cg.ops.slice_axis(d.x, -1, 1, 4),
    "softmax": lambda d: cg.softmax(d.x),
    "sort": lambda d: cg.ops.sort(d.rows),
    "split": lambda d: cg.ops.split(d.x, (4, 4)),
    "sqrt": lambda d: cg.ops.sqrt(d.x),
    "squeeze_excitation": lambda d: cg.nn.squeeze_excitation(d.image, 4),
    "stack": lambda d: cg.ops.stack([d.x, d.x]),
    "stochastic_depth": lambda d: cg.nn.stochastic_depth(d.x, 0.1),
    "stop_gradient": lambda d: cg.ops.stop_gradient(d.x),
    "take_along": lambda d: cg.ops.take_along(d.rows, d.order),
    "tanh": lambda d: cg.tanh(d.x),
    "tied_head": lambda d: cg.nn.tied_head(d.x, d.table),
    "timestep_embedding": lambda d: cg.nn.timestep_embedding(d.times, 8),
    "token_shift": lambda d: cg.nn.token_shift(d.x),
    "top_k": lambda d: cg.ops.top_k(d.rows, 2),
    "transfer": lambda d: cg.ops.transfer(d.x),
    "transpose": lambda d: d.x.mT,
    "upsample": lambda d: cg.nn.upsample(d.image),
    "where": lambda d: cg.ops.where(d.x, d.x, 0.0),
    "window_bias": lambda d: cg.nn.window_bias(2, 2),
    "window_merge": lambda d: cg.nn.window_merge(d.cut, d.nhwc, 2, 1),
    "window_partition": lambda d: cg.nn.window_partition(d.nhwc, 2, 1),
    "zeros": lambda d: cg.ops.zeros((B, 4)),
}


def test_calls_cover_all_public_functions():
    answers = {name: str(inspect.signature(found).return_annotation) for name, found in FUNCTIONS.items()}
    # functions that return a function, such as a loss for `training_step`, add nothing themselves
    declaring = {n for n, text in answers.items() if "Callable" not in text and ("Tensor" in text or "Carry" in text)}
    assert declaring == set(CALLS)


# -- graph state ---------------------------------------------------------------------------------------------------


def facts(node):
    if isinstance(node, Op):
        attrs = {k: v if k != "body" else state(v) for k, v in node.kind.stated().items()}
        names = [t.name for t in node.operands], [t.name for t in node.results]
        return (node.kind.name, node.name, names, str(attrs), node.scope, node.phase)
    storage = node.storage
    places = node.graph.name, storage.name, storage.role, storage.pieces, str(storage.bytes)
    return (repr(node), str(node.strides), str(node.offset), str(node.domain), node.requires_grad, places)


def state(g):
    """Return everything observable in a graph, bodies included."""
    return {
        "nodes": list(map(facts, g.nodes)),
        "edges": [(a.name, b.name) for a, b in g.edges],
        "names": [[t.name for t in ts] for ts in (g.outputs, g.formals, g.captured)],
        "gradients": [(a.name, b.name) for a, b in g.gradients.items()],
        "handed": [s.name for s in g.handed],
        "rest": (g.dtype, [r.text for r in g.relations.relations], dict(g.defaults), g.loss, g.fused),
        "modules": sorted(g.modules),
        "quotients": sorted(map(str, g.quotients)),
    }


def size(g):
    return sum(map(len, g.bodies()))


class Refusal(cg.GraphError):
    """Raised in the middle of a call."""


class Failing:
    """Context that refuses the n-th node added from now on."""

    def __init__(self, monkeypatch):
        self.left = None
        add = cg.Graph.add_node

        def refused(graph, node, **attr):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise Refusal("no room for a node")
            add(graph, node, **attr)

        monkeypatch.setattr(cg.Graph, "add_node", refused)

    def at(self, number, call):
        """Return whether the call reached this node."""
        self.left = number
        try:
            call()
        except Refusal:
            return True
        finally:
            self.left = None
        return False


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


PLACES = {
    "top": lambda d, call: call(d),
    "scope": lambda d, call: in_scope(d, call),
    "kernel": lambda d, call: d.graph.output(in_kernel(d, call)),
    "repeat": lambda d, call: cg.repeat(3, lambda x: (call(d), cg.tanh(x))[1], d.rows, name="layers"),
    "scan": lambda d, call: cg.scan(B, lambda state, x: (call(d), step(state, x))[1], d.row, d.rows),
    "nested": lambda d, call: cg.repeat(2, lambda x: x + in_kernel(d, call), d.rows),
}


def in_scope(d, call):
    with cg.scope("part/0"):
        return call(d)


def in_kernel(d, call):
    with cg.kernel("fused"):
        made = cg.tanh(d.rows)
        call(d)
    return made


# -- the laws ------------------------------------------------------------------------------------------------------


@each("name", CALLS)
def test_a_call_that_is_refused_halfway_changes_nothing(name, failing):
    call = CALLS[name]
    plain, other = Declared(), Declared()
    with plain.graph:
        call(plain)
    nodes = size(plain.graph) - size(Declared().graph)
    with other.graph as g:
        before, place = state(g), here()
        for number in range(0, nodes, max(nodes // examples(4), 1)):
            assert failing.at(number, lambda: call(other))
            assert state(g) == before
            assert here() is place
        call(other)
    assert state(other.graph) == state(plain.graph)


@drawing(60)
@given(st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(PLACES)), st.integers(0, 40), st.booleans())
def test_a_refusal_in_any_body_changes_nothing(name, place, number, caught_inside):
    call = CALLS[name]
    plain, other = Declared(), Declared()
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch)

        def around(d, call):
            try:
                PLACES[place](d, call)
            except Refusal:
                raise
            except cg.CostGraphError as error:  # not every call is allowed in a kernel
                return str(error)
            return None

        def twice(d):
            before = state(d.graph), here()
            if failing.at(number, lambda: call(d)):
                assert (state(d.graph), here()) == before
                call(d)

        with plain.graph:
            expected = around(plain, call)
        with other.graph as g:
            before = state(g), here()
            if caught_inside:
                assert around(other, twice) == expected
            elif failing.at(number, lambda: around(other, call)):
                assert (state(g), here()) == before
                assert around(other, call) == expected
    assert state(other.graph) == state(plain.graph)


# -- other changes -------------------------------------------------------------------------------------------------


def finished():
    d = Declared()
    with d.graph as g:
        g.output(cg.tanh(d.rows))
        g.assume("B >= S")
        g.defaults = {"S": 3}
        g.loss = "cross_entropy"
    return g


#: Ways to change a graph, all refused once it is finished.
CHANGES = {
    "input": lambda g: g.input("new", (B,)),
    "param": lambda g: g.param("new", (B,)),
    "buffer": lambda g: g.buffer("new", (B,)),
    "op": lambda g: cg.tanh(g.tensors[0]),
    "layer": lambda g: cg.layer_norm(g.tensors[0]),
    "operator": lambda g: g.tensors[0] + g.tensors[0],
    "repeat": lambda g: cg.repeat(2, cg.tanh, g.tensors[0]),
    "remove": lambda g: g.remove_node(next(t for t in g.tensors if g.degree(t) == 0)),
}


@each("name", CHANGES)
def test_finished_graph_is_immutable(name):
    g, other = finished(), finished()
    before = state(g)
    with pytest.raises(cg.GraphError, match="is finished; reopen it with 'with g:'"):
        CHANGES[name](g)
    assert state(g) == before == state(other)
    assert cg.flops(g, B=1, S=1) == cg.flops(other, B=1, S=1)
    with other:
        CHANGES[name](other)  # the change itself is valid


def test_copy_of_finished_graph_is_mutable():
    g = finished()
    for out in (g.copy(), copy.deepcopy(g.defaults), copy.copy(g.outputs)):
        changed = out if not isinstance(out, cg.Graph) else out.defaults
        changed.clear()
    assert g.defaults == {"S": 3}
    assert pickle.loads(pickle.dumps(g.defaults)) == {"S": 3}


BAD_CHANGES = {
    "input taken": lambda g: g.input("x", (B,)),
    "input of no size": lambda g: g.input("new", (0,)),
    "input of no format": lambda g: g.input("new", (B,), "fp7"),
    "param of no name": lambda g: g.param("a b", (B,)),
    "output of others": lambda g: g.output(g.tensors[0], finished().tensors[0]),
    "output of nothing": lambda g: g.output(g.tensors[0], None),
    "assume nonsense": lambda g: g.assume("B >= 2", "B >"),
    "assume against": lambda g: g.assume("V <= 7", "B < S"),
    "op of two graphs": lambda g: g.tensors[0] + finished().tensors[0],
    "op of no shape": lambda g: cg.einsum(g.tensors[0], "a b -> a"),
    "layer of no size": lambda g: cg.linear(g.tensors[0], "b s d -> b s f", f=-1, bias=True),
    "repeat of others": lambda g: cg.repeat(2, lambda x: finished().tensors[0], g.tensors[0]),
    "repeat of more": lambda g: cg.repeat(2, lambda x: (cg.layer_norm(x), x), g.tensors[0]),
    "scan of no pair": lambda g: cg.scan(B, lambda h, x: cg.layer_norm(h), g.tensors[0], g.tensors[0]),
    "repeat of an error": lambda g: cg.repeat(2, lambda x: cg.layer_norm(x).nothing, g.tensors[0]),
    "nested": lambda g: cg.repeat(2, lambda x: cg.repeat(2, lambda y: cg.layer_norm(y)[9], x), g.tensors[0]),
}


@each("name", BAD_CHANGES)
def test_refused_change_leaves_graph_unchanged(name):
    g = finished()
    before, place = state(g), here()
    with pytest.raises((cg.CostGraphError, AttributeError)) as refusal, g:
        BAD_CHANGES[name](g)
    assert "is finished" not in str(refusal.value)
    assert state(g) == before
    assert here() is place
    assert state(g.freeze()) == before


def test_aborted_kernel_leaves_nothing():
    d = Declared()
    with d.graph as g:
        before = state(g)
        with suppress(ZeroDivisionError), cg.kernel("fused"):
            cg.layer_norm(d.x)
            raise ZeroDivisionError
        assert state(g) == before


# -- interleaved graphs ----------------------------------------------------------------------------------------------


def holding(name):
    with cg.Graph(name) as g:
        yield g


@drawing(40)
@given(st.permutations([0, 1, 2]), st.integers(0, 3))
def test_generators_that_hold_graphs_open_leave_none(order, broken):
    """Graphs closed in any order leave none open; closing an outer graph before an inner one is an error."""
    place, held = here(), [holding(f"g{i}") for i in range(3)]
    graphs = list(map(next, held))
    left = [0, 1, 2]
    for i in order:
        if i == broken:
            held[i].close()  # raises inside its block, which is allowed
        elif i == left[-1]:
            assert next(held[i], None) is None
        else:
            with pytest.raises(cg.GraphError, match=f"'g{i}' is closed while a context opened later is still open"):
                next(held[i])
        left.remove(i)
        assert here().graph is (graphs[left[-1]] if left else None)
    assert here() is place


def test_generator_scopes_and_kernels_close_in_any_order():
    def scoped(name):
        with cg.scope(name):
            yield cg.relu(x).name

    with cg.Graph("g") as g:
        x = g.input("x", (B, S))
        one, two = scoped("one"), scoped("two")
        assert [next(one), next(two)] == ["one/relu", "one/two/relu"]
        assert next(one, None) is None
        assert cg.relu(x).name == "one/two/relu_1"  # the scope at the time of opening
        assert next(two, None) is None
        assert cg.relu(x).name == "relu"
