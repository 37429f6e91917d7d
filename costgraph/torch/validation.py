"""The public function: predict and measure every case of a suite."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

import costgraph as cg

from ..algebra.polynomial import Poly, total
from ..algebra.symbols import shorten, shown
from ..analysis.costs import executions
from ..analysis.work import exact, works
from ..bind.evaluate import answer, real
from ..errors import BindingError, FormatError, GraphError, UnsupportedError
from ..hardware.specs import Hardware, load_hardware
from ..hardware.tables import Column, Fact, Table
from ..hardware.units import format_quantity
from ..ir.graph import Graph, bindings, known_names, need_choice
from ..notation.progress import progressing
from ..notation.validation import Count, Rule, Size, at_least, one_of, read_fields, read_record
from ..ops.einsum import Einsum
from ..ops.loops import Kernel
from ..ops.opaque import Foreign
from ..text_file import read_text, target_of, write_file
from .calibration import calibrate, last_level_cache, specification
from .lowering.context import FORMATS
from .measurement import Times, environment, find_device, measure, timed
from .tracing import trace
from .validation_programs import CHECKPOINTS, KERNELS, MODELS, OPTIMIZERS, Case, Model, Program

__all__ = [
    "SUBJECTS",
    "check",
    "FOLLOWS",
    "OUTCOMES",
    "Attained",
    "agrees",
    "outcome",
    "suite",
    "Failed",
    "Measured",
    "Modelled",
    "Predicted",
    "Row",
    "Cells",
    "bytes_and_flops",
    "markdown",
    "summary",
    "times",
    "SCHEMA",
    "Validation",
    "declared",
    "modelled",
    "predicted",
    "traced",
    "validate",
]


# -- subjects ----------------------------------------------------------------------------------------------------------
# What cases are of, and which settings each of them takes.

SUBJECTS = {**KERNELS, **MODELS}
"""Subjects by name."""

_ATTENDING = ("gpt", "llama")


def check(cases: Sequence[Case]) -> None:
    """Refuse a suite that is none.

    Raises
    ------
    GraphError
        If there are no cases, one has an unknown subject, or a setting that its subject does not take.
    BindingError
        If a size is missing, or no positive integer.
    """
    if not cases:
        raise GraphError("validate: no cases, expected one at least")
    for case in cases:
        if not isinstance(case, Case):
            raise GraphError(f"validate: case {shown(case, 100)}, expected a costgraph.torch.validation.Case")
        need_choice("validate: subject", case.subject, tuple(SUBJECTS))
        _settings(case, f"validate: {case.subject}")
        _sizes(case, f"validate: {case.subject}")


def _settings(case: Case, place: str) -> None:
    modes: tuple[str, ...] = ("kernel",)
    if case.subject in MODELS:
        modes = ("forward", "step") if isinstance(MODELS[case.subject], Model) else ("forward",)
    step = case.mode == "step"
    need_choice(f"{place}: mode", case.mode, modes)
    need_choice(f"{place}: dtype", case.dtype, tuple(FORMATS))
    need_choice(f"{place}: program", case.program, ("module", "lowered") if step else ("module",))
    need_choice(f"{place}: attention", case.attention, ("eager", "flash") if case.subject in _ATTENDING else ("",))
    need_choice(f"{place}: optimizer", case.optimizer, tuple(OPTIMIZERS) if step else ("",))
    need_choice(f"{place}: checkpoint", case.checkpoint, tuple(CHECKPOINTS) if step else ("",))
    if step and case.program == "module" and OPTIMIZERS[case.optimizer][1] is None:
        raise GraphError(f"{place}: torch has no {case.optimizer} for it, expected program='lowered'")


def _sizes(case: Case, place: str) -> None:
    needed = SUBJECTS[case.subject].sizes
    for name in needed:
        if name not in case.sizes:
            raise BindingError(f"{place}: no size {name}, expected {', '.join(needed)}")
    for name, size in case.sizes.items():
        if name not in needed:
            raise BindingError(f"{place}: size {shown(name)}, expected {', '.join(needed)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BindingError(f"{place}: {name}={shown(size)}, expected a positive integer")


# -- judging -----------------------------------------------------------------------------------------------------------
# What a measured time follows: the bytes at the measured bandwidth, the FLOPs at the measured peak, or neither.

FOLLOWS = 2.0
"""A time follows another one that is at most so many times as long, or as short."""

OUTCOMES = ("memory", "compute", "both", "overhead", "faster")
"""What bounds an op by its measured time; `both` near the ridge point."""


def outcome(seconds: float, memory: float, compute: float) -> str:
    """Say what a time, the fastest run, follows: its bytes at the measured bandwidth, or its FLOPs at the rate.

    memory or compute where the time is within a factor `FOLLOWS` of that one alone, both where it is of both; overhead
    where it is longer than either by more than that: launches, memory that has to be fetched from the system, a rate
    that this op does not reach; faster where it is shorter than the longer of them, as where operands come from a
    cache.

    Examples
    --------
    >>> outcome(1.2e-3, memory=1e-3, compute=1e-4), outcome(1.2e-3, memory=1e-3, compute=2e-3)
    ('memory', 'both')
    >>> outcome(1e-5, memory=1e-6, compute=1e-6), outcome(1e-4, memory=1e-3, compute=1e-5)
    ('overhead', 'faster')
    """
    near = [name for name, s in (("memory", memory), ("compute", compute)) if _near(seconds, s)]
    if near:
        return near[0] if len(near) == 1 else "both"
    return "overhead" if seconds > max(memory, compute) else "faster"


def _near(a: float, b: float) -> bool:
    return a <= FOLLOWS * b and b <= FOLLOWS * a


def agrees(bound: str, found: str) -> bool | None:
    """Say whether what a roofline predicts is what was measured; None where overhead hides it, or it was faster.

    Examples
    --------
    >>> agrees("memory", "memory"), agrees("compute", "memory"), agrees("memory", "overhead")
    (True, False, None)
    """
    return None if found in ("overhead", "faster") else found in (bound, "both")


@dataclass(frozen=True)
class Attained:
    """Times of a graph at measured rates."""

    memory: float
    """bytes moved, as declared, at the measured bandwidth; s"""
    compute: float
    """FLOPs at the measured peaks; s"""

    @classmethod
    def of(cls, graph: Graph, hardware: Hardware, fallback: Mapping[str, str], sizes: Mapping[str, int]) -> Attained:
        """Return the times on a device, with the rates that it attains where they were measured.

        Transcendentals run at the rate of the fastest of them that was measured, where one was: the vector unit's peak
        is one of fused multiply-adds. `fallback` has rates that stand in for those of formats that are missing.
        """
        values, memory, compute = bindings(graph, dict(sizes)), Fraction(0), Fraction(0)
        for work in works(graph):
            memory += exact(work.bytes.bind(values)) / Fraction(hardware.bandwidth.value)
            for (kind, dtype), amount in work.flops.items():
                compute += exact(amount.bind(values)) / _rate(hardware, kind, dtype, fallback)
        return cls(real(memory), real(compute))


def _rate(hardware: Hardware, kind: str, dtype: str, fallback: Mapping[str, str]) -> Fraction:
    if kind == "transcendental":
        measured = hardware.tables.get("measured", {})
        found = [Fraction(q.value) for key, q in measured.items() if key.startswith("transcendental_")]
        if found:
            return max(found)
    return Fraction(hardware.rate(dtype, "matmul" if kind == "matmul" else "vector", fallback=fallback).value)


# -- suite -------------------------------------------------------------------------------------------------------------
# The suite of cases of a device: small ones for a processor, large ones for a GPU.

Sizes = Mapping[str, int]

_PRODUCTS: dict[str, list[tuple[str, tuple[int, int, int]]]] = {
    # squares from far below the ridge point to far above it, and one row or a few against a large matrix
    "cpu": [
        ("fp32", (64, 64, 64)), ("fp32", (256, 256, 256)), ("fp32", (1024, 1024, 1024)), ("fp32", (1021, 523, 257)),
        ("fp32", (1, 6144, 6144)), ("fp32", (16, 6144, 6144)), ("bf16", (256, 256, 256)), ("bf16", (1024, 1024, 1024)),
        ("bf16", (1, 8192, 8192)), ("fp64", (512, 512, 512)),
    ],
    "cuda": [
        ("fp32", (512, 512, 512)), ("fp32", (4096, 4096, 4096)), ("fp32", (1, 16384, 16384)),
        ("bf16", (128, 128, 128)), ("bf16", (512, 512, 512)), ("bf16", (1024, 1024, 1024)),
        ("bf16", (2048, 2048, 2048)), ("bf16", (4096, 4096, 4096)), ("bf16", (8192, 8192, 8192)),
        ("bf16", (16384, 16384, 16384)), ("bf16", (1, 16384, 16384)), ("bf16", (16, 16384, 16384)),
        ("bf16", (128, 16384, 16384)), ("bf16", (701, 4093, 2039)), ("fp16", (8192, 8192, 8192)),
        ("fp64", (4096, 4096, 4096)),
    ],
}  # fmt: skip

#: Elementwise work, reductions and norms: rows and columns within the cache, and beyond it.
_CELLS: dict[str, list[tuple[int, int]]] = {
    "cpu": [(61, 1024), (34003, 1024)],
    "cuda": [(61, 1024), (4096, 4096), (65536, 8192)],
}
_CELLED = [
    "add", "relu", "gelu", "silu", "exp", "transpose", "sum of rows", "sum of columns", "max of rows", "softmax",
    "layer norm", "rms norm", "cross entropy",
]  # fmt: skip

_OTHERS: dict[str, list[Case]] = {
    "cpu": [
        Case("batched matmul", {"B": 7, "M": 128, "K": 96, "N": 160}),
        Case("linear", {"M": 509, "K": 512, "N": 1024}),
        Case("linear", {"M": 509, "K": 512, "N": 1024}, dtype="bf16"),
        Case("embedding", {"V": 50257, "C": 256, "R": 4093}),
        Case("embedding", {"V": 50257, "C": 768, "R": 32768}),
        *(
            Case(f"attention {kernel}", {"B": 2, "H": 4, "S": S, "K": 64})
            for kernel in ("eager", "flash", "flash causal")
            for S in (127, 1024)
        ),
        Case("convolution 1x1", {"B": 4, "C": 64, "O": 128, "X": 28}),
        Case("convolution 3x3", {"B": 4, "C": 64, "O": 64, "X": 28}),
        Case("convolution 3x3", {"B": 16, "C": 128, "O": 128, "X": 28}),
        Case("convolution depthwise 3x3", {"B": 4, "C": 64, "X": 56}),
    ],
    "cuda": [
        Case("batched matmul", {"B": 128, "M": 1024, "K": 64, "N": 1024}, dtype="bf16"),
        Case("linear", {"M": 16384, "K": 4096, "N": 11008}, dtype="bf16"),
        Case("embedding", {"V": 128256, "C": 4096, "R": 16384}, dtype="bf16"),
        *(
            Case(f"attention {kernel}", {"B": 8, "H": 16, "S": S, "K": 64}, dtype="bf16")
            for kernel in ("eager", "flash", "flash causal")
            for S in (257, 1024, 4096)
        ),
        Case("convolution 1x1", {"B": 64, "C": 256, "O": 256, "X": 56}, dtype="bf16"),
        Case("convolution 3x3", {"B": 64, "C": 64, "O": 64, "X": 56}, dtype="bf16"),
        Case("convolution 3x3", {"B": 64, "C": 256, "O": 256, "X": 56}, dtype="bf16"),
        Case("convolution depthwise 3x3", {"B": 64, "C": 128, "X": 56}, dtype="bf16"),
    ],
}

_GPT: dict[str, Sizes] = {
    "cpu": {"B": 2, "S": 127, "D": 128, "H": 4, "F": 512, "L": 2, "V": 1009, "P": 128},
    "cuda": {"B": 8, "S": 1024, "D": 1024, "H": 16, "F": 4096, "L": 8, "V": 50257, "P": 1024},
}
_LLAMA: dict[str, Sizes] = {
    "cpu": {"B": 2, "S": 127, "D": 128, "H": 4, "G": 2, "K": 32, "F": 352, "L": 2, "V": 1009},
    "cuda": {"B": 4, "S": 1024, "D": 1024, "H": 16, "G": 4, "K": 64, "F": 2816, "L": 8, "V": 32000},
}
_PERCEPTRON: dict[str, Sizes] = {
    "cpu": {"B": 251, "D": 256, "F": 512, "L": 2, "C": 101},
    "cuda": {"B": 8192, "D": 4096, "F": 8192, "L": 4, "C": 1000},
}
_CONVOLUTIONS: dict[str, Sizes] = {
    "cpu": {"B": 8, "C": 3, "X": 32, "D": 32, "L": 2, "V": 101},
    "cuda": {"B": 64, "C": 3, "X": 112, "D": 128, "L": 4, "V": 1000},
}
#: What torch has no program for runs as the lowered graph.
_LOWERED = ("fp32", "bf16", "bf16-master", "fp16-mixed", "megatron-bf16", "fp8")


def suite(device: str = "cpu", *, quick: bool = False) -> list[Case]:
    """Return the cases of a device.

    Parameters
    ----------
    device : str
        cpu or cuda, which decides the sizes.
    quick : bool
        A cheap case of each kind alone.

    Returns
    -------
    list of Case
        Ops, then forward passes, then training steps.

    Examples
    --------
    >>> len(suite("cpu")) >= 40 and len(suite("cuda")) >= 40
    True
    >>> sorted({case.mode for case in suite("cpu", quick=True)})
    ['forward', 'kernel', 'step']
    """
    cases = [*_kernels(device), *_forwards(device), *_steps(device)]
    return list(_cheap(cases)) if quick else cases


def _kernels(device: str) -> Iterator[Case]:
    for dtype, (m, k, n) in _PRODUCTS[device]:
        yield Case("matmul", {"M": m, "K": k, "N": n}, dtype=dtype)
    for subject in _CELLED:
        for rows, columns in _CELLS[device]:
            yield Case(subject, {"R": rows, "C": columns})
    if device == "cuda":
        for subject in ("add", "softmax", "layer norm"):
            yield Case(subject, {"R": 65536, "C": 8192}, dtype="bf16")
    yield from _OTHERS[device]


def _forwards(device: str) -> Iterator[Case]:
    dtype = "fp32" if device == "cpu" else "bf16"
    gpt, llama = _GPT[device], _LLAMA[device]
    yield Case("perceptron", _PERCEPTRON[device], mode="forward", dtype=dtype)
    yield Case("convolutions", _CONVOLUTIONS[device], mode="forward", dtype=dtype)
    yield Case("gpt block", {k: gpt[k] for k in "BSDHF"}, mode="forward", dtype=dtype)
    yield Case("llama block", {k: llama[k] for k in "BSDHGKF"}, mode="forward", dtype=dtype)
    for attention in ("eager", "flash"):
        yield Case("gpt", gpt, mode="forward", dtype=dtype, attention=attention)
        yield Case("llama", llama, mode="forward", dtype=dtype, attention=attention)


def _steps(device: str) -> Iterator[Case]:
    mlp = Case("perceptron", _PERCEPTRON[device], mode="step", optimizer="SGD", implementation="foreach")
    for name, (ours, theirs) in OPTIMIZERS.items():
        for implementation in ours().available:
            # torch has no fused AdaGrad on CUDA
            if (name, implementation, device) != ("AdaGrad", "fused", "cuda"):
                program = "lowered" if theirs is None else "module"
                yield replace(mlp, optimizer=name, implementation=implementation, program=program)
    yield replace(mlp, subject="convolutions", sizes=_CONVOLUTIONS[device], optimizer="SGD-momentum")
    adamw = {"optimizer": "AdamW", "implementation": "foreach", "mode": "step"}
    gpt = Case("gpt", _GPT[device], attention="eager", **adamw)
    llama = Case("llama", _LLAMA[device], attention="eager", **adamw)
    for case in (gpt, llama):
        for attention in ("eager", "flash"):
            yield replace(case, attention=attention)
    for implementation in ("for-loop", "fused"):
        yield replace(gpt, implementation=implementation)
    yield replace(gpt, dtype="bf16", attention="flash", implementation="fused")
    for case in (gpt, llama):
        yield replace(case, precision="bf16-mixed", attention="flash")
    for precision in _LOWERED:
        yield replace(gpt, precision=precision, program="lowered", attention="flash")
    for policy in ("every-block", "selective"):
        yield replace(gpt, checkpoint=policy)
    # as many more forward passes as the layer is far from the first: torch has nothing like it
    yield replace(gpt, checkpoint="from-start", program="lowered")
    deeper = {**_GPT[device], "L": 4}
    yield replace(gpt, checkpoint="every-2", sizes=deeper)
    yield replace(llama, checkpoint="every-block", attention="flash")
    yield replace(gpt, precision="bf16-mixed", checkpoint="every-block", attention="flash")


def _cheap(cases: list[Case]) -> Iterator[Case]:
    """Keep the first case of each subject and mode, and of each policy of precision and of checkpointing."""
    seen = set()
    for case in cases:
        policy = (case.precision, case.checkpoint)
        kind = policy if any(policy) else (case.subject, case.mode)
        if kind not in seen and case.program == "module":
            seen.add(kind)
            yield case


# -- rows --------------------------------------------------------------------------------------------------------------
# Rows of a validation: what one case was predicted to take, and took.

_Seconds = Annotated[float, at_least(0, float)]
_IN_ORDER = Rule("them in order", lambda t: t.min <= t.lower <= t.median <= t.upper <= t.max)


@dataclass(frozen=True)
class Predicted:
    """What a graph says."""

    flops: Count
    """matmul FLOPs, every domain ignored"""
    uncounted: Count
    """those of them in ops that torch's FlopCounterMode counts as none"""
    peak: Size
    """bytes at the peak; on CUDA in blocks of 512 B"""


