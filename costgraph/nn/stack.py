"""Layer stacks with several kinds of layer, such as alternating window and full attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import overload

from ..algebra.symbols import is_name, shown
from ..errors import GraphError
from ..ir.graph import (
    Tensor,
    current_graph,
    here,
    module,
    need_call,
    need_list,
    need_tensor,
    positive,
)
from ..ops.loops import (
    Carry,
    repeat,
)

__all__ = ["layers"]

_Step = Callable[..., tuple[Tensor, ...]]


@overload
def layers(
    count: object,
    bodies: Mapping[str, Callable[..., Tensor]],
    x: Tensor,
    kinds: Sequence[str],
    *,
    rest: int = ...,
    name: str = ...,
) -> Tensor: ...


@overload
def layers(
    count: object,
    bodies: Mapping[str, Callable[..., tuple[Tensor, ...]]],
    x: tuple[Tensor, ...],
    kinds: Sequence[str],
    *,
    rest: int = ...,
    name: str = ...,
) -> tuple[Tensor, ...]: ...


def layers(
    count: object,
    bodies: Mapping[str, Callable[..., Carry]],
    x: Carry,
    kinds: Sequence[str],
    *,
    rest: int = 0,
    name: str = "layers",
) -> Carry:
    """Apply layers whose kinds alternate periodically; the count may be a symbol.

    Parameters
    ----------
    count : sympy.Expr or int
        Total number of layers: `rest`, plus a positive multiple of `len(kinds)`.
    bodies : mapping of str to callable
        One layer per kind, `body(x) -> x` as in `repeat`; called once per run of equal kinds.
    x : Tensor or tuple of Tensor
        First layer's input; a tuple is passed as several arguments.
    kinds : sequence of str
        Layer kinds in one period; several kinds are also scopes.
    rest : int
        Number of layers in an incomplete last period.
    name : str
        Layer scope; an incomplete period has the suffix `_rest`.

    Returns
    -------
    Tensor or tuple of Tensor
        Last layer's output.

    Raises
    ------
    GraphError, ShapeError
        If an argument is invalid, or a body's results do not match its arguments. An invalid `count` is a
        BindingError once it is bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, L = cg.dims("B D L")
    >>> bodies = {"narrow": lambda x: cg.nn.mlp(x, D), "wide": lambda x: cg.nn.mlp(x, 4 * D)}
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.layers(L, bodies, g.input("x", (B, D)), ("narrow", "narrow", "wide"), rest=2))
    >>> cg.param_count(g)  # of a narrow layer 2*D**2, of a wide one 8*D**2
    4*D**2*L - 4*D**2
    >>> cg.param_count(g, D=1, L=5), cg.param_count(g, D=1, L=8)
    (16, 28)
    """
    place = f"layers {shown(name)}"
    total, kinds = positive(f"{place}: count", count), need_list(f"{place}: kinds", kinds)
    steps = _steps(place, bodies)
    unknown = next((kind for kind in kinds if not isinstance(kind, str) or kind not in steps), None)
    if not kinds or unknown is not None:
        raise GraphError(f"{place}: kinds {shown(unknown if kinds else kinds)}, expected one of {', '.join(steps)}")
    if isinstance(rest, bool) or not isinstance(rest, int) or not 0 <= rest < len(kinds):
        raise GraphError(f"{place}: rest {shown(rest)}, expected a whole number below {len(kinds)}")
    if not is_name(name):
        raise GraphError(f"{place}: expected an identifier as its name")
    carries = x if isinstance(x, tuple) else (x,)
    need_tensor(place, *carries)
    if len(set(kinds)) == 1:
        finals = repeat(total, steps[kinds[0]], carries, name=name)
    else:
        finals = repeat((total - rest) / len(kinds), lambda *x: _run(kinds, steps, x), carries, name=name)
        if rest:
            with module(current_graph(finals[0].graph), f"{name}_rest"):
                finals = _run(kinds[:rest], steps, finals)
    return finals if isinstance(x, tuple) else finals[0]


def _steps(place: str, bodies: object) -> dict[str, _Step]:
    """Return the bodies as functions from tuples to tuples."""
    if not isinstance(bodies, Mapping) or not bodies or not all(isinstance(k, str) and is_name(k) for k in bodies):
        raise GraphError(f"{place}: bodies {shown(bodies)}, expected a mapping of identifiers to functions")

    def step(body: Callable[..., Carry]) -> _Step:
        need_call(f"{place}: body", body)

        def run(*x: Tensor) -> tuple[Tensor, ...]:
            returned = body(*x)
            return returned if isinstance(returned, tuple) else (returned,)

        return run

    return {kind: step(body) for kind, body in bodies.items()}


def _run(kinds: Sequence[str], steps: Mapping[str, _Step], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Apply layers in order; runs of equal kinds become a repeat."""

    def layer(kind: str, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        root = current_graph(x[0].graph).root
        previous, root.layers = root.layers, root.layers | {"/".join(here().levels)}
        root.note(lambda: setattr(root, "layers", previous))
        return steps[kind](*x)

    for kind, run in groupby(kinds):
        times = len(list(run))
        if times > 1:
            x = repeat(times, lambda *x, kind=kind: layer(kind, x), x, name=kind)
        else:
            with module(current_graph(x[0].graph), kind):
                x = layer(kind, x)
    return x
