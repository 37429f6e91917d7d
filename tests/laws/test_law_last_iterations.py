"""Loops with unused final states, compared with their unrolled iterations and torch's autograd."""

import pytest
import torch
from budget import drawing
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph import testing
from costgraph.errors import GraphError, UnsupportedError

B, C, D, K, L, T = cg.dims("B C D K L T")
SIZES = {"B": 2, "C": 5, "K": 3}


@drawing(25)
@given(case=testing.losses(most=2, kinds=("einsum", "pointwise", "einsum", "repeat"), around="repeat"))
def test_loops_go_back_as_their_iterations_do(case):
    try:
        cg.backward(case.graph)
    except UnsupportedError:
        return
    except GraphError as error:
        if "has overwritten in place" not in str(error):
            raise
        return
    testing.check_training(case.graph, ["a_loop_goes_back_as_its_iterations_do"], **case.point)


# -- test-time training, compared with torch ----------------------------------------------------------------------


def trained_state(count, *, learned, layers=None):
    """Test-time training: each position reads a matrix and updates it by a gradient descent step."""

    def step(w, now):
        q, k, v = now
        y = cg.einsum(w, q, "b i j, b c j -> b c i")
        error = cg.einsum(w, k, "b i j, b c j -> b c i") - v
        return w - cg.einsum(error, k, "b c i, b c j -> b i j"), y

    def layer(x):
        projections = (cg.linear(x, "b t c k -> b t c j", j=K, name=n) for n in "qkv")
        qkv = tuple(cg.rearrange(t, "b t c k -> t b c k") for t in projections)
        start = cg.ops.contiguous_copy(cg.ops.expand(g.param("w", (K, K), grad=learned), "i j -> b i j", b=B))
        _, ys = cg.scan(count, step, start, qkv, name="time")
        return cg.linear(cg.rearrange(ys, "t b c k -> b t c k"), "b t c k -> b t c j", j=K, name="out")

    with cg.Graph("ttt") as g:
        x = g.input("x", (B, count, C, K))
        y = layer(x) if layers is None else cg.repeat(layers, layer, x, name="layers")
        g.output(cg.reduce(y * y, "b t c k -> ", "mean"))
    return g


class TrainedState(torch.nn.Module):
    def __init__(self, size, *, learned):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(size, size, bias=False) for _ in range(4))
        self.w = torch.nn.Parameter(torch.randn(size, size), requires_grad=learned)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        w, ys = self.w.expand(x.shape[0], -1, -1).contiguous(), []
        for t in range(x.shape[1]):
            ys.append(torch.einsum("bij,bcj->bci", w, q[:, t]))
            error = torch.einsum("bij,bcj->bci", w, k[:, t]) - v[:, t]
            w = w - torch.bmm(error.mT, k[:, t])
        return self.out(torch.stack(ys, 1))


class Group(torch.nn.ModuleList):
    def __init__(self, modules, nested):
        super().__init__(modules)
        self.nested = nested

    def forward(self, x):
        for module in self:
            x = checkpoint(module, x, use_reentrant=False) if self.nested else module(x)
        return x


def counted_by_torch(times, *, learned, layers=1, again=0, nested=False):
    modules = [TrainedState(SIZES["K"], learned=learned) for _ in range(layers)]
    groups = [Group(modules[i : i + max(again, 1)], nested) for i in range(0, layers, max(again, 1))]
    x = torch.randn(SIZES["B"], times, SIZES["C"], SIZES["K"])
    with FlopCounterMode(display=False) as counter:
        for group in groups:
            x = checkpoint(group, x, use_reentrant=False) if again else group(x)
        x.square().mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("learned", [True, False])
def test_trained_state_costs_match_torch(learned):
    """The last step's state is unused: autograd skips it, and skips an initial state that needs no gradient."""
    step = cg.backward(trained_state(T, learned=learned))
    for times in (2, 3, 5):
        assert cg.matmul_flops(step, T=times, **SIZES) == counted_by_torch(times, learned=learned)
    for times in (1, 2):
        alone = cg.backward(trained_state(times, learned=learned))
        assert cg.matmul_flops(alone, **SIZES) == counted_by_torch(times, learned=learned)
    with pytest.raises(cg.BindingError, match=r"T=1: .* expected a"):  # then keys and values get no gradient at all
        cg.flops(step, T=1, **SIZES)


