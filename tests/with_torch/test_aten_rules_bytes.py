"""Bytes of aten ops that do not read all operands or write all results in full."""

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import calls_of, number
from torch.nn import functional

import costgraph as cg
from costgraph.torch import lower, trace

V, D, N = 13, 5, 7  # table rows, row size, number of lookups


def moved(program, name):
    """Return the bytes read per tensor argument and written per result, None for all bytes."""
    seen = calls_of(program).of(name)
    for amounts, tensors in ((seen.counts.reads, seen.call.operands), (seen.counts.writes, seen.call.results)):
        assert amounts is None or len(amounts) == len(tensors)
    return tuple(
        None if amounts is None else [number(n) for n in amounts] for amounts in (seen.counts.reads, seen.counts.writes)
    )


def table(rows=V):
    return torch.rand(rows, D)


def ids(*sizes):
    return torch.zeros(sizes, dtype=torch.int64)


# 4 bytes per fp32 element, 8 per index
PICKS = {
    "embedding": (lambda: functional.embedding(ids(N), table()), "embedding", [4 * N * D, 8 * N]),
    "of more indices than rows": (
        lambda: functional.embedding(ids(3, V), table()),
        "embedding",
        [4 * 3 * V * D, 8 * 3 * V],
    ),
    "index_select": (lambda: table().index_select(0, ids(N)), "index_select", [4 * N * D, 8 * N]),
    "index": (lambda: table()[ids(N)], "index", [4 * N * D, 8 * N]),
    "index of two axes": (lambda: table()[ids(N), ids(N)], "index", [4 * N, 8 * N, 8 * N]),
    "index that broadcasts": (lambda: table()[ids(N, 1), ids(3)], "index", [4 * 3 * N, 8 * N, 8 * 3]),
    "gather": (lambda: table().gather(1, ids(V, 2)), "gather", [4 * 2 * V, 8 * 2 * V]),
    "take": (lambda: table().take(ids(N)), "take", [4 * N, 8 * N]),
    "nll_loss": (lambda: functional.nll_loss(table(N), ids(N)), "nll_loss_forward", [4 * N, 8 * N]),
    "embedding_bag": (
        lambda: functional.embedding_bag(ids(2, N), table()),
        "_embedding_bag_forward_only",
        [4 * 2 * N * D, 8 * 2 * N, 8 * 2],
    ),
}


@pytest.mark.parametrize("name", PICKS)
def test_lookup_reads_only_selected_rows(name):
    program, op, reads = PICKS[name]
    assert moved(program, op) == (reads, None)


