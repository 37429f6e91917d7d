"""Random graphs with a loss: their backward passes keep every training law."""

import pytest
from budget import drawing, examples, seed
from hypothesis import given
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.errors import GraphError, UnsupportedError
from costgraph.ir.graph import known_names

drawn = drawing(40)
B, D, F, H, L, S, V = cg.dims("B D F H L S V")


def held(case, laws=None):
    """Hold a random graph to the laws, unless autograd rejects it as well."""
    try:
        cg.backward(case.graph)
    except UnsupportedError:
        return  # for example max pooling that saves no positions
    except GraphError as error:
        if "has overwritten in place" not in str(error):
            raise
        return
    testing.check_training(case.graph, laws, **case.point)


LOSSES = {
    "graphs": (testing.losses(), 40),
    "large graphs": (testing.losses(most=8), 25),
    "nested loops and kernels": (testing.losses(most=3, kinds=("repeat", "kernel", "pointwise", "einsum")), 40),
}


@pytest.mark.parametrize("what", LOSSES)
def test_backward_passes_of_drawn_graphs_keep_all_laws(what):
    strategy, count = LOSSES[what]
    testing.search(strategy, held, examples(count), seed=seed())


@drawn
@given(case=testing.losses(most=3, kinds=("einsum", "rearrange", "slice", "expand", "concat", "gather", "pad", "pool")))
def test_the_gradients_of_linear_ops_are_their_transposes(case):
    held(case, ["the_gradient_of_a_linear_loss_is_its_transpose", "gradients_are_finite_differences"])


def residual(x):
    return x + cg.linear(cg.silu(cg.linear(cg.layer_norm(x), "b d -> b f", f=F, bias=True)), "b f -> b d", d=D)


def stack():
    with cg.Graph("stack") as g:
        x = cg.repeat(L, residual, g.input("x", (B, D)), name="layers")
        g.output(cg.reduce(cg.ops.pointwise("square", x), "b d -> ", "mean"))
    return g


def shared():
    with cg.Graph("shared") as g:
        w = g.param("w", (D, D))

        def inner(x):
            return cg.tanh(cg.linear(x, "b d -> b e", e=D) @ w)

        x = cg.repeat(L, lambda x: cg.repeat(S, inner, x, name="inner"), g.input("x", (B, D)), name="outer")
        g.output(cg.reduce(cg.ops.pointwise("square", x), "b d -> ", "mean"))
    return g


def recurrent():
    with cg.Graph("recurrent") as g:
        w, v = g.param("w", (D, D)), g.param("v", (D, D))

        def step(h, x):
            new = cg.tanh(x @ v + h @ w)
            return new, new

        _, states = cg.scan(S, step, g.input("h", (B, D)), g.input("x", (S, B, D), grad=True))
        g.output(cg.reduce(cg.ops.pointwise("square", states), "s b d -> ", "mean"))
    return g


def restricted(*, looped):
    """Causal scores times a full matrix: the matrix gradient is full, the score gradient is restricted."""
    with cg.Graph("restricted") as g:
        q, k, m = g.param("q", (S, D)), g.param("k", (S, D)), g.param("m", (S, S))
        scores = cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True), over=("s", "t"))

        def step(h):
            return h + cg.einsum(scores, m, "s t, s t -> s") * cg.reduce(scores * scores, "s t -> s", "sum")

        h = cg.reduce(m, "s t -> s", "sum")
        h = cg.repeat(L, step, h) if looped else step(h)
        g.output(cg.reduce(h, "s -> ", "sum"))
    return g


@pytest.mark.parametrize("looped", [False, True])
def test_gradients_share_the_domain_of_their_tensors(looped, tmp_path):
    graph = restricted(looped=looped)
    testing.check_training(graph, **{n: POINT[n] for n in known_names(graph)})
    step = cg.backward(graph)
    cg.save(step, tmp_path / "step.json")
    assert cg.flops(cg.load(tmp_path / "step.json")) == cg.flops(step)


ONES = {
    "nothing": lambda a: cg.rearrange(a, "b s t -> b s t"),
    "an order": lambda a: cg.rearrange(a, "b s t -> s b t"),
    "an axis less": lambda a: cg.ops.reshape(cg.rearrange(a, "b s t -> s b t"), (1, S)),
    "an axis more": lambda a: cg.ops.reshape(a, (1, 1, 1, S)),
}


@pytest.mark.parametrize("change", ONES)
def test_domain_over_singleton_axis_is_found_by_its_gradient(change):
    with cg.Graph("ones") as g:
        q, k = g.param("q", (1, 1, D)), g.param("k", (S, D))
        a = cg.einsum(q, k, "b s d, t d -> b s t", domain=cg.Domain(causal=True), over=("s", "t"))
        x = ONES[change](a)
        x = x + a if change == "nothing" else x
        g.output(cg.reduce(cg.tanh(x) * x, " ".join("abcd"[: x.ndim]) + " -> ", "sum"))
    testing.check_training(g, D=2, S=3)


POINT = {"B": 2, "D": 3, "F": 5, "L": 4, "S": 3}


@pytest.mark.parametrize("make", [stack, shared, recurrent])
def test_loop_backward_passes_keep_all_laws(make):
    graph = make()
    testing.check_training(graph, **{n: POINT[n] for n in known_names(graph)})


@pytest.mark.long  # other tests hold loops, and drawn graphs cover the ops in models
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b"])
def test_model_backward_passes_keep_the_laws(name, attention):
    graph = load(name, symbolic=True, attention=attention, dtype="fp32")
    with graph:
        loss = cg.cross_entropy(graph.outputs[0], graph.input("targets", (B, S), dtype="int64"))
        graph.outputs[:] = [loss]
    sizes = {"B": 2, "D": 6, "H": 3, "F": 7, "L": 2, "V": 5, "S": 3, "P": 4, "G": 3, "K": 2}
    laws = [n for n in testing.TRAINING if n != "a_backward_pass_keeps_the_laws_of_graphs"]  # minutes at this size
    testing.check_training(graph, laws, **{n: sizes[n] for n in known_names(graph)})


def test_unknown_law_and_missing_loss_raise():
    with pytest.raises(UnsupportedError, match="check_training: law 'none', expected one of gradients_are"):
        testing.check_training(stack(), ["none"], **POINT)
    with cg.Graph("g") as g:
        g.output(cg.relu(g.param("w", (D,))))
    with pytest.raises(GraphError, match="0 scalar outputs, expected one, the loss"):
        testing.check_training(g, D=3)
