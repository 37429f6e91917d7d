"""Counts made without the library: loops over index points, sets of live storages, and torch's own decisions."""

from itertools import product

import torch

import costgraph as cg


def index_points(pattern, sizes):
    """Count the FLOPs of a contraction by visiting every index point: 2 if an axis is summed, else 1."""
    left, right = (part.replace("(", " ").replace(")", " ") for part in pattern.split("->"))
    axes = sorted(set(left.replace(",", " ").split()) - {"1"})
    each = 2 if set(axes) - set(right.split()) else 1
    count = 0
    for _ in product(*(range(sizes[a]) for a in axes)):
        count += each
    return count


def pairs(queries, keys, causal, window):
    """Return the pairs (s, t) that attention sees, with queries and keys aligned at their last positions."""
    seen = []
    for s in range(queries):
        at = s + keys - queries
        for t in range(keys):
            if causal and t > at:
                continue
            if window is not None and (t <= at - window or t >= at + window):
                continue
            seen.append((s, t))
    return seen


def touched(size, out, window, stride, dilation, padding):
    """Return the axis positions that a sliding window reads, excluding padding."""
    at = {h * stride + r * dilation - padding for h in range(out) for r in range(window)}
    return len([i for i in at if 0 <= i < size])


def peak(graph):
    """Return the peak memory of a graph without bodies by replaying its ops with a set of live storages; sizes are
    numbers.
    """
    storages = {t.storage: t.storage for t in graph.tensors}
    last = {}
    for i, op in enumerate(graph.ops):
        for t in (*op.operands, *op.results):
            last[t.storage] = i
    for t in graph.outputs:
        last[t.storage] = len(graph.ops)
    fixed = {t.storage for t in graph.tensors if t.producer is None}
    live = set(fixed)
    most = sum(s.bytes.constant for s in live)
    for i, op in enumerate(graph.ops):
        live |= {t.storage for t in op.results}
        most = max(most, sum(s.bytes.constant for s in live))
        live = {s for s in storages if s in live and (s in fixed or last[s] > i)}
    return most


def strides(tensor):
    """Return the strides of a tensor with numeric sizes, as torch prints them."""
    return tuple(s.constant for s in tensor.strides)


def like(g, t, name="x"):
    """Declare a graph input with the shape of a torch tensor."""
    return g.input(name, tuple(t.shape))


def same_layout(mine, theirs, base):
    """Check that torch agrees on shape, strides where they matter, and view or copy."""
    assert tuple(mine.shape) == tuple(theirs.shape)
    for n, a, b in zip(theirs.shape, strides(mine), theirs.stride(), strict=True):
        assert n == 1 or a == b, (strides(mine), theirs.stride())
    shared = theirs.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert (mine.storage.role == "input") == shared
    if shared:
        assert mine.offset == theirs.storage_offset()


def counted(run, *shapes, dtype=torch.float32):
    """Return the FLOPs that torch's counter reports for a function on meta tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [torch.empty(s, device="meta", dtype=dtype) for s in shapes]
    with FlopCounterMode(display=False) as mode:
        run(*tensors)
    return mode.get_total_flops()


def graph_of(make, *shapes, dtype="fp32", output=True):
    """Return a graph around one function of inputs, and its result."""
    with cg.Graph("g", dtype=dtype) as g:
        made = make(*(g.input(f"x{i}", s) for i, s in enumerate(shapes)))
        if output:
            g.output(made)
    return g, made