@dataclass(frozen=True)
class Measured:
    """What torch took."""

    flops: Count
    """matmul FLOPs as FlopCounterMode counts them"""
    held: Count
    """bytes of parameters, buffers, inputs and optimizer state, there throughout"""
    above: Count
    """bytes at the peak above those"""
    left: int
    """bytes that are there afterwards and were not before"""

    @property
    def peak(self) -> int:
        """Bytes at the peak, those that are there throughout included."""
        return self.held + self.above


@dataclass(frozen=True)
class Modelled:
    """Where the declared graph stands on the roof; seconds and bytes."""

    bound: _Seconds
    """no run from device memory is faster: the roofline's `lower_bound` with the device's own peaks"""
    estimate: _Seconds
    """the roofline's `estimate`"""
    fused: Count
    """bytes that have to move at least"""
    moved: Size
    """bytes moved as declared"""
    flops: Count
    """FLOPs of all kinds, as executed"""
    limit: Annotated[str, one_of(("compute", "memory"))]
    """compute or memory: what the roofline says bounds it"""
    memory: _Seconds
    """bytes moved at the measured bandwidth"""
    compute: _Seconds
    """FLOPs at the measured peaks"""


@dataclass(frozen=True)
class Row:
    """One case, predicted and measured."""

    case: Case
    """what ran"""
    seconds: Annotated[Times, _IN_ORDER]
    """how long"""
    measured: Measured
    """FLOPs and bytes that torch took"""
    declared: Predicted
    """what the declared graph says"""
    traced: Predicted | None
    """what the graph traced from the module says; None where there is none"""
    untraced: str
    """why there is none"""
    modelled: Modelled
    """what the roofline says of the declared graph"""
    outcome: Annotated[str, one_of(OUTCOMES)]
    """what bounds it by its measured time, see `outcome`"""

    @property
    def agrees(self) -> bool | None:
        """Whether that is what the roofline says; None for more than one op, and where nothing tells."""
        return agrees(self.modelled.limit, self.outcome) if self.case.mode == "kernel" else None

    def beyond(self, cache: int | None) -> bool:
        """Say whether a last-level cache holds a quarter at most of the bytes that the case has to move."""
        return self.modelled.fused > 4 * (cache or 0)

    def off(self, which: str = "declared") -> int | None:
        """Return predicted bytes at the peak less the measured ones; None where nothing was traced."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.peak - self.measured.peak

    def counted(self, which: str = "declared") -> bool | None:
        """Say whether the FLOPs are those that torch counts, and those that it is known to leave out."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.flops - found.uncounted == self.measured.flops


