"""Disaggregated serving: prefill and decode on separate meshes, with the KV cache sent between them."""

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
    """Serving with a prefill mesh and a decode mesh. Created by `disaggregated`."""

    first_token: float
    """seconds to prefill one batch"""
    transfer: float
    """seconds to send its KV cache"""
    next_token: float
    """seconds of the first decode step"""
    last_token: float
    """seconds of the last decode step, which has the longest context"""
    total: float
    """seconds of prefill, transfer and all decode steps"""
    sent: int | float
    """largest number of bytes that a device sends or receives"""
    link: str
    """link used for the transfer: interconnect, network or one of its levels"""
    prefill_devices: int
    """devices in the prefill mesh"""
    decode_devices: int
    """devices in the decode mesh"""
    prefill_memory: int | float
    """peak memory during prefill in bytes, on one device"""
    decode_memory: int | float
    """peak memory in the last decode step in bytes, on one device"""
    fits: bool
    """whether both fit into the usable memory"""
    prefilled: float
    """sequences per second that the prefill mesh can start, limited by compute or transfer"""
    decoded: float
    """sequences per second that the decode mesh can finish when full"""
    tokens: int
    """tokens per answer, from prefill and decode steps"""

    @property
    def meshes(self) -> float:
        """Prefill meshes for each decode mesh, so that neither waits for the other."""
        return self.decoded / self.prefilled

    @property
    def devices(self) -> float:
        """Prefill devices for each decode device, so that neither waits for the other."""
        return self.meshes * self.prefill_devices / self.decode_devices

    @property
    def tokens_per_device(self) -> float:
        """New tokens per second and device of both meshes, in balance."""
        return self.tokens * self.decoded / (self.meshes * self.prefill_devices + self.decode_devices)


