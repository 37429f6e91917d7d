"""Buffers of units: those that live until the next one is there, what a loop hands on for it, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...algebra.polynomial import Poly
from ...dtypes import DType
from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from ...ops.pieces import Absent
from ...ops.stacks import Empty
from .flat import added
from .frames import Carried, Frame, window
from .kept import Kept
from .tensors import Stated

__all__ = ["Buffers"]


class Buffers(Kept):
    """Lets buffers live as long as a system that works ahead lets them."""

    def __init__(self, stated: Stated) -> None:
        super().__init__(stated)
        self.policy = stated.policy
        self.frame = Frame()
        self.left = Frame()
        """That of the body that was copied last."""
        self.kept: dict[Tensor, Tensor] = {}
        """New stacks of parameters, and what the forward pass has kept of them for the backward pass."""
        self.early: dict[tuple[Op, Empty | Absent], Tensor] = {}
        """Buffers that are there before a loop whose first layer is put together in them."""

    def hold(self, tensors: Sequence[Tensor], new: Graph, phase: str) -> None:
        """Let tensors live until here."""
        if tensors:
            added(new, Keep(), tensors, f"{tensors[0].name}.freed", phase)

    def release(self, new: Graph, phase: str) -> None:
        """Give back what waits for the next buffer before a loop, whose layers have buffers of their own."""
        self.hold([*self.frame.flats, *self.frame.inputs], new, phase)
        self.frame.flats, self.frame.inputs = [], []

    def after_last(self, flats: Sequence[Tensor], new: Graph, phase: str) -> list[Tensor]:
        """Return buffers of parameters, before which those of the unit before cannot be given back."""
        out = []
        for flat in flats:
            waiting, self.frame.flats = self.frame.flats, []
            if self.frame.layer and not (self.frame.split and self.frame.carried):
                waiting = [self.hand_over("flat", Absent(sizes=flat.sizes, dtype=flat.dtype), new)]
            out.append(added(new, Keep(), [flat, *waiting], f"{flat.name}.kept", phase) if waiting else flat)
            if self.frame.layer and not self.frame.split:
                self.frame.carried[-1].next = out[-1]
        self.frame.flats = [] if self.frame.layer and not self.frame.split else [*out]
        return out

    def hand_on_last(self, body: Graph, phase: str) -> None:
        """Hand the buffers of the last unit of an iteration to the next one, where they are as large as the first."""
        left = {"flat": self.frame.flats, "input": self.frame.inputs}
        for c in (c for c in self.frame.carried if c.next is None):
            alike = [t for t in left[c.what] if t.sizes == c.start.sizes and t.dtype == c.start.dtype]
            kind = Absent(sizes=c.start.sizes, dtype=c.start.dtype)
            c.next = alike[0] if alike else added(body, kind, [], f"{c.start.name}.none", phase)

    def before_input(self, row: Tensor, size: Poly, dtype: DType, new: Graph, phase: str) -> Tensor:
        """Return the first row of a buffer of gradients, which is made when that of the unit before is given back."""
        waiting, self.frame.inputs = self.frame.inputs, []
        if self.frame.layer and not (self.frame.split and any(c.what == "input" for c in self.frame.carried)):
            sizes = (*row.sizes[:-1], size)
            waiting = [self.hand_over("input", Absent(sizes=sizes, dtype=dtype), new)]
        return added(new, Keep(), [row, *waiting], f"{row.name}.kept", phase) if waiting else row

    def hand_over(self, what: str, kind: Empty | Absent, body: Graph) -> Tensor:
        """Add a carry to the loop that is being written, and return what stands for it in the body."""
        host, frame = body.parent, self.frame
        assert host is not None
        assert frame.around is not None
        start = self.early.get((frame.around, kind))
        start = start or added(host, kind, [], f"{frame.around.name}.{what}", frame.around.phase)
        made = body.formal(start, f"{start.name}.in", start.sizes, contiguous(start.sizes))
        body.formals.remove(made)  # carries stand before all else
        body.formals.insert(len(frame.around.loop.carries) + len(frame.carried), made)  # type: ignore[union-attr]
        frame.carried.append(Carried(what, start))
        return made

    # -- loops ------------------------------------------------------------------------------------------------------

    def as_kept(self, loop: Loop, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return what a loop reads in slices: of parameters that a pass reads, what was kept put together."""
        if not any(window(op) for op in loop.body.walk()):
            return [*xs]
        written = {t.storage for op in loop.body.walk() for i in op.kind.overwrites() for t in [op.operands[i]]}
        for f, t in zip(loop.slices, xs, strict=True):
            if t in self.kept and f.storage in written:
                raise UnsupportedError(
                    f"shard: {loop.op.name!r} updates {t.name!r}, of which reshard_after_forward=False keeps a copy: "
                    f"expected updates behind the backward pass, or reshard_after_forward=True"
                )
        return [self.kept.get(t, t) for t in xs]

    def finished(
        self, op: Op, body: Graph, given: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], new: Graph
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Add a loop with what its units hand on and keep: its results, what they are inside, and which are stacks."""
        frame, loop = self.left, op.loop
        assert loop is not None
        (begun, xs, shared), carries = given, len(loop.carries)
        stacks = dict(zip(loop.slices, xs, strict=True))
        kept = [(stacks[t], made) for t, made in frame.kept if t in stacks]
        nexts = [c.next for c in frame.carried if c.next is not None]
        # a cast of a parameter is put together again: what it is of is there
        gone = {i: stacks[frame.casts[t]] for i, t in enumerate(loop.body.outputs) if t in frame.casts}
        self.tensors |= {op.results[i]: t for i, t in gone.items()}
        left = [i for i in range(len(outputs)) if i not in gone]
        outputs = [outputs[i] for i in left]
        inner = [*outputs[:carries], *nexts, *outputs[carries:], *(made for _, made in kept)]
        body.outputs += [body.adopt(t) for t in inner]
        kind = replace(
            loop.kind, body=body, carries=carries + len(nexts), saved=loop.kind.saved - len(gone) + len(kept)
        )
        starts = [*begun, *(c.start for c in frame.carried)]
        made = new.add_op(kind, [*starts, *xs, *shared], op.name, op.phase)
        made.scope, body.owner = op.scope, made
        behind = made.results[carries + len(nexts) :]
        own = [*made.results[:carries], *behind[: len(outputs) - carries]]
        self.tensors |= {op.results[i]: t for i, t in zip(left, own, strict=True)}
        for i, (r, t) in enumerate(zip(own, outputs, strict=True)):
            yield r, t, i >= carries
        for (stack, t), r in zip(kept, behind[len(outputs) - carries :], strict=True):
            yield r, t, True
            self.kept[stack] = r
        lasts = list(zip(frame.carried, made.results[carries : carries + len(nexts)], strict=True))
        if op.phase == "forward":
            self.frame.flats = [r for c, r in lasts if c.what == "flat"]
        self.frame.inputs = [r for c, r in lasts if c.what == "input"]
