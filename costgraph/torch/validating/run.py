"""The public function: predict and measure every case of a suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import costgraph as cg

from ...algebra.polynomial import Poly, total
from ...analysis.costs import executions
from ...bind.evaluate import answer
from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.sizes import bindings, known_names
from ...hardware.specs import Hardware, load_hardware
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.foreign import Foreign
from ..calibrating import calibrate
from ..calibrating.caches import last_level_cache
from ..measuring import environment, measure, progressing, timed
from ..measuring.environment import find_device
from ..tracing import trace
from .case import Case, Program
from .judging import Attained, outcome
from .record import Validation
from .rows import Failed, Measured, Modelled, Predicted, Row
from .subjects import SUBJECTS, check
from .suite import suite

__all__ = ["declared", "modelled", "predicted", "traced", "validate"]

_UNCOUNTED = "scaled_dot_product_flash_attention_for_cpu"
_RULE = "flash"  # how attention in one kernel goes back; kernels of gradients have the name of the forward one
_NEWEST = ("fp8_e4m3", "fp8_e5m2", "bf16", "fp16", "fp64")


def validate(
    device: str | torch.device = "cpu",
    cases: Iterable[Case] | None = None,
    *,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    quick: bool = False,
    progress: bool | None = None,
    command: str | None = None,
) -> Validation:
    """Run a suite of ops, models and training steps, and hold predictions to what they took.

    Parameters
    ----------
    device : str or torch.device
        cpu or cuda.
    cases : iterable of Case, optional
        What is run; by default the suite of the device.
    hardware : str, path-like or Hardware, optional
        The device that times are held to. By default it is calibrated first, quickly; the vendor's peaks are those of
        a built-in specification whose device has this name, if there is one.
    quick : bool
        The cheap cases alone, and fewer runs.
    progress : bool, optional
        Whether a line shows how far it is; by default where the standard error is a terminal.
    command : str, optional
        What the record names as the way to measure this again; by default the words this process was started with.

    Returns
    -------
    Validation
        `.rows`, `.table()`, `.plot(directory)`, `.save(path)`; cases that torch refuses are in `.failed`.

    Raises
    ------
    UnsupportedError
        If there is no such device.
    SpecError
        If there is no such specification, or it lacks a rate.
    GraphError
        If there are no cases, one has an unknown subject, or a setting that its subject does not take.
    BindingError
        If a size is missing, or no positive integer.

    Examples
    --------
    >>> from costgraph.torch.validating import Case
    >>> found = validate("cpu", [Case("matmul", {"M": 17, "K": 29, "N": 31})], hardware="h100-sxm", progress=False)
    >>> row = found.rows[0]
    >>> row.declared.flops == row.measured.flops == 2 * 17 * 29 * 31
    True
    >>> row.declared.peak == row.measured.peak == 4 * (17 * 29 + 29 * 31 + 17 * 31)
    True
    """
    where = find_device(device)
    chosen = list(suite(where.type, quick=quick) if cases is None else cases)
    check(chosen)
    if hardware is None:
        device_file = calibrate(where, quick=True, progress=progress, command=command).hardware
    else:
        device_file = load_hardware(hardware)
    rows, failed = [], []
    with progressing("validate", len(chosen), progress) as step, _frozen():
        for case in chosen:
            step(case.name)
            try:
                rows.append(_row(case, where, device_file, quick=quick))
            except (RuntimeError, UnsupportedError) as error:  # no memory for it, or no such kernel on this device
                failed.append(Failed(case, " ".join(str(error).split())[:300]))
            _given_back(where)
    cache = _cache(where, device_file)
    return Validation(environment(where, command), device_file, cache, tuple(rows), tuple(failed))


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep the collector from looking through what was there before, which takes longer than most cases."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _given_back(device: torch.device) -> None:
    """Let go of what a case has left, so that the next one does not find its blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cache(device: torch.device, hardware: Hardware) -> int | None:
    """Return the largest figure that anyone gives for the last-level cache."""
    stated = hardware.last_level_cache
    return max(0 if stated is None else int(stated.value), last_level_cache(device) or 0) or None


