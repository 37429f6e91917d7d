"""Bytes that aten ops read and write where those are not all operands and all results."""

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import calls_of, number
from torch.nn import functional

V, D, N = 13, 5, 7  # rows of a table, their size, how many are looked up


def moved(program, name):
    """Bytes read of each tensor argument and written of each result, None where they are whole."""
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


# 4 bytes of an element in fp32, 8 of an index
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
def test_a_lookup_reads_the_rows_and_not_the_table(name):
    program, op, reads = PICKS[name]
    assert moved(program, op) == (reads, None)


CHANGES = {
    # name of the op, what it reads of self, indices and values, what it writes, FLOPs
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
    "scatter_ of a part": (  # of the source as much as there are indices
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
def test_a_change_in_place_touches_what_it_changes(name):
    program, op, reads, writes, flops = CHANGES[name]
    assert moved(program, op) == (reads, [writes])
    assert calls_of(program).total("pointwise") == flops


def test_a_change_of_a_copy_moves_the_whole():
    seen = calls_of(lambda: table().index_put((ids(N),), torch.rand(N, D))).of("index_put")
    assert [number(n) for n in seen.counts.reads] == [4 * V * D, 8 * N, 4 * N * D]
    assert seen.counts.writes is None


def test_a_source_that_is_expanded_is_read_once():
    program = lambda: table().index_put_((ids(N),), torch.rand(1, D).expand(N, D))  # noqa: E731  # one of a list above
    assert moved(program, "index_put")[0] == [0, 8 * N, 4 * D]


# -- what is written over, or only looked at -----------------------------------------------------------------------

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
def test_what_is_written_over_is_not_read(name):
    program, op, reads, writes = UNREAD[name]
    assert moved(program, op) == (reads, writes)
    assert calls_of(program).total("pointwise") == 0


def test_gradients_that_need_the_shape_of_an_operand_do_not_read_it():
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    grad = 4 * 2 * 3 * 4 * 4
    mean = lambda: functional.avg_pool2d(x, 2).sum().backward()  # noqa: E731  # read as the line below
    assert moved(mean, "avg_pool2d_backward")[0] == [4, 0]  # one number, expanded
    weights = torch.rand(2, 3, 4, 4)
    pooled = lambda: (functional.max_pool2d(x, 2) * weights).sum().backward()  # noqa: E731  # read as the line below
    assert moved(pooled, "max_pool2d_with_indices_backward")[0] == [grad, 0, 2 * grad]


def test_a_fused_update_writes_parameters_and_state():
    params = [torch.nn.Parameter(torch.rand(n)) for n in (3, 5)]
    optimizer = torch.optim.AdamW(params, fused=True)
    for p in params:
        p.grad = torch.rand_like(p)
    seen = calls_of(optimizer.step).of("_fused_adamw")
    # parameters, gradients (read alone), first and second moments
    assert [number(n) for n in seen.counts.writes] == [12, 20, 0, 0, 12, 20, 12, 20]
    assert seen.counts.reads is None


def test_a_fused_update_that_scales_gradients_writes_them_too():
    params = [torch.rand(3)]
    lists = [[torch.rand(3)] for _ in range(3)]
    step = [torch.ones(())]

    def program():
        torch._fused_adam_(
            params, *lists, [], step, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False, grad_scale=torch.ones(()), found_inf=torch.zeros(()),
        )  # fmt: skip

    seen = calls_of(program).of("_fused_adam")
    assert [number(n) for n in seen.counts.writes] == [12] * 4
    assert number(seen.counts.pointwise) == 3 * (12 + 1)  # as without, and the division
