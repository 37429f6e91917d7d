"""Validate predictions against torch on a suite of ops, models and training steps: FLOPs, bytes and times."""

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
from ..ir.graph import VIEWS, Graph, bindings, known_names, need_choice
from ..notation.progress import progressing
from ..notation.validation import Count, Rule, Size, at_least, one_of, read_fields, read_record
from ..ops.einsum import Einsum
from ..ops.loops import Kernel
from ..ops.opaque import CustomCall
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

SUBJECTS = {**KERNELS, **MODELS}
"""subjects by name"""

_ATTENDING = ("gpt", "llama")


def check(cases: Sequence[Case]) -> None:
    """Check that a suite is valid.

    Raises
    ------
    GraphError
        If there are no cases, or a case has an unknown subject or an unsupported setting.
    BindingError
        If a size is missing or not a positive integer.
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


# -- bottlenecks -------------------------------------------------------------------------------------------------------

FOLLOWS = 2.0
"""ratio up to which a measured time counts as near a predicted one"""

OUTCOMES = ("memory", "compute", "both", "overhead", "faster")
"""bottlenecks from measured times; `both` near the ridge point"""


def outcome(seconds: float, memory: float, compute: float) -> str:
    """Classify the bottleneck of the fastest run, from the times of its bytes and its FLOPs at measured rates.

    "memory" or "compute" if the measurement is within a factor of `FOLLOWS` of only that time, "both" if of both.
    "overhead" if it is longer than that, due to launches, memory allocation, or a rate that this op does not reach.
    "faster" if it is shorter than the longer of both, for example if operands are in cache.

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
    """Whether the measured bottleneck matches the predicted one; None for "overhead" and "faster".

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
    """seconds for the declared bytes at the measured bandwidth"""
    compute: float
    """seconds for the FLOPs at the measured peak rates"""

    @classmethod
    def of(cls, graph: Graph, hardware: Hardware, fallback: Mapping[str, str], sizes: Mapping[str, int]) -> Attained:
        """Return the times on a device at its attained rates, where measured.

        Transcendentals use the fastest measured transcendental rate, because the vector peak counts fused
        multiply-adds. `fallback` has substitutes for rates of missing formats.
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
# Cases are small for a CPU, large for a GPU.

Sizes = Mapping[str, int]

