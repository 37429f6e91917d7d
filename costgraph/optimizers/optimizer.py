"""What all optimizers share: which implementation runs, lists of one format, step counters and master copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from ..errors import GraphError
from ..graph.arguments import need_choice, need_flag
from ..graph.graph import current_graph
from ..graph.scopes import building, phase, scope
from ..graph.tensor import Tensor
from ..ops.fill import assign
from ..ops.pointwise import cast, pointwise
from .calls import Calls, Column, one_by_one
from .fused import fused_update
from .over import over
from .slots import Slot, in_parts, need_slots, pieces
from .states import STATES, BlockStates

__all__ = ["COUNTERS", "IMPLEMENTATIONS", "Optimizer", "bounds"]

#: One call for a list of parameters, one parameter after the other, or one kernel for each.
IMPLEMENTATIONS = ("foreach", "for-loop", "fused")
#: Where the number of the step is kept: torch's fused kernels read it on the device, the others use it on the host.
COUNTERS = ("host", "device")


def bounds(place: str, **values: tuple[float, float, float]) -> None:
    """Raise GraphError where a number, given with its least and largest value, is none or lies outside."""
    for name, (value, least, most) in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise GraphError(f"{place}: {name} is {value!r}, expected a number from {least} to {most}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: which ops update a parameter, and what state it keeps.

    Numbers such as the learning rate are on the host and cost nothing. Temporaries die with the last op that reads
    them; in torch's for-loop, where a variable of Python names one until the next parameter's, it stays until then.
    """

    #: What there is of it; torch's own, where torch has the optimizer.
    available: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS
    #: Whether it counts steps.
    counts: ClassVar[bool] = False

    lr: float = 1e-3
    """Learning rate."""
    implementation: str = "foreach"
    """One of foreach, for-loop and fused."""
    counters: str | None = None
    """Where step counters are: on the host, where they take no memory of the device, or on the device, 4 bytes for
    each parameter tensor. By default torch's choice: on the device if fused."""
    step: int = 2
    """Number of the step: it decides numbers of the update, no cost. Steps after the first do the same."""
    states: str | BlockStates | None = None
    """State in blocks of few bits: bitsandbytes-8bit, torchao-8bit, torchao-4bit, torchao-fp8, or what is described by
    a `BlockStates`. Kernels for it are fused; steps are counted on the host."""

    def __post_init__(self) -> None:
        place = type(self).__name__
        need_choice(f"{place}: implementation", self.implementation, IMPLEMENTATIONS)
        if self.implementation not in self.available:
            raise GraphError(
                f"{place}: implementation {self.implementation!r}, expected one of {', '.join(self.available)}: there "
                f"is no other"
            )
        bounds(place, lr=(self.lr, 0, float("inf")), step=(self.step, 1, float("inf")))
        if self.counters is not None:
            need_choice(f"{place}: counters", self.counters, COUNTERS)
        if self.counters == "device" and self.implementation != "fused":
            raise GraphError(
                f"{place}: counters 'device' with implementation {self.implementation!r}, expected 'host': what "
                f"depends on the step is computed on the host"
            )
        self._check_states(place)
        need_flag(place, **{f.name: getattr(self, f.name) for f in fields(self) if f.type == "bool"})

    def _check_states(self, place: str) -> None:
        if self.states is None:
            return
        if not isinstance(self.states, BlockStates):
            need_choice(f"{place}: states", self.states, tuple(STATES))
        if self.implementation != "fused":
            raise GraphError(
                f"{place}: states in blocks with implementation {self.implementation!r}, expected 'fused': they are "
                f"read and written by one kernel for each parameter"
            )
        if self.counters == "device":
            raise GraphError(f"{place}: counters 'device' with states in blocks, expected 'host'")

    @property
    def _blocks(self) -> BlockStates | None:
        return STATES[self.states] if isinstance(self.states, str) else self.states

    # -- what each optimizer says of itself ------------------------------------------------------------------------

    def _states(self, slot: Slot) -> Column:
        """Declare the state of a parameter."""
        raise NotImplementedError

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        """Add the ops of an update; returns the updated tensors and their gradients as they are afterwards."""
        raise NotImplementedError

    def _kind(self, slot: Slot) -> object:
        """Say what parameters of a list have in common: torch makes lists of one format."""
        return slot.updated.dtype

    # -- what is the same for all ----------------------------------------------------------------------------------

    def update(self, slots: Sequence[Slot]) -> list[Slot]:
        """Add the ops that update parameters to the graph.

        Parameters
        ----------
        slots : list of Slot
            Parameters and their gradients; their state is declared here.

        Returns
        -------
        list of Slot
            The same with the tensors to read from now on: the parameters were changed in place.

        Raises
        ------
        GraphError
            If there is no slot, or a parameter has state already.
        """
        place = type(self).__name__
        found = need_slots(place, slots)
        with building(current_graph(found[0].param.graph)), phase("optimizer"), scope(place.lower()):
            found = [in_parts(s) for s in found]
            if self._blocks is not None:
                found = [replace(s, moments=self._blocks.format_of(s)) for s in found]
            out = dict(enumerate(found))
            for positions in _alike(self._kind(s) for s in found):
                of_list = [found[i] for i in positions]
                out |= dict(zip(positions, self._one_list(of_list), strict=True))
        return list(out.values())

    def _one_list(self, slots: list[Slot]) -> list[Slot]:
        states = [self._states(s) for s in slots]
        grads = [s.grad for s in slots]
        wide = [i for i, s in enumerate(slots) if s.master is not None and s.grad.dtype != s.master.dtype]
        if self.implementation != "fused" and wide:
            # gradients in the master copies' format exist for the whole list before the first update
            dtype = slots[0].updated.dtype
            casts = over([(grads[i],) for i in wide], lambda g: cast(g, dtype), "grads")
            for i, (g,) in zip(wide, casts, strict=True):
                grads[i] = g
        groups = [(s.updated, g, *state) for s, g, state in zip(slots, grads, states, strict=True)]
        made = self._run(groups, slots)
        after = [
            replace(s, grad=s.grad if i in wide and self.implementation != "fused" else g)
            for i, (s, (_, g)) in enumerate(zip(slots, made, strict=True))
        ]
        return self._assigned(after, [p for p, _ in made])

    def _run(self, groups: list[Column], slots: list[Slot]) -> list[tuple[Tensor, Tensor]]:
        name = type(self).__name__.lower()
        if self.implementation == "foreach":
            p, g = self._update(Calls(listed=True), *zip(*groups, strict=True))
            return list(zip(p, g, strict=True))
        if self.implementation == "for-loop":
            made = one_by_one(self._update, groups, name)
        else:
            made = self._fused(groups, slots, name)
        return [(p, g) for p, g in made]

    def _fused(self, groups: list[Column], slots: list[Slot], name: str) -> list[Column]:
        sizes, blocks = len(groups[0]), self._blocks
        beside = self._counters(slots) if blocks is None else blocks.own_tables(slots, [g[2:] for g in groups])
        common = () if blocks is None else blocks.common_tables([g[2:] for g in groups])

        def one(*group: Tensor) -> Column:
            looked = common if blocks is not None and any(map(blocks.holds, group[2:sizes])) else ()
            return fused_update(self._update, group[:sizes], (*group[sizes:], *looked), name="fused_update")[:2]

        return over([(*g, *b) for g, b in zip(groups, beside, strict=True)], one, name)

    def _counters(self, slots: list[Slot]) -> list[Column]:
        """Count the step in a scalar for each parameter; nothing where the host does."""
        if not self.counts or self.counters == "host":
            return [()] * len(slots)
        counters = [(s.state("step", s.param.sizes[: pieces(s.param)], "fp32"),) for s in slots]
        return over(counters, lambda t: pointwise("add", t, 1.0, inplace=True, name="step"), "steps")

    def _assigned(self, slots: list[Slot], updated: list[Tensor]) -> list[Slot]:
        """Write the master copies into the parameters, where there are any."""
        out = [
            replace(s, param=t) if s.master is None else replace(s, master=t)
            for s, t in zip(slots, updated, strict=True)
        ]
        masters = [i for i, s in enumerate(out) if s.master is not None]
        groups = [(out[i].param, updated[i]) for i in masters]
        for i, (p,) in zip(masters, over(groups, lambda p, m: assign(p, m), "params"), strict=True):
            out[i] = replace(out[i], param=p)
        return out


def _alike(kinds: Iterable[object]) -> list[list[int]]:
    """Return the positions of equal ones together, in the order in which they first come."""
    found: dict[object, list[int]] = {}
    for i, kind in enumerate(kinds):
        found.setdefault(kind, []).append(i)
    return list(found.values())
