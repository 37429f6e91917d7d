"""Loops played out: what an iteration is given, hands on and leaves behind, once for all who run one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..algebra.polynomial import ONE, Poly
from ..graph.loop import Loop
from ..graph.op import Op
from ..graph.tensor import Tensor
from .pieces import Absent, Accumulate, taken

__all__ = ["Env", "Player", "Turn"]

P = TypeVar("P")


@dataclass(frozen=True)
class Turn:
    """An iteration that is played."""

    at: int
    """its number among those that are played"""
    times: int
    """how many are played"""
    count: Poly = ONE
    """how many there are"""


Env = dict[Any, Any]


class Player(Generic[P]):
    """Runs the ops of a graph in order, and the body of a loop as often as it repeats.

    What an op makes is a value of the player's own, kept by `key`; a sum before its first term is None, and what has a
    storage for each iteration is what `collected` says. `P` is what a player wants to know of where an op stands: it is
    handed down, and each iteration has its own.
    """

    def __init__(self) -> None:
        self.around: list[Turn] = [Turn(0, 1)]
        """The iterations around what is played; the first one stands for none."""

    # -- what a player says ----------------------------------------------------------------------------------------

    def key(self, t: Tensor) -> Hashable:
        """Return by what the value of a tensor is kept."""
        return t

    def step(self, op: Op, env: Env, place: P) -> None:
        """Run an op that is no loop."""
        raise NotImplementedError

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterable[Turn]:
        """Yield the iterations, in the order in which they run."""
        raise NotImplementedError

    def stack(self, loop: Loop, t: Tensor, env: Env, place: P) -> Any:
        """Return what the slices of a result are written into, before the first one is."""
        raise NotImplementedError

    def slice(self, loop: Loop, value: Any, turn: Turn, place: P) -> Any:
        """Return what an iteration is given of what is read slice by slice."""
        raise NotImplementedError

    def inside(self, env: Env) -> Env:
        """Return where values are kept during an iteration."""
        return {}

    def iteration(self, loop: Loop, env: Env, turn: Turn, stacks: Sequence[Any], place: P) -> None:
        """Run the body once."""
        raise NotImplementedError

    def filled(self, loop: Loop, i: int, stack: Any, rows: Sequence[Any], place: P) -> Any:
        """Return a stack once all of its slices are written; they are in the order of the iterations."""
        return stack

    def collected(self, loop: Loop, rows: Sequence[Any]) -> Any:
        """Return what stands for a storage of each iteration; they are in the order of the iterations."""
        return list(rows)

    def revised(self, whole: Tensor, env: Env, rows: Sequence[Any], place: P) -> Any:
        """Return an operand once each iteration has written its slice; they are in the order of the iterations."""
        return env[self.key(whole)]

    # -- what a loop does --------------------------------------------------------------------------------------------

    def play(self, ops: Iterable[Op], env: Env, place: P) -> None:
        """Run ops one after the other."""
        for op in ops:
            self.one(op, env, place)

    def one(self, op: Op, env: Env, place: P) -> None:
        """Run an op: one that adds to a sum before there is anything makes the term the sum."""
        if op.loop is not None:
            self.loop(op.loop, env, place)
        elif isinstance(op.kind, Absent):
            env[self.key(op.results[0])] = None
        elif isinstance(op.kind, Accumulate) and env[self.key(op.operands[0])] is None:
            if op.kind.lent:
                del env[self.key(op.operands[0])]
                self.step(taken(op), env, place)
            else:
                env[self.key(op.results[0])] = env[self.key(op.operands[1])]
        else:
            self.step(op, env, place)

    def loop(self, loop: Loop, env: Env, place: P) -> None:
        """Run a loop: each iteration is handed what the one before it made of its carries."""
        stacks = [self.stack(loop, t, env, place) for t in loop.stacks]
        state, xs, shared = (self._values(ts, env) for ts in (loop.starts, loop.xs, loop.shared))
        ys: list[list[Any]] = []
        left: list[list[Any]] = []
        for turn in self.turns(loop, xs):
            inner = self.inside(env)
            self._put(inner, loop.captured, shared)
            self._put(inner, loop.slices, [self.slice(loop, v, turn, place) for v in xs])
            self._put(inner, loop.carries, state)
            self.around.append(turn)
            self.iteration(loop, inner, turn, stacks, place)
            self.around.pop()
            state = self._values(loop.nexts, inner)
            ys.append(self._values(loop.ys, inner))
            left.append(self._values(loop.saved, inner))
        if loop.reverse:
            ys, left = ys[::-1], left[::-1]
        self._put(env, loop.lasts, state)
        filled = [self.filled(loop, i, s, [row[i] for row in ys], place) for i, s in enumerate(stacks)]
        self._put(env, loop.stacks, filled)
        for i, t in enumerate(loop.pieces):
            rows, whole = [row[i] for row in left], loop.revised(i)
            self._put(
                env, [t], [self.collected(loop, rows) if whole is None else self.revised(whole, env, rows, place)]
            )

    def _values(self, tensors: Iterable[Tensor], env: Env) -> list[Any]:
        return [env[self.key(t)] for t in tensors]

    def _put(self, env: Env, tensors: Sequence[Tensor], values: Sequence[Any]) -> None:
        for t, value in zip(tensors, values, strict=True):
            env[self.key(t)] = value
