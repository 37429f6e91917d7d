"""View or copy, shape and strides for every op in drawn graphs, as decided by torch on the same strides."""

import pytest
import torch
from budget import drawing
from hypothesis import HealthCheck, given, settings

from costgraph import testing

drawn = drawing(400)


def number(p, point):
    return int(testing.value(p.expr, point))


def meta(t, point):
    """Return the layout as a meta tensor; one dtype serves all, except where torch's dtype matters."""
    sizes, strides = ([number(p, point) for p in ps] for ps in (t.sizes, t.strides))
    return torch.empty_strided(sizes, strides, device="meta")


def moved(op, x, point):
    a = op.kind.facts()
    if op.kind.name == "rearrange":
        split, merged = ([number(p, point) for p in a[k]] for k in ("split", "merged"))
        y = x.reshape(split).permute(a["order"]).reshape(merged)
        return y.clone(memory_format=torch.contiguous_format) if a.get("copy") else y
    if op.kind.name == "slice":
        start, size = number(a["start"], point), number(a["size"], point)
        key = (slice(None),) * a["axis"] + (slice(start, start + (size - 1) * a["step"] + 1, a["step"]),)
        return x[key]
    axes = [i for i in a["kept"] if i is not None]
    assert axes == sorted(axes)
    for i, k in enumerate(a["kept"]):
        x = x.unsqueeze(i) if k is None else x
    return x.expand([number(p, point) for p in a["sizes"]])


def check(op, point):
    name = op.kind.name
    operands = [meta(t, point) for t in op.operands]
    mine = op.results[0]
    if name in ("rearrange", "slice", "expand"):
        theirs = moved(op, operands[0], point)
        shared = theirs.untyped_storage()._cdata == operands[0].untyped_storage()._cdata
        assert shared == mine.is_view, f"{op.name}: {'a view' if shared else 'a copy'} in torch"
    elif name == "pointwise" and not op.kind.overwrites():
        functions = {1: torch.neg, 2: torch.add, 3: lambda c, a, b: torch.where(c.bool(), a, b)}
        masks = [t.bool() if i == 0 and len(operands) == 3 else t for i, t in enumerate(operands)]
        theirs = functions[len(operands)](*masks)
    else:
        return False
    assert [number(p, point) for p in mine.sizes] == list(theirs.shape)
    for n, s, t in zip(theirs.shape, mine.strides, theirs.stride(), strict=True):
        assert n == 1 or number(s, point) == t, f"{op.name}: strides {mine.strides}, torch has {theirs.stride()}"
    return True


@drawn
@given(case=testing.graphs(most=8, kinds=("rearrange", "slice", "expand", "pointwise", "repeat", "kernel")))
def test_layouts_are_those_of_torch(case):
    for op in case.graph.walk():
        check(op, case.point)


@pytest.mark.parametrize("kind", ["rearrange", "slice", "expand", "pointwise"])
def test_the_check_looks_at_ops_of_every_kind(kind):
    """Most drawn graphs check each kind, so the law above does not pass by skipping."""
    looked = []

    @settings(max_examples=30, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=testing.ops(kind))
    def count(case):
        looked.append(any(check(op, case.point) for op in case.graph.walk() if op.kind.name == kind))

    count()
    assert sum(looked) > len(looked) / 2
