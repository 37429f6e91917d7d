"""The walk over a graph: every op in program order, loops played out, fused bodies op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import BindingError, CostGraphError, ShapeError, UnsupportedError
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op, OpKind
from ...graph.tensor import Storage, Tensor
from ...ops.play import Env, Player, Turn
from ...ops.stacks import Empty
from .emitter import Emitter, Numbers
from .formats import torch_dtype
from .groups import Groups
from .indices import Indices
from .replay import replay, runs_on
from .site import Shared, Site, laid_out, strided
from .sources import Leaf, Leaves
from .table import LOWERINGS

__all__ = ["Walk", "kept", "taken"]


def kept(first: Any, *others: Any) -> Any:
    """Return the first argument: the others are named here, and so live until now."""
    return first


def taken(x: torch.Tensor, name: str, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
    """Return an input after a look at it.

    BindingError if it has another shape, format or strides than in the graph.
    """
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != tuple(sizes) or x.dtype != dtype:
        found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise BindingError(f"input {name!r} is {found}, expected {dtype} {tuple(sizes)}")
    if not laid_out(x, strides):
        raise BindingError(f"input {name!r} has strides {x.stride()}, expected {tuple(strides)}")
    return x


@dataclass(frozen=True)
class Place:
    """Where an op stands."""

    slices: Mapping[Storage, Any]
    """nodes of the slices of stacks that are written, by the storage that the body has for them"""
    where: tuple[int, ...]
    """iterations around"""


class Walk(Player[Place]):
    """Lowers a graph and the bodies inside it.

    What has a storage for each iteration of a loop is a list, a sum before its first term None.
    """

    def __init__(
        self, graph: Graph, numbers: Numbers, device: torch.device, functions: Mapping[str, Callable[..., Any]],
        groups: Groups,
    ) -> None:  # fmt: skip
        super().__init__()
        self.numbers = numbers
        self.emitter = Emitter(device)
        self.indices = Indices(graph, numbers)
        self.leaves = Leaves(graph)
        self.shared = Shared(self.emitter, numbers, self.indices, groups, functions, self.body)
        self._stacks: dict[Storage, Any] = {}  # made before what is written into their slices

    def run(self, graph: Graph) -> None:
        """Lower the whole graph."""
        env: Env = {}
        for t in graph.tensors:
            if t.producer is None and t.role == "input":
                env[t] = self._input(t)
        self.ops(graph, env, Place({}, ()))
        outputs = [_nested(env[t]) for t in graph.outputs]
        made = outputs[0] if len(outputs) == 1 else tuple(outputs)
        # gradients live to the end of the step
        grads = [n for t in graph.gradients.values() for n in _flat(env[t])]
        if grads:
            made = self.emitter.call(kept, made, *grads)
        self.emitter.graph.output(made)

    def _input(self, t: Tensor) -> Any:
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        dtype, name = torch_dtype(f"input {t.name!r}", t.dtype), self.leaves.argument(t.name)
        node = self.emitter.source(self.emitter.graph.placeholder(name), sizes, strides, dtype)
        return self.emitter.call(taken, node, t.name, sizes, dtype, strides)

    def ops(self, graph: Graph, env: Env, place: Place) -> None:
        """Lower the ops of a graph."""
        for t in graph.tensors:
            if t.producer is None and t.role not in ("formal", "input"):
                env[t] = self._source(t, self.numbers.of(t.sizes), place.where, t.storage.pieces)
        self.play(graph.ops, env, place)

    def _source(self, t: Tensor, sizes: tuple[int, ...], where: tuple[int, ...], pieces: int) -> Any:
        """Return the node of a parameter, or of each of its layers."""
        if pieces:
            return [self._source(t, sizes[1:], (*where, i), pieces - 1) for i in range(sizes[0])]
        dtype = torch_dtype(f"{t.role} {t.name!r}", t.dtype)
        strides = self.numbers.of(t.strides[t.ndim - len(sizes) :])
        target = self.leaves.add(Leaf(t, sizes, strides, dtype, where, self.indices.limit(t)))
        return self.emitter.source(self.emitter.graph.get_attr(target), sizes, strides, dtype)

    def step(self, op: Op, env: Env, place: Place) -> None:
        """Emit the calls of an op."""
        rule = _rule_of(op, self.emitter.device)
        slices = place.slices
        there = {t: slices[t.storage] for t in op.results if t.storage in slices} | self._slices(op)
        site: Site[OpKind] = Site(op, self.shared, [env[t] for t in op.operands], there)
        try:
            rule(site)
        except CostGraphError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
            what = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"lower {op.name!r}: torch refuses it ({what}), expected operands that its kernels take"
            ) from error
        env |= {t: site.made[i] for i, t in enumerate(op.results)}
        if isinstance(op.kind, Empty):
            self._stacks[op.results[0].storage] = env[op.results[0]]

    def _slices(self, op: Op) -> dict[Tensor, Any]:
        """Return where the results of an op lie that an unrolled loop writes into a stack."""
        if isinstance(op.kind, Empty):  # which makes one, in each iteration anew
            return {}
        return {t: self._place(t) for t in op.results if t.storage in self._stacks and not t.is_view}

    def _place(self, t: Tensor) -> Any:
        """Return where a tensor lies in a stack."""
        sizes, strides = self.numbers.of(t.sizes), self.numbers.of(t.strides)
        return self.emitter.call(strided, self._stacks[t.storage], sizes, strides, self.numbers(t.offset))

    def body(self, body: Graph, operands: Sequence[Any]) -> list[Any]:
        """Lower the ops of a fused body one by one and return its outputs."""
        inner: Env = dict(zip(body.formals, operands, strict=True))
        self.ops(body, inner, Place({}, ()))
        return [inner[t] for t in body.outputs]

    # -- loops -------------------------------------------------------------------------------------------------------

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterator[Turn]:
        """Yield every iteration."""
        count = self.around[-1].at if loop.until else self.numbers(loop.count)
        for turn in range(count):
            yield Turn(count - 1 - turn if loop.reverse else turn, count)

    def stack(self, loop: Loop, t: Tensor, env: Env, place: Place) -> Any:
        """Make a stack before its slices, if none is there."""
        if t.storage in self._stacks:
            return self._place(t)
        dtype = torch_dtype(repr(t.name), t.dtype)
        return self.emitter.call(torch.empty, self.numbers.of(t.sizes), dtype=dtype, device=self.emitter.device)

    def slice(self, loop: Loop, value: Any, turn: Turn, place: Place) -> Any:
        """Return one position along the first axis."""
        return self._at(value, turn.at)

    def iteration(self, loop: Loop, env: Env, turn: Turn, stacks: Sequence[Any], place: Place) -> None:
        """Lower the body, whose slices are written into the stacks."""
        slices = {t.storage: self._at(stack, turn.at) for t, stack in zip(loop.ys, stacks, strict=True)}
        self.ops(loop.body, env, Place(slices, (*place.where, turn.at)))

    def _at(self, v: Any, i: int) -> Any:
        if v is None or isinstance(v, list):
            return None if v is None else v[i]
        if not self.emitter.shadow(v).ndim:
            raise ShapeError("slice of a scalar, expected an axis of iterations")
        return self.emitter.call(torch.select, v, 0, i)


def _rule_of(op: Op, device: torch.device) -> Callable[[Site[Any]], None]:
    """Return what lowers an op: the call that a trace saw there, which no result was added to, or that of its kind."""
    call = op.call
    here = call is not None and runs_on(call, device)
    if call is not None and here and len(call.places) == len(op.results):
        return partial(replay, call=call)
    rule = LOWERINGS.get(type(op.kind))
    if call is not None and not here and rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: torch has {call.target} for CUDA alone ({call.rule}), expected device='cuda'"
        )
    if rule is None:
        raise UnsupportedError(
            f"lower {op.name!r}: op kind {op.kind.name!r} has no lowering, expected one from costgraph.torch.lowering"
        )
    return rule


def _nested(made: Any) -> Any:
    """Return a tensor, of one with a storage for each iteration a tuple of them."""
    return tuple(map(_nested, made)) if isinstance(made, list) else made


def _flat(made: Any) -> list[Any]:
    if isinstance(made, list):
        return [n for part in made for n in _flat(part)]
    return [] if made is None else [made]