@dataclass(frozen=True)
class Failed:
    """A case that could not run."""

    case: Case
    """what was to run"""
    error: str
    """what torch said, or the library"""


# -- table -------------------------------------------------------------------------------------------------------------
# The tables of a validation, and what its rows come to.

Cells = tuple[list[str], list[list[str]]]
"""Head and rows of a table, as texts."""

_EXACT = 4096
"""Bytes up to which a difference is shown as such, and not as a part of the peak."""


def bytes_and_flops(rows: Sequence[Row]) -> Cells:
    """Return the table of matmul FLOPs and bytes at the peak: measured, and how far predictions are off."""
    head = ["case", "matmul FLOPs", "peak", "declared", "traced"]
    return head, [
        [
            row.case.name,
            _flops(row),
            format_quantity(row.measured.peak, "B"),
            _off(row, "declared"),
            _off(row, "traced"),
        ]
        for row in rows
    ]


def times(rows: Sequence[Row], cache: int | None) -> Cells:
    """Return the table of times: the fastest run, how often the lower bound goes into it, and what it follows.

    In parentheses where the last-level cache may hold what has to move, so that the bound need not hold.
    """
    head = ["case", "fastest run", "/ bound", "/ estimate", "follows"]
    return head, [
        [
            row.case.name,
            format_quantity(row.seconds.min, "s"),
            _times(row.seconds.min, row.modelled.bound, "{}" if row.beyond(cache) else "({})"),
            _times(row.seconds.min, row.modelled.estimate),
            _follows(row),
        ]
        for row in rows
    ]