def _row(case: Case, device: torch.device, hardware: Hardware, *, quick: bool) -> Row:
    torch.manual_seed(0)
    program = SUBJECTS[case.subject].program(case, device)
    budget = 0.05 if quick else 0.2
    clocked = program.into is None
    found = measure(program, device=device, least=3 if clocked else 1, budget=budget if clocked else 0, progress=False)
    times = found.time if clocked else timed(program.clocked, device, least=3, budget=budget)
    assert found.flops is not None
    assert found.peak is not None
    assert found.left is not None
    took = Measured(found.flops, program.held(device), found.peak, found.left)
    graph, sizes = declared(case, device.type), dict(case.sizes)
    by_declaration = predicted(graph, sizes, device.type)
    followed, untraced = _traced(case, program, device.type)
    roof = modelled(graph, sizes, hardware)
    end = outcome(times.min, roof.memory, roof.compute)
    return Row(case, times, took, by_declaration, followed, untraced, roof, end)


def _traced(case: Case, program: Program, device: str) -> tuple[Predicted | None, str]:
    """Return what a trace predicts, or why there is none."""
    if program.dims is None:
        return None, "the lowered graph ran"
    try:
        return traced(case, program, device), ""
    except UnsupportedError as error:
        return None, str(error)[:300]


# -- predictions ---------------------------------------------------------------------------------------------------


def declared(case: Case, device: str) -> Graph:
    """Return the declared graph of a case; `device` is cpu or cuda."""
    return SUBJECTS[case.subject].declare(case, device)


def predicted(graph: Graph, sizes: Mapping[str, int], device: str) -> Predicted:
    """Return what a graph says of FLOPs and bytes at some sizes, of which it may have a part."""
    own: dict[str, Any] = {k: v for k, v in sizes.items() if k in known_names(graph)}
    return Predicted(
        flops=int(cg.matmul_flops(graph, count="full", **own)),
        uncounted=_uncounted(graph, own) if device == "cpu" else 0,
        peak=int(cg.peak_memory(graph, allocator="cuda" if device == "cuda" else "exact", **own)),
    )


def traced(case: Case, program: Program, device: str) -> Predicted:
    """Return what the graph says that is traced from the module of a program, the optimizer's step included.

    UnsupportedError if it cannot be traced.
    """
    train = program.make is not None
    graph = trace(program.module, *program.inputs, dims=program.dims, train=train, optimizer=program.make)
    return predicted(graph, case.sizes, device)


def _uncounted(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Return the FLOPs of products that torch's counter leaves out on a CPU: those of its attention in one kernel."""
    values = bindings(graph, dict(sizes))
    return int(answer(total(amount.bind(values) for amount in _in_attention(graph))))


def _in_attention(graph: Graph) -> Iterator[Poly]:
    """Yield the products of kernels that attend: by the call that was traced, else by the rule of their gradients."""
    kernels = {op for op in graph.walk() if isinstance(op.kind, Kernel) and op.kind.backward == _RULE}
    gradients = tuple(op.name.rpartition("/")[2].replace(".", "_") + "_backward" for op in kernels)
    for op, times, _ in executions(graph):
        own = op in kernels or op.name.rpartition("/")[2].startswith(gradients)
        if not (own if op.call is None else _UNCOUNTED in op.call.target):
            continue
        if isinstance(op.kind, Foreign):
            yield op.kind.flops(op).full * times
        elif op.body is not None:
            yield total(o.kind.flops(o).full for o in op.body.ops if isinstance(o.kind, Einsum)) * times


def modelled(graph: Graph, sizes: Mapping[str, int], hardware: Hardware) -> Modelled:
    """Return where a graph stands on the roof of a device, and its times at the rates that were measured there."""
    measured = hardware.attained() if "attained" in hardware.tables else hardware
    instead = _instead(hardware)
    found = cg.roofline(
        graph, hardware, fallback=instead, hierarchical=False, overlap="none", network=None, bound="cold", **sizes
    )
    times = Attained.of(graph, measured, _instead(measured), sizes)
    return Modelled(
        bound=found.lower_bound, estimate=found.estimate, fused=int(found.fused_bytes), moved=int(found.bytes),
        flops=int(found.flops), limit=found.bound, memory=times.memory, compute=times.compute,
    )  # fmt: skip


def _instead(hardware: Hardware) -> dict[str, str]:
    """Let the fastest rate of a device stand in for one that it lacks: no bound made of it is above a time."""
    fastest = max(hardware.peak, key=lambda k: hardware.peak[k].value)
    return {name: f"peak.{fastest}" for name in _NEWEST if name != fastest}