_PRODUCTS: dict[str, list[tuple[str, tuple[int, int, int]]]] = {
    # squares from memory-bound to compute-bound, and few rows times a large matrix
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

#: Rows and columns of elementwise ops, reductions and norms, within the cache and beyond it.
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
#: Policies without a torch program, for which the lowered graph runs.
_LOWERED = ("fp32", "bf16", "bf16-master", "fp16-mixed", "megatron-bf16", "fp8")


def suite(device: str = "cpu", *, quick: bool = False) -> list[Case]:
    """Return the validation cases for a device.

    Parameters
    ----------
    device : str
        "cpu" or "cuda", which determines the sizes.
    quick : bool
        Only one cheap case of each kind.

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
            # torch lacks fused AdaGrad on CUDA
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
    # each layer recomputes all layers before it, which torch does not offer
    yield replace(gpt, checkpoint="from-start", program="lowered")
    deeper = {**_GPT[device], "L": 4}
    yield replace(gpt, checkpoint="every-2", sizes=deeper)
    yield replace(llama, checkpoint="every-block", attention="flash")
    yield replace(gpt, precision="bf16-mixed", checkpoint="every-block", attention="flash")


def _cheap(cases: list[Case]) -> Iterator[Case]:
    """Keep the first case of each subject and mode, and of each precision and checkpointing policy."""
    seen = set()
    for case in cases:
        policy = (case.precision, case.checkpoint)
        kind = policy if any(policy) else (case.subject, case.mode)
        if kind not in seen and case.program == "module":
            seen.add(kind)
            yield case


# -- rows --------------------------------------------------------------------------------------------------------------

_Seconds = Annotated[float, at_least(0, float)]
_IN_ORDER = Rule("them in order", lambda t: t.min <= t.lower <= t.median <= t.upper <= t.max)


@dataclass(frozen=True)
class Predicted:
    """Predictions of a graph."""

    flops: Count
    """matmul FLOPs, ignoring domains"""
    uncounted: Count
    """matmul FLOPs that torch's FlopCounterMode misses"""
    peak: Size
    """peak bytes; on CUDA in blocks of 512 B"""


@dataclass(frozen=True)
class Measured:
    """Measurements of torch."""

    flops: Count
    """matmul FLOPs from FlopCounterMode"""
    held: Count
    """persistent bytes: parameters, buffers, inputs and optimizer states"""
    above: Count
    """peak bytes above `held`"""
    left: int
    """bytes allocated by the call and still live after it"""

    @property
    def peak(self) -> int:
        """Peak bytes, including persistent ones."""
        return self.held + self.above


@dataclass(frozen=True)
class Modelled:
    """Roofline of the declared graph, in seconds and bytes."""

    bound: _Seconds
    """lower bound from device memory: the roofline's `lower_bound` at peak rates"""
    estimate: _Seconds
    """the roofline's `estimate`"""
    fused: Count
    """compulsory bytes"""
    moved: Size
    """bytes moved, unfused"""
    flops: Count
    """executed FLOPs of all kinds"""
    limit: Annotated[str, one_of(("compute", "memory"))]
    """the roofline's bottleneck: compute or memory"""
    memory: _Seconds
    """time of the bytes at the measured bandwidth"""
    compute: _Seconds
    """time of the FLOPs at the measured peak rates"""


@dataclass(frozen=True)
class Row:
    """Prediction and measurement of one case."""

    case: Case
    """the case"""
    seconds: Annotated[Times, _IN_ORDER]
    """run times"""
    measured: Measured
    """measured FLOPs and bytes"""
    declared: Predicted
    """predictions of the declared graph"""
    traced: Predicted | None
    """predictions of the traced graph; None if there is none"""
    untraced: str
    """reason for a missing trace"""
    modelled: Modelled
    """roofline of the declared graph"""
    outcome: Annotated[str, one_of(OUTCOMES)]
    """bottleneck from the measured time, see `outcome`"""

    @property
    def agrees(self) -> bool | None:
        """Whether the roofline predicts the bottleneck; None for more than one op, or if the time does not tell."""
        return agrees(self.modelled.limit, self.outcome) if self.case.mode == "kernel" else None

    def beyond(self, cache: int | None) -> bool:
        """Whether the compulsory bytes exceed four times the last-level cache."""
        return self.modelled.fused > 4 * (cache or 0)

    def off(self, which: str = "declared") -> int | None:
        """Return predicted minus measured peak bytes; None without a trace."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.peak - self.measured.peak

    def counted(self, which: str = "declared") -> bool | None:
        """Whether the FLOPs equal torch's count, except for those that it is known to miss."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.flops - found.uncounted == self.measured.flops


@dataclass(frozen=True)
class Failed:
    """A case that failed to run."""

    case: Case
    """the case"""
    error: str
    """error message"""


# -- tables ------------------------------------------------------------------------------------------------------------

Cells = tuple[list[str], list[list[str]]]
"""header and rows of a table, as text"""

_EXACT = 4096
"""bytes up to which a difference is shown absolutely instead of relative to the peak"""


def bytes_and_flops(rows: Sequence[Row]) -> Cells:
    """Return a table of matmul FLOPs and peak bytes, measured and relative to predictions."""
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
    """Return a table of times: the fastest run, its ratio to lower bound and estimate, and its bottleneck.

    Ratios are in parentheses if the data may fit into the last-level cache, which invalidates the bound.
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


# -- tables: summary ---------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], failed: Iterable[Failed], cache: int | None) -> list[str]:
    """Return conclusions as sentences."""
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


# -- tables: Markdown --------------------------------------------------------------------------------------------------


def markdown(texts: Iterable[str], tables: Iterable[Cells]) -> str:
    """Return sentences and tables as Markdown."""
    lines = [f"- {text}" for text in texts]
    for head, rows in tables:
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


# -- record ------------------------------------------------------------------------------------------------------------

SCHEMA = "costgraph/validation/1"
"""schema of the JSON; changes when keys change"""

_MOST_BYTES = 2**24
_FACTS = {"device": Annotated[str, one_of(("cpu", "cuda"))], "name": str, "torch": str, "date": str, "command": str,
          "threads": Size}  # fmt: skip


@dataclass(frozen=True)
class _Device:
    """The specification's file, and the cache size that it lacks."""

    specification: str
    cache_bytes: Size | None


@dataclass(frozen=True)
class _Record:
    """Content of a file."""

    schema: Annotated[str, Rule(repr(SCHEMA), SCHEMA.__eq__)]
    environment: Annotated[Mapping[str, str | int | bool], Rule("texts and integers by name", bool)]
    hardware: _Device
    rows: Sequence[Row]
    failed: Sequence[Failed]


@dataclass(frozen=True, repr=False)
class Validation(Table):
    """Predictions and measurements of a suite of cases on one device.

    `.rows` has the cases. Use `.table()` for text, `.plot(directory)` for plots, and `.save(path)` to write a record
    for `Validation.load(path)`.
    """

    environment: Mapping[str, str | int | bool]
    """device, versions, threads, date and command"""
    hardware: Hardware
    """device for predicted times"""
    cache: int | None
    """bytes of its last-level cache; None if unknown"""
    rows: tuple[Row, ...]
    """one per case that ran"""
    failed: tuple[Failed, ...] = ()
    """cases that failed"""

    def _description(self) -> str:
        return f"{len(self.rows)} cases on {self.hardware.id}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("case", read=lambda r: r.case.name),
            Column("flops", "FLOP", lambda r: r.declared.flops, title="matmul FLOPs"),
            Column("peak", "B", lambda r: r.measured.peak), Column("declared", "B", lambda r: r.off("declared")),
            Column("traced", "B", lambda r: r.off("traced")),
            Column("seconds", "s", lambda r: r.seconds.min, title="fastest run"),
            Column("lower_bound", "s", lambda r: r.modelled.bound, title="lower bound"),
            Column("estimate", "s", lambda r: r.modelled.estimate), Column("outcome", title="follows"),
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        failed = f"Could not run: {len(self.failed)} cases, see `failed`."
        told = summary(self.rows, (), self.cache) + [failed] * bool(self.failed)
        return [Fact("", text) for text in told]

    def beyond(self, row: Row) -> bool:
        """Whether a case's compulsory bytes exceed four times the last-level cache."""
        return row.beyond(self.cache)

    def tables(self) -> tuple[Cells, Cells]:
        """Return the table of FLOPs and bytes, and the table of times, as header and rows of text."""
        return bytes_and_flops(self.rows), times(self.rows, self.cache)

    def summary(self) -> list[str]:
        """Return conclusions as sentences."""
        return summary(self.rows, self.failed, self.cache)

    def table(self) -> str:
        """Return conclusions and both tables as Markdown."""
        return markdown(self.summary(), self.tables())

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Plot predicted against measured peaks, and ops on the measured roofline. Requires matplotlib.

        Parameters
        ----------
        directory : str or path-like
            Directory for `peaks.png` and `roof.png`, created if missing.

        Returns
        -------
        list of Path
            The written files.
        """
        drawn: list[Path] = VIEWS["plot_validation"](self, directory)
        return drawn

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, and the hardware specification to a file next to it with extension `.toml`.

        Raises
        ------
        FormatError
            If the path does not end in `.json` or cannot be written.
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
            If the file is invalid. The message names the place and key.
        SpecError
            If its hardware specification is invalid.
        """
        return _read(Path(path))


# -- record: JSON ------------------------------------------------------------------------------------------------------


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


# -- validation --------------------------------------------------------------------------------------------------------

_UNCOUNTED = "scaled_dot_product_flash_attention_for_cpu"
_RULE = "flash"  # backward rule of fused attention; gradient kernels are named after the forward kernel
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
    """Run a suite of ops, models and training steps, and compare predictions with measurements.

    Parameters
    ----------
    device : str or torch.device
        "cpu" or "cuda".
    cases : iterable of Case, optional
        Cases to run, by default the suite of the device.
    hardware : str, path-like or Hardware, optional
        Device for predicted times. By default a quick calibration runs first, with the vendor's peaks from a built-in
        specification if one has this device name.
    quick : bool
        Only cheap cases, with fewer runs.
    progress : bool, optional
        Whether to show progress, by default if standard error is a terminal.
    command : str, optional
        Command to record for reproduction, by default this process's command line.

    Returns
    -------
    Validation
        The result: `.rows`, `.table()`, `.plot(directory)`, `.save(path)`. Cases that fail in torch are in `.failed`.

    Raises
    ------
    UnsupportedError
        If the device does not exist.
    SpecError
        If the specification does not exist or lacks a rate.
    GraphError
        If there are no cases, or a case has an unknown subject or an unsupported setting.
    BindingError
        If a size is missing or not a positive integer.

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
            except (RuntimeError, UnsupportedError) as error:  # out of memory, or no such kernel on this device
                failed.append(Failed(case, " ".join(str(error).split())[:300]))
            _given_back(where)
    cache = _cache(where, device_file)
    return Validation(environment(where, command), device_file, cache, tuple(rows), tuple(failed))


@contextmanager
def _frozen() -> Iterator[None]:
    """Exempt existing objects from garbage collection, which takes longer than most cases.

    Objects that the caller had frozen stay frozen, and so do those of this run then: the collector has no partial undo.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _given_back(device: torch.device) -> None:
    """Free the memory of a case, so that the next one finds no cached blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cache(device: torch.device, hardware: Hardware) -> int | None:
    """Return the largest known size of the last-level cache."""
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
    """Return the predictions of a trace, or why there are none."""
    if program.dims is None:
        return None, "the lowered graph ran"
    try:
        return traced(case, program, device), ""
    except UnsupportedError as error:
        return None, str(error)[:300]


# -- validation: predictions -------------------------------------------------------------------------------------------


def declared(case: Case, device: str) -> Graph:
    """Return the declared graph of a case for device cpu or cuda."""
    return SUBJECTS[case.subject].declare(case, device)


def predicted(graph: Graph, sizes: Mapping[str, int], device: str) -> Predicted:
    """Return a graph's FLOPs and peak bytes; sizes of unused dimensions are ignored."""
    own: dict[str, Any] = {k: v for k, v in sizes.items() if k in known_names(graph)}
    return Predicted(
        flops=int(cg.matmul_flops(graph, count="full", **own)),
        uncounted=_uncounted(graph, own) if device == "cpu" else 0,
        peak=int(cg.peak_memory(graph, allocator="cuda" if device == "cuda" else "exact", **own)),
    )


def traced(case: Case, program: Program, device: str) -> Predicted:
    """Return the predictions of the graph traced from a program, optimizer step included.

    Raises UnsupportedError if tracing fails.
    """
    train = program.make is not None
    graph = trace(program.module, *program.inputs, dims=program.dims, train=train, optimizer=program.make)
    return predicted(graph, case.sizes, device)


def _uncounted(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Return the matmul FLOPs that torch's counter misses on a CPU: those of fused attention."""
    values = bindings(graph, dict(sizes))
    return int(answer(total(amount.bind(values) for amount in _in_attention(graph))))


def _in_attention(graph: Graph) -> Iterator[Poly]:
    """Yield the matmul FLOPs of fused attention, found by its traced call, or by its backward rule."""
    kernels = {op for op in graph.walk() if isinstance(op.kind, Kernel) and op.kind.backward == _RULE}
    gradients = tuple(op.name.rpartition("/")[2].replace(".", "_") + "_backward" for op in kernels)
    for op, times, _ in executions(graph):
        own = op in kernels or op.name.rpartition("/")[2].startswith(gradients)
        if not (own if op.call is None else _UNCOUNTED in op.call.target):
            continue
        if isinstance(op.kind, CustomCall):
            yield op.kind.flops(op).full * times
        elif op.body is not None:
            yield total(o.kind.flops(o).full for o in op.body.ops if isinstance(o.kind, Einsum)) * times


def modelled(graph: Graph, sizes: Mapping[str, int], hardware: Hardware) -> Modelled:
    """Return a graph's roofline on a device, and its times at measured rates."""
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
    """Substitute a device's fastest rate for missing ones, which keeps lower bounds valid."""
    fastest = max(hardware.peak, key=lambda k: hardware.peak[k].value)
    return {name: f"peak.{fastest}" for name in _NEWEST if name != fastest}