def _times(seconds: float, of: float, form: str = "{}") -> str:
    return form.format(f"{seconds / of:.2f}") if of else ""


def _flops(row: Row) -> str:
    wrong = row.counted("declared") is False or row.counted("traced") is False
    marks = [mark for mark, there in (("(*)", row.declared.uncounted), ("(!)", wrong)) if there]
    return " ".join([format_quantity(row.declared.flops, "FLOP"), *marks])


def _off(row: Row, which: str) -> str:
    more = row.off(which)
    if more is None:
        return ""
    if abs(more) <= _EXACT:
        return f"{more:+d} B" if more else "equal"
    return f"{100 * more / row.measured.peak:+.2f} %"


def _follows(row: Row) -> str:
    if row.case.mode != "kernel":
        return ""
    return f"{row.outcome} (!)" if row.agrees is False else row.outcome


# -- what it comes to ----------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], failed: Iterable[Failed], cache: int | None) -> list[str]:
    """Return what the rows come to, in a sentence each."""
    told = (_predictions(rows, "declared"), _predictions(rows, "traced"), _speeds(rows, cache)) if rows else ()
    left = (f"Could not run: {row.case.name}: {row.error}" for row in failed)
    return [*(text for texts in told for text in texts), *left]


def _predictions(rows: Sequence[Row], which: str) -> Iterator[str]:
    told = [row.counted(which) for row in rows if row.counted(which) is not None]
    if not told:
        return
    uncounted = sum(row.declared.uncounted > 0 for row in rows)
    but = f", but for attention in {uncounted} of them, which it counts as none (*)" if uncounted else ""
    but += "" if all(told) else "; (!) marks the others"
    yield f"Matmul FLOPs, {which}: {sum(map(bool, told))} of {len(told)} cases equal torch's counter{but}."
    for mode, what in (("kernel", "ops"), ("forward", "forward passes"), ("step", "training steps")):
        found = [(row.off(which), row.measured.peak) for row in rows if row.case.mode == mode]
        offs = [(abs(off), abs(off) / peak) for off, peak in found if off is not None]
        if offs:
            shares = [share for _, share in offs]
            yield (
                f"Peak of {what}, {which}: off by {100 * median(shares):.3f} % in the median of {len(offs)}, "
                f"{100 * max(shares):.2f} % at most; {sum(n <= _EXACT for n, _ in offs)} of them within 4 KiB."
            )


