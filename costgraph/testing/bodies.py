"""Samples of ops with a body, and whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ..algebra.symbols import dims
from ..graph.graph import Graph, current_graph
from ..graph.loop import Repeat
from ..graph.op import Bodied, OpKind
from ..graph.sizes import known_names
from ..graph.tensor import Tensor
from ..nn.attention import attention
from ..nn.linear import linear
from ..nn.norms import layer_norm, rms_norm
from ..nn.softmax import log_softmax, softmax
from ..ops.blocks import Kernel, kernel, repeat, scan
from ..ops.contraction import Einsum
from ..ops.einsum import einsum
from ..ops.fill import Revised
from ..ops.index import Gather
from ..ops.moves import Concat, Expand, Rearrange, Slice
from ..ops.pointwise import Pointwise, cast, pointwise
from ..ops.pooling import Pool
from ..ops.reduce import Reduce, reduce
from ..ops.stochastic import Dropout
from .kinds import Named, kind_of
from .samples import SAMPLES, sample
from .sketch import Case, Sketch

__all__ = ["graphs", "ops"]

#: What a fused kernel holds: ops that move or compute elements.
_FUSED = (Einsum, Pointwise, Reduce, Rearrange, Slice, Expand, Concat, Gather, Dropout, Pool)
_DEEPEST = 2


def _grow(s: Sketch, kinds: Sequence[type[OpKind]], least: int, most: int) -> list[Tensor]:
    """Draw some ops and return what they made."""
    out: list[Tensor] = []
    for _ in range(s.number(least, most)):
        made = s.drawn(SAMPLES[s.one_of(kinds)])
        s.made(*made)
        out += made
    return [t for t in out if t in s.pool]


@sample(Kernel)
def _kernel(s: Sketch) -> Sequence[Tensor]:
    return s.one_of([_drawn_kernel, _layer, _attention])(s)


def _layer(s: Sketch) -> Sequence[Tensor]:
    """A layer that is one kernel."""
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    name = s.one_of(["softmax", "log_softmax", "layer_norm", "rms_norm", "linear"])
    if name == "linear" and x.dtype.bits >= 16:
        return [linear(x, "... i -> ... o", o=2, bias=True)]
    if name.endswith("softmax"):
        return [(softmax if name == "softmax" else log_softmax)(x, s.number(0, x.ndim - 1))]
    small = x.dtype.bits < 16  # parameters of the graph's own format have to have a common one with it
    norm = layer_norm if name == "layer_norm" else rms_norm
    return [norm(cast(x, "bf16") if small else x, affine=s.chance(1))]


def _attention(s: Sketch) -> Sequence[Tensor]:
    """Attention in one kernel, or an op each for its steps; queries may share keys, and see some of them."""
    groups, share = s.number(1, 2), s.number(1, 2)
    queries = s.one_of([2, 3, dims("A")])
    window = s.one_of([None, 2, dims("W")])
    s.point.setdefault("W", s.number(1, 4))
    causal = s.chance(1)
    keys = s.one_of([queries, 5]) if causal or window is None else queries
    q = s.fresh((1, groups * share, queries, 2), "fp32")
    k, v = (s.fresh((1, groups, keys, 2), "fp32") for _ in "kv")
    kernel_ = s.one_of(["flash", "eager"])
    return [attention(q, k, v, causal, window, kernel_, softcap=s.one_of([None, 30.0]), p=s.one_of([0, 0.5]))]


def _drawn_kernel(s: Sketch) -> Sequence[Tensor]:
    s.tensor()
    space = s.one_of([0, 0, 96, 8 * dims("A")])
    with kernel("fused", workspace=space) as body, s.inside(changes=False):
        made: list[Tensor] = []
        while not made:
            made = [t for t in _grow(s, _FUSED, 1, 3) if t.graph is body and t.producer is not None]
    # something outside has to read what it makes
    handed = [body.export(t) for t in s.some(made, 1)]
    return [t for t in handed if t.dtype.kind == "float"]


def _count(s: Sketch) -> Any:
    s.point.setdefault("L", s.number(1, 4))
    s.point.setdefault("T", s.number(1, 3))
    return s.one_of([dims("L"), dims("T"), 1, 2, 3])


def _usual() -> tuple[type[OpKind], ...]:
    """Return all kinds that have a sample, but what traces alone make of a write: it is drawn where it is asked for."""
    return tuple(k for k in SAMPLES if k is not Revised)


def _kinds(s: Sketch) -> Sequence[type[OpKind]]:
    return [k for k in s.kinds or _usual() if s.depth < _DEEPEST or not issubclass(k, Bodied)]


def _like(s: Sketch, x: Tensor, made: Sequence[Tensor]) -> Tensor:
    """Turn what a body made into something of the shape and format of a carry."""
    fits = [t for t in made if t.sizes == x.sizes and t.dtype == x.dtype and t.domain is None]
    if fits and s.chance(1):
        return s.one_of(fits)
    floats = [t for t in made if t.dtype.kind == "float" and t.dtype.bits >= 16 and t.domain is None]
    if floats and s.chance(1):
        y = floats[-1]
        names = " ".join(f"a{i}" for i in range(y.ndim))
        y = reduce(y, f"{names} -> ", "sum") if y.ndim else y
        return cast(pointwise("add", x, y), x.dtype)
    if x.ndim and s.value(x.sizes[-1]) <= 5 and x.dtype.bits >= 16 and s.chance(1):
        w = s.fresh((x.sizes[-1].expr, x.sizes[-1].expr), x.dtype.name, "param")
        return einsum(x, w, "... i, i j -> ... j")
    return s.one_of([x, pointwise("relu", x), pointwise("neg", x)])


@sample(Repeat)
def _repeat(s: Sketch) -> Sequence[Tensor]:
    many = s.one_of([1, 1, 2])
    carries = tuple(s.tensor(lambda t: s.elements(t) <= 20, s.shape(s.number(0, 2), 20)) for _ in range(many))
    carries = tuple(t if t.dtype.block is None else cast(t, "bf16") for t in carries)
    count = _count(s)
    stacked = s.chance(1)
    xs = tuple(s.fresh((count, *s.shape(1, 6)), "fp32") for _ in range(s.number(0, 1))) if stacked else ()

    def inner(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with s.inside(*tensors):
            # a part of a tensor that shares scales is charged otherwise: a known deviation
            s.pool = [t for t in s.pool if t.dtype.block is None]
            made = _grow(s, _kinds(s), 0, 3)
            # slices of block formats have scales of their own: a known deviation; none is restricted to a domain
            here = [t for t in made if t.graph is current_graph() and t.dtype.block is None and t.domain is None]
            after = [_like(s, x, made) for x in tensors[: len(carries)]]
        if len(after) == 2 and after[0].sizes == after[1].sizes and after[0].dtype == after[1].dtype and s.chance(1):
            after.reverse()
        return after, s.some(here[-2:])

    if not stacked:
        out = repeat(count, lambda *t: tuple(inner(*t)[0]), carries)
        return list(out)

    def step(carry: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        after, ys = inner(*carry, *x)
        return tuple(after), tuple(ys)

    state, ys = scan(count, step, carries, xs)
    return [*_tuple(state), *_tuple(ys)]


def _tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _finish(s: Sketch) -> Case:
    """Declare outputs: what nobody reads, and some of what others read as well."""
    graph = s.graph
    here = [t for t in s.pool if t.producer is not None]
    unread = [t for t in here if t in graph and not graph.out_degree(t)]
    for t in dict.fromkeys([*s.some(unread, 1), *s.some(here[-3:])]):
        graph.output(t)
    if not graph.outputs:
        graph.output(pointwise("relu", s.fresh((2,), "fp32")))
    return Case(graph, {name: s.point[name] for name in sorted(known_names(graph))})


def _case(draw: Callable[[Any], Any], kinds: Sequence[type[OpKind]], must: type[OpKind] | None, most: int) -> Case:
    with Graph("drawn", dtype="fp32") as graph:
        s = Sketch(draw, graph)
        _grow(s, kinds, 0 if must else 1, most)
        if must:
            s.made(*s.drawn(SAMPLES[must]))
            _grow(s, (Pointwise, Rearrange), 0, 1)
        return _finish(s)


@st.composite
def _drawn(draw: Callable[[Any], Any], kinds: Sequence[type[OpKind]], must: type[OpKind] | None, most: int) -> Case:
    return _case(draw, kinds, must, most)


def ops(kind: Named) -> st.SearchStrategy[Case]:
    """Draw graphs around an op of one kind: operands of all layouts before it, sometimes a reader behind it.

    Parameters
    ----------
    kind : subclass of OpKind or str
        An op kind with a sample, or its name.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`.
    """
    return _drawn((Rearrange, Slice, Expand, Pointwise), kind_of("ops", kind), 2)


def graphs(most: int = 6, kinds: Sequence[Named] = ()) -> st.SearchStrategy[Case]:
    """Draw whole graphs: views, several consumers, ops in place, kernels, nested loops, domains, lookups.

    Parameters
    ----------
    most : int
        Most ops at the outermost level.
    kinds : sequence of subclasses of OpKind or str
        Kinds of ops or their names, all that have a sample by default, but `revised`.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`.
    """
    return _drawn([kind_of("graphs", k) for k in kinds] or _usual(), None, most)