@pytest.mark.parametrize(("again", "nested"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)])
def test_layers_with_trained_states_match_torch(again, nested):
    """Recomputing several layers together stops early within the last one."""
    policy = cg.every(again, inside=cg.every_block() if nested else None) if again else None
    step = cg.backward(trained_state(T, learned=True, layers=L), checkpoint=policy)
    for groups, times in ((1, 2), (3, 2), (2, 4)):
        layers = groups * max(again, 1)
        theirs = counted_by_torch(times, learned=True, layers=layers, again=again, nested=nested)
        assert cg.matmul_flops(step, L=layers, T=times, **SIZES) == theirs


# -- several and nested states --------------------------------------------------------------------------------------


def product(w, x):
    return cg.einsum(x, w, "b k, k j -> b j")


def some_are_read(g, count, a, b, c, xs, w):
    """Two out of three final states are unused."""
    (_, y, _), ys = cg.scan(
        count, lambda s, x: ((product(w, s[0]) + x, cg.tanh(s[1]) * x, product(w, s[2])), s[0] * s[2]), (a, b, c), xs
    )
    return [y, ys]


def one_after_the_other(g, count, a, b, c, xs, w):
    """The first state reaches the third two steps later, so the last two steps differ."""
    (_, _, y), _ = cg.scan(
        count, lambda s, x: ((product(w, s[0]) * x, product(w, s[0]) + s[1], cg.tanh(s[1]) + s[2]), None), (a, b, c), xs
    )
    return [y]


def in_each_other(g, count, a, b, c, xs, w):
    def outer(s, x):
        inner, ys = cg.scan(2, lambda h, _: (cg.tanh(product(w, h)) + x, h * h), s[0], name="inner")
        return (inner, cg.reduce(ys, "t b k -> b k", "sum") + s[1]), s[0] * x

    (_, y), ys = cg.scan(count, outer, (a, b), xs, name="outer")
    return [y, ys]


def replaced(g, count, a, b, c, xs, w):
    """The result is computed from the last slice alone; the initial state is unused."""
    (y, _), _ = cg.scan(count, lambda s, x: ((product(w, x), product(w, s[0])), None), (a, b), xs)
    return [y]


def nobody(g, count, a, b, c, xs, w):
    """A loop with unused results, and a layer loop with an unused second result."""
    cg.repeat(count, lambda h: product(w, h), a, name="unread")
    y, _ = cg.repeat(count, lambda h, s: (product(w, h), s + product(w, h)), (b, c), name="layers")
    return [y]


LOOPS = (some_are_read, one_after_the_other, in_each_other, replaced, nobody)


def declared(loop, count, wants):
    with cg.Graph(loop.__name__) as g:
        a, b, c = (g.input(n, (B, K), grad=wants) for n in "abc")
        xs = g.input("xs", (count, B, K), grad=wants)
        for y in loop(g, count, a, b, c, xs, g.param("w", (K, K))):
            out = cg.reduce(y * y, " ".join("tbk"[-y.ndim :]) + " -> ", "sum")
            g.outputs[:] = [out + g.outputs[0]] if g.outputs else [out]
    return g


def answered(step, **sizes):
    try:
        return cg.flops(step, **sizes)
    except cg.BindingError:
        return None