CHANGES = {
    # op name, bytes read from self, indices and values, bytes written, FLOPs
    "index_put_": (
        lambda: table().index_put_((ids(N),), torch.rand(N, D)), "index_put", [0, 8 * N, 4 * N * D], 4 * N * D, 0,
    ),
    "index_put_ of one number": (
        lambda: table().index_put_((ids(N),), torch.rand(())), "index_put", [0, 8 * N, 4], 4 * N * D, 0,
    ),
    "index_put_ along the second axis": (
        lambda: table().__setitem__((slice(None), ids(2)), torch.rand(V, 2)),
        "index_put", [0, 16, 4 * 2 * V], 4 * 2 * V, 0,
    ),
    "index_put_ that adds": (
        lambda: table().index_put_((ids(N),), torch.rand(N, D), accumulate=True),
        "index_put", [4 * N * D, 8 * N, 4 * N * D], 4 * N * D, N * D,
    ),
    "scatter_": (
        lambda: table().scatter_(0, ids(N, D), torch.rand(N, D)), "scatter", [0, 8 * N * D, 4 * N * D], 4 * N * D, 0,
    ),
    "scatter_ of a part": (  # reads only as much of the source as there are indices
        lambda: table().scatter_(0, ids(2, D), torch.rand(N, D)), "scatter", [0, 8 * 2 * D, 4 * 2 * D], 4 * 2 * D, 0,
    ),
    "scatter_ of a number": (lambda: table().scatter_(0, ids(N, D), 1.0), "scatter", [0, 8 * N * D], 4 * N * D, 0),
    "scatter_add_": (
        lambda: table().scatter_add_(0, ids(N, D), torch.rand(N, D)),
        "scatter_add", [4 * N * D, 8 * N * D, 4 * N * D], 4 * N * D, N * D,
    ),
    "index_add_": (
        lambda: table().index_add_(0, ids(N), torch.rand(N, D)),
        "index_add", [4 * N * D, 8 * N, 4 * N * D], 4 * N * D, N * D,
    ),
    "index_add_ with a scale": (
        lambda: table().index_add_(0, ids(N), torch.rand(N, D), alpha=2),
        "index_add", [4 * N * D, 8 * N, 4 * N * D], 4 * N * D, 2 * N * D,
    ),
    "index_copy_": (
        lambda: table().index_copy_(0, ids(N), torch.rand(N, D)), "index_copy", [0, 8 * N, 4 * N * D], 4 * N * D, 0,
    ),
    "index_fill_": (lambda: table().index_fill_(0, ids(N), 1.0), "index_fill", [0, 8 * N], 4 * N * D, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_in_place_writes_move_only_changed_elements(name):
    program, op, reads, writes, flops = CHANGES[name]
    assert moved(program, op) == (reads, [writes])
    assert calls_of(program).total("pointwise") == flops


def test_out_of_place_index_put_moves_the_whole_table():
    seen = calls_of(lambda: table().index_put((ids(N),), torch.rand(N, D))).of("index_put")
    assert [number(n) for n in seen.counts.reads] == [4 * V * D, 8 * N, 4 * N * D]
    assert seen.counts.writes is None


def test_expanded_source_is_read_once():
    program = lambda: table().index_put_((ids(N),), torch.rand(1, D).expand(N, D))  # noqa: E731  # one of a list above
    assert moved(program, "index_put")[0] == [0, 8 * N, 4 * D]


# -- overwritten operands, and operands used only for their shape ------------------------------------------------------

UNREAD = {
    "copy_": (lambda: table().copy_(torch.rand(D)), "copy", [0, 4 * D], None),
    "fill_": (lambda: table().fill_(1.0), "fill", [0], None),
    "fill_ with a tensor": (lambda: table().fill_(torch.tensor(1.0)), "fill", [0, 4], None),
    "zero_": (lambda: table().zero_(), "zero", [0], None),
    "normal_": (lambda: table().normal_(), "normal", [0], None),
    "bernoulli_": (lambda: table().bernoulli_(0.5), "bernoulli", [0], None),
    "zeros_like": (lambda: torch.zeros_like(table()), "zeros_like", [0], None),
    "new_full": (lambda: table().new_full((3,), 1.0), "new_full", [0], None),
    "empty_like": (lambda: torch.empty_like(table()), "empty_like", [0], [0]),
    "new_empty": (lambda: table().new_empty((3,)), "new_empty", [0], [0]),
    "squeeze_": (lambda: torch.rand(3, 1).squeeze_(), "squeeze", [0], [0]),
}


@pytest.mark.parametrize("name", UNREAD)
def test_overwritten_operands_are_not_read(name):
    program, op, reads, writes = UNREAD[name]
    assert moved(program, op) == (reads, writes)
    assert calls_of(program).total("pointwise") == 0


def test_gradients_do_not_read_operands_used_for_their_shape():
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    grad = 4 * 2 * 3 * 4 * 4
    mean = lambda: functional.avg_pool2d(x, 2).sum().backward()  # noqa: E731  # read as the line below
    assert moved(mean, "avg_pool2d_backward")[0] == [4, 0]  # one number, expanded
    weights = torch.rand(2, 3, 4, 4)
    pooled = lambda: (functional.max_pool2d(x, 2) * weights).sum().backward()  # noqa: E731  # read as the line below
    assert moved(pooled, "max_pool2d_with_indices_backward")[0] == [grad, 0, 2 * grad]


class Updated(torch.nn.Module):
    """Parameters with several sizes, and their sum."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.rand(n) for n in (3, 5))

    def forward(self):
        return sum(w.sum() for w in self.weights)


def update_calls(graph, name):
    """Return the bytes read and written by each call of an op, and its FLOPs."""
    for op in graph.ops:
        if op.call is not None and op.call.target.startswith(name):
            reads, writes = op.kind.reads(op), op.kind.writes(op)
            yield (
                {t.storage.name: number(n) * 4 for t, n in zip(op.operands, reads, strict=True) if n},
                [number(n) * 4 for n in writes],
                sum(number(inner.kind.flops(inner).pointwise) for inner in (op, *(op.body.ops if op.body else ()))),
            )


def test_fused_update_writes_parameters_and_state():
    graph = trace(Updated(), train=True, optimizer=lambda params: torch.optim.AdamW(params, fused=True))
    first, second = update_calls(graph, "_fused_adamw_")
    # parameter, gradient (read only), two moments, and the step counter
    assert (sorted(first[0].values()), first[1]) == ([4, 12, 12, 12, 12], [12, 12, 12])
    assert (sorted(second[0].values()), second[1]) == ([4, 20, 20, 20, 20], [20, 20, 20])
    assert cg.costs(graph).filter(phase="optimizer").total().pointwise == (3 + 5) * 13 + 2  # and two step counters


def test_fused_update_writes_rescaled_gradients():
    class Scaled(torch.nn.Module):
        def forward(self, *lists):
            torch._fused_adam_(
                *([t] for t in lists[:4]), [], [lists[4]], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
                amsgrad=False, maximize=False, grad_scale=lists[5], found_inf=lists[6],
            )  # fmt: skip

    given = [torch.rand(3) for _ in range(4)] + [torch.ones(()) for _ in range(3)]
    ((reads, writes, flops),) = update_calls(trace(Scaled(), *given), "_fused_adam_")
    assert sorted(reads.values()) == [4, 4, 4, 12, 12, 12, 12]
    assert writes == [12] * 4
    assert flops == 3 * (12 + 1)  # as without scaling, plus the division


def test_foreach_calls_become_one_op_per_tensor():
    """A foreach call acts on each tensor separately; scalar lists have one value per tensor."""

    class Lists(torch.nn.Module):
        def forward(self, a, b, c, d):
            torch._foreach_addcdiv_([a, c], [b, d], [b, d], [0.5, 1.0])
            sums = torch._foreach_add([a, c], [b, d], alpha=2)
            torch._foreach_zero_([b, d])
            return *sums, *torch._foreach_norm(sums)

    graph = trace(Lists(), *(torch.rand(n) for n in (3, 3, 5, 5)))
    rows = [(op, [op] if op.body is None else op.body.ops) for op in graph.ops if op.call]
    calls = [(op.call.target, op.kind.name, sum(number(o.kind.flops(o).pointwise) for o in own)) for op, own in rows]
    assert calls == [
        ("_foreach_addcdiv_.ScalarList", "pointwise", 3 * 3), ("_foreach_addcdiv_.ScalarList", "pointwise", 5 * 2),
        ("_foreach_add.List", "pointwise", 3 * 2), ("_foreach_add.List", "pointwise", 5 * 2),
        ("_foreach_zero_.default", "zero_grad", 0), ("_foreach_zero_.default", "zero_grad", 0),
        ("_foreach_norm.Scalar", "kernel", 3 * 2), ("_foreach_norm.Scalar", "kernel", 5 * 2),
    ]  # fmt: skip
    operands = [torch.rand(n) for n in (3, 3, 5, 5)]
    for mine, other in zip(
        lower(graph)(*map(torch.clone, operands)), Lists()(*map(torch.clone, operands)), strict=True
    ):
        torch.testing.assert_close(mine, other)
