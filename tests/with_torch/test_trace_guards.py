"""Guards on sizes and data: assumptions that hold exactly where a real run takes the same branch."""

import itertools

import pytest
import torch
from torch import nn

import costgraph as cg
from costgraph.torch import trace


class Asks(nn.Module):
    """Multiplies if its condition holds, else copies."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.register_buffer("window", torch.tensor(5))

    def forward(self, x, *others):
        return x @ x.mT if self.question(self, x, *others) else x.clone()


X = torch.zeros(3, 17)
D = ("B", "S")
QUESTIONS = {
    "odd": lambda m, x: x.shape[1] % 2,
    "even": lambda m, x: x.shape[1] % 2 == 0,
    "unequal": lambda m, x: x.shape[0] != x.shape[1],
    "no number": lambda m, x: x.shape[1] != 11,
    "neither": lambda m, x: not (x.shape[1] > 20 or x.shape[0] > 7),
    "both": lambda m, x: x.shape[1] % 4 == 1 and x.shape[0] < 5,
    "one of several": lambda m, x: x.shape[1] in (4, 9, 16),
    "half": lambda m, x: x.shape[1] / 2 > 5,
    "whole part": lambda m, x: x.shape[1] // 4 > x.shape[0],
    "product": lambda m, x: x.numel() % 3 == 0,
    "whole multiple": lambda m, x: x.shape[0] % (x.shape[0] * ((x.shape[1] + 15) // 16)) != 0,
    "symbolic choice": lambda m, x: torch.sym_not((x.shape[1] > 20) | (x.shape[0] == 4)),
}


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_graph_binds_where_a_real_run_takes_the_same_branch(name):
    net = Asks(QUESTIONS[name])
    g = trace(net, X, dims=[D])
    way = bool(net.question(net, X))
    for B, S in itertools.product((2, 3, 4, 7, 8, 11, 18), (2, 4, 9, 11, 12, 16, 17, 18, 21, 23)):
        same = bool(net.question(net, torch.empty(B, S))) == way
        if same:
            assert cg.matmul_flops(g, B=B, S=S) == (2 * B * S * B if way else 0)
        else:
            with pytest.raises(cg.BindingError, match="against the assumption"):
                cg.matmul_flops(g, B=B, S=S)


def test_only_the_true_part_of_a_disjunction_is_assumed():
    g = trace(Asks(lambda m, x: x.shape[1] > 20 or x.shape[0] > 2), X, dims=[D])
    assert [r.text for r in g.relations.relations] == ["S <= 20", "B > 2"]


def test_padding_guard_is_stated_with_ceiling():
    g = trace(Asks(QUESTIONS["whole multiple"]), X, dims=[D])
    assert [r.text for r in g.relations.relations] == ["ceiling(S/16) > 1"]


def test_comparison_with_size_one_is_no_assumption():
    g = trace(Asks(lambda m, x: x.shape[0] != 1), X, dims=[D])
    assert g.relations.relations == ()


# -- specialized sizes -------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """A recurrence over time as a Python loop."""

    def __init__(self, part):
        super().__init__()
        self.part, self.cell = part, nn.Linear(5, 5)

    def forward(self, x):
        for t in range(x.shape[1] // self.part):
            x = x + torch.tanh(self.cell(x[:, t : t + 1]))
        return x


@pytest.mark.parametrize("part", [1, 3])
def test_loop_over_a_size_is_unrolled_on_request(part):
    net, x = Steps(part), torch.zeros(3, 7, 5)
    with pytest.raises(
        cg.UnsupportedError, match=r"in forward, 'for t in range.*iterates over a size, and .* differ: .*fixed='given'"
    ):
        trace(net, x, dims=[("B", "S", None)])
    g = trace(net, x, dims=[("B", "S", None)], fixed="given")
    B = cg.dims("B")
    assert [r.text for r in g.relations.relations] == ["S == 7"]
    assert cg.matmul_flops(g) == 7 // part * 2 * B * 5 * 5
    assert cg.matmul_flops(g, B=2, S=7) == 7 // part * 2 * 2 * 5 * 5
    with pytest.raises(cg.BindingError, match="against the assumption 'S == 7'"):
        cg.matmul_flops(g, B=2, S=8)


def test_unrolled_loop_is_not_folded():
    g = trace(Steps(1), torch.zeros(3, 7, 5), dims=[("B", "S", None)], fixed="given")
    for where in ((), ("cell",)):
        with pytest.raises(cg.GraphError, match="expected a graph with a stack of layers"):
            cg.fold(g, *where)


def test_fixed_size_needs_a_unique_value():
    with pytest.raises(
        cg.UnsupportedError, match="needs the size S as a number, but its given size is 3; expected a size abov"
    ):
        trace(Steps(1), torch.zeros(3, 3, 5), dims=[("B", "S", None)], fixed="given")


# -- data ---------------------------------------------------------------------------------------------------------

MASK = torch.ones(3, 17, dtype=torch.bool)
KNOWN = {
    "a mask hides nothing": (lambda m, x, mask: mask.all(), True),
    "counted": (lambda m, x, mask: mask.sum() == mask.numel(), True),
    "compared": (lambda m, x, mask: torch.equal(mask, torch.zeros_like(mask)), False),
    "a buffer": (lambda m, x, mask: m.window.item() > 4, True),
    "a number of a buffer": (lambda m, x, mask: x[:, : int(m.window)].shape[1] == 4, False),
    "positions": (lambda m, x, mask: (torch.arange(x.shape[1]).diff() == 1).all(), True),
    "a list": (lambda m, x, mask: torch.tensor([3, 5]).tolist() == [3, 5], True),
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_data_decide_branches(name):
    question, answer = KNOWN[name]
    g = trace(Asks(question), X, MASK, dims=[D, D])
    for B, S in ((3, 17), (2, 31)):
        assert bool(question(Asks(question), torch.empty(B, S), torch.ones(B, S, dtype=torch.bool))) is answer
        assert cg.matmul_flops(g, B=B, S=S) == (2 * B * S * B if answer else 0)


def test_partial_mask_takes_the_other_branch():
    mask = MASK.clone()
    mask[1, 3:] = False
    assert cg.matmul_flops(trace(Asks(KNOWN["a mask hides nothing"][0]), X, mask, dims=[D, D])) == 0


def test_size_dependent_answer_specializes_the_size():
    net = Asks(lambda m, x: torch.arange(x.shape[1]).max() < 2048)
    with pytest.raises(cg.UnsupportedError, match="converts the size S to the number 17"):
        trace(net, X, dims=[D])
    g = trace(net, X, dims=[D], fixed="given")
    assert [r.text for r in g.relations.relations] == ["S == 17"]


def changed(m, x, mask):
    mask.logical_not_()
    return mask.any()


@pytest.mark.parametrize(
    "question",
    [lambda m, x, mask: (x > 0).all(), lambda m, x, mask: m.window.add_(1) > 5, changed],
    ids=["measured", "a buffer that was changed", "an input that was changed"],
)
def test_unknown_data_dependent_branches_are_refused(question):
    with pytest.raises(
        cg.UnsupportedError, match=r"test_trace_guards\.py:\d+, in .*: branches on the values of a tensor"
    ):
        trace(Asks(question), X, MASK, dims=[D, D])


def test_input_values_used_as_sizes_are_refused():
    net = Asks(lambda m, x, n: x[:, : n.max().item()].shape[1] > 3)
    with pytest.raises(cg.UnsupportedError, match=r"test_trace_guards\.py:\d+, in <lambda>, .*: size max_1 depends on"):
        trace(net, X, torch.full((3,), 5), dims=[D, ("B",)], data_sizes="error")


def test_programs_see_no_fake_tensors():
    seen = []

    class Looks(nn.Module):
        def forward(self, x, ids):
            seen.extend(isinstance(t, torch._subclasses.FakeTensor) for t in (x, ids, ids + 1))
            return x

    trace(Looks(), X, MASK, dims=[D, D])
    trace(Looks(), X, MASK.to("meta"), dims=[D, D])  # no data to query
    assert seen == [False, False, False, False, True, True]