@pytest.mark.parametrize(("loop", "wants"), [(loop, i) for loop in LOOPS for i in (True, False)])
def test_last_iterations_match_unrolled_graph(loop, wants):
    """Compare FLOPs from the closed form, from graphs with numeric iteration counts, and from unrolled graphs."""
    sizes = {"B": 2, "K": 3}
    step = cg.backward(declared(loop, T, wants))
    for times in (1, 2, 3, 4, 7):
        flat = cg.flops(cg.backward(cg.unroll(declared(loop, T, wants), T=times)), **sizes)
        assert cg.flops(cg.backward(declared(loop, times, wants)), **sizes) == flat
        closed = answered(step, T=times, **sizes)
        assert closed == flat or (closed is None and times < 4)  # if both ends differ, both must exist


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_with_peeled_iterations_keep_the_laws(loop):
    testing.check_training(declared(loop, T, wants=True), T=5, B=2, K=2)


# -- gradients that are forwarded unchanged ------------------------------------------------------------------------


class Additions(TorchDispatchMode):
    """Count the added elements."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.count += result.numel()
        return result


def added_by_torch(loss):
    with Additions() as counted:
        loss.backward()
    return counted.count


def backward_additions(graph, **sizes):
    testing.check_training(graph, ["gradients_are_finite_differences"], **sizes)
    return cg.flops(cg.backward(graph), **sizes) - cg.flops(graph, **sizes)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_last_iteration_does_not_accumulate_incoming_gradient(times):
    """h + (p - 2): all gradients equal the incoming one, whatever earlier iterations compute."""
    with cg.Graph("g") as g:

        def layer(h):
            p = g.param("p", (D,))
            return h + cg.repeat(times, lambda _: p - 2, p, name="inner")

        g.output(cg.reduce(cg.repeat(3, layer, g.param("h", (D,))), "d -> ", "sum"))
    y = torch.ones(7, requires_grad=True)
    for p in torch.ones(3, 7, requires_grad=True).unbind():
        for _ in range(times):
            c = p - 2
        y = y + c
    assert backward_additions(g, D=7) == added_by_torch(y.sum()) == 0


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_first_term_of_a_carried_sum_is_copied(times):
    """h + p, with 7 elements: torch adds the gradient T - 1 times."""
    with cg.Graph("g") as g:
        p = g.param("p", (D,))
        g.output(cg.reduce(cg.repeat(times, lambda h: h + p, g.param("h", (D,))), "d -> ", "sum"))
    y, w = torch.ones(7, requires_grad=True), torch.ones(7, requires_grad=True)
    for _ in range(times):
        y = y + w
    theirs = added_by_torch(y.sum())
    assert theirs == 7 * (times - 1)
    assert backward_additions(g, D=7) == theirs
    testing.check_training(g, ["a_loop_goes_back_as_its_iterations_do"], D=7)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_gradient_sum_does_not_alias_the_carry(times, later):
    """2 * (h + p) + 3 * q: the gradient of h + p is carried and accumulated, and read again for q's gradient."""
    with cg.Graph("g") as g:
        p, q = g.param("p", (D,)), g.param("q", (D,))

        def body(h):
            first = 3 * q
            return 2 * (h + p) + first if later else first + 2 * (h + p)

        g.output(cg.reduce(cg.repeat(times, body, g.param("h", (D,))) * p, "d -> ", "sum"))
    testing.check_training(g, D=7)
    y, a, b = (torch.ones(7, requires_grad=True) for _ in range(3))
    for _ in range(times):
        y = 2 * (y + a) + 3 * b
    # besides additions: y * a and the sum, forward; each operand's product, and 2 and 3 times per iteration
    theirs = added_by_torch((y * a).sum())
    assert backward_additions(g, D=7) == theirs + 7 * (2 + 2 * times)


def test_gradient_shared_by_two_operands_reaches_both():
    """h + (h + p), twice: each h has two contributions, p has one per iteration: three additions over 7 elements."""
    with cg.Graph("g") as g:
        p, h = g.param("p", (D,)), g.param("h", (D,))
        for _ in range(2):
            h = h + (h + p)
        g.output(cg.reduce(h, "d -> ", "sum"))
    w, y = torch.ones(7, requires_grad=True), torch.ones(7, requires_grad=True)
    for _ in range(2):
        y = y + (y + w)
    assert backward_additions(g, D=7) == added_by_torch(y.sum()) == 3 * 7
