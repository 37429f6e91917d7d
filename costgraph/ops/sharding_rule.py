"""Named sharding rules that op kinds assign: how operand and result axes correspond."""

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
    """Return axis sizes from factor sizes."""
    return tuple(numel([extents[n] for n in axis]) for axis in names)


def _unchanged(kind: OpKind, extents: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
    return kind


def alike(
    op: Op, *, whole: Sequence[int] = (), linear: bool = False, local: Any = None, others: Sequence[int] = ()
) -> Split:
    """Return a rule with operand axes broadcast from the right onto result axes; axes in `whole` cannot be split."""
    result = op.results[0]
    names = [f"a{i}" for i in range(result.ndim)]
    extents = dict(zip(names, result.sizes, strict=True))

    def labels(t: Tensor) -> Labels:
        lead = result.ndim - t.ndim
        axes = [(n, result.sizes[i + lead], names[i + lead]) for i, n in enumerate(t.sizes)]
        return tuple(() if n == ONE and result_size != ONE else (name,) for n, result_size, name in axes)

    return Split(
        operands=tuple(None if i in others else labels(t) for i, t in enumerate(op.operands)),
        results=tuple(labels(t) for t in op.results),
        extents=extents,
        local=partial(_unchanged, op.kind) if local is None else local,
        whole=frozenset(names[i] for i in whole),
        linear=linear,
    )


def as_it_is(kind: OpKind, op: Op) -> Split:
    """Let the result inherit the first operand's placement, regardless of the others."""
    return alike(op, linear=True, others=range(1, len(op.operands)))


def same_shape(kind: OpKind, op: Op) -> Split:
    """Match operands elementwise, with optional scalars."""
    return alike(op)


def in_blocks(rule: Split, axis: int, blocks: Poly, *, of_operand: bool) -> Split:
    """Extend a rule to an op with several blocks along an axis on one side, and one block on the other."""

    def with_blocks(labels: Labels) -> Labels:
        return tuple(("n", *names) if i == axis else names for i, names in enumerate(labels))

    extents = {**rule.extents, "n": blocks}
    if of_operand:
        return replace(
            rule,
            operands=tuple(operand_labels and with_blocks(operand_labels) for operand_labels in rule.operands),
            extents=extents,
        )
    return replace(rule, results=tuple(map(with_blocks, rule.results)), extents=extents)


def summed(kind: OpKind, op: Op) -> Split:
    """Match operands elementwise; partial sums give partial sums."""
    return alike(op, linear=True)


def across(op: Op, operands: Sequence[Labels], result: Labels, local: Any, **facts: Any) -> Split:
    """Return a rule for one result; extents are read from axes with a single factor."""
    extents: dict[str, Poly] = {}
    for labels, t in (*zip(operands, op.operands, strict=False), (result, op.results[0])):
        for names, size in zip(labels, t.sizes, strict=True):
            if len(names) == 1:
                extents.setdefault(names[0], size)
    return Split(tuple(operands), (result,), extents, local, **facts)


def fresh(kind: Any, op: Op) -> Split:
    """Create a tensor with local sizes."""
    names = tuple((f"a{i}",) for i in range(op.results[0].ndim))
    return across(op, (), names, lambda extents, ranks: replace(kind, sizes=local_of(names, extents)))


def refined(
    a: Sizes, b: Sizes, equal: Any
) -> tuple[dict[str, Poly], list[tuple[str, ...]], list[tuple[str, ...]], set[str]]:
    """Return common factors of two shapes with equal element count.

    Return factor sizes by name, the factors in each axis for both shapes, and the factors that cannot be split because
    one shape has no counterpart.
    """
    extents: dict[str, Poly] = {}
    a_factors: list[list[str]] = [[] for _ in a]
    b_factors: list[list[str]] = [[] for _ in b]
    unsplittable: set[str] = set()

    def add_factor(size: Poly, i: Sequence[int], j: Sequence[int]) -> str:
        name = f"p{len(extents)}"
        extents[name] = size
        for axis in i:
            a_factors[axis].append(name)
        for axis in j:
            b_factors[axis].append(name)
        return name

    # long: one case for each order in which axis boundaries may follow
    p = [(i, n) for i, n in enumerate(a) if n != ONE]
    q = [(j, n) for j, n in enumerate(b) if n != ONE]
    while p and q:
        (i, n), (j, m) = p[0], q[0]
        if equal(n, m):
            add_factor(n, [i], [j])
            p, q = p[1:], q[1:]
            continue
        q_count = next((k for k in range(2, len(q) + 1) if equal(numel([s for _, s in q[:k]]), n)), None)
        p_count = next((k for k in range(2, len(p) + 1) if equal(numel([s for _, s in p[:k]]), m)), None)
        if q_count is not None:
            for axis, size in q[:q_count]:
                add_factor(size, [i], [axis])
            p, q = p[1:], q[q_count:]
        elif p_count is not None:
            for axis, size in p[:p_count]:
                add_factor(size, [axis], [j])
            p, q = p[p_count:], q[1:]
        elif is_integral(n / m):
            add_factor(m, [i], [j])
            p, q = [(i, n / m), *p[1:]], q[1:]
        elif is_integral(m / n):
            add_factor(n, [i], [j])
            p, q = p[1:], [(j, m / n), *q[1:]]
        else:
            break
    for axis, size in p:
        unsplittable.add(add_factor(size, [axis], []))
    for axis, size in q:
        unsplittable.add(add_factor(size, [], [axis]))
    return extents, [tuple(x) for x in a_factors], [tuple(x) for x in b_factors], unsplittable