def _speeds(rows: Sequence[Row], cache: int | None) -> Iterator[str]:
    beyond = [row for row in rows if row.beyond(cache)]
    below = [row for row in rows if row.seconds.min < row.modelled.bound]
    inside = sum(not row.beyond(cache) for row in below)
    yield (
        f"Time: {len(below) - inside} of {len(beyond)} cases beyond the last-level cache ran below the lower bound, "
        f"{inside} of {len(rows) - len(beyond)} within it."
    )
    told = [row.agrees for row in rows if row.agrees is not None]
    kernels = sum(row.case.mode == "kernel" for row in rows)
    if kernels:
        yield (
            f"Classification: {sum(map(bool, told))} of {len(told)} ops follow what the roofline says bounds them; "
            f"{kernels - len(told)} more are bound by overhead, or faster than memory and units are."
        )


# -- as text -------------------------------------------------------------------------------------------------------


def markdown(texts: Iterable[str], tables: Iterable[Cells]) -> str:
    """Return sentences and tables in Markdown."""
    lines = [f"- {text}" for text in texts]
    for head, rows in tables:
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


# -- record ------------------------------------------------------------------------------------------------------------
# What a validation found, and its record in JSON: schema `costgraph/validation/1`.

SCHEMA = "costgraph/validation/1"
"""What the JSON of this version calls itself; another number means other keys."""

