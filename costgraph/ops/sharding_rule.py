"""Named rules of placement that op records assign: which axes of operands and results belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..algebra.polynomial import ONE, Poly
from ..ir.graph import Op, OpKind, Split, Tensor
from ..ir.strides import Sizes, is_integral, numel

__all__ = [
    "across",
    "alike",
    "as_it_is",
    "fresh",
    "in_blocks",
    "local_of",
    "refined",
    "same_shape",
    "summed",
]

Labels = tuple[tuple[str, ...], ...]


def local_of(names: Sequence[tuple[str, ...]], extents: Mapping[str, Poly]) -> Sizes:
    """Return sizes of axes from those of the names that make them up."""
    return tuple(numel([extents[n] for n in axis]) for axis in names)


def _unchanged(kind: OpKind, extents: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
    return kind


def alike(
    op: Op, *, whole: Sequence[int] = (), linear: bool = False, local: Any = None, others: Sequence[int] = ()
) -> Split:
    """Axes of all operands broadcast from the right onto those of the results; some axes of the results are whole."""
    made = op.results[0]
    names = [f"a{i}" for i in range(made.ndim)]
    extents = dict(zip(names, made.sizes, strict=True))

    def labels(t: Tensor) -> Labels:
        lead = made.ndim - t.ndim
        own = [(n, made.sizes[i + lead], names[i + lead]) for i, n in enumerate(t.sizes)]
        return tuple(() if n == ONE and full != ONE else (name,) for n, full, name in own)

    return Split(
        operands=tuple(None if i in others else labels(t) for i, t in enumerate(op.operands)),
        results=tuple(labels(t) for t in op.results),
        extents=extents,
        local=partial(_unchanged, op.kind) if local is None else local,
        whole=frozenset(names[i] for i in whole),
        linear=linear,
    )


def as_it_is(kind: OpKind, op: Op) -> Split:
    """Let the result lie as the first operand does; where the others lie has no say."""
    return alike(op, linear=True, others=range(1, len(op.operands)))


def same_shape(kind: OpKind, op: Op) -> Split:
    """Take operands of one shape element by element, scalars beside them."""
    return alike(op)


def in_blocks(rule: Split, axis: int, blocks: Poly, *, of_operand: bool) -> Split:
    """Return the rule of an op of which one side has several blocks along an axis, and the other one."""

    def several(labels: Labels) -> Labels:
        return tuple(("n", *names) if i == axis else names for i, names in enumerate(labels))

    extents = {**rule.extents, "n": blocks}
    if of_operand:
        return replace(rule, operands=tuple(each and several(each) for each in rule.operands), extents=extents)
    return replace(rule, results=tuple(map(several, rule.results)), extents=extents)


def summed(kind: OpKind, op: Op) -> Split:
    """Take operands of one shape element by element; of parts of sums the result is a part of a sum."""
    return alike(op, linear=True)


def across(op: Op, operands: Sequence[Labels], result: Labels, local: Any, **facts: Any) -> Split:
    """Return the rule of an op with one result, its extents read from the shapes of axes with a name each."""
    extents: dict[str, Poly] = {}
    for labels, t in (*zip(operands, op.operands, strict=False), (result, op.results[0])):
        for names, size in zip(labels, t.sizes, strict=True):
            if len(names) == 1:
                extents.setdefault(names[0], size)
    return Split(tuple(operands), (result,), extents, local, **facts)


def fresh(kind: Any, op: Op) -> Split:
    """Make a tensor of the sizes that a rank has of it."""
    names = tuple((f"a{i}",) for i in range(op.results[0].ndim))
    return across(op, (), names, lambda extents, ranks: replace(kind, sizes=local_of(names, extents)))


def refined(
    a: Sizes, b: Sizes, same: Any
) -> tuple[dict[str, Poly], list[tuple[str, ...]], list[tuple[str, ...]], set[str]]:
    """Return parts that two shapes of as many elements are both made of.

    Returns the size of each part by name, the parts of each axis of both shapes, and those that cannot be split:
    axes of which one shape has no part that the other has.
    """
    extents: dict[str, Poly] = {}
    left: list[list[str]] = [[] for _ in a]
    right: list[list[str]] = [[] for _ in b]
    whole: set[str] = set()

    def part(size: Poly, i: Sequence[int], j: Sequence[int]) -> str:
        name = f"p{len(extents)}"
        extents[name] = size
        for at in i:
            left[at].append(name)
        for at in j:
            right[at].append(name)
        return name

    # over 40 lines: one case for each way in which the boundaries of both shapes may follow one another
    p = [(i, n) for i, n in enumerate(a) if n != ONE]
    q = [(j, n) for j, n in enumerate(b) if n != ONE]
    while p and q:
        (i, n), (j, m) = p[0], q[0]
        if same(n, m):
            part(n, [i], [j])
            p, q = p[1:], q[1:]
            continue
        mine = next((k for k in range(2, len(q) + 1) if same(numel([s for _, s in q[:k]]), n)), None)
        yours = next((k for k in range(2, len(p) + 1) if same(numel([s for _, s in p[:k]]), m)), None)
        if mine is not None:
            for at, size in q[:mine]:
                part(size, [i], [at])
            p, q = p[1:], q[mine:]
        elif yours is not None:
            for at, size in p[:yours]:
                part(size, [at], [j])
            p, q = p[yours:], q[1:]
        elif is_integral(n / m):
            part(m, [i], [j])
            p, q = [(i, n / m), *p[1:]], q[1:]
        elif is_integral(m / n):
            part(n, [i], [j])
            p, q = p[1:], [(j, m / n), *q[1:]]
        else:
            break
    for at, size in p:
        whole.add(part(size, [at], []))
    for at, size in q:
        whole.add(part(size, [], [at]))
    return extents, [tuple(x) for x in left], [tuple(x) for x in right], whole
