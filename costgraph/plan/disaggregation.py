"""Serving on two meshes: prompts on one, steps after them on another, and what has to be kept sent between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from ..algebra.polynomial import ONE, poly
from ..analysis.memory import peak_memory
from ..analysis.params import cached
from ..analysis.roofline import bound_roofline
from ..analysis.training import tokens_poly
from ..bind.evaluate import number
from ..errors import BindingError, GraphError, SpecError
from ..hardware.links import Wire, extents, joined, wire
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..ir.graph import (
    Graph,
    known_names,
    need_choice,
    need_graph,
    need_open,
    of_stages,
)
from ..ir.graph import (
    dimension_size as size_of,
)
from ..notation.validation import guarded
from .capacity import rooms
from .cluster import served
from .serving import Fallback, all_steps, bound_size, numbers

__all__ = ["Disaggregated", "disaggregated"]


@guarded()
@dataclass(frozen=True)
class Disaggregated:
    """Serving on a mesh for prompts and one for steps. Made by `disaggregated`."""

    first_token: float
    """seconds of a prefill of all sequences that it has together"""
    transfer: float
    """seconds in which what it keeps is sent"""
    next_token: float
    """seconds of the first step after that"""
    last_token: float
    """seconds of the last step: its context is the longest"""
    total: float
    """seconds of the prefill, the transfer and of all steps"""
    sent: int | float
    """bytes that a device sends or receives, the most of any"""
    link: str
    """what they go over: interconnect, network or a level of it"""
    prefill_devices: int
    """of the mesh for prompts"""
    decode_devices: int
    """of the mesh for steps"""
    prefill_memory: int | float
    """bytes at the peak of a prefill, of one device"""
    decode_memory: int | float
    """bytes at the peak of the last step, of one device"""
    fits: bool
    """whether the usable memory is enough for both"""
    prefilled: float
    """sequences in a second of the mesh for prompts: as fast as it computes, or sends"""
    decoded: float
    """sequences in a second of the mesh for steps, all of which it has at any time"""
    tokens: int
    """of an answer: that of the prefill, and those of the steps"""

    @property
    def meshes(self) -> float:
        """Meshes for prompts for each one for steps, so that neither waits for the other."""
        return self.decoded / self.prefilled

    @property
    def devices(self) -> float:
        """Devices for prompts for each one for steps, so that neither waits for the other."""
        return self.meshes * self.prefill_devices / self.decode_devices

    @property
    def tokens_per_device(self) -> float:
        """New tokens in a second for each device of both, where neither waits for the other."""
        return self.tokens * self.decoded / (self.meshes * self.prefill_devices + self.decode_devices)


def disaggregated(
    prefill: Graph, decode: Graph, hardware: str | Hardware, /, *, prompt: int, steps: int, sequences: tuple[int, int],
    batch: str = "B", along: str = "S", time: str = "estimate", network: str | Network | None = None,
    fallback: Fallback = None, **dims: int,
) -> Disaggregated:  # fmt: skip
    """Return times, memory and balance of prefill and decode on devices of their own.

    Parameters
    ----------
    prefill, decode : Graph
        What the two transforms made of one declaration, each with `parallelize` for its own mesh or for one device.
    hardware : str, path-like or Hardware
        The devices of both.
    prompt : int
        Positions of the prompt.
    steps : int
        Steps of `decode` after the prefill.
    sequences : (int, int)
        How many a prefill has, and how many a step has, on all devices of the mesh; of a pipeline in all micro-batches.
    batch : str
        Dimension of sequences.
    along : str
        Dimension of positions.
    time : str
        estimate or lower_bound of the roofline.
    network : str, path-like or Network, optional
        Between the domains of the devices' interconnect, as in `roofline`.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        All other sizes.

    Returns
    -------
    Disaggregated
        Seconds, bytes, and `.devices`, the ratio that balances.

    Raises
    ------
    BindingError, GraphError, SpecError
        If a size is left open or no positive integer, the graphs are not of sequences of these positions, or the device
        is unknown, or lacks a rate or what is said of the link.

    Notes
    -----
    What is sent is what the graphs keep, `cache_bytes` after the prompt, over the nearest link that joins as many
    devices as both meshes have. All of them send at once and go on meanwhile: the time is of the most that one sends or
    receives, what several ranks have alike included. Sequences of one prefill go to as many parts of the other mesh's
    batch as there are. Answers that are done are replaced at once in the mesh for steps; its step takes the mean over
    an answer. In a second the mesh for prompts makes what it computes, or what it sends, whichever takes longer.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-3-70b")
    >>> first, step = cg.parallelize(cg.prefill(g, logits="last"), tp=4), cg.parallelize(cg.decode(g), tp=8)
    >>> found = cg.plan.disaggregated(first, step, "h100-sxm", prompt=2048, steps=255, sequences=(1, 64))
    >>> f"{found.sent / 1e6:.0f} MB in {1000 * found.transfer:.1f} ms over the {found.link}"
    '168 MB in 3.4 ms over the network'
    >>> round(found.devices, 2)
    1.17
    """
    place = "disaggregated"
    need_choice(f"{place}: time", time, ("estimate", "lower_bound"))
    prompt, steps = size_of(f"{place}: prompt", prompt), size_of(f"{place}: steps", steps)
    many, held = (size_of(f"{place}: sequences[{i}]", n) for i, n in enumerate(sequences))
    device = joined(hardware, network)
    for g in (prefill, decode):
        need_graph(place, g)
    unknown = sorted(set(dims) - known_names(prefill) - known_names(decode))
    if unknown:
        raise BindingError(f"{place}: {unknown[0]} is no dimension of either graph, expected one that is")
    first, after = (_Side(g, device, dims, (batch, along), n) for g, n in ((prefill, many), (decode, held)))
    if first.tokens(prompt) != many * prompt:
        has = f"graph {prefill.name!r} has {first.tokens(prompt)} tokens"
        raise GraphError(f"{place}: {has}, expected {prompt} of each of {many} sequences")
    new, rest = divmod(after.tokens(prompt), held)
    if rest:
        has = f"graph {decode.name!r} has {after.tokens(prompt)} tokens"
        raise GraphError(f"{place}: {has}, expected as many of each of {held} sequences")
    prefilling = first.seconds(prompt, time, fallback)
    room = rooms(decode, {**after.fixed, along: prompt}, along)
    step = cache(lambda size: after.seconds(size, time, fallback))
    following, last, all_of = all_steps(lambda i: step(room(prompt + new * (i + 1))), steps)
    # a rank has a share of each sequence of its part of the batch
    received = Fraction(after.kept(room(prompt)) * after.parts * after.batches, held) * -(-many // after.parts)
    sent = max(Fraction(first.kept(prompt) * first.batches), received)
    link = _between(device, first.devices + after.devices)
    taken = float((link.latency + poly(sent) / link.pair).constant or 0)
    memory = (first.memory(prompt), after.memory(room(prompt + new * steps)))
    return Disaggregated(
        first_token=prefilling, transfer=taken, next_token=following, last_token=last,
        total=prefilling + taken + all_of, sent=number(sent), link=link.name, prefill_devices=first.devices,
        decode_devices=after.devices, prefill_memory=memory[0], decode_memory=memory[1],
        fits=bool(max(memory) <= device.capacity().value), prefilled=many / max(prefilling, taken),
        decoded=held / all_of, tokens=1 + new * steps,
    )  # fmt: skip


class _Side:
    """One of the two graphs on its mesh, all sizes but that of positions bound."""

    def __init__(
        self, graph: Graph, device: Hardware, dims: Mapping[str, Any], free: tuple[str, str], sequences: int
    ) -> None:
        place = "disaggregated"
        own = {k: v for k, v in dims.items() if k in known_names(graph)}
        for name in free:
            need_open(graph, name, own, place)
        self.graph, self.device = graph, device
        self.batches = _batches(place, graph)
        each, rest = divmod(sequences, self.batches)
        if rest:
            has = f"graph {graph.name!r} has {self.batches} micro-batches"
            raise GraphError(f"{place}: {has}, expected as many sequences in each of {sequences}")
        self.dims, self.along = {**own, free[0]: each}, free[1]
        self.fixed = numbers(place, graph, self.dims, self.along)
        self.devices, parts = (bound_size(p, self.fixed) for p in served(place, graph))
        self.parts = parts // self.batches

    def tokens(self, positions: int) -> int:
        """Return the tokens of a pass on all devices."""
        return self.parts * self.batches * bound_size(tokens_poly(self.graph), {**self.fixed, self.along: positions})

    def seconds(self, positions: int, time: str, fallback: Fallback) -> float:
        """Return the time of a pass."""
        sizes = {**self.dims, self.along: positions}
        times = bound_roofline("disaggregated", self.graph, self.device, fallback, sizes)
        return times.estimate if time == "estimate" else times.lower_bound

    def kept(self, positions: int) -> int:
        """Return the bytes that a rank keeps of one batch, of stages the one that keeps the most."""
        sizes = {**self.dims, self.along: positions}
        return max(
            bound_size(cached(g), {k: int(v.constant or 0) for k, v in values.items()})
            for g, values in of_stages(self.graph, sizes)
        )

    def memory(self, positions: int) -> int | float:
        """Return the bytes of a rank at the peak."""
        sizes: dict[str, Any] = {**self.dims, self.along: positions}
        found = peak_memory(self.graph, **sizes)
        assert isinstance(found, int | float)
        return found


def _batches(place: str, graph: Graph) -> int:
    """Return how many batches of a graph are on their way in a pipeline."""
    many = ONE if graph.waiting is None else graph.waiting.micro_batches
    if many.constant is None:
        raise GraphError(f"{place}: graph {graph.name!r} has {many} micro-batches, expected a number")
    return int(many.constant)


def _between(device: Hardware, devices: int) -> Wire:
    """Return the nearest link that joins so many devices."""
    if device.cluster is not None and device.cluster.torus:
        raise SpecError(f"disaggregated: network {device.cluster.id} is a torus, expected levels of switches")
    for name, size in extents(device):
        if size is None or size >= devices:
            return wire(device, name)
    raise SpecError(f"disaggregated: {devices} devices, expected the {size:,} that the {name} joins at most")