_MOST_BYTES = 2**24
_FACTS = {"device": Annotated[str, one_of(("cpu", "cuda"))], "name": str, "torch": str, "date": str, "command": str,
          "threads": Size}  # fmt: skip


@dataclass(frozen=True)
class _Device:
    """Where the specification stands, and what it does not have."""

    specification: str
    cache_bytes: Size | None


@dataclass(frozen=True)
class _Record:
    """What a file holds."""

    schema: Annotated[str, Rule(repr(SCHEMA), SCHEMA.__eq__)]
    environment: Annotated[Mapping[str, str | int | bool], Rule("texts and whole numbers by name", bool)]
    hardware: _Device
    rows: Sequence[Row]
    failed: Sequence[Failed]


@dataclass(frozen=True, repr=False)
class Validation(Table):
    """A suite of cases, predicted and measured on one device.

    `.rows` are the cases, `.table()` shows them, `.plot(directory)` draws them, `.save(path)` writes a record that
    `Validation.load(path)` reads.
    """

    environment: Mapping[str, str | int | bool]
    """device, versions, threads, date and command"""
    hardware: Hardware
    """the device that times are held to"""
    cache: int | None
    """bytes of its last-level cache; None where nothing says"""
    rows: tuple[Row, ...]
    """one of each case that ran"""
    failed: tuple[Failed, ...] = ()
    """the others"""

    def _about(self) -> str:
        return f"{len(self.rows)} cases on {self.hardware.id}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("case", read=lambda r: r.case.name),
            Column("flops", "FLOP", lambda r: r.declared.flops, title="matmul FLOPs"),
            Column("peak", "B", lambda r: r.measured.peak), Column("declared", "B", lambda r: r.off("declared")),
            Column("traced", "B", lambda r: r.off("traced")),
            Column("seconds", "s", lambda r: r.seconds.min, title="fastest run"),
            Column("lower_bound", "s", lambda r: r.modelled.bound, title="at least"),
            Column("estimate", "s", lambda r: r.modelled.estimate), Column("outcome", title="follows"),
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        failed = f"Could not run: {len(self.failed)} cases, see `failed`."
        told = summary(self.rows, (), self.cache) + [failed] * bool(self.failed)
        return [Fact("", text) for text in told]

    def beyond(self, row: Row) -> bool:
        """Say whether the last-level cache holds a quarter at most of the bytes that a case has to move."""
        return row.beyond(self.cache)

    def tables(self) -> tuple[Cells, Cells]:
        """Return head and rows, as texts, of the table of FLOPs and bytes and of that of times."""
        return bytes_and_flops(self.rows), times(self.rows, self.cache)

    def summary(self) -> list[str]:
        """Return what the rows come to, in a sentence each."""
        return summary(self.rows, self.failed, self.cache)

    def table(self) -> str:
        """Return what the rows come to and both tables, in Markdown."""
        return markdown(self.summary(), self.tables())

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw predicted against measured peaks, and ops on the measured roof; needs matplotlib.

        Parameters
        ----------
        directory : str or path-like
            Where `peaks.png` and `roof.png` go; it is made if it is not there.

        Returns
        -------
        list of Path
            What was written.
        """
        from ..analysis.registrations import plotter

        drawn: list[Path] = plotter("validation")(self, directory)
        return drawn

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record, and beside it the specification that times are held to, with `.toml` at its end.

        Raises
        ------
        FormatError
            If the path does not end in `.json`, or cannot be written.
        """
        target = target_of(path, ".json")
        spec = target.with_suffix(".toml")
        data = {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "hardware": {"specification": spec.name, "cache_bytes": self.cache},
            "rows": [_plain(row) for row in self.rows],
            "failed": [_plain(row) for row in self.failed],
        }
        write_file(spec, specification(self.hardware.name, self.hardware.vendor, {}, {}, self.hardware))
        write_file(target, json.dumps(data, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Validation:
        """Read a record.

        Raises
        ------
        FormatError
            If it is not one; the text names the place and the key.
        SpecError
            If its specification is none.
        """
        return _read(Path(path))


# -- as JSON -------------------------------------------------------------------------------------------------------


def _plain(row: Row | Failed) -> dict[str, Any]:
    data = asdict(row)
    data["case"] = {k: v for k, v in data["case"].items() if v != ""}
    return data


def _read(path: Path) -> Validation:
    place = shorten(str(path), 200)
    text = read_text(path, place, _MOST_BYTES, "a record of a validation")
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {str(error)[:200]}, expected JSON") from None
    record = read_record(place, data, _Record)
    of, spec = record.environment, path.with_suffix(".toml")
    read_fields(f"{place}: environment", {key: of[key] for key in _FACTS if key in of}, _FACTS)
    if record.hardware.specification != spec.name:
        found = shown(record.hardware.specification)
        raise FormatError(f"{place}: hardware: specification {found}, expected the file beside the record")
    return Validation(of, load_hardware(spec), record.hardware.cache_bytes, tuple(record.rows), tuple(record.failed))


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text}, which is no number of JSON")


# -- run ---------------------------------------------------------------------------------------------------------------

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
    >>> from costgraph.torch.validation import Case
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