def disaggregated(
    prefill: Graph, decode: Graph, hardware: str | Hardware, /, *, prompt: int, steps: int, sequences: tuple[int, int],
    batch: str = "B", along: str = "S", time: str = "estimate", network: str | Network | None = None,
    fallback: Fallback = None, **dims: int,
) -> Disaggregated:  # fmt: skip
    """Return times, memory and balance of prefill and decode on separate devices.

    Parameters
    ----------
    prefill, decode : Graph
        Results of the two transforms for one model, each with `parallelize` for its own mesh or for one device.
    hardware : str, path-like or Hardware
        The devices in both meshes.
    prompt : int
        Prompt length.
    steps : int
        Decode steps after the prefill.
    sequences : (int, int)
        Sequences in a prefill and in a decode step, on all devices of the mesh; with a pipeline, in all micro-batches.
    batch : str
        Batch dimension.
    along : str
        Sequence dimension.
    time : str
        Roofline time to use: estimate or lower_bound.
    network : str, path-like or Network, optional
        Network between the interconnect domains, as in `roofline`.
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
        If a size is missing or not a positive integer, the graphs do not have these sequences, or the device is
        unknown or lacks a rate or link data.

    Notes
    -----
    The transfer sends the KV cache after the prompt (`cache_bytes`) over the nearest link that joins the devices of
    both meshes. All devices send at once while the meshes keep computing. The time is that of the largest amount a
    device sends or receives, including replicated parts. Sequences of one prefill go to as many parts of the decode
    batch as possible. The decode mesh replaces finished answers at once, and its step time is the mean over an answer.
    The prefill rate is limited by the longer of prefill and transfer.

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
    prompts, decoding = (size_of(f"{place}: sequences[{i}]", n) for i, n in enumerate(sequences))
    device = joined(hardware, network)
    for g in (prefill, decode):
        need_graph(place, g)
    unknown = sorted(set(dims) - known_names(prefill) - known_names(decode))
    if unknown:
        raise BindingError(f"{place}: {unknown[0]} is not a dimension of either graph")
    first, after = (_Side(g, device, dims, (batch, along), n) for g, n in ((prefill, prompts), (decode, decoding)))
    if first.tokens(prompt) != prompts * prompt:
        problem = f"graph {prefill.name!r} has {first.tokens(prompt)} tokens"
        raise GraphError(f"{place}: {problem}, expected {prompt} for each of {prompts} sequences")
    new, remainder = divmod(after.tokens(prompt), decoding)
    if remainder:
        problem = f"graph {decode.name!r} has {after.tokens(prompt)} tokens"
        raise GraphError(f"{place}: {problem}, expected an equal number for each of {decoding} sequences")
    prefilling = first.seconds(prompt, time, fallback)
    room = rooms(decode, {**after.fixed, along: prompt}, along)
    step = cache(lambda size: after.seconds(size, time, fallback))
    following, last, all_of = all_steps(lambda i: step(room(prompt + new * (i + 1))), steps)
    # each rank holds a share of every sequence in its part of the batch
    received = Fraction(after.kept(room(prompt)) * after.parts * after.batches, decoding) * -(-prompts // after.parts)
    cache_bytes = max(Fraction(first.kept(prompt) * first.batches), received)
    link = _between(device, first.devices + after.devices)
    transfer_seconds = float((link.latency + poly(cache_bytes) / link.pair).constant or 0)
    memory = (first.memory(prompt), after.memory(room(prompt + new * steps)))
    return Disaggregated(
        first_token=prefilling, transfer=transfer_seconds, next_token=following, last_token=last,
        total=prefilling + transfer_seconds + all_of, sent=number(cache_bytes), link=link.name,
        prefill_devices=first.devices,
        decode_devices=after.devices, prefill_memory=memory[0], decode_memory=memory[1],
        fits=bool(max(memory) <= device.capacity().value), prefilled=prompts / max(prefilling, transfer_seconds),
        decoded=decoding / all_of, tokens=1 + new * steps,
    )  # fmt: skip


class _Side:
    """One of the two graphs on its mesh, with all sizes but the sequence length bound."""

    def __init__(
        self, graph: Graph, device: Hardware, dims: Mapping[str, Any], free: tuple[str, str], sequences: int
    ) -> None:
        place = "disaggregated"
        bound = {k: v for k, v in dims.items() if k in known_names(graph)}
        for name in free:
            need_open(graph, name, bound, place)
        self.graph, self.device = graph, device
        self.batches = _batches(place, graph)
        each, remainder = divmod(sequences, self.batches)
        if remainder:
            problem = f"graph {graph.name!r} has {self.batches} micro-batches"
            raise GraphError(f"{place}: {problem}, expected a divisor of the {sequences} sequences")
        self.dims, self.along = {**bound, free[0]: each}, free[1]
        self.fixed = numbers(place, graph, self.dims, self.along)
        self.devices, parts = (bound_size(p, self.fixed) for p in served(place, graph))
        self.parts = parts // self.batches

    def tokens(self, positions: int) -> int:
        """Return the tokens per pass on all devices."""
        return self.parts * self.batches * bound_size(tokens_poly(self.graph), {**self.fixed, self.along: positions})

    def seconds(self, positions: int, time: str, fallback: Fallback) -> float:
        """Return the seconds per pass."""
        sizes = {**self.dims, self.along: positions}
        times = bound_roofline("disaggregated", self.graph, self.device, fallback, sizes)
        return times.estimate if time == "estimate" else times.lower_bound

    def kept(self, positions: int) -> int:
        """Return a rank's KV cache bytes for one batch, in the stage with the largest cache."""
        sizes = {**self.dims, self.along: positions}
        return max(
            bound_size(cached(g), {k: int(v.constant or 0) for k, v in values.items()})
            for g, values in of_stages(self.graph, sizes)
        )

    def memory(self, positions: int) -> int | float:
        """Return a rank's peak memory in bytes."""
        sizes: dict[str, Any] = {**self.dims, self.along: positions}
        peak = peak_memory(self.graph, **sizes)
        assert isinstance(peak, int | float)
        return peak


def _batches(place: str, graph: Graph) -> int:
    """Return the number of batches in flight in a graph's pipeline."""
    batches = ONE if graph.waiting is None else graph.waiting.micro_batches
    if batches.constant is None:
        raise GraphError(f"{place}: graph {graph.name!r} has {batches} micro-batches, expected a number")
    return int(batches.constant)


def _between(device: Hardware, devices: int) -> Wire:
    """Return the nearest link that joins all devices."""
    if device.cluster is not None and device.cluster.torus:
        raise SpecError(f"disaggregated: network {device.cluster.id} is a torus, expected levels of switches")
    for name, size in extents(device):
        if size is None or size >= devices:
            return wire(device, name)
    raise SpecError(f"disaggregated: {devices} devices, but the {name} joins at most {size:,}")
