"""What inference keeps between steps: marks of what is cached, the start of a recurrence, appending to a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..algebra.extremum import smaller
from ..algebra.polynomial import ZERO, Poly
from ..dtypes import dtype as find_dtype
from ..errors import PatternError, ShapeError
from ..ir.graph import (
    Index,
    Op,
    OpKind,
    Result,
    Size,
    Split,
    Tensor,
    apply,
    current_graph,
    is_count,
    itself,
    need_tensor,
    optional,
    positive,
    sizes_of,
)
from ..ir.strides import distinct, numel
from ..notation.pattern import Affine, PatternText, parse_pattern
from . import rules
from . import sharding_rule as splits
from .fill import Fresh
from .registry import register

__all__ = [
    "Append",
    "Cache",
    "InitialState",
    "append",
    "cache",
    "initial_state",
]


@register
@dataclass(frozen=True, kw_only=True)
class Cache(OpKind):
    """A view of what is kept between steps of inference."""

    name = "cache"
    axis: Annotated[int | None, optional("an integer of at least 0", is_count)] = None
    """The axis that grows, None of what is written once."""
    window: Size | None = None
    """How many of the last positions are kept."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the operand."""
        (x,) = operands
        return [itself(x)]


@register
@dataclass(frozen=True, kw_only=True)
class InitialState(Fresh):
    """What a recurrence starts from: zeros in training, in inference what the last step left."""

    name = "initial_state"


@register
@dataclass(frozen=True, kw_only=True)
class Append(OpKind):
    """New positions behind those that a cache holds, in its own storage and number format."""

    name = "append"
    axis: Index
    """The axis of positions."""
    part: str = ""
    """The axis of a mesh that splits the positions of the cache, "" for none; the new ones are behind all of them."""
    flops = rules.free

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the cache."""
        rules.need_operands(self, operands, 2)
        held, new = operands
        axis = self.axis
        fits = held.ndim == new.ndim and all(
            i == axis or held.graph.same(a, b) for i, (a, b) in enumerate(zip(held.sizes, new.sizes, strict=True))
        )
        if not fits or not 0 <= axis < held.ndim:
            raise ShapeError(f"append {new!r} to {held!r}: expected equal sizes on all axes but {axis}")
        return [itself(held)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the positions that it takes; of ranks, those of the one that has the last ones."""
        return ZERO, distinct(self._latest(op), op.operands[1].strides)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the positions that it takes; of ranks, those of the one that has the last ones."""
        return (numel(self._latest(op)),)

    def placed(self, op: Op) -> Split:
        """Split all axes; of other positions than those that are new, each rank takes those that it has of these."""
        rule, (held, new), axis = splits.alike(op), op.operands, self.axis
        if held.graph.same(held.sizes[axis], new.sizes[axis]):
            return rule
        (names,), every = rule.results, "new"
        return replace(
            rule,
            operands=(names, (*names[:axis], (every,), *names[axis + 1 :])),
            extents={**rule.extents, every: new.sizes[axis]},
            local=lambda extents, ranks: replace(self, part=ranks.get(names[axis][0], "")),
            whole=frozenset([every]),
            once=frozenset(names[axis]),
        )

    def overwrites(self) -> tuple[int, ...]:
        """Return the cache."""
        return (0,)

    def _latest(self, op: Op) -> tuple[Poly, ...]:
        """Shape of what a cache takes: of more positions than it has room for, the last ones."""
        (held, new), axis = op.operands, self.axis
        return (*new.sizes[:axis], smaller(new.sizes[axis], held.sizes[axis]), *new.sizes[axis + 1 :])


def cache(
    x: Tensor, pattern: PatternText, /, *, along: str | None = None, window: object = None, name: str = "cache"
) -> Tensor:
    """Mark what inference keeps between steps: keys and values, a latent vector, the results of an encoder.

    In training nothing happens here. `prefill` also writes the tensor to a cache; `decode` appends the new positions
    to the cache and reads it whole.

    Parameters
    ----------
    x : Tensor
        What is kept.
    pattern : str
        Names of its axes: `"b g t k"`.
    along : str, optional
        The axis of positions, that grows. Without it the cache is written once, by `prefill`, and neither `x` nor
        what it alone is made from is computed in `decode`: keys and values of an encoder's results.
    window : sympy.Expr or int, optional
        How many of the last positions are kept, the one of the query included; all by default.
    name : str
        Name of the op, and of the cache.

    Returns
    -------
    Tensor
        A view of `x`: no FLOPs and no bytes.

    Raises
    ------
    PatternError, ShapeError
        If the pattern does not name the axes of `x` once each, or `along` is none of them.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D = cg.dims("B S D")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     x = g.input("x", (B, S, D))
    ...     k = cg.ops.cache(cg.linear(x, "b s d -> b s e", e=D), "b t d", along="t")
    ...     g.output(cg.einsum(x, k, "b s d, b t d -> b s t"))
    >>> cg.matmul_flops(g)
    2*B*D**2*S + 2*B*D*S**2
    >>> cg.matmul_flops(cg.decode(g))  # one new token, S positions with it
    2*B*D**2 + 2*B*D*S
    """
    need_tensor("cache", x)
    parsed = parse_pattern(f"{pattern} -> {pattern}" if isinstance(pattern, str) else pattern, (x.ndim,))
    names = [a.names[0] if len(a.names) == 1 and not isinstance(a, Affine) else None for a in parsed.operands[0]]
    if len(set(names) - {None}) != x.ndim:
        raise PatternError(f"cache of {x!r}: pattern {pattern!r}, expected a name for each axis")
    if along is None and window is not None:
        raise PatternError(f"cache of {x!r}: window={window!r} without along=, expected the axis that it is of")
    if along is not None and along not in names:
        raise PatternError(f"cache of {x!r}: along={along!r}, expected an axis of {pattern!r}")
    kept = None if window is None else positive("cache: window", window)
    return apply(Cache(axis=None if along is None else names.index(along), window=kept), [x], name)[0]


def initial_state(shape: Sequence[object], dtype: object = None, *, name: str = "state") -> Tensor:
    """Make what a recurrence starts from, as the carry of a `scan` over positions.

    In training it is zeros. In `prefill` the last carry is written to a cache, from which `decode` goes on.

    Parameters
    ----------
    shape : sequence of sympy.Expr or int
        Sizes.
    dtype : str or DType, optional
        Number format, the graph's by default.
    name : str
        Name of the op, and of the cache.

    Returns
    -------
    Tensor
        No FLOPs, one write.

    Raises
    ------
    GraphError, ShapeError, FormatError
        If no graph is open, a size is none, or the format is unknown.
    """
    format_ = current_graph().root.dtype if dtype is None else find_dtype(dtype)
    return apply(InitialState(sizes=sizes_of(shape, f"state {name!r}"), dtype=format_), [], name)[0]


def append(held: Tensor, new: Tensor, axis: int, *, name: str = "append") -> Tensor:
    """Write new positions behind those that a cache holds: one read and one write of them, in the cache's storage.

    The numbers are converted to the cache's format; of more positions than it has room for, the last ones are written.
    """
    need_tensor("append", held, new)
    return apply(Append(axis=axis), [held, new], name)[0]
