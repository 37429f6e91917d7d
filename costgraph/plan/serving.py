"""Serving a model: throughput against latency, on one mesh or with separate meshes for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import islice
from typing import Annotated, Any

from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import shorten, shown
from ..analysis.memory import peak_memory
from ..analysis.params import cached
from ..analysis.roofline import bound_roofline
from ..analysis.training import tokens_poly
from ..bind.evaluate import number
from ..errors import BindingError, GraphError, SpecError
from ..hardware.links import Wire, extents, joined, wire
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..hardware.tables import Column, Fact, Table, legend_rows
from ..ir.graph import VIEWS, Graph, known_names, need_choice, need_graph, need_open, of_stages
from ..ir.graph import dimension_size as size_of
from ..notation.validation import READ, guarded
from .capacity import is_allowed, largest, parts_of, rooms, smallest
from .cluster import served

__all__ = [
    "Latency",
    "Throughput",
    "ThroughputRow",
    "all_steps",
    "bound_size",
    "latency",
    "numbers",
    "throughput",
    "Disaggregated",
    "disaggregated",
]


# -- serving -----------------------------------------------------------------------------------------------------------


Fallback = str | Mapping[str, str] | None

#: Relative deviation from a straight line below which step times are interpolated.
_STRAIGHT = 1e-9
_MOST_SIZES = 1000  # each needs a roofline and a peak


@guarded()
@dataclass(frozen=True)
class ThroughputRow:
    """One step at one size."""

    size: int
    """of the varied dimension, such as the batch"""
    tokens: int
    """new tokens of the step, in all sequences on all devices"""
    seconds: float
    """estimated seconds of the step: the time between tokens"""
    lower_bound: float
    """lower bound in seconds"""
    memory: int | float
    """peak memory in bytes, on one device"""
    fits: bool
    """whether it fits into the usable memory"""
    bound: str
    """largest part of the estimated time: compute, memory or link"""
    devices: int = 1
    """number of devices"""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sequences, at the estimate."""
        return self.tokens / self.seconds

    @property
    def most_tokens_per_second(self) -> float:
        """Tokens per second of all sequences, at the lower bound."""
        return self.tokens / self.lower_bound

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device, at the estimate."""
        return self.tokens_per_second / self.devices


@guarded()
@dataclass(frozen=True, repr=False)
class Throughput(Table):
    """Throughput against latency. Created by `throughput`."""

    graph: str
    """name of the graph"""
    hardware: Hardware
    """the device"""
    symbol: str
    """varied dimension"""
    sizes: Mapping[str, int]
    """sizes of the other dimensions"""
    rows: tuple[ThroughputRow, ...]
    """by size"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions"""

    @property
    def best(self) -> ThroughputRow | None:
        """The step with the most tokens per second among those that fit, None if none does."""
        fitting = [r for r in self.rows if r.fits]
        return max(fitting, key=lambda r: r.tokens_per_second, default=None)

    def plot(self, path: object = None) -> object:
        """Plot tokens per second against the time of a step; requires matplotlib.

        Parameters
        ----------
        path : str or path-like, optional
            File to write.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        return VIEWS["plot_throughput"](self, path)

    def _description(self) -> str:
        return f"{shorten(self.graph)} on {self.hardware.id}, {len(self.rows)} sizes of {self.symbol}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("size", "1", title=self.symbol), Column("tokens", "1", shown=False),
            Column("seconds", "s", title="step"), Column("lower_bound", "s", title="lower bound"),
            Column("tokens_per_second", "1", title="tokens/s"),
            Column("most_tokens_per_second", "1", title="upper bound"),
            *([Column("tokens_per_device", "1", title="per device")] if any(r.devices > 1 for r in self.rows) else []),
            Column("memory", "B", title="peak memory"),
            Column("fits", title="", text=lambda fits: "fits" if fits else "does not fit"),
            Column("bound", title="bottleneck"),
        )  # fmt: skip

    def _facts(self) -> Iterable[Fact]:
        return [Fact(*row) for row in legend_rows({self.symbol}, self.legend)]


def numbers(place: str, graph: Graph, dims: Mapping[str, Any], free: str) -> dict[str, int]:
    """Return a graph's bound sizes, except for one dimension."""
    bound: dict[str, int] = {}
    for g, values in of_stages(graph, dims):
        values.pop(free, None)
        unbound = sorted(n for n in known_names(g) - {free} if n not in values or values[n].constant is None)
        if unbound:
            raise BindingError(
                f"{place} of graph {graph.name!r}: expected numbers, still unbound: {', '.join(unbound)}"
            )
        bound |= {k: int(v.constant or 0) for k, v in values.items() if v.constant is not None}
    return dict(sorted(bound.items()))


def bound_size(amount: Poly, values: Mapping[str, int]) -> int:
    """Return an integer amount at given sizes."""
    value = amount.bind({k: Poly({(): v}) for k, v in values.items()}).constant
    assert value is not None
    return int(value)


