"""From one placement to another: which collectives take a tensor there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.polynomial import ONE
from ...graph.op import OpKind
from ...graph.placement import Factors, Mesh, Placement, agree, blocks, seen
from ...ops.collectives import Collective, Meshed, Part

__all__ = ["reductions", "steps"]

Step = tuple[OpKind, Placement, str]


def steps(have: Placement, want: Placement, mesh: Mesh, query: int | None = None) -> Iterator[Step]:
    """Yield the ops that take a tensor from one placement to another, where it lies after each, and a name.

    What neighbouring ones do along axes of the mesh that have a name together is one op along that. Of a tensor that is
    restricted to a domain, ranks have consecutive blocks of its queries after each of them: of axes of the mesh that
    split these the innermost one goes first, and comes last, as in DTensor.
    """
    yield from _joined(have, _apart(have, want, mesh, query), mesh)


def reductions(have: Placement, want: Placement, mesh: Mesh) -> Iterator[Step]:
    """Yield the ops that reduce what is pending where it lies, each rank's own part of it in one piece.

    Where that is none, all of it is reduced; what else takes a tensor to where it is wanted is left to its readers.
    """
    yield from _joined(have, _reduced(have, want, mesh, one_piece=True), mesh)


def _joined(have: Placement, apart: Iterable[Step], mesh: Mesh) -> Iterator[Step]:
    """Yield steps, those that neighbouring axes of the mesh take together as one."""
    before, waiting = have, list[Step]()
    for step in apart:
        if waiting:
            both = _as_one(before, waiting[-1], step, mesh)
            if both is not None:
                waiting[-1] = both
                continue
            yield waiting[-1]
            before = waiting.pop()[1]
        waiting.append(step)
    yield from waiting


def _as_one(before: Placement, first: Step, second: Step, mesh: Mesh) -> Step | None:
    """Return one op for two that do the same along axes of the mesh next to each other, None where there is none."""
    (a, _, name), (b, after, _) = first, second
    assert isinstance(a, Meshed)
    assert isinstance(b, Meshed)
    axes = (*mesh.parts(a.axis), *mesh.parts(b.axis))
    joint = mesh.together(axes)
    source = a.source if isinstance(a, Collective) else None
    # of blocks within those of the first one, the second has as many more as the first has ranks
    same: dict[str, Any] = {"axis": a.axis, "ranks": a.ranks, "blocks": a.blocks}
    same |= {"source_blocks": a.source_blocks} if isinstance(a, Collective) else {}
    if joint is None or type(a) is not type(b) or replace(b, **same) != a:
        return None
    gathered = source if source is not None else a.dim if name == "all_gather" else None
    split = a.dim if name in ("part", "reduce_scatter", "all_to_all") else None
    if not all(_beside(p.dims[i], axes) for p, i in ((before, gathered), (after, split)) if i is not None):
        return None
    return replace(a, axis=joint, ranks=mesh[joint]), after, name


def _beside(dim: Factors, axes: Sequence[str]) -> bool:
    """Whether axes of the mesh split an axis one right within the other."""
    at = dim.index(axes[0])
    return dim[at : at + len(axes)] == tuple(axes)


def _apart(have: Placement, want: Placement, mesh: Mesh, query: int | None) -> Iterator[Step]:
    """Yield the ops along each axis of the mesh.

    A sum that is pending is reduced to where the tensor is wanted; an axis of the mesh that goes from one axis of the
    tensor to another is an all-to-all, one that goes away an all-gather; what is split anew is a part, which is free.
    """
    at, inner = have, _inner(have, want, query)
    # what goes away makes room for what comes
    for axis in (*inner, *sorted((a for a in mesh if a not in inner), key=lambda axis: want.dim(axis) is not None)):
        if axis in at.pending:
            continue
        here, there = at.dim(axis), want.dim(axis)
        stays = axis not in inner if here == query else here == there and here is not None
        if here is None or (stays and agree(at.dims[here], want.dims[here], mesh)):
            continue
        free = at.without([axis], mesh)
        room = there is not None and axis not in want.pending and _fits(free, want, axis, there, mesh, query)
        if there is not None and there != here and room:
            at, kind = _exchange(at, want, axis, here, there, mesh)
            yield kind, at, "all_to_all"
        else:
            kind = Collective(
                collective="all_gather", ranks=mesh[axis], axis=axis, dim=here, blocks=blocks(at.dims[here], axis)
            )
            at = free
            yield kind, at, "all_gather"
    for step in _reduced(at, want, mesh, query):
        yield step
        at = step[1]
    outer = () if query is None else _axes(want.dims[query])
    for axis in (*outer, *(a for a in mesh if a not in outer)):
        there = want.dim(axis)
        if there is not None and axis not in at.axes:
            at = _into(at, want, axis, there, mesh)
            yield Part(ranks=mesh[axis], axis=axis, dim=there, blocks=blocks(at.dims[there], axis)), at, "part"


def _axes(dim: Factors) -> list[str]:
    return [f for f in dim if isinstance(f, str)]


def _inner(have: Placement, want: Placement, query: int | None) -> list[str]:
    """Return the axes of the mesh that have to leave an axis of queries, the innermost first: some come again."""
    if query is None:
        return []
    now, then = _axes(have.dims[query]), _axes(want.dims[query])
    alike = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then)))
    return now[alike:][::-1]


def _reduced(
    at: Placement, want: Placement, mesh: Mesh, query: int | None = None, *, one_piece: bool = False
) -> Iterator[Step]:
    """Yield the reductions along each axis of the mesh: what is scattered first leaves less to be reduced."""
    for axis, how in sorted(at.partial, key=lambda part: want.dim(part[0]) is None):
        if want.pending.get(axis) == how:
            continue
        there = want.dim(axis)
        free = at.without([axis], mesh)
        into = None
        if there is not None and _fits(free, want, axis, there, mesh, query):
            into = _into(free, want, axis, there, mesh)
        if there is not None and into is not None and (not one_piece or blocks(into.dims[there], axis) == ONE):
            at = into
            kind = Collective(
                collective="reduce_scatter", ranks=mesh[axis], axis=axis, dim=there,
                blocks=blocks(at.dims[there], axis), operation=how,
            )  # fmt: skip
            yield kind, at, "reduce_scatter"
        else:
            at = free
            yield Collective(collective="all_reduce", ranks=mesh[axis], axis=axis, operation=how), at, "all_reduce"


def _fits(at: Placement, want: Placement, axis: str, dim: int, mesh: Mesh, query: int | None) -> bool:
    """Whether an axis of the mesh can be put where it is wanted, beside those that split the same axis already."""
    stay = all(f in want.dims[dim] for f in at.dims[dim] if isinstance(f, str))
    if dim == query:
        beside = [*_axes(at.dims[dim]), axis]
        stay = _axes(want.dims[dim])[: len(beside)] == beside
    return stay and agree(at.dims[dim], want.dims[dim], mesh)


def _into(at: Placement, want: Placement, axis: str, dim: int, mesh: Mesh) -> Placement:
    there = frozenset(f for f in at.dims[dim] if isinstance(f, str)) | {axis}
    return at.with_dims([seen(want.dims[dim], there, mesh) if i == dim else d for i, d in enumerate(at.dims)])


def _exchange(
    at: Placement, want: Placement, axis: str, here: int, there: int, mesh: Mesh
) -> tuple[Placement, Collective]:
    after = _into(at.without([axis], mesh), want, axis, there, mesh)
    kind = Collective(
        collective="all_to_all", ranks=mesh[axis], axis=axis, dim=there, blocks=blocks(after.dims[there], axis),
        source=here, source_blocks=blocks(at.dims[here], axis),
    )  # fmt: skip
    return after, kind
