"""State that inference keeps between steps: cached tensors, recurrent state, and appending to a KV cache."""

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
from .fill import DenseFactory
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
    """View that marks a tensor as cached between inference steps."""

    name = "cache"
    axis: Annotated[int | None, optional("an integer of at least 0", is_count)] = None
    """Axis that grows; None if the cache is written once."""
    window: Size | None = None
    """Number of last positions to keep."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the operand itself."""
        (x,) = operands
        return [itself(x)]


@register
@dataclass(frozen=True, kw_only=True)
class InitialState(DenseFactory):
    """Initial recurrent state: zeros in training, the previous step's state in inference."""

    name = "initial_state"


@register
@dataclass(frozen=True, kw_only=True)
class Append(OpKind):
    """Write new positions at the end of a cache, in its storage and dtype."""

    name = "append"
    axis: Index
    """Position axis."""
    mesh_axis: str = ""
    """Mesh axis that splits the cached positions, "" for none; the last rank takes the new ones."""
    flops = rules.free

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the cache."""
        rules.need_operands(self, operands, 2)
        cached, new = operands
        axis = self.axis
        fits = cached.ndim == new.ndim and all(
            i == axis or cached.graph.same(a, b) for i, (a, b) in enumerate(zip(cached.sizes, new.sizes, strict=True))
        )
        if not fits or not 0 <= axis < cached.ndim:
            raise ShapeError(f"append {new!r} to {cached!r}: expected equal sizes on all axes but {axis}")
        return [itself(cached)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the new positions that fit; on a mesh, only the last rank takes them."""
        return ZERO, distinct(self._written_shape(op), op.operands[1].strides)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the new positions that fit; on a mesh, only the last rank takes them."""
        return (numel(self._written_shape(op)),)

    def placed(self, op: Op) -> Split:
        """Split all axes; new positions are split only if they replace the whole cache."""
        rule, (cached, new), axis = splits.alike(op), op.operands, self.axis
        if cached.graph.same(cached.sizes[axis], new.sizes[axis]):
            return rule
        (names,), label = rule.results, "new"
        return replace(
            rule,
            operands=(names, (*names[:axis], (label,), *names[axis + 1 :])),
            extents={**rule.extents, label: new.sizes[axis]},
            local=lambda extents, ranks: replace(self, mesh_axis=ranks.get(names[axis][0], "")),
            whole=frozenset([label]),
            once=frozenset(names[axis]),
        )

    def overwrites(self) -> tuple[int, ...]:
        """Return the cache."""
        return (0,)

    def _written_shape(self, op: Op) -> tuple[Poly, ...]:
        """Return the shape written: the last new positions that the cache has room for."""
        (cached, new), axis = op.operands, self.axis
        return (*new.sizes[:axis], smaller(new.sizes[axis], cached.sizes[axis]), *new.sizes[axis + 1 :])


def cache(
    x: Tensor, pattern: PatternText, /, *, along: str | None = None, window: object = None, name: str = "cache"
) -> Tensor:
    """Mark a tensor that inference caches: keys and values, a latent vector, encoder outputs.

    In training this does nothing. `prefill` also writes the tensor to a cache; `decode` appends the new positions to
    the cache and reads it whole.

    Parameters
    ----------
    x : Tensor
        Tensor to cache.
    pattern : str
        Axis names: `"b g t k"`.
    along : str, optional
        Position axis, which grows. Without it, `prefill` writes the cache once, and `decode` computes neither `x`
        nor tensors used for `x` alone, such as the keys and values of encoder outputs.
    window : sympy.Expr or int, optional
        Number of last positions to keep, including the query's; all by default.
    name : str
        Name of op and cache.

    Returns
    -------
    Tensor
        A view of `x`, without FLOPs or bytes.

    Raises
    ------
    PatternError, ShapeError
        If the pattern does not name each axis of `x` once, or `along` is not one of them.

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
        raise PatternError(f"cache of {x!r}: window={window!r} without along=, expected the axis to which it applies")
    if along is not None and along not in names:
        raise PatternError(f"cache of {x!r}: along={along!r}, expected an axis of {pattern!r}")
    size = None if window is None else positive("cache: window", window)
    return apply(Cache(axis=None if along is None else names.index(along), window=size), [x], name)[0]


def initial_state(shape: Sequence[object], dtype: object = None, *, name: str = "state") -> Tensor:
    """Create a recurrence's initial state, the carry for a `scan` over positions.

    In training it is zeros. `prefill` writes the final carry to a cache, from which `decode` continues.

    Parameters
    ----------
    shape : sequence of sympy.Expr or int
        Sizes.
    dtype : str or DType, optional
        Dtype, the graph's by default.
    name : str
        Name of op and cache.

    Returns
    -------
    Tensor
        Zeros: no FLOPs, one write.

    Raises
    ------
    GraphError, ShapeError, FormatError
        If no graph is open, or a size or the dtype is invalid.
    """
    format_ = current_graph().root.dtype if dtype is None else find_dtype(dtype)
    return apply(InitialState(sizes=sizes_of(shape, f"state {name!r}"), dtype=format_), [], name)[0]


def append(held: Tensor, new: Tensor, axis: int, *, name: str = "append") -> Tensor:
    """Write new positions at the end of a cache: one read and one write of them, in the cache's storage.

    Values are cast to the cache's dtype; if the cache has too little room, only the last positions are written.
    """
    need_tensor("append", held, new)
    return apply(Append(axis=axis), [held, new], name)[0]
