"""Graphs with a loss: parameters, inputs that want a gradient, and ops that have one, drawn to be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ..graph.graph import Graph
from ..graph.loop import Repeat
from ..graph.op import OpKind
from ..graph.sizes import known_names
from ..graph.tensor import Tensor
from ..nn.losses import cross_entropy
from ..ops.blocks import Kernel
from ..ops.contraction import Einsum
from ..ops.fill import Assign, Pad
from ..ops.index import Gather, Scatter
from ..ops.moves import Concat, Expand, Rearrange, Slice
from ..ops.pointwise import FUNCTIONS, Pointwise, cast, pointwise
from ..ops.pooling import Pool
from ..ops.reduce import Reduce, reduce
from ..ops.stated import Transfer
from ..ops.stochastic import Dropout
from .bodies import _grow
from .kinds import Named, kind_of
from .sketch import Case, Sketch

__all__ = ["losses"]

#: Kinds of ops that a gradient goes through.
_KINDS: tuple[type[OpKind], ...] = (
    Einsum, Einsum, Pointwise, Pointwise, Pointwise, Reduce, Rearrange, Slice, Expand, Concat, Gather, Scatter, Dropout,
    Pool, Pad, Assign, Kernel, Repeat, Repeat, Transfer,
)  # fmt: skip
#: Elementwise functions of numbers of either sign, with a gradient at almost all of them.
_FUNCTIONS = (
    "add", "sub", "mul", "div", "fma", "lerp", "neg", "abs", "square", "exp", "sin", "cos", "tanh", "erf", "maximum",
    "minimum", "relu", "leaky_relu", "relu2", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "elu", "softcap",
    "hardswish", "mish", "copy", "clamp",
)  # fmt: skip
_LEAST_BITS = 16


class _Trained(Sketch):
    """Draws floating sources that want a gradient more often than not."""

    trained = True

    def fresh(self, shape: Sequence[Any], dtype: str | None = None, role: str | None = None) -> Tensor:
        dtype = self.one_of(["fp32", "fp32", "fp32", "bf16", "fp64"]) if dtype is None else dtype
        if role is None:
            role = self.one_of(["param", "param", "input", "buffer"])
        self._made += 1
        name = f"{role}{self._made}"
        options = {"grad": self.chance(1)} if role == "input" and dtype.startswith(("fp", "bf")) else {}
        t: Tensor = getattr(self.graph, role)(name, tuple(shape), dtype, **options)
        self.pool.append(t)
        return t


def _scalar(s: Sketch, t: Tensor) -> Tensor:
    """Make one number of a tensor."""
    wide = t if t.dtype.bits > _LEAST_BITS else cast(t, "fp32")
    if t.ndim == 2 and t.domain is None and s.value(t.sizes[0]) <= s.value(t.sizes[1]) and s.chance(3):
        return cross_entropy(wide, s.fresh(t.shape[:1], "int64", "input"))
    names = " ".join(f"a{i}" for i in range(t.ndim))
    return reduce(wide, f"{names} -> ", s.one_of(["sum", "mean"])) if t.ndim else wide


def _is_last(t: Tensor) -> bool:
    """Whether a loop ends with a tensor: a state that nobody need read."""
    op = t.producer
    return op is not None and op.loop is not None and t in op.loop.lasts


def _loss(s: Sketch) -> Tensor:
    """Add up what nobody reads, and some of what others read as well."""
    here = [t for t in s.pool if t in s.graph and t.dtype.kind == "float" and t.dtype.bits >= _LEAST_BITS]
    made = [t for t in here if t.producer is not None]
    unread = [t for t in made if not s.graph.out_degree(t) and not (_is_last(t) and s.chance(1))]
    parts = [_scalar(s, t) for t in dict.fromkeys([*unread, *s.some(made[-2:])])]
    parts = parts or [_scalar(s, s.fresh((2,), "fp32", "param"))]
    loss = parts[0]
    for part in parts[1:]:
        loss = pointwise("add", loss, part)
    return cast(loss, "fp32") if loss.dtype.name != "fp32" else loss


@st.composite
def _drawn(draw: Callable[[Any], Any], most: int, kinds: Sequence[type[OpKind]], must: type[OpKind] | None) -> Case:
    with Graph("drawn", dtype="fp32") as graph:
        s = _Trained(draw, graph)
        s.kinds, s.functions = kinds, [n for n in _FUNCTIONS if n in FUNCTIONS]
        s.fresh(s.shape(s.number(1, 3), 30), "fp32", "param")
        _grow(s, kinds, 0 if must else 1, most)
        if must:
            _grow(s, (must,), 1, 1)
        graph.output(_loss(s))
    return Case(graph, {name: s.point[name] for name in sorted(known_names(graph))})


def losses(most: int = 5, kinds: Sequence[Named] = (), *, around: Named | None = None) -> st.SearchStrategy[Case]:
    """Draw graphs with one scalar output, whose parameters and some of whose inputs want gradients.

    Parameters
    ----------
    most : int
        Most ops at the outermost level, what makes the loss of them aside.
    kinds : sequence of subclasses of OpKind or str
        Kinds of ops or their names; by default those that a gradient goes through: contractions, elementwise functions,
        reductions, views, lookups, windows, kernels and loops, in place where it is drawn so.
    around : subclass of OpKind or str, optional
        A kind of which there is one op at least.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`. `costgraph.backward` may still refuse it,
        such as where an op in place overwrites what a gradient reads.
    """
    must = None if around is None else kind_of("losses", around)
    return _drawn(most, [kind_of("losses", k) for k in kinds] or _KINDS, must)