def throughput(
    graph: Graph, hardware: str | Hardware, symbol: str, values: Annotated[Iterable[int] | None, READ] = None, /, *,
    network: str | Network | None = None, fallback: Fallback = None, **dims: int,
) -> Throughput:  # fmt: skip
    """Return time, throughput and memory of an inference step for several sizes.

    Parameters
    ----------
    graph : Graph
        A result of `decode` or `prefill`, optionally with `quantize` and `parallelize`. A pipeline has as many batches
        in flight as micro-batches, each with the size of the graph and its own KV cache.
    hardware : str, path-like or Hardware
        The device; the memory limit is its usable memory (`Hardware.capacity`).
    symbol : str
        Dimension to vary, such as `"B"`.
    values : iterable of int, optional
        Sizes to evaluate; by default powers of two up to the largest size that fits, and that size.
    network : str, path-like or Network, optional
        Network between the interconnect domains, as in `roofline`.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        Sizes of all other dimensions, including symbolic mesh sizes.

    Returns
    -------
    Throughput
        `.rows` by size, `.best`, `.plot(path)`; `print` it.

    Raises
    ------
    BindingError
        If a size is missing or not a positive integer.
    GraphError
        If the graph has no token inputs.
    SpecError
        If the device is unknown or lacks a rate.

    Notes
    -----
    Tokens are counted as the elements of integer inputs, on all devices. In speculative decoding, rejected tokens are
    counted too.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.decode(cg.models.load("llama-3-8b"))
    >>> print(cg.plan.throughput(step, "h100-sxm", "B", [1, 64], S=8192))
     B      step  lower bound  tokens/s  upper bound  peak memory        bottleneck
     1  4.805 ms     4.801 ms       208          208     17.13 GB  fits  memory
    64  25.26 ms        25 ms     2,533        2,560      84.8 GB  fits  memory
    symbols  B batch size
    """
    place = "throughput"
    need_graph(place, graph)
    need_open(graph, symbol, dims, place)
    device = joined(hardware, network)
    fixed = numbers(place, graph, dims, symbol)
    if values is None:
        smallest_size = smallest(lambda n: is_allowed(graph, {**dims, symbol: n}))
        sizes = _doublings(smallest_size, largest(graph, symbol, hardware=device, **dims))
    else:
        sizes = sorted({size_of(f"{place}: {symbol}", v) for v in _listed(values)})
    rows = tuple(_row(graph, device, {**dims, symbol: n}, {**fixed, symbol: n}, n, fallback) for n in sizes)
    return Throughput(graph.name, device, symbol, fixed, rows, dict(graph.root.legend))


def _listed(values: object) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise BindingError(f"throughput: values {shown(values)}, expected sizes such as [1, 2, 4]")
    listed = list(islice(values, _MOST_SIZES + 1))  # it may be infinite
    if not listed:
        raise BindingError("throughput: no values, expected at least one")
    if len(listed) > _MOST_SIZES:
        raise BindingError(f"throughput: expected at most {_MOST_SIZES} values")
    return listed


def _doublings(first: int, last: int) -> list[int]:
    """Return powers of two times the least size, up to the largest, and the largest."""
    out = [first << i for i in range(max(last // first, 1).bit_length())]
    return out if out[-1] >= last else [*out, last]


def _row(
    graph: Graph, device: Hardware, dims: dict[str, Any], values: Mapping[str, int], size: int, fallback: Fallback
) -> ThroughputRow:
    times = bound_roofline("throughput", graph, device, fallback, dims)
    peak = peak_memory(graph, **dims)
    devices, splits = served("throughput", graph)
    return ThroughputRow(
        size=size, tokens=bound_size(tokens_poly(graph) * splits, values), seconds=times.estimate,
        lower_bound=times.lower_bound, memory=peak, fits=bool(peak <= device.capacity().value), bound=times.bound,
        devices=bound_size(devices, values),
    )  # fmt: skip


# -- latency of an answer --------------------------------------------------------------------------------------------


@guarded()
@dataclass(frozen=True)
class Latency:
    """Latency of an answer, from roofline estimates or lower bounds."""

    first_token: float
    """seconds of the prefill: time to first token"""
    next_token: float
    """seconds of the first decode step"""
    last_token: float
    """seconds of the last decode step, which has the longest context"""
    total: float
    """seconds of the prefill and all decode steps"""
    steps: int
    """decode steps after the prefill"""

    @property
    def per_token(self) -> float:
        """Mean seconds of a decode step, 0 if there is none."""
        return (self.total - self.first_token) / self.steps if self.steps else 0.0


def latency(
    prefill: Graph, decode: Graph, hardware: str | Hardware, /, *, prompt: int, steps: int, along: str = "S",
    time: str = "estimate", network: str | Network | None = None, fallback: Fallback = None, **dims: int,
) -> Latency:  # fmt: skip
    """Return the time to first token, and the time of each decode step as the context grows.

    Parameters
    ----------
    prefill, decode : Graph
        Results of the two transforms for one model, optionally with `parallelize`.
    hardware : str, path-like or Hardware
        The device.
    prompt : int
        Prompt length.
    steps : int
        Decode steps after the prefill.
    along : str
        Sequence dimension.
    time : str
        Roofline time to use: estimate or lower_bound.
    network : str, path-like or Network, optional
        Network between the interconnect domains, as in `roofline`.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        All other sizes, such as the batch.

    Returns
    -------
    Latency
        Times in seconds.

    Raises
    ------
    BindingError, GraphError, SpecError
        If a size is missing or not a positive integer, the graphs are not of one model, or the device is unknown or
        lacks a rate.

    Notes
    -----
    The prefill produces the first token, and each decode step extends the context by its new tokens. Step times are
    interpolated between two contexts if they are linear at the points tested in between, as they are while no op
    changes between memory-bound and compute-bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-3-8b")
    >>> found = cg.plan.latency(cg.prefill(g, logits="last"), cg.decode(g), "h100-sxm", prompt=2048, steps=256, B=1)
    >>> [f"{1000 * t:.2f} ms" for t in (found.first_token, found.next_token, found.last_token, found.total)]
    ['35.52 ms', '4.56 ms', '4.57 ms', '1205.43 ms']
    """
    place = "latency"
    need_graph(place, prefill)
    need_graph(place, decode)
    need_choice(f"{place}: time", time, ("estimate", "lower_bound"))
    size_of(f"{place}: prompt", prompt)
    steps = size_of(f"{place}: steps", steps)
    device = joined(hardware, network)
    for g in (prefill, decode):
        need_open(g, along, dims, place)

    def seconds(g: Graph, size: int) -> float:
        times = bound_roofline(place, g, device, fallback, {**_of(g, dims), along: size})
        return times.estimate if time == "estimate" else times.lower_bound

    unknown = sorted(set(dims) - known_names(prefill) - known_names(decode))
    if unknown:
        raise BindingError(f"{place}: {unknown[0]} is not a dimension of either graph")
    new = _new_tokens(prefill, decode, dims, along, prompt)
    first = seconds(prefill, prompt)
    room = rooms(decode, {**_of(decode, dims), along: prompt}, along)
    step_seconds = cache(lambda size: seconds(decode, size))
    following, last, decode_total = all_steps(lambda i: step_seconds(room(prompt + new * (i + 1))), steps)
    return Latency(first, following, last, first + decode_total, steps)


def _new_tokens(prefill: Graph, decode: Graph, dims: Mapping[str, Any], along: str, prompt: int) -> int:
    """Return the new tokens of each sequence in a decode step, from the inputs that both graphs share."""
    sizes = [{**numbers("latency", g, _of(g, dims), along), along: prompt} for g in (prefill, decode)]
    inputs = [
        {t.name: t.numel * parts_of(g, t, along) for t in g.tensors if t.producer is None and t.role == "input"}
        for g in (prefill, decode)
    ]
    counts = {
        Fraction(bound_size(inputs[1][name], sizes[1]) * prompt, bound_size(amount, sizes[0]))
        for name, amount in inputs[0].items()
        if along in amount.names() and name in inputs[1]
    }
    if len(counts) != 1 or next(iter(counts)).denominator != 1:
        raise GraphError(
            f"latency: graphs {prefill.name!r} and {decode.name!r} share no inputs along {along} with equal "
            f"numbers of sequences; expected the results of prefill and decode for one model"
        )
    return int(counts.pop())


def _of(graph: Graph, dims: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in dims.items() if k in known_names(graph)}


def all_steps(seconds: Callable[[int], float], steps: int) -> tuple[float, float, float]:
    """Return the time of the first step, of the last step, and of all steps."""
    cost = _remembered(seconds)
    return cost(0), cost(steps - 1), _sum(cost, 0, steps - 1)


def _remembered(function: Callable[[int], float]) -> Callable[[int], float]:
    cache_by_step: dict[int, float] = {}

    def asked(i: int) -> float:
        if i not in cache_by_step:
            cache_by_step[i] = function(i)
        return cache_by_step[i]

    return asked


def _sum(cost: Callable[[int], float], first: int, last: int) -> float:
    """Sum step times recursively; a linear range is its mean times its length."""
    count = last - first + 1
    if count <= 2:
        return sum(cost(i) for i in range(first, last + 1))
    ends = (cost(first) + cost(last)) / 2
    samples = [(first + last) // 2, first + (last - first) // 3]
    line = [cost(first) + (cost(last) - cost(first)) * (i - first) / (last - first) for i in samples]
    if all(abs(cost(i) - y) <= _STRAIGHT * y for i, y in zip(samples, line, strict=True)):
        return ends * count
    return _sum(cost, first, samples[0]) + _sum(cost, samples[0] + 1, last)


# -- disaggregation ----------------------------------------------------------------------------------------------------


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
